"""The command line: `mpirun -n 8 python -m dpfl_mpi --dataset cifar10 --budget 10`.

Arguments are parsed before MPI starts, so `--help` needs no MPI and a wrong value is one sentence from rank 0 alone.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from dpfl_mpi.config import OLD_FIELDS, Job, Run, allowed_choices, old_flags
from dpfl_mpi.errors import RootFailed, UserError
from dpfl_mpi.plugins import KINDS, names
from dpfl_mpi.survival.signals import Leave, listen

RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MPI_RANK")
LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def launched(names: tuple[str, ...], default: int) -> int:
    """Return what the launcher (mpirun or srun) put into the environment, before MPI itself can be asked."""
    return next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdigit()), default)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one sentence on the launcher's rank 0 and end this rank."""
    if launched(RANK, 0) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def parser() -> Any:
    """Return the command line: one flag a field of `Run` and `Job`, in the groups their metadata name."""
    from argparse import SUPPRESS

    from jsonargparse import ActionYesNo, ArgumentParser, DefaultHelpFormatter

    class OneLine(DefaultHelpFormatter):
        """Help of one line a flag: the text and the default, without Python's names of types."""

        def __init__(self, prog: str):
            super().__init__(prog, max_help_position=29)

        def _get_help_string(self, action: Any) -> str:
            known = action.default not in (None, "==SUPPRESS==") and action.dest not in (
                "help",
                "print_config",
                "config",
            )
            if not known:
                return action.help
            shown = {True: "yes", False: "no"}[action.default] if isinstance(action.default, bool) else action.default
            return f"{action.help} [{shown}]"

        def _format_action_invocation(self, action: Any) -> str:
            flags = [n for n in action.option_strings if not n.startswith("--no-")]
            if action.metavar and action.nargs != 0:
                return f"{flags[0]} {action.metavar}"
            return (
                ", ".join(flags)
                .replace("--augment", "--[no-]augment")
                .replace("--budget_counts_self", "--[no-]budget_counts_self")
            )

    out = ArgumentParser(
        prog="python -m dpfl_mpi",
        usage="mpirun -n RANKS python -m dpfl_mpi [--config FILE] [--SETTING VALUE ...]",
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=OneLine,
        description="Train N simulated clients that each pick their own collaborators, on all ranks of mpirun or srun.",
        epilog="Where no default is shown it is the paper's value for the data set; --print_config shows the values that a run would use.",
    )
    out.add_argument(
        "--config", action="config", metavar="FILE", help="YAML file with these settings; flags after it win"
    )
    shown = next(a for a in out._actions if a.dest == "print_config")
    shown.help, shown.metavar = "print the settings of the run and exit", ""
    groups: dict[str, Any] = {}
    for settings in (Run, Job):
        hints = get_type_hints(settings)
        for f in dataclasses.fields(settings):
            title = f.metadata["group"]
            group = groups.setdefault(title, out.add_argument_group(title))
            text = f.metadata["help"].format(names=", ".join(names(f.name)) if f.name in KINDS else "")
            if hints[f.name] is bool or hints[f.name] == (bool | None):
                action = ActionYesNo(yes_prefix="", no_prefix="no-")
                group.add_argument(f"--{f.name}", action=action, default=f.default, help=text)
            else:
                metavar = "|".join(allowed_choices(f)) or kind_of(f)[1]
                group.add_argument(f"--{f.name}", type=hints[f.name], default=f.default, metavar=metavar, help=text)
    for name in OLD_FIELDS:  # accepted, not shown
        action = ActionYesNo(yes_prefix="", no_prefix="no-")
        out.add_argument(f"--{name}", action=action, default=SUPPRESS, help=SUPPRESS)
    return out


def kind_of(f: dataclasses.Field[Any]) -> tuple[str, str]:
    """Return what a field takes, in words and as a placeholder."""
    text = str(f.type)
    if "str" in text:
        return "text", "B" if "int" in text else "NAME"
    return ("a whole number", "N") if "int" in text else ("a number", "X")


def parse(arguments: list[str]) -> tuple[Run, Job]:
    """Return the resolved Run and the Job of a command line; a mistake ends the program with one sentence."""
    from jsonargparse import ArgumentError

    show = "--print_config" in arguments
    try:
        values = parser().parse_args([a for a in arguments if a != "--print_config"]).as_dict()
    except ArgumentError as error:
        fail(sentence(str(error)))
    except (OSError, TypeError, ValueError) as error:
        fail(sentence(str(error)))
    try:
        run = old_flags(Run(**{f.name: values[f.name] for f in dataclasses.fields(Run)}), values).resolve()
        job = Job(**{f.name: values[f.name] for f in dataclasses.fields(Job)})
        job.check()
    except UserError as error:
        fail(str(error))
    if show:
        if launched(RANK, 0) == 0:
            import yaml

            print(yaml.safe_dump(dataclasses.asdict(run) | dataclasses.asdict(job), sort_keys=False), end="")
        sys.exit(0)
    return run, job


