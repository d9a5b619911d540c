"""Many Runs: `python -m dpfl_mpi.sweep analysis/accuracy_table.py --cluster slurm` submits one job for each Run that has no result yet.

Finished Runs are skipped, running ones left alone, failed ones named with the end of their log and submitted again with --retry; each
goes on from its own checkpoint. Instead of a file of analysis/ a grid: `--datasets cifar10 --methods dpfl,local --seeds 1,2,3`. Every
other flag is one of `python -m dpfl_mpi` and holds for all Runs. While Runs go on here, and with --watch those on Slurm, a table shows
how far each is.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.config import Job, Run, old_flags
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.survival.lock import Lock, born
from dpfl_mpi.sweep_table import Live, Row

GRID = {"seeds": "seed", "methods": "method", "datasets": "dataset", "budgets": "budget"}
LOG_LINES = 6
BLIND_S = 60  # a job just submitted may not be in the queue yet
LOOK_S = 0.5  # between two looks at the Runs of this machine
WATCH_S = 10.0  # and of Slurm's, whose controller serves everybody
LEAVING_S = 60.0  # that interrupted Runs have to end their round


def compute(arguments: list[str]) -> int:
    """Compute one Run: the function that is submitted. Returns 0.

    As a Slurm task it is one rank of the world that srun started; alone (`local`, `debug`) it calls mpirun.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
        from dpfl_mpi.__main__ import main

        main(arguments)
        return 0
    ranks, rest = int(arguments[0]), arguments[1:]
    command = ["mpirun", "-n", str(ranks), sys.executable, "-m", "dpfl_mpi", *rest]
    process = subprocess.Popen(
        command,
        env=os.environ | {"SUBMITIT_EXECUTOR": ""},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us: mpirun may end its ranks on it, but passes USR1 on
    )
    try:
        code = process.wait()
    except BaseException:  # Ctrl-C, or submitit's time limit
        process.send_signal(signal.SIGUSR1)  # the end of the round, a checkpoint
        process.wait()
        raise
    if code:
        raise RuntimeError(f"{shlex.join(command)} ended with exit code {code}")
    return 0


def again(arguments: list[str]) -> Any:
    """Return the same submission: a job that Slurm is about to end goes on from the Run's own checkpoint."""
    from submitit.helpers import DelayedSubmission

    return DelayedSubmission(compute, arguments)


compute.checkpoint = again  # type: ignore[attr-defined]  # where submitit looks for it


# which Runs --------------------------------------------------------------------------------------------------------------
def runs_of(file: Path) -> list[Run]:
    """Return the Runs that a file of analysis/ names in its RUNS."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))  # a figure may import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    if not isinstance(getattr(module, "RUNS", None), list):
        raise UserError(f"{file} has no list RUNS")
    return list(module.RUNS)


def grid(args: argparse.Namespace, base: Run) -> list[Run]:
    """Return the Runs of --seeds, --methods, --datasets and --budgets, all combinations, over the fields of `base`."""
    axes = {field: words(getattr(args, flag)) for flag, field in GRID.items() if getattr(args, flag)}
    if "seed" in axes:
        axes["seed"] = [whole("--seeds", s) for s in axes["seed"]]
    return [
        dataclasses.replace(base, **dict(zip(axes, point, strict=True))) for point in itertools.product(*axes.values())
    ]


def words(text: str) -> list[Any]:
    """Return the parts of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def whole(flag: str, text: str) -> int:
    """Return a whole number."""
    if not text.isdigit():
        raise UserError(f"{flag} has {text}; allowed are whole numbers, separated by commas")
    return int(text)


