"""The command line of a sweep, and which Runs it wants: of a file, of a grid, of values to be tuned; which goes on from which."""

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import admit, find
from dpfl_mpi.plugins.code import execute, in_path
from dpfl_mpi.results.result import mean, result_of
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.command_line import Parser, add_flags
from dpfl_mpi.settings.fields import fields, read
from dpfl_mpi.sweep.known import Known

GRID = {"seeds": "seed", "methods": "method", "datasets": "dataset", "budgets": "budget"}
MINUTES = 720  # of a job on Slurm, unless told


def words(text: str) -> list[Any]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} holds none; allowed are values, separated by commas")
    return found


def seeds(text: str) -> list[int]:
    found = words(text)
    for word in found:
        if not (word.isascii() and word.isdigit()):
            raise UserError(f"--seeds has {word}; allowed are whole numbers, separated by commas")
    return [int(word) for word in found]


def parser(description: str) -> Parser:
    """Return the flags that are a sweep's own."""
    out = Parser(prog="python -m dpfl_mpi.sweep", description=description)
    add = out.add_argument
    add("file", type=Path, nargs="?", help="file of analysis/ whose RUNS are wanted")
    for flag, field in GRID.items():
        text = f"a Run for each --{field}; of a file the Runs with these"
        add(f"--{flag}", type=seeds if flag == "seeds" else words, metavar="A,B,...", help=text)
    add("--tune", metavar="METHOD.NAME=A,B", help="a Run for each value; picks by validation accuracy")
    add("--list", action="store_true", help="say how far the Runs are; submit nothing")
    add("--watch", action="store_true", help="show the table until no Run waits or runs")
    add("--dry_run", action="store_true", help="print what would be submitted")
    add("--retry", action="store_true", help="submit failed Runs again; they go on from their checkpoints")
    add("--cluster", choices=("slurm", "local", "debug"), default="local", help="where [local]")
    add("--max_parallel", type=int, default=0, help="most jobs at once [cores / ranks, what GPUs hold; 256 on slurm]")
    add("--ranks", type=int, default=1, help="MPI ranks (per node, on slurm) [1]")
    add("--nodes", type=int, default=1, help="nodes per job [1]")
    add("--cpus", type=int, default=1, help="threads per rank [1]")
    add("--gpus", type=int, help="GPUs per node on slurm, here per Run [1 where there are any]")
    add("--runs_per_gpu", type=int, default=1, help="Runs here that share a GPU, under CUDA's MPS [1]")
    add("--time", help=f"time limit of a Run: minutes, H:MM:SS or D-H:MM:SS [{MINUTES} on slurm, none here]")
    add("--slurm_partition", metavar="NAME", help="Slurm partition (--partition is a Run's)")
    add("--slurm_account", "--account", metavar="NAME", help="Slurm account")
    add("--mpi", default="pmi2", help="srun --mpi=...: pmi2 for MPICH, pmix for Open MPI [pmi2]")
    add("--sbatch", action="append", default=[], metavar="NAME=VALUE", help="any other sbatch option, repeatable")
    add_flags(out)
    return out


def runs_of(file: Path) -> list[Run]:
    """Return the Runs that a file of analysis/ names in its RUNS; it may import its neighbours."""
    module, _ = execute(str(file), in_path(str(file), file))
    runs = getattr(module, "RUNS", None)
    if not isinstance(runs, list) or not all(isinstance(run, Run) for run in runs):
        raise UserError(f"{file} has no list RUNS of Run(...)")
    return runs


def axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the values of the flags of `GRID` that are given, by the field of Run."""
    return {field: getattr(args, flag) for flag, field in GRID.items() if getattr(args, flag)}


def grid(args: argparse.Namespace, base: Run) -> list[Run]:
    """Return the Runs of --seeds, --methods, --datasets and --budgets, all combinations, over the fields of `base`."""
    wanted = axes(args)
    points = itertools.product(*wanted.values())
    return [dataclasses.replace(base, **dict(zip(wanted, point, strict=True))) for point in points]


def only(runs: list[Run], args: argparse.Namespace) -> list[Run]:
    """Return the Runs of a file that have one of the values of each of --seeds, --methods, --datasets and --budgets; refuse a value of no Run.

    A method that reads no budget has every budget.
    """
    flags = {field: flag for flag, field in GRID.items()}
    for field, values in axes(args).items():
        has = {value: [run for run in runs if same(run, field, value)] for value in values}
        for value in (value for value, found in has.items() if not found):
            there = sorted({str(run.resolve().budget if (v := getattr(run, field)) is None else v) for run in runs})
            raise UserError(f"--{flags[field]} has {value}; the Runs of {args.file} have {', '.join(there)}")
        runs = [run for run in runs if any(run in found for found in has.values())]
    return runs


def same(run: Run, field: str, value: Any) -> bool:
    """Return whether a Run has this value of a field; a budget is compared as the number that it comes to."""
    if field != "budget":
        return bool(getattr(run, field) == value)
    return dataclasses.replace(run, budget=value).resolve().budget == run.resolve().budget


def trials(runs: list[Run], tune: str) -> dict[str, list[Run]]:
    """Return the Runs of each value of `--tune METHOD.NAME=a,b,c`; NAME is an option of the method or a field of Run."""
    name, _, values = tune.partition("=")
    method, _, field = name.rpartition(".")  # a method may be a file: path/to/mine.py.lam
    if not (method and field and values.strip(", ")):
        raise UserError(f"--tune is {tune}; allowed is METHOD.NAME=VALUE,VALUE, such as ditto.lam=0.1,0.75,1")
    admit("method", method)
    options = {f.name for f in dataclasses.fields(find("method", method).options)}
    if field not in options | {f.name for f in fields(Run) if f.name != "method"}:
        raise UserError(f"--tune: {method} has no {field}; its options are {', '.join(sorted(options)) or 'none'}")
    out: dict[str, list[Run]] = {}
    for value in words(values):
        for run in runs:
            change: dict[str, Any] = {field: read(Run, field, value)} if field not in options else {}
            change = change or {"options": {**(run.options or {}), field: value}}
            one = dataclasses.replace(run, method=method, **change)
            if one not in out.setdefault(value, []):  # runs may differ in their method alone
                out[value].append(one)
    return out


def choose(values: Mapping[str, Sequence[Run]], job: Job, tune: str) -> str:
    """Return the tuning table and its choice: the largest validation accuracy, mean over clients and trials. The test set is not read."""
    name = tune.partition("=")[0]
    means: dict[str, float] = {}
    without = dict.fromkeys(values, 0)  # clients that were never scored, as they diverged
    for value, runs in values.items():
        scores = []
        for run in runs:
            path = run.path(job.results)
            if not path.exists():
                return "the tuning is not finished: submit it, then run the same command again"
            with result_of(run, path) as result:
                if not result.finished:
                    return "the tuning is not finished: run the same command again when it is"
                each = result["best/val_acc"][result.benign]
                scores.append(mean(each))
                without[value] += int(np.isnan(each).sum())
        means[value] = float(np.mean(scores))
    shown = {value: f"{100 * accuracy:.2f} %" for value, accuracy in means.items()}
    lines = [f"{name}  validation accuracy, mean over {len(next(iter(values.values()), ()))} runs"]
    lacks = {value: f"  without {n} clients that were never scored" * (n > 0) for value, n in without.items()}
    lines += [f"  {value:>10s}  {percent}{lacks[value]}" for value, percent in shown.items()]
    scored = [value for value in means if np.isfinite(means[value])]
    if not scored:
        return "\n".join([*lines, "no value is best: no client was scored"])
    best = max(scored, key=lambda value: means[value])
    equal = [value for value in scored if value != best and shown[value] == shown[best]]
    tie = f" (a tie to two digits with {', '.join(equal)}; of equal accuracies the first is taken)" if equal else ""
    return "\n".join([*lines, f"best by validation: {name}={best}{tie}"])


def bases(known: Sequence[Known]) -> dict[str, Known]:
    """Return the base of each fine-tuned Run whose base is in the sweep, too, by the name of the tuned one's result.

    The base is the same Run with --finetune_epochs 0. With its models kept, the tuned Run starts from them: the rounds are computed once.
    """
    of = {k.path: k for k in known}
    tuned = [k for k in known if k.run.finetune_epochs]
    found = {k.path.name: of.get(k.run.untuned().path(k.path.parent)) for k in tuned}
    return {name: base for name, base in found.items() if base}
