"""The command line of a sweep: its own flags, and those of `python -m dpfl_mpi`, which hold for all Runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.fields import fields, types
from dpfl_mpi.settings.run import OLD_FIELDS

GRID = {"seeds": "seed", "methods": "method", "datasets": "dataset", "budgets": "budget"}
MINUTES = 720  # of a job on Slurm, unless told


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parser(description: str) -> Parser:
    """Return the flags that are a sweep's own."""
    out = Parser(prog="python -m dpfl_mpi.sweep", description=description, allow_abbrev=False)
    out.add_argument("file", type=Path, nargs="?", help="file of analysis/ whose RUNS are wanted")
    for flag, field in GRID.items():
        out.add_argument(
            f"--{flag}", metavar="A,B,...", help=f"a Run for each --{field}; of a file the Runs with these"
        )
    out.add_argument("--tune", metavar="METHOD.NAME=A,B", help="a Run for each value; picks by validation accuracy")
    out.add_argument(
        "--list", action="store_true", help="say what is finished, running, failed, missing; submit nothing"
    )
    out.add_argument("--watch", action="store_true", help="show the table until no Run waits or runs")
    out.add_argument("--dry_run", action="store_true", help="print what would be submitted")
    out.add_argument("--retry", action="store_true", help="submit failed Runs again; they go on from their checkpoints")
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
    out.add_argument(
        "--time", help=f"time limit of a Run: minutes, H:MM:SS or D-H:MM:SS [{MINUTES} on slurm, none here]"
    )
    out.add_argument("--slurm_partition", metavar="NAME", help="Slurm partition (--partition is a Run's)")
    out.add_argument("--slurm_account", "--account", metavar="NAME", help="Slurm account")
    out.add_argument("--mpi", default="pmi2", help="srun --mpi=...: pmi2 for MPICH, pmix for Open MPI [pmi2]")
    out.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=VALUE", help="any other sbatch option, repeatable"
    )
    return out


def split(arguments: Sequence[str], own: Parser) -> tuple[argparse.Namespace, list[str]]:
    """Return a sweep's own settings, and the words that belong to every Run: the value of an unknown flag is no file.

    Raises:
        UserError: a flag of the sweep has no value, or a wrong one.
    """
    switches = {f.name for settings in (Run, Job) for f in fields(settings) if types(settings)[f.name] is bool}
    switches |= set(OLD_FIELDS)
    mine: list[str] = []
    rest: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        flag, given, _ = word.partition("=")
        action = own._option_string_actions.get(flag)
        belongs = mine if action or not word.startswith("--") else rest
        belongs.append(word)
        valued = action.nargs != 0 if action else flag[2:].removeprefix("no-") not in switches
        if word.startswith("--") and not given and valued and words and not words[0].startswith("--"):
            belongs.append(words.pop(0))
    return own.parse_args(mine), rest
