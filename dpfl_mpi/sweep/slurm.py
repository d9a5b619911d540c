"""Submits the Runs of a sweep to Slurm, by the library submitit, which calls sbatch.

An `Entry` is a Run with its result file. A fine-tuned Run goes on from the models of its base, the
same Run without fine-tuning, and so waits for its job.
"""

import argparse
import contextlib
import dataclasses
import io
import os
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi import launcher
from dpfl_mpi.settings import Job
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.storage.files import explained
from dpfl_mpi.sweep.entries import Entry, Submission, load_submissions
from dpfl_mpi.sweep.table import Monitor
from dpfl_mpi.sweep.wanted import bases

WARNING_S = 120  # seconds before its end at which Slurm warns a job; a short one at half its time
GRACE_S = 100.0  # seconds of WARNING_S in which to end the round; the rest is for leaving
MOST_JOBS = 256  # that run at once, unless --max_parallel says otherwise
SITE = Path("slurm/site.sh")  # modules and virtual environment, sourced if it is there


def compute(flags: list[str]) -> None:
    """Start the ranks of a Run and wait for them. submitit calls this function inside the job."""
    if code := launcher.run(flags):
        sys.exit(code)


def executor(args: argparse.Namespace, folder: Path, **more: str) -> Any:
    """Return submitit's executor, which submits jobs with the resources that the flags ask for."""
    # `more` are further options of sbatch
    import submitit

    try:
        out = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=10000)
    except RuntimeError as error:
        raise UserError(f"--cluster is slurm: {error}") from None
    extra: dict[str, Any] = {"requeue": True}
    for item in args.sbatch:
        name, _, value = item.partition("=")
        extra[name.lstrip("-")] = value if value else True
    site = [f". {shlex.quote(str(SITE.resolve()))}"] if SITE.is_file() else []
    out.update_parameters(
        name="dpfl",
        timeout_min=args.time,
        nodes=args.nodes,
        tasks_per_node=args.ranks,
        cpus_per_task=args.cpus,
        slurm_gpus_per_node=args.gpus,
        slurm_setup=site,
        slurm_array_parallelism=args.max_parallel or MOST_JOBS,
        slurm_use_srun=False,  # the launcher calls it
        slurm_signal_delay_s=min(WARNING_S, args.time * 60 // 2),
        slurm_additional_parameters=extra | more,
    )
    return out


def new_folder(job: Job) -> Path:
    """Make and return the folder of a submission, for its logs."""
    sweeps = Path(job.results) / "sweeps"
    with explained(f"--results is {job.results}; nothing can be written there"):
        sweeps.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=sweeps))


def flags_of(entry: Entry, job: Job, base_of: Mapping[str, Entry]) -> list[str]:
    """Return the command line of a Run. A base of other Runs keeps its models for them."""
    save_models = entry in base_of.values() or job.save_models
    out = str(entry.path.resolve())
    of_entry = dataclasses.replace(job, quiet=False, out=out, save_models=save_models)
    of_run = changed(entry.run)
    if "budget" in of_run:  # as it was typed, such as 0.1N
        of_run["budget"] = entry.run.typed_budget
    return to_flags(of_run | changed(of_entry))


@contextlib.contextmanager
def refusals(before: int = 0) -> Iterator[None]:
    """Raise `UserError` with sbatch's last line if it refuses a job; `before` were not refused."""
    try:
        # submitit prints what sbatch says
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, RuntimeError) as error:  # submitit's errors are of RuntimeError
        lines = [ln for ln in str(error).splitlines() if ln.strip() and not ln.startswith("Try ")]
        last = lines[-1] if lines else "sbatch does not say why"
        why = last.removeprefix("sbatch: ").removeprefix("error: ")
        others = f"; the {before} before stay submitted" if before else ""
        raise UserError(f"Slurm refuses the jobs: {why}{others}") from None


def sbatch_text(args: argparse.Namespace, tasks: int) -> str:
    """Return the script that sbatch would get for so many Runs."""
    # it needs no Slurm: submitit calls a fake sbatch, first in the PATH
    before = os.environ.get("PATH", "")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("sbatch", "srun"):
            Path(folder, name).write_text("#!/bin/sh\necho Submitted batch job 1\n")
            Path(folder, name).chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
        try:
            with refusals():
                first, *_ = executor(args, Path(folder)).map_array(compute, [[]] * tasks)
            return str(first.paths.submission_file.read_text()).replace(folder, "FOLDER")
        finally:
            os.environ["PATH"] = before


def submit(args: argparse.Namespace, job: Job, todo: Sequence[Entry], monitor: Monitor) -> None:
    """Submit these of a sweep's Runs.

    One array comes first. Each Run that goes on from another's models is a job after it, which
    waits until that one has ended well; Slurm cancels it if that one fails.
    """
    if "%" in str(Path(job.results).resolve()):
        why = "Slurm replaces % in the names of logs: its path must have none"
        raise UserError(f"--results is {job.results}; {why}")
    base_of, jobs = bases(monitor.entries), monitor.jobs
    # bases that are still to be computed, or are being computed
    open_bases = [e for e in base_of.values() if e in todo or (e.on_slurm and e.alive(jobs))]
    first = [entry for entry in todo if base_of.get(entry.path.name) not in open_bases]
    after = [entry for entry in todo if entry not in first]
    folder = new_folder(job)
    lines = [flags_of(entry, job, base_of) for entry in first]
    with refusals():
        array = executor(args, folder).map_array(compute, lines) if first else []
    # the number of each Run's job; saved after each submission, as the next one may be refused
    numbers = {entry.path.name: task.job_id for entry, task in zip(first, array, strict=True)}
    Submission("slurm", numbers).save(folder)
    for entry in after:
        base = base_of[entry.path.name]
        number = numbers.get(base.path.name, base.job)
        wait = {"dependency": f"afterok:{number}", "kill_on_invalid_dep": "yes"}
        with refusals(len(numbers)):
            later_job = executor(args, folder, **wait).submit(
                compute, flags_of(entry, job, base_of)
            )
        numbers[entry.path.name] = later_job.job_id
        Submission("slurm", numbers).save(folder)
    load_submissions(monitor.entries, folder.parent)
    number, later = next(iter(numbers.values())).split("_")[0], len(numbers) - len(array)
    first_jobs = f"{len(array)} jobs as array {number}" if len(array) > 1 else f"job {number}"
    words = [first_jobs] * bool(array) + [f"{later} that wait for others"] * bool(later)
    print(f"submitted {' and '.join(words)}; logs in {folder}", flush=True)
