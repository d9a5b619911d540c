"""The command line of a sweep: its own flags, and those of `python -m dpfl_mpi`, which hold for all Runs."""

from pathlib import Path
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings.command_line import Parser, add_flags

GRID = {"seeds": "seed", "methods": "method", "datasets": "dataset", "budgets": "budget"}
MINUTES = 720  # of a job on Slurm, unless told


def words(text: str) -> list[Any]:
    """Return the parts of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def seeds(text: str) -> list[int]:
    """Return whole numbers of a comma-separated list."""
    for word in words(text):
        if not (word.isascii() and word.isdigit()):
            raise UserError(f"--seeds has {word}; allowed are whole numbers, separated by commas")
    return [int(word) for word in words(text)]


def parser(description: str) -> Parser:
    """Return the flags that are a sweep's own."""
    out = Parser(prog="python -m dpfl_mpi.sweep", description=description)
    out.add_argument("file", type=Path, nargs="?", help="file of analysis/ whose RUNS are wanted")
    for flag, field in GRID.items():
        kind = seeds if flag == "seeds" else words
        text = f"a Run for each --{field}; of a file the Runs with these"
        out.add_argument(f"--{flag}", type=kind, metavar="A,B,...", help=text)
    out.add_argument("--tune", metavar="METHOD.NAME=A,B", help="a Run for each value; picks by validation accuracy")
    out.add_argument("--list", action="store_true", help="say how far the Runs are; submit nothing")
    out.add_argument("--watch", action="store_true", help="show the table until no Run waits or runs")
    out.add_argument("--dry_run", action="store_true", help="print what would be submitted")
    out.add_argument("--retry", action="store_true", help="submit failed Runs again; they go on from their checkpoints")
    out.add_argument("--cluster", choices=("slurm", "local", "debug"), default="local", help="where [local]")
    most = "most jobs at once [cores / ranks, and what the GPUs hold; 256 on slurm]"
    out.add_argument("--max_parallel", type=int, default=0, help=most)
    out.add_argument("--ranks", type=int, default=1, help="MPI ranks (per node, on slurm) [1]")
    out.add_argument("--nodes", type=int, default=1, help="nodes per job [1]")
    out.add_argument("--cpus", type=int, default=1, help="threads per rank [1]")
    out.add_argument("--gpus", type=int, help="GPUs per node on slurm, here per Run [1 where there are any]")
    out.add_argument("--runs_per_gpu", type=int, default=1, help="Runs here that share a GPU, under CUDA's MPS [1]")
    limit = f"time limit of a Run: minutes, H:MM:SS or D-H:MM:SS [{MINUTES} on slurm, none here]"
    out.add_argument("--time", help=limit)
    out.add_argument("--slurm_partition", metavar="NAME", help="Slurm partition (--partition is a Run's)")
    out.add_argument("--slurm_account", "--account", metavar="NAME", help="Slurm account")
    out.add_argument("--mpi", default="pmi2", help="srun --mpi=...: pmi2 for MPICH, pmix for Open MPI [pmi2]")
    more = "any other sbatch option, repeatable"
    out.add_argument("--sbatch", action="append", default=[], metavar="NAME=VALUE", help=more)
    add_flags(out)
    return out
