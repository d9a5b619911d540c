"""The command line of a sweep, and which Runs it wants: of a file, of a grid, of tried values."""

import argparse
import dataclasses
import itertools
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import LONGEST, UserError
from dpfl_mpi.plugins import admit, find
from dpfl_mpi.results.result import mean, result_of
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.command_line import Parser, add_flags
from dpfl_mpi.settings.fields import fields, read
from dpfl_mpi.sweep.entries import Entry

GRID = {"seeds": "seed", "methods": "method", "datasets": "dataset", "budgets": "budget"}
MINUTES = 720  # default time limit of a job on Slurm


def words(text: str) -> list[Any]:
    """Return the values of a list with commas."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        allowed = "allowed are values, separated by commas"
        raise argparse.ArgumentTypeError(f"{text!r} holds none; {allowed}")
    return found


def seeds(text: str) -> list[int]:
    found = words(text)
    for word in found:
        if not (word.isascii() and word.isdigit()):
            allowed = "allowed are whole numbers, separated by commas"
            raise UserError(f"--seeds has {word}; {allowed}")
    return [int(word) for word in found]


def parser(description: str) -> Parser:
    """Return the parser of a sweep's own flags and those of its Runs."""
    out = Parser(prog="python -m dpfl_mpi.sweep", description=description)
    add = out.add_argument
    add("file", type=Path, nargs="?", help="a file whose list RUNS is wanted, such as of analysis/")
    for flag, field in GRID.items():
        text = f"a Run for each --{field}; of a file, its Runs with these"
        kind = seeds if flag == "seeds" else words
        add(f"--{flag}", type=kind, metavar="A,B,...", help=text)
    tune = "a Run for each value; picks by validation accuracy"
    add("--tune", metavar="METHOD.NAME=A,B", help=tune)
    add("--list", action="store_true", help="print how far the Runs are; submit nothing")
    add("--watch", action="store_true", help="print changes until no Run waits or runs")
    add("--dry_run", action="store_true", help="print what would be submitted")
    add("--retry", action="store_true", help="submit failed Runs again, from their checkpoints")
    add("--cluster", choices=("slurm", "local"), default="local", help="where [local]")
    most = "most jobs at once [by cores and GPUs; 256 on slurm]"
    add("--max_parallel", type=int, default=0, help=most)
    add("--ranks", type=int, default=1, help="MPI ranks (per node, on slurm) [1]")
    add("--nodes", type=int, default=1, help="nodes per job on slurm [1]")
    add("--cpus", type=int, default=1, help="threads per rank [1]")
    add("--gpus", type=int, help="GPUs per node on slurm; here per Run [1 if there are any]")
    limit = f"time limit of a job on slurm: minutes, H:MM:SS or D-H:MM:SS [{MINUTES}]"
    add("--time", help=limit)
    add("--slurm_partition", metavar="NAME", help="Slurm partition (--partition is a Run's)")
    add("--slurm_account", "--account", metavar="NAME", help="Slurm account")
    more = "any other option of sbatch, repeatable"
    add("--sbatch", action="append", default=[], metavar="NAME=VALUE", help=more)
    add_flags(out)
    return out


def runs_of(file: Path) -> list[Run]:
    """Return the list RUNS of a file, which is executed as a script: it may import neighbours."""
    if not file.is_file():
        raise UserError(f"{file}; there is no such file")
    sys.path.insert(0, folder := str(file.resolve().parent))
    try:
        runs = runpy.run_path(str(file)).get("RUNS")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {frame.lineno}" for frame in frames if frame.filename == str(file)]
        text = " ".join(str(error).split())[:LONGEST]
        why = f"{type(error).__name__}: {text} ({file}{''.join(lines[-1:])})"
        raise UserError(f"{file}, which fails: {why}") from None
    finally:
        sys.path.remove(folder)
    if not isinstance(runs, list) or not all(isinstance(run, Run) for run in runs):
        raise UserError(f"{file} has no list RUNS of Run(...)")
    return runs


def axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the values of the flags of `GRID` that are given, by the field of Run."""
    return {field: getattr(args, flag) for flag, field in GRID.items() if getattr(args, flag)}


def grid(args: argparse.Namespace, base: Run) -> list[Run]:
    """Return `base` with every combination of the values of the grid's flags."""
    wanted = axes(args)
    points = itertools.product(*wanted.values())
    return [dataclasses.replace(base, **dict(zip(wanted, point, strict=True))) for point in points]


