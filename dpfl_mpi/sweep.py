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
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.config import Job, Run, old_flags
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.settings.fields import changed, fields, to_flags
from dpfl_mpi.sweeps.jobs import LOOK_S, UNSET, executor, submit
from dpfl_mpi.sweeps.known import Known, follow, queued, recall
from dpfl_mpi.sweeps.table import Live

GRID = {"seeds": "seed", "methods": "method", "datasets": "dataset", "budgets": "budget"}
WATCH_S = 10.0  # between two looks at Slurm's Runs, whose controller serves everybody


def compute(arguments: list[str]) -> int:
    """Compute one Run: the function that is submitted. Returns 0.

    As a Slurm task it is one rank of the world that srun started; alone (`local`, `debug`) it calls mpirun.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
        from dpfl_mpi.__main__ import main

        main(arguments)
        return 0
    ranks, gpus, *rest = arguments
    env = os.environ | {"SUBMITIT_EXECUTOR": "", "CUDA_VISIBLE_DEVICES": gpus}
    if gpus == UNSET:
        del env["CUDA_VISIBLE_DEVICES"]
    command = ["mpirun", "-n", ranks, sys.executable, "-m", "dpfl_mpi", *rest]
    process = subprocess.Popen(
        command,
        env=env,
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
    if field not in options | {f.name for f in fields(Run)}:
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


def show_text(args: argparse.Namespace, job: Job, todo: list[Known]) -> None:
    """Print what would be submitted: the sbatch text, or the commands."""
    if args.cluster == "slurm":
        inner = executor(args, Path(job.results) / "sweeps" / "TIME")._executor
        inner.parameters["map_count"] = len(todo)
        print(inner._make_submission_file_text(inner._submitit_command_str, "dry"))
    for k in todo:
        line = shlex.join(to_flags(changed(k.run) | changed(dataclasses.replace(job, out=str(k.path)))))
        print(f"# {'task' if args.cluster == 'slurm' else f'mpirun -n {args.ranks}'}: python -m dpfl_mpi {line}")


def choose(values: Mapping[str, Sequence[Run]], job: Job, tune: str) -> str:
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
    out.add_argument(
        "--max_parallel",
        type=int,
        default=0,
        help="most jobs at once [cores / ranks, and what the GPUs hold; 256 on slurm]",
    )
    out.add_argument("--ranks", type=int, default=1, help="MPI ranks (per node, on slurm) [1]")
    out.add_argument("--nodes", type=int, default=1, help="nodes per job [1]")
    out.add_argument("--cpus", type=int, default=1, help="threads per rank [1]")
    out.add_argument("--gpus", type=int, help="GPUs per node on slurm, here per Run [1 where there are any]")
    out.add_argument(
        "--runs_per_gpu", type=int, default=1, help="Runs of this machine that share a GPU, under CUDA's MPS [1]"
    )
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
    for flag, least in (("ranks", 1), ("nodes", 1), ("cpus", 1), ("max_parallel", 0), ("runs_per_gpu", 1)):
        if getattr(args, flag) < least:
            raise UserError(f"--{flag} is {getattr(args, flag)}; allowed is a whole number of at least {least}")
    if args.cluster == "slurm" and args.runs_per_gpu > 1:
        raise UserError(
            "--runs_per_gpu is for Runs of this machine; Slurm shares a GPU between jobs by its own means, such as --sbatch gres=shard:1"
        )
    _, job = parse(rest)
    given = one_run().parse_args(rest)
    base = Run(**{f.name: given[f.name] for f in fields(Run)})
    wanted = runs_of(args.file) if args.file else grid(args, base)
    if args.file and base != Run():
        wanted = [dataclasses.replace(run, **changed(base)) for run in wanted]
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
            submit(compute, args, job, todo, known, live)
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
