"""The command line: `mpirun -n 8 python -m dpfl_mpi --dataset cifar10 --budget 10`.

Rank 0 alone parses the arguments, before MPI starts: `--help` needs no MPI, and a wrong value is one sentence. The other ranks are told the
settings, and so need neither the parser nor the libraries that it checks names and files with.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import io
import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dpfl_mpi.errors import NO_READER, RootFailed, UserError, exit_with
from dpfl_mpi.plugins import KINDS, names
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.config_file import check_yaml
from dpfl_mpi.settings.fields import allowed, as_dict, check, choices, fields, types
from dpfl_mpi.settings.run import OLD_FIELDS, old_flags
from dpfl_mpi.survival.signals import Leave, listen

if TYPE_CHECKING:
    from dpfl_mpi.mpi.world import World

RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MPI_RANK")
SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
# what the help shows for a value, by type or by name
PLACEHOLDERS = {int: "N", float: "X", "budget": "B", "omega_period": "P"}


def launched(names: tuple[str, ...], default: int) -> int:
    """Return the number in the first of these environment variables that has one, else `default`.

    mpirun and srun set them: rank and size are known before MPI itself can be asked.
    """
    return next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdigit()), default)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one sentence on the launcher's rank 0 and end this rank."""
    if launched(RANK, 0) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def parser() -> Any:
    """Return the command line: one flag per field of `Run` and `Job`, in the groups their metadata name."""
    from jsonargparse import ActionYesNo, ArgumentParser, Namespace

    class Help(argparse.HelpFormatter):
        """Help of one line per flag."""

        def __init__(self, prog: str):
            super().__init__(prog, max_help_position=29)

        def _format_action_invocation(self, action: argparse.Action) -> str:
            if isinstance(action, ActionYesNo):
                return f"--[no-]{action.dest}" if action.default is not False else f"--{action.dest}"
            return (
                f"{action.option_strings[0]} {action.metavar}" if action.metavar else ", ".join(action.option_strings)
            )

    class Parser(ArgumentParser):
        """jsonargparse's parser, whose --print_config shows the values that the run would use."""

        def dump(self, cfg: Any, **how: Any) -> str:
            return super().dump(
                Namespace(**{n: v for settings in understood(cfg) for n, v in as_dict(settings).items()}), **how
            )

    out = Parser(
        prog="python -m dpfl_mpi",
        usage="mpirun -n RANKS python -m dpfl_mpi [--config FILE] [--SETTING VALUE ...]",
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=Help,
        description="Train N simulated clients that each pick their own collaborators, on all ranks of mpirun or srun.",
        epilog="Where no default is shown it is the paper's value for the data set; --print_config shows the values that a run would use.",
    )
    out.add_argument(
        "--config", action="config", metavar="FILE", help="YAML file with these settings; flags after it win"
    )
    shown = next(a for a in out._actions if a.dest == "print_config")
    shown.help, shown.metavar = "print the settings of the run and exit", None
    groups: dict[str, Any] = {}
    for settings in (Run, Job):
        for f in fields(settings):
            kind = types(settings)[f.name]
            title = f.metadata["group"]
            group = groups.setdefault(title, out.add_argument_group(title))
            text = f.metadata["help"].format(names=", ".join(names(f.name)) if f.name in KINDS else "")
            if f.default is not None:
                text += f" [{('yes' if f.default else 'no') if kind is bool else f.default}]"
            if kind is bool:
                how: dict[str, Any] = {"action": ActionYesNo(yes_prefix="", no_prefix="no-")}
            else:
                how = {"type": kind if f.default is not None else kind | None}
                how["metavar"] = "|".join(choices(kind)) or PLACEHOLDERS.get(f.name) or PLACEHOLDERS.get(kind, "NAME")
            group.add_argument(f"--{f.name}", default=f.default, help=text, **how)
    for name in OLD_FIELDS:  # accepted, not shown
        action = ActionYesNo(yes_prefix="", no_prefix="no-")
        out.add_argument(f"--{name}", action=action, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return out


def understood(cfg: Any) -> tuple[Resolved, Job]:
    """Return the resolved Run and the Job that parsed arguments describe; raise `UserError` for a mistake in them."""
    run = old_flags(Run(**{f.name: cfg[f.name] for f in fields(Run)}), cfg).resolve()
    job = Job(**{f.name: cfg[f.name] for f in fields(Job)})
    check(job)
    return run, job


def parse(arguments: list[str]) -> tuple[Resolved, Job]:
    """Return the resolved Run and the Job of a command line; a mistake ends the program with one sentence."""
    from jsonargparse import ArgumentError

    try:
        for flag, path in itertools.pairwise([*arguments, ""]):
            if flag.partition("=")[0] == "--config":
                check_yaml(Path(path if flag == "--config" else flag.partition("=")[2]))
        with contextlib.redirect_stdout(sys.stdout if launched(RANK, 0) == 0 else io.StringIO()):
            cfg = parser().parse_args(arguments)
        return understood(cfg)
    except UserError as error:
        fail(str(error))
    except (ArgumentError, OSError, TypeError, ValueError, RecursionError, OverflowError) as error:
        fail(sentence(str(error)))


def told(arguments: list[str]) -> dict[str, Any]:
    """Return what root tells all ranks of a command line: the settings, or the exit code of one that ends here (root has said why)."""
    try:
        return packed(*parse(arguments))
    except SystemExit as end:
        return {"exit": end.code}
    except BrokenPipeError:
        return {"exit": NO_READER}
    except Exception:  # a root that ends here leaves the others in MPI_Init
        traceback.print_exc()
        return {"exit": 1}


def packed(run: Resolved, job: Job) -> dict[str, Any]:
    """Return the settings as root tells them to all ranks; `unpacked` is the inverse."""
    derived = {"contents": run.contents, "declared": run.declared}
    return {"run": as_dict(run) | derived, "job": as_dict(job)}


def unpacked(settings: dict[str, Any]) -> tuple[Resolved, Job]:
    """Return the Run and the Job that root has told."""
    return Resolved(**settings["run"]), Job(**settings["job"])


def sentence(text: str) -> str:
    """Return an error of the argument parser as one sentence that names the flag and what is allowed."""
    text = " ".join(text.split()).removeprefix("error: ")
    wrong = re.match(r'Parser key "(\w+)": .*(?:Given value|value): (.*)$', text)
    for settings in (Run, Job):
        for f in fields(settings):
            if wrong and wrong.group(1) == f.name:
                return f"--{f.name} is {wrong.group(2)}; allowed {allowed(f, types(settings)[f.name])}"
    unknown = re.match(r"unrecognized arguments: --(?:no-)?([\w-]+)", text)
    if unknown:
        known = ["config", "print_config", *(f.name for settings in (Run, Job) for f in fields(settings))]
        close = difflib.get_close_matches(unknown.group(1).replace("-", "_"), known, 1)
        return text + (f"; did you mean --{close[0]}?" if close else "; --help lists all flags")
    return re.sub(r'^Parser key "(\w+)": ', r"--\1: ", text)


def before_mpi() -> None:
    """Set what must be set before MPI and torch start: one thread per rank, and MPICH's yielding where ranks outnumber cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is of nested levels
    os.environ["OMP_NUM_THREADS"] = threads if threads.isdigit() and int(threads) else "1"
    # MPICH's pipelined ring is 50 times slower on shared cores
    os.environ.setdefault("MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE", "0")
    if launched(LOCAL_SIZE, 1) > len(os.sched_getaffinity(0)):
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")  # MPICH spins while it waits


def open_world() -> World:
    """Start MPI and return the world of all ranks.

    Raises:
        UserError: there is no MPI, or it sees one rank where srun started several.
    """
    before_mpi()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"MPI could not be loaded ({error}); load your site's MPI module, or install one with pip install -e '.[mpich]'"
        ) from None
    tasks = launched(("SLURM_STEP_NUM_TASKS",), 1)
    if tasks > 1 and MPI.COMM_WORLD.size == 1:
        raise UserError(
            f"srun started {tasks} tasks, but MPI sees one: each would train alone. Use the srun --mpi= type of your MPI "
            "(pmi2 for MPICH, pmix for Open MPI), or mpirun inside sbatch"
        )
    from dpfl_mpi.mpi.world import World, tell_script

    world = World(MPI.COMM_WORLD)
    if world.root:
        tell_script("MPI has started")  # from here on an error is ours
    return world


@contextlib.contextmanager
def all_or_none(world: World) -> Iterator[None]:
    """Let an error end all ranks, or be raised on every rank: no rank waits for one that has left.

    `UserError` and `Leave` are raised, on every rank alike. A mistake on some ranks only, such as a file that one node lacks, and
    everything else end all ranks here, once it is told.
    """
    try:
        yield
    except Leave:
        raise
    except UserError as error:
        if not world.all_stop():
            world.abort(2, f"error: {error}")
        raise
    except BrokenPipeError:
        world.abort(
            NO_READER,
            "error: nobody reads the output of this run any more; the same command, without --fresh, goes on from what it kept",
        )
    except RootFailed:
        time.sleep(1)  # root says what happened, and ends all
        world.abort(1)
    except BaseException:
        world.abort(1, f"rank {world.rank} of {world.size}:\n{traceback.format_exc()}")


def main(arguments: list[str] | None = None, before_abort: Callable[[int], None] | None = None) -> None:
    """Run the command line and end the process with its exit code; `before_abort` is called with it where all ranks are ended at once."""
    listen()  # first of all: a warning that comes before would end this rank
    gc.disable()  # until everything is imported: modules are no garbage, and looking through them takes time
    before_mpi()  # before root parses, too: a method of one's own may import torch
    arguments = sys.argv[1:] if arguments is None else arguments
    alone = launched(SIZE, 1) == 1  # or the launcher does not say: then every rank parses
    settings = told(arguments) if alone or launched(RANK, 0) == 0 else {}
    if alone and "exit" in settings:
        sys.exit(settings["exit"])
    try:
        world = open_world()
    except UserError as error:
        fail(str(error), 3)
    if before_abort:
        world.before_abort = before_abort
    settings = world.decide(lambda: settings or told(arguments))
    if "exit" in settings:
        sys.exit(settings["exit"])
    run, job = unpacked(settings)
    try:
        with all_or_none(world):
            import torch

            from dpfl_mpi.engine.train import train

            gc.freeze()  # neither a collection nor the end of the interpreter looks through torch again: 0.4 s of a core
            gc.enable()
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            path = train(run, job, world)
    except UserError as error:
        if world.root:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except Leave as leave:
        if world.root:
            print(leave, file=sys.stderr, flush=True)
        sys.exit(leave.code)
    if world.root and not job.quiet:
        from dpfl_mpi.results.summary import summary

        print(summary(path))


if __name__ == "__main__":
    exit_with(main)
