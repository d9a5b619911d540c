"""The command line of `python -m dpfl_mpi.sweep`, and which Runs it wants.

They are the list RUNS of a file, or all combinations of the values of some flags (the grid). With
`--tune NAME=A,B` each of them is computed with each value, and `tuning_report` says which is best.
"""

import argparse
import dataclasses
import itertools
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.plugins.code import failure
from dpfl_mpi.results.result import mean, result_of
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.command_line import EPILOG, Parser, add_flags
from dpfl_mpi.settings.fields import fields, read
from dpfl_mpi.sweep.entries import Entry

# flags with several values, and the field of a Run that takes one of them
GRID = {"seeds": "seed", "methods": "method", "datasets": "dataset", "budgets": "budget"}
# flags for Slurm alone, and their defaults; `time` is in minutes
SLURM: dict[str, Any] = {"nodes": 1, "time": 720, "sbatch": []}


def words(text: str) -> list[Any]:
    """Return the values of a list with commas."""
    found = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    if not found:
        allowed = "allowed are values, separated by commas"
        raise argparse.ArgumentTypeError(f"{text!r} holds none; {allowed}")
    return list(found)


def parser(description: str) -> Parser:
    """Return the parser of a sweep's own flags and those of its Runs."""
    usage = "python -m dpfl_mpi.sweep [FILE] [--FLAG VALUE ...] [--SETTING VALUE ...]"
    out = Parser(usage=usage, description=description, epilog=EPILOG)
    add = out.add_argument_group("which Runs").add_argument
    text = "Python file with a list RUNS, such as those of analysis/"
    add("file", type=Path, nargs="?", metavar="FILE", help=text)
    for flag, field in GRID.items():
        text = f"a Run for each --{field}; with FILE, only its Runs that have one of these"
        add(f"--{flag}", type=words, metavar="A,B,...", help=text)
    text = "try each value of a setting or an option; report the best by validation accuracy"
    add("--tune", metavar="NAME=A,B", help=text)
    add = out.add_argument_group("what to do").add_argument
    add("--list", action="store_true", help="print how far the Runs are; submit nothing")
    add("--dry_run", action="store_true", help="print what would be submitted")
    add("--retry", action="store_true", help="submit failed Runs again, from their checkpoints")
    add("--watch", action="store_true", help="print changes until no Run waits or runs")
    add = out.add_argument_group("where the Runs are computed").add_argument
    text = "on this machine, or as jobs of Slurm [local]"
    add("--cluster", choices=("local", "slurm"), default="local", metavar="local|slurm", help=text)
    text = "most Runs at once (0: by cores and GPUs; 256 on Slurm) [0]"
    add("--max_parallel", type=int, default=0, metavar="N", help=text)
    add("--ranks", type=int, default=1, metavar="N", help="MPI ranks; on Slurm, per node [1]")
    add("--cpus", type=int, default=1, metavar="N", help="threads per rank [1]")
    text = "GPUs per Run [1 if there are any]; on Slurm, per node [none]"
    add("--gpus", type=int, metavar="N", help=text)
    add("--nodes", type=int, default=SLURM["nodes"], metavar="N", help="Slurm: nodes per job [1]")
    text = f"Slurm: time limit of a job in minutes [{SLURM['time']}]"
    add("--time", type=int, default=SLURM["time"], metavar="N", help=text)
    text = "Slurm: an option of sbatch, such as partition or account, repeatable"
    add("--sbatch", action="append", default=SLURM["sbatch"], metavar="NAME=VALUE", help=text)
    add_flags(out, hidden=("fresh", "out"))  # which are for one Run
    return out


def runs_of(file: Path) -> list[Run]:
    """Return a file's list RUNS; it is executed as a script and may import files beside it."""
    if not file.is_file():
        raise UserError(f"{file}; there is no such file")
    sys.path.insert(0, folder := str(file.resolve().parent))
    try:
        runs = runpy.run_path(str(file)).get("RUNS")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{file}, which fails: {failure(error, file, file)}") from None
    finally:
        sys.path.remove(folder)
    if not isinstance(runs, list) or not runs or not all(isinstance(run, Run) for run in runs):
        raise UserError(f"{file} has no list RUNS of Run(...)")
    return runs


def axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the values of each flag of `GRID` that is given, by the field of a Run."""
    out = {}
    for flag, field in GRID.items():
        if values := getattr(args, flag):
            out[field] = [read(Run, field, value) for value in values]
    return out


def grid(args: argparse.Namespace, base: Run) -> list[Run]:
    """Return `base` with every combination of the values of the grid's flags."""
    values = axes(args)
    points = (dict(zip(values, p, strict=True)) for p in itertools.product(*values.values()))
    return [dataclasses.replace(base, **point) for point in points]