def trials(runs: list[Run], tune: str) -> dict[str, list[Run]]:
    """Return the Runs of each value of `--tune METHOD.NAME=a,b,c`; NAME is an option of the method or a field of Run."""
    name, _, values = tune.partition("=")
    method, _, field = name.partition(".")
    if not (field and values):
        raise UserError(f"--tune is {tune}; allowed is METHOD.NAME=VALUE,VALUE, such as ditto.lam=0.1,0.75,1")
    options = {f.name for f in dataclasses.fields(find("method", method).options)}
    fields = {f.name for f in dataclasses.fields(Run)}
    if field not in options | fields:
        raise UserError(f"--tune: {method} has no {field}; its options are {', '.join(sorted(options)) or 'none'}")
    out: dict[str, list[Run]] = {}
    for value in words(values):
        number = yaml(value)
        for run in runs:
            change: dict[str, Any] = (
                {"options": (run.options or {}) | {field: number}} if field in options else {field: number}
            )
            out.setdefault(value, []).append(dataclasses.replace(run, method=method, **change))
    return out


def yaml(text: str) -> Any:
    """Return a value as the command line would read it."""
    from yaml import safe_load

    return safe_load(text)


def flags(run: Run, job: Job) -> list[str]:
    """Return the command line that computes a resolved Run: all that differs from the defaults."""
    out = []
    for settings in (run, job):
        for f in dataclasses.fields(settings):
            value = getattr(settings, f.name)
            if value is None or value == f.default:
                continue
            if f.name == "options":
                out += [f"--options.{name}={option}" for name, option in value.items()]
            elif isinstance(value, bool):
                out.append(f"--{f.name}" if value else f"--no-{f.name}")
            else:
                out.append(f"--{f.name}={value}")
    return out


# what became of them -----------------------------------------------------------------------------------------------------
@dataclass
class Known:
    """A Run, its result file, and the newest submission of it: job, folder of the logs, time."""

    run: Run
    path: Path
    job_id: str = ""
    folder: str = ""
    submitted: float = 0.0
    cluster: str = ""
    born: str = ""  # when a process of this machine began, and its host: a number may be used again
    host: str = ""

    def look(self, queue: set[str]) -> Row:
        """Return what its result file and its job say: finished, running, stopped, waiting, failed, missing or unreadable."""
        recorded, t, accuracy = "missing", -1, float("nan")
        if self.path.exists():
            try:
                with Result(self.path) as result:
                    recorded, t, accuracy = result.state.split()[0].rstrip(","), result.last_round, result.test_acc
            except (UserError, OSError, KeyError, RuntimeError):  # torn, or being written at this moment
                recorded = "unreadable"
        if recorded != "finished" and self.job_id:
            begun = self.cluster != "slurm" or recorded in ("running", "unreadable")  # here nothing queues
            recorded = "failed" if not self.alive(queue) else "running" if begun else "waiting"
        return Row(self.path.stem, recorded, t, int(self.run.rounds or 0), accuracy)

    def alive(self, queue: set[str]) -> bool:
        """Return whether its job waits or runs."""
        if not self.job_id:
            return False
        if self.cluster == "slurm":
            return self.job_id in queue or time.time() - self.submitted < BLIND_S
        if self.cluster == "debug" or self.host != socket.gethostname():  # no process of its own, or none of ours
            return Lock(self.path).taken()
        return born(int(self.job_id)) == self.born != ""

    def log(self) -> str:
        """Return the sentences in which the Run says what is wrong, or else the end of the job's output and errors."""
        text = ""
        for path in sorted(Path(self.folder).glob(f"{self.job_id}_0_log.*")) if self.folder else []:
            text += path.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("submitit ")]
        said = [line for line in lines if line.startswith("error: ")]
        return "\n".join((said or lines)[-LOG_LINES:])