def sentence(text: str) -> str:
    """Return an error of the argument parser as one sentence that names the flag and what is allowed."""
    text = " ".join(text.split()).removeprefix("error: ")
    wrong = re.match(r'Parser key "(\w+)": .*Given value: (.*)$', text) or re.match(
        r'Parser key "(\w+)": .*value: (.*)$', text
    )
    fields = {f.name: f for settings in (Run, Job) for f in dataclasses.fields(settings)}
    if wrong and wrong.group(1) in fields:
        f = fields[wrong.group(1)]
        choices = allowed_choices(f)
        return f"--{f.name} is {wrong.group(2)}; allowed " + (
            f"are {', '.join(choices)}" if choices else f"is {kind_of(f)[0]}"
        )
    return re.sub(r'^Parser key "(\w+)": ', r"--\1: ", text)


def before_mpi() -> None:
    """Set what must be set before MPI and torch start: one thread a rank, and MPICH's yielding where ranks outnumber cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is of nested levels
    os.environ["OMP_NUM_THREADS"] = threads if threads.isdigit() and int(threads) else "1"
    # MPICH's pipelined ring is 50 times slower on shared cores
    os.environ.setdefault("MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE", "0")
    if launched(LOCAL_SIZE, 1) > len(os.sched_getaffinity(0)):
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")  # MPICH spins while it waits


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    listen()  # first of all: a warning that comes before would end this rank
    run, job = parse(sys.argv[1:] if arguments is None else arguments)
    before_mpi()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        fail(
            f"MPI could not be loaded ({error}); load your site's MPI module, or install one with pip install -e '.[mpich]'",
            3,
        )
    tasks = launched(("SLURM_STEP_NUM_TASKS",), 1)
    if tasks > 1 and MPI.COMM_WORLD.size == 1:
        fail(
            f"srun started {tasks} tasks, but MPI sees one: each would train alone. Use the srun --mpi= type of your MPI "
            "(pmi2 for MPICH, pmix for Open MPI), or mpirun inside sbatch",
            3,
        )
    from dpfl_mpi.mpi.world import World

    world = World(MPI.COMM_WORLD)
    try:
        import torch

        from dpfl_mpi.engine.train import train

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        path = train(run, job, world)
    except UserError as error:
        together = world.all_stop()
        if world.root or not together:
            print(f"error: {error}", file=sys.stderr, flush=True)
        if not together:  # a mistake on some ranks only, such as a file that one node lacks
            world.abort(2)
        sys.exit(2)
    except Leave as leave:  # on every rank alike, too
        if world.root:
            print(leave, file=sys.stderr, flush=True)
        sys.exit(leave.code)
    except RootFailed:
        time.sleep(1)  # root says what happened, and ends all
        world.abort(1)
    except BaseException:
        print(f"rank {world.rank} of {world.size}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        world.abort(1)
    if world.root and not job.quiet:
        print(summary(path))


def summary(path: Path) -> str:
    """Return the few lines shown at the end of a run."""
    import numpy as np

    from dpfl_mpi.results import PHASES, Result

    with Result(path) as result:
        run, test = result.run, result["best/test_acc"][result.benign]
        chosen = np.diff(result["graph/chosen/indptr"], axis=1).sum(1)
        received = result["traffic/models_received"]
        rounds = max(len(received) - 1, 1)
        return "\n".join(
            [
                f"{run.method} on {run.dataset}, {run.partition}, {run.clients} clients, B_c = {run.budget}, "
                f"{run.rounds} rounds, seed {run.seed}",
                f"  test accuracy        {100 * test.mean():.2f} %, mean over clients of their best-validation models "
                f"({100 * result.mean('round/test_acc')[0]:.2f} % in round 0)",
                f"  spread over clients  {100 * test.std():.2f} points (lowest {100 * test.min():.1f} %, highest {100 * test.max():.1f} %)",
                f"  edges                {chosen[0]} in Omega, {chosen[1:].mean() if len(chosen) > 1 else chosen[0]:.1f} kept a round",
                f"  models received      {received[1:].mean(1).sum() / rounds:.2f} a client and round, "
                f"{received[0].mean():.1f} to build Omega",
                "  seconds (slowest)    " + ", ".join(f"{p} {result[f'seconds/{p}'][:, 2].sum():.1f}" for p in PHASES),
                f"  results              {path}",
                f"  draw the graph       python analysis/graph_evolution.py {path}",
            ]
        )


if __name__ == "__main__":
    main()