def only(runs: list[Run], args: argparse.Namespace) -> list[Run]:
    """Return the Runs of a file that have one of the values of each flag of the grid.

    A method that reads no budget has every budget.

    Raises:
        UserError: no Run has a value.
    """
    flags = {field: flag for flag, field in GRID.items()}
    for field, values in axes(args).items():
        has = {value: [run for run in runs if same(run, field, value)] for value in values}
        for value in (value for value, found in has.items() if not found):
            names = sorted({value_of(run, field) for run in runs})
            there = f"the Runs of {args.file} have {', '.join(names)}"
            raise UserError(f"--{flags[field]} has {value}; {there}")
        runs = [run for run in runs if any(run in found for found in has.values())]
    return runs


def value_of(run: Run, field: str) -> str:
    value = getattr(run, field)
    return str(run.resolve().budget if value is None else value)


def same(run: Run, field: str, value: Any) -> bool:
    """Return whether a Run has this value of a field; budgets are compared as numbers."""
    if field != "budget":
        return bool(getattr(run, field) == value)
    return dataclasses.replace(run, budget=value).resolve().budget == run.resolve().budget


def bases(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the base of each fine-tuned Run, by the name of its result, if the sweep has it.

    The base is the same Run with --finetune_epochs 0, which keeps its models. The tuned Run starts
    from them: the rounds are computed once.
    """
    by_path = {entry.path: entry for entry in entries}
    tuned = [entry for entry in entries if entry.run.finetune_epochs]
    paths = {entry.path.name: entry.run.untuned().path(entry.path.parent) for entry in tuned}
    return {name: by_path[path] for name, path in paths.items() if path in by_path}


# tuning -------------------------------------------------------------------------------------------
def trials(runs: list[Run], tune: str) -> dict[str, list[Run]]:
    """Return the Runs of each value of `--tune METHOD.NAME=a,b,c`.

    NAME is an option of the method or a field of Run.
    """
    name, _, values = tune.partition("=")
    method, _, field = name.rpartition(".")  # a method may be a file: path/to/mine.py.lam
    if not (method and field and values.strip(", ")):
        allowed = "METHOD.NAME=VALUE,VALUE, such as ditto.lam=0.1,0.75,1"
        raise UserError(f"--tune is {tune}; allowed is {allowed}")
    admit("method", method)
    options = {f.name for f in dataclasses.fields(find("method", method).options)}
    if field not in options | {f.name for f in fields(Run) if f.name != "method"}:
        there = f"its options are {', '.join(sorted(options)) or 'none'}"
        raise UserError(f"--tune: {method} has no {field}; {there}")
    out: dict[str, list[Run]] = {}
    for value in words(values):
        tried = out.setdefault(value, [])
        for run in runs:
            if field in options:
                change: dict[str, Any] = {"options": {**(run.options or {}), field: value}}
            else:
                change = {field: read(Run, field, value)}
            changed = dataclasses.replace(run, method=method, **change)
            if changed not in tried:  # runs may differ in their method alone
                tried.append(changed)
    return out


def choose(values: Mapping[str, Sequence[Run]], job: Job, tune: str) -> str:
    """Return the table of tried values and the best one by validation accuracy.

    The accuracy is a mean over clients and Runs. The test set is not read.
    """
    name = tune.partition("=")[0]
    means: dict[str, float] = {}
    unscored = dict.fromkeys(values, 0)  # clients, as they diverged
    for value, runs in values.items():
        scores = []
        for run in runs:
            path = run.path(job.results)
            if not path.exists():
                return "the tuning is not finished: submit it, then run the same command again"
            with result_of(run, path) as result:
                if not result.finished:
                    return "the tuning is not finished: run the same command again when it is"
                of_clients = result["best/val_acc"][result.benign]
            scores.append(mean(of_clients))
            unscored[value] += int(np.isnan(of_clients).sum())
        means[value] = float(np.mean(scores))
    percent = {value: f"{100 * accuracy:.2f} %" for value, accuracy in means.items()}
    count = len(next(iter(values.values()), ()))
    lines = [f"{name}  validation accuracy, mean over {count} runs"]
    for value in means:
        clients = f"  without {unscored[value]} clients that were never scored"
        lines.append(f"  {value:>10s}  {percent[value]}{clients if unscored[value] else ''}")
    scored = [value for value in means if np.isfinite(means[value])]
    if not scored:
        return "\n".join([*lines, "no value is best: no client was scored"])
    best = max(scored, key=lambda value: means[value])
    equal = [value for value in scored if value != best and percent[value] == percent[best]]
    rule = f"a tie to two digits with {', '.join(equal)}; of equal accuracies the first is taken"
    lines.append(f"best by validation: {name}={best}{f' ({rule})' if equal else ''}")
    return "\n".join(lines)
