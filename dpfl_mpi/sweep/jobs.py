"""The Runs of a sweep as jobs on Slurm, by submitit: what is submitted, and what one rank of a job does."""

import argparse
import contextlib
import dataclasses
import io
import os
import re
import shlex
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dpfl_mpi.errors import REQUEUE, UserError
from dpfl_mpi.mpi import slurm
from dpfl_mpi.settings import Job
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.storage.files import explained
from dpfl_mpi.sweep.known import Known, Submission, recall
from dpfl_mpi.sweep.wanted import MINUTES, bases

ROOT_S = 15.0  # that the other ranks leave root to requeue the job before all are aborted: nothing runs after that
WARNING_S = 120  # before the end of a job, or half of a shorter one
GRACE_S = 100.0  # of them for the round to end, unless told; the rest is for leaving
# A killed start leaves MPICH's shared memory under the name of its job and step, on which MPI_Init of another one fails. The steps of a
# requeued job are numbered from 0 again: empty ones come first, so that the Run's own has another number than the times before.
STEPS = (
    "for i in $(seq $((${SLURM_RESTART_COUNT:-0} % 10))); do srun --mpi=none -N 1 -n 1 --ntasks-per-node=1 true; done"
)
SITE = Path("slurm/site.sh")  # modules and virtual environment, sourced where it is there


# in a job ----------------------------------------------------------------------------------------------------------------
def compute(arguments: list[str]) -> int:
    """Compute one Run as one rank of the world that srun started: the function that is submitted. Returns 0.

    Slurm's warning is heard by the Run, which installs its handlers after submitit's: those would requeue at once, and for ever. It leaves
    with a code that says whether the same command would get further, in order or, where a round is too long, by an abort.
    """
    from dpfl_mpi.__main__ import main

    try:
        main(arguments, partial(requeue, patience=ROOT_S))
    except SystemExit as end:  # it left in order: submitit would call that a failure
        requeue(end.code)
        raise
    return 0


def requeue(code: object, patience: float = 0.0) -> None:
    """Let Slurm start this job again if its Run ended with 75: rank 0 asks, the others wait."""
    if code != REQUEUE:
        return
    if os.environ.get("SLURM_PROCID", "0") == "0":
        slurm.requeue("--retry goes on")  # a sentence, and the ranks end all the same
    else:
        time.sleep(patience)


def again(arguments: list[str]) -> Any:
    """Return the same submission: a job that is warned before its Run listens goes on from the Run's own checkpoint."""
    from submitit.helpers import DelayedSubmission

    return DelayedSubmission(compute, arguments)


compute.checkpoint = again  # type: ignore[attr-defined]  # where submitit looks for it


# submitting --------------------------------------------------------------------------------------------------------------
def executor(args: argparse.Namespace, folder: Path, **more: str) -> Any:
    """Return submitit's executor with the resources of the command line, and `more` options of sbatch."""
    import submitit

    try:
        out = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=10000)
    except RuntimeError as error:
        raise UserError(f"--cluster is slurm: {error}") from None
    extra: dict[str, Any] = {"requeue": True}
    for item in args.sbatch:
        name, _, value = item.partition("=")
        extra[name.lstrip("-")] = value if value else True
    limit = minutes(args.time or str(MINUTES))
    site = [f". {shlex.quote(str(SITE.resolve()))}"] if SITE.is_file() else []
    out.update_parameters(
        name="dpfl",
        timeout_min=limit,
        nodes=args.nodes,
        tasks_per_node=args.ranks,
        cpus_per_task=args.cpus,
        slurm_partition=args.slurm_partition,
        slurm_account=args.slurm_account,
        slurm_gpus_per_node=args.gpus,
        slurm_array_parallelism=args.max_parallel or 256,
        slurm_srun_args=[f"--mpi={args.mpi}", f"--cpus-per-task={args.cpus}", "--kill-on-bad-exit=1"],
        slurm_setup=[*site, f"export OMP_NUM_THREADS={args.cpus}", STEPS],
        slurm_signal_delay_s=min(WARNING_S, limit * 60 // 2),
        slurm_additional_parameters=extra | more,
    )
    return out


def minutes(text: str) -> int:
    """Return a time limit in minutes, at least 1: a number of them, or H:MM:SS, or D-H:MM:SS."""
    found = re.fullmatch(r"([0-9]{1,9})|(?:([0-9]{1,5})-)?([0-9]{1,5}):([0-9]{1,2}):([0-9]{1,2})", text)
    if not found:
        raise UserError(f"--time is {text}; allowed is a number of minutes, H:MM:SS or D-H:MM:SS")
    alone, days, hours, mins, seconds = (int(part or 0) for part in found.groups())
    total = alone + days * 1440 + hours * 60 + mins + -(-seconds // 60)
    if not total:
        raise UserError(f"--time is {text}; a Run needs at least a minute")
    return total


def new_folder(job: Job) -> Path:
    sweeps = Path(job.results) / "sweeps"
    with explained(f"--results is {job.results}; nothing can be written there"):
        sweeps.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=sweeps))


