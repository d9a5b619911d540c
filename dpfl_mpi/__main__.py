"""The command line: `mpirun -n 8 python -m dpfl_mpi --dataset cifar10 --budget 10`."""

import signal

if __name__ == "__main__":  # before the imports, which take a second; `main` unblocks them
    early = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, early)

import gc
import os
import sys
from typing import Any

from dpfl_mpi.errors import Leave, UserError, complain, exit_with
from dpfl_mpi.mpi.start import all_or_none, modules_by_name, set_environment, start
from dpfl_mpi.survival.signals import SIGNALS, listen


def finished(run: Any, job: Any) -> bool:
    """Return whether a Run has a finished result, which is printed."""
    from dpfl_mpi.results.summary import print_finished  # on root alone

    return print_finished(run, job)


def main(arguments: list[str] | None = None) -> None:
    """Compute the Run of a command line on all ranks; a failed one ends the process."""
    listen()  # first: a signal that comes earlier ends this rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.disable()  # while modules are imported, which are no garbage
    set_environment()  # before root parses: a method of the user's may import torch
    arguments = sys.argv[1:] if arguments is None else arguments
    world, run, job = start(arguments, finished)
    code, text = 0, ""
    try:
        with all_or_none(world):
            with modules_by_name():
                import torch

            from dpfl_mpi.engine.train import train
            from dpfl_mpi.results.summary import summary

            gc.freeze()  # spares looking through torch again: 0.4 s of a core
            gc.enable()
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            path = train(run, job, world)
            text = "" if job.quiet else world.decide(lambda: summary(path))
    except (UserError, Leave) as end:
        if world.root:
            complain(str(end) if isinstance(end, Leave) else f"error: {end}")
        code = end.code if isinstance(end, Leave) else 2
    if world.root and text:
        print(text)
    if world.stuck:  # MPI would wait at its end
        sys.stdout.flush()
        world.all_stop()
        world.abort(code)
    if code:
        sys.exit(code)


def command() -> None:
    """Run `main` as the command `dpfl_mpi`."""
    exit_with(main)


if __name__ == "__main__":
    command()