def queued(known: list[Known], before: set[str] | None = None) -> set[str]:
    """Return the jobs that Slurm still has, array tasks as JOB_TASK; none where no Run was submitted to it.

    Raises:
        UserError: Slurm does not answer, and there is no answer from `before` to go by.
    """
    if not any(k.cluster == "slurm" for k in known):
        return set()
    try:
        command = ["squeue", "--me", "-h", "-r", "-o", "%i %F_%K"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return set(done.stdout.split())
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if before is None:
        raise UserError(
            f"squeue does not say which of the submitted jobs are alive ({reason}); try again when it answers"
        )
    return before


def remember(folder: Path, jobs: dict[str, str], cluster: str, since: dict[str, str] | None = None) -> None:
    """Write which Run went to which job beside the logs, and when the processes of this machine began."""
    entry = {"cluster": cluster, "submitted": time.time(), "jobs": jobs}
    entry |= {"host": socket.gethostname(), "born": since or {}}
    with replacing(folder / "jobs.json") as part:  # whole, for whoever reads it meanwhile
        part.write_text(json.dumps(entry, indent=1))


def recall(known: list[Known], sweeps: Path) -> None:
    """Fill in the newest submission of each Run."""
    of = {k.path.name: k for k in known}
    entries = [(json.loads(file.read_text()), str(file.parent)) for file in sweeps.glob("*/jobs.json")]
    for entry, folder in sorted(entries, key=lambda e: e[0]["submitted"]):
        for name, job_id in entry["jobs"].items():
            if k := of.get(name):
                k.job_id, k.folder, k.submitted, k.cluster = job_id, folder, entry["submitted"], entry["cluster"]
                k.born, k.host = entry["born"].get(name, ""), entry["host"]


def follow(known: list[Known], live: Live, pause: float, busy: Callable[[], bool] | None = None) -> None:
    """Show the table every `pause` seconds, until `busy` says no; without it, until no Run waits or runs."""
    queue = queued(known)
    while True:
        going = busy() if busy else None
        rows = [k.look(queue) for k in known]
        live.show(rows)
        if not (any(row.state in ("waiting", "running") for row in rows) if going is None else going):
            return
        time.sleep(pause)
        queue = queued(known, queue)


# submitting --------------------------------------------------------------------------------------------------------------
def executor(args: argparse.Namespace, folder: Path) -> Any:
    """Return submitit's executor with the resources of the command line."""
    import submitit

    try:
        out = submitit.AutoExecutor(folder=folder, cluster=args.cluster, slurm_max_num_timeout=10000)
    except RuntimeError as error:
        raise UserError(f"--cluster is {args.cluster}: {error}") from None
    if args.cluster != "slurm":
        out.update_parameters(name="dpfl", timeout_min=minutes(args.time))
        return out
    extra: dict[str, Any] = {"requeue": True}
    for item in args.sbatch:
        name, _, value = item.partition("=")
        extra[name.lstrip("-")] = value if value else True
    out.update_parameters(
        name="dpfl",
        timeout_min=minutes(args.time),
        nodes=args.nodes,
        tasks_per_node=args.ranks,
        cpus_per_task=args.cpus,
        slurm_partition=args.partition,
        slurm_account=args.account,
        slurm_gpus_per_node=args.gpus,
        slurm_array_parallelism=args.max_parallel or 256,
        slurm_srun_args=[f"--mpi={args.mpi}", f"--cpus-per-task={args.cpus}", "--kill-on-bad-exit=1"],
        slurm_setup=[f"export OMP_NUM_THREADS={args.cpus}"],
        slurm_signal_delay_s=120,
        slurm_additional_parameters=extra,
    )
    return out


def minutes(text: str) -> int:
    """Return a time limit in minutes: a number of them, or H:MM:SS, or D-H:MM:SS."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    right = len(parts) == 3 or (len(parts) == 1 and not days)
    if not right or not all(p.isdigit() for p in [*parts, days or "0"]):
        raise UserError(f"--time is {text}; allowed is a number of minutes, H:MM:SS or D-H:MM:SS")
    if len(parts) == 1:
        return int(parts[0])
    hours, mins, seconds = map(int, parts)
    return int(days or 0) * 1440 + hours * 60 + mins + -(-seconds // 60)


def submit(args: argparse.Namespace, job: Job, todo: list[Known], known: list[Known], live: Live) -> None:
    """Submit a job for each of these Runs: an array on Slurm, here as many at once as there are cores for, one with `debug`."""
    sweeps = Path(job.results) / "sweeps"
    with explained(f"--results is {job.results}; nothing can be written there"):
        sweeps.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=sweeps))
    jobs = executor(args, folder)
    lines = [flags(k.run, dataclasses.replace(job, quiet=False, out=str(k.path.resolve()))) for k in todo]
    if args.cluster == "slurm":
        array = jobs.map_array(compute, lines)
        remember(folder, {k.path.name: j.job_id for k, j in zip(todo, array, strict=True)}, "slurm")
        recall(known, sweeps)
        number = array[0].job_id.split("_")[0]
        what = (
            f"{len(array)} jobs as array {number}" if len(array) > 1 else f"job {number}"
        )  # submitit makes one no array
        print(f"submitted {what}; logs in {folder}", flush=True)
        return
    at_once = args.max_parallel or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    running: list[Any] = []
    begun: dict[str, str] = {}
    since: dict[str, str] = {}

    def busy(most: int) -> bool:
        running[:] = [r for r in running if not r.done()]
        return len(running) > most

    try:
        for k, line in zip(todo, lines, strict=True):
            one = jobs.submit(compute, [str(args.ranks), *line])
            begun[k.path.name] = one.job_id
            since[k.path.name] = born(int(one.job_id)) if args.cluster == "local" else ""
            remember(folder, begun, args.cluster, since)
            recall(known, sweeps)
            if args.cluster == "debug":
                print(f"--- {k.path.stem}", flush=True)
                if failure := one.exception():  # computes it; .result() would open a debugger
                    print(f"{k.path.stem} failed: {failure}", file=sys.stderr, flush=True)
                continue
            running.append(one)
            follow(known, live, LOOK_S, lambda: busy(at_once - 1))
        if running:
            follow(known, live, LOOK_S, lambda: busy(0))
    except KeyboardInterrupt:
        for r in running:
            r.cancel()
        end = time.monotonic() + LEAVING_S
        while any(Lock(k.path).taken() for k in todo) and time.monotonic() < end:
            time.sleep(LOOK_S)
        raise


def show_text(args: argparse.Namespace, job: Job, todo: list[Known]) -> None:
    """Print what would be submitted: the sbatch text, or the commands."""
    if args.cluster == "slurm":
        inner = executor(args, Path(job.results) / "sweeps" / "TIME")._executor
        inner.parameters["map_count"] = len(todo)
        print(inner._make_submission_file_text(inner._submitit_command_str, "dry"))
    for k in todo:
        line = shlex.join(flags(k.run, dataclasses.replace(job, out=str(k.path))))
        print(f"# {'task' if args.cluster == 'slurm' else f'mpirun -n {args.ranks}'}: python -m dpfl_mpi {line}")


def choose(values: dict[str, list[Run]], job: Job, tune: str) -> str:
    """Return the tuning table and its choice: the largest validation accuracy, mean over clients and trials. The test set is not read."""
    lines, best = (
        [f"{tune.partition('=')[0]}  validation accuracy, mean over {len(next(iter(values.values())))} runs"],
        ("", -1.0),
    )
    for value, runs in values.items():
        scores = []
        for run in runs:
            path = run.path(job.results)
            if not path.exists():
                return "the tuning is not finished: submit it, then run the same command again"
            with Result(path) as result:
                if not result.finished:
                    return "the tuning is not finished: run the same command again when it is"
                scores.append(float(np.nanmean(result["best/val_acc"])))
        mean = float(np.mean(scores))
        lines.append(f"  {value:>10s}  {100 * mean:.2f} %")
        if mean > best[1]:
            best = (value, mean)
    return "\n".join([*lines, f"best by validation: {tune.partition('=')[0]}={best[0]}"])


def parser() -> argparse.ArgumentParser:
    """Return the command line of a sweep."""
    out = argparse.ArgumentParser(
        prog="python -m dpfl_mpi.sweep", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    out.add_argument("file", type=Path, nargs="?", help="file of analysis/ whose RUNS are wanted")
    for flag, field in GRID.items():
        out.add_argument(f"--{flag}", metavar="A,B,...", help=f"a Run for each --{field}")
    out.add_argument("--tune", metavar="METHOD.NAME=A,B", help="a Run for each value; picks by validation accuracy")
    out.add_argument(
        "--list", action="store_true", help="say what is finished, running, failed, missing; submit nothing"
    )
    out.add_argument("--watch", action="store_true", help="show the table until no Run waits or runs")
    out.add_argument("--dry_run", action="store_true", help="print what would be submitted")
    out.add_argument(
        "--retry", action="store_true", help="submit failed and stopped Runs again; they go on from their checkpoints"
    )
    out.add_argument("--cluster", choices=("slurm", "local", "debug"), default="local", help="where [local]")
    out.add_argument("--max_parallel", type=int, default=0, help="most jobs at once [cores / ranks; 256 on slurm]")
    out.add_argument("--ranks", type=int, default=1, help="MPI ranks (a node, on slurm) [1]")
    out.add_argument("--nodes", type=int, default=1, help="nodes a job [1]")
    out.add_argument("--cpus", type=int, default=1, help="threads a rank [1]")
    out.add_argument("--gpus", type=int, help="GPUs a node")
    out.add_argument("--time", default="720", help="time limit: minutes, H:MM:SS or D-H:MM:SS [720]")
    out.add_argument("--partition", help="Slurm partition")
    out.add_argument("--account", help="Slurm account")
    out.add_argument("--mpi", default="pmi2", help="srun --mpi=...: pmi2 for MPICH, pmix for Open MPI [pmi2]")
    out.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=VALUE", help="any other sbatch option, repeatable"
    )
    return out


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 1 where a Run failed."""
    args, rest = parser().parse_known_args(arguments)
    try:
        return sweep(args, rest)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        on_slurm = "jobs on Slurm go on" if args.cluster == "slurm" or args.list else "the Runs keep a checkpoint each"
        print(f"interrupted: {on_slurm}; the same command with --list says how far they are", file=sys.stderr)
        return 130


def sweep(args: argparse.Namespace, rest: list[str]) -> int:
    """Find, submit and report the Runs of a command line."""
    from dpfl_mpi.__main__ import parse
    from dpfl_mpi.__main__ import parser as one_run

    if args.file and any(getattr(args, flag) for flag in GRID):
        raise UserError(f"name either {args.file} or a grid ({', '.join('--' + flag for flag in GRID)}), not both")
    for flag, least in (("ranks", 1), ("nodes", 1), ("cpus", 1), ("max_parallel", 0)):
        if getattr(args, flag) < least:
            raise UserError(f"--{flag} is {getattr(args, flag)}; allowed is a whole number of at least {least}")
    _, job = parse(rest)
    given = one_run().parse_args(rest)
    base = Run(**{f.name: given[f.name] for f in dataclasses.fields(Run)})
    wanted = runs_of(args.file) if args.file else grid(args, base)
    if args.file and base != Run():
        changed = {f.name: getattr(base, f.name) for f in dataclasses.fields(Run) if getattr(base, f.name) != f.default}
        wanted = [dataclasses.replace(run, **changed) for run in wanted]
    tried = trials(wanted, args.tune) if args.tune else {"": wanted}
    values = {v: [old_flags(r, given).resolve() for r in runs] for v, runs in tried.items()}
    runs = [r for some in values.values() for r in some]
    known = list({path.name: Known(run, path) for run in runs for path in [run.path(job.results)]}.values())
    recall(known, Path(job.results) / "sweeps")
    queue = queued(known)
    again_too = ("missing", "failed", "stopped", "running", "unreadable") if args.retry else ("missing",)
    todo = [k for k in known if k.look(queue).state in again_too and not k.alive(queue)]
    if args.dry_run:
        show_text(args, job, todo)
        return 0
    live = Live(sys.stdout)
    if todo and not args.list:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # submitit's own
            submit(args, job, todo, known, live)
    if args.watch:
        follow(known, live, WATCH_S if any(k.cluster == "slurm" for k in known) else LOOK_S)
    queue = queued(known)
    rows = [k.look(queue) for k in known]
    live.end(rows)
    failed = [k for k, row in zip(known, rows, strict=True) if row.state == "failed"]
    for k in failed:
        print(f"\n{k.path.stem} failed (job {k.job_id}, --retry submits it again):\n{k.log()}")
    if args.tune:
        print(choose(values, job, args.tune))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