def only(runs: list[Run], args: argparse.Namespace) -> list[Run]:
    """Return the Runs of a file that have one of the values of each flag of the grid."""
    # A method that reads no budget has every budget. A value that no Run has is a `UserError`.
    flags, whose = {field: flag for flag, field in GRID.items()}, f"the Runs of {args.file}"
    for field, values in axes(args).items():
        for value in values:
            if not any(same(run, field, value) for run in runs):
                names = dict.fromkeys(str(getattr(run.resolve(), field)) for run in runs)
                raise UserError(f"--{flags[field]} has {value}; {whose} have {', '.join(names)}")
        runs = [run for run in runs if any(same(run, field, value) for value in values)]
        whose = f"the Runs of {args.file} that the other flags leave"
    return runs


def same(run: Run, field: str, value: Any) -> bool:
    """Return whether a Run has this value of a field; budgets are compared as numbers."""
    if field != "budget":
        return bool(getattr(run, field) == value)
    return dataclasses.replace(run, budget=value).resolve().budget == run.resolve().budget


def bases(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the base of each fine-tuned Run, by the name of its result, if the sweep has it."""
    # The base is the same Run without fine-tuning. The fine-tuned Run starts from its models.
    by_path = {entry.path: entry for entry in entries}
    tuned = [entry for entry in entries if entry.run.finetune_epochs]
    paths = {entry.path.name: entry.run.untuned().path(entry.path.parent) for entry in tuned}
    return {name: by_path[path] for name, path in paths.items() if path in by_path}


# --tune -------------------------------------------------------------------------------------------
def trials(runs: list[Run], tune: str) -> dict[str, list[Run]]:
    """Return the Runs with each value of `--tune NAME=A,B`, by the value."""
    # NAME is a setting, or an option by its flag: options.lam is option "lam" of field "options"
    name, _, values = tune.partition("=")
    field, _, option = name.rpartition(".")  # the field is "" where NAME is a setting
    settings = {f.name for f in fields(Run)} - {"method", "options", "model_options"}
    known = field in ("options", "model_options") or name in settings
    if not (known and values.strip(", ")):
        allowed = "a setting or an option with its values: lr=0.01,0.1 or options.lam=0.1,0.75,1"
        raise UserError(f"--tune is {tune}; allowed is {allowed}")
    out: dict[str, list[Run]] = {}
    for value, run in itertools.product(words(values), runs):
        change: dict[str, Any]
        if field:
            change = {field: {**(getattr(run, field) or {}), option: value}}
        else:
            change = {name: read(Run, name, value)}
        out.setdefault(value, []).append(dataclasses.replace(run, **change))
    return out


def tuning_report(values: Mapping[str, Sequence[Run]], job: Job, tune: str) -> str:
    """Return a table of tried values and the best of them for each method of the Runs.

    `values` has the Runs by the tried value.
    """
    name, tables = tune.partition("=")[0], []
    methods = dict.fromkeys(run.method for runs in values.values() for run in runs)
    for method in methods:
        of_method = {v: [run for run in runs if run.method == method] for v, runs in values.items()}
        shown_name = name if len(methods) < 2 else f"{short(method)}.{name}"
        tables.append(report_of_method(of_method, job, shown_name))
    return "\n\n".join(tables)


def report_of_method(values: Mapping[str, Sequence[Run]], job: Job, name: str) -> str:
    """Return the table of tried values and the best one by validation accuracy.

    The accuracy is a mean over clients and Runs. The test set is not read.
    """
    means: dict[str, float] = {}  # by value
    unscored = dict.fromkeys(values, 0)  # benign clients that were never scored
    count = 0
    for value, runs in values.items():
        # a Run that is asked for twice, or by settings that it does not read, counts once
        by_path = {run.path(job.results): run for run in runs}
        count, scores = len(by_path), []
        for path, run in by_path.items():
            if not path.exists():
                continue
            with result_of(run.key(), path) as result:
                if not result.finished:
                    continue
                of_clients = result["best/val_acc"][result.benign]
            scores.append(mean(of_clients))
            unscored[value] += int(np.isnan(of_clients).sum())
        if len(scores) == count:
            means[value] = float(np.mean(scores))
    percent = {value: f"{100 * accuracy:.2f} %" for value, accuracy in means.items()}
    lines = [f"{name}  validation accuracy, mean over {count} run{'s' * (count > 1)}"]
    for value in values:
        clients = f"  without {unscored[value]} clients that were never scored"
        note = clients if unscored[value] and value in means else ""
        lines.append(f"  {value:>10s}  {percent.get(value, 'not finished')}{note}")
    if len(means) < len(values):
        again = "run the same command again when it is, or leave out a value that fails"
        return "\n".join([*(lines if means else []), f"the tuning is not finished: {again}"])
    scored = [value for value in means if np.isfinite(means[value])]
    if not scored:
        return "\n".join([*lines, "no value is best: no client was scored"])
    best = max(scored, key=lambda value: means[value])
    lines.append(f"best by validation: {name}={best}")
    if equal := [value for value in scored if value != best and percent[value] == percent[best]]:
        tie = f"a tie to two digits with {', '.join(equal)}"
        lines[-1] += f" ({tie}; of equal accuracies the first is taken)"
    return "\n".join(lines)