def flags_of(k: Known, job: Job, base_of: Mapping[str, Known]) -> list[str]:
    """Return the command line of a Run; the models of one that others go on from are kept."""
    kept = k in base_of.values() or job.save_models
    how = dataclasses.replace(job, quiet=False, out=str(k.path.resolve()), save_models=kept)
    return to_flags(changed(k.run) | changed(how))


@contextlib.contextmanager
def taken_by_slurm(before: int = 0) -> Iterator[None]:
    """Raise `UserError` with sbatch's last line where it refuses the jobs that are submitted inside, after so many that it took."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():  # submitit prints what sbatch said
            warnings.simplefilter("ignore")
            yield
    except (OSError, RuntimeError) as error:  # submitit's errors are of RuntimeError
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Try ")]
        why = lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else "sbatch does not say why"
        others = f"; the {before} before stay submitted" if before else ""
        raise UserError(f"Slurm refuses the jobs: {why}{others}") from None


def sbatch_text(args: argparse.Namespace, tasks: int) -> str:
    """Return what sbatch would get for so many Runs. It needs no Slurm: submitit hands it to an sbatch that takes everything."""
    before = os.environ.get("PATH", "")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("sbatch", "srun"):
            Path(folder, name).write_text("#!/bin/sh\necho Submitted batch job 1\n")
            Path(folder, name).chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
        try:
            with taken_by_slurm():
                first, *_ = executor(args, Path(folder)).map_array(compute, [[]] * tasks)
            return str(first.paths.submission_file.read_text()).replace(folder, "FOLDER")
        finally:
            os.environ["PATH"] = before


def submit(args: argparse.Namespace, job: Job, todo: Sequence[Known], known: Sequence[Known], queue: set[str]) -> None:
    """Submit `todo`, of all Runs that are `known`: one array, and after it, one by one, those that go on from another's models.

    Such a job waits until its base has ended well. Slurm cancels it where the base fails.
    """
    if "%" in str(Path(job.results).resolve()):
        raise UserError(f"--results is {job.results}; Slurm replaces % in the names of logs: its path must have none")
    base_of = bases(known)
    awaited = {name for name, base in base_of.items() if base in todo or (base.on_slurm and base.alive(queue))}
    first = [k for k in todo if k.path.name not in awaited]
    after = [k for k in todo if k.path.name in awaited]
    folder = new_folder(job)
    lines = [flags_of(k, job, base_of) for k in first]
    with taken_by_slurm():
        array = executor(args, folder).map_array(compute, lines) if first else []
    jobs = {k.path.name: j.job_id for k, j in zip(first, array, strict=True)}
    Submission("slurm", jobs).remember(folder)
    for k in after:
        base = base_of[k.path.name]
        wait = {"dependency": f"afterok:{jobs.get(base.path.name, base.job_id)}", "kill_on_invalid_dep": "yes"}
        with taken_by_slurm(len(jobs)):
            jobs[k.path.name] = executor(args, folder, **wait).submit(compute, flags_of(k, job, base_of)).job_id
        Submission("slurm", jobs).remember(folder)
    recall(known, folder.parent)
    numbers = list(dict.fromkeys(number.split("_")[0] for number in jobs.values()))
    # submitit makes one job no array
    what = f"{len(array)} jobs as array {numbers[0]}" if len(array) > 1 else f"job {numbers[0]}"
    later = len(jobs) - max(1, len(array))
    print(f"submitted {what}{f' and {later} that wait for others' if later else ''}; logs in {folder}", flush=True)
