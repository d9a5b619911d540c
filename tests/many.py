"""Many small Runs by one start of the ranks: what `launch.run_many` starts under mpirun."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from dpfl_mpi import api
from dpfl_mpi.engine.train import train
from dpfl_mpi.errors import LONGEST, Leave, UserError
from dpfl_mpi.mpi.start import open_world, share_settings
from dpfl_mpi.plugins import LOADED
from dpfl_mpi.plugins.code import forget_modules
from dpfl_mpi.survival.signals import Heard


def compute(plan: str) -> None:
    """Compute the tasks of a plan, a JSON file, each on its first few ranks. Collective."""
    everyone = open_world()
    import torch

    from dpfl_mpi.mpi.world import World

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    worlds = {}
    for task in json.loads(Path(plan).read_text()):
        ranks = task["ranks"]
        if ranks not in worlds:
            worlds[ranks] = World(everyone.comm.Split(int(everyone.rank >= ranks)))
        if everyone.rank < ranks:
            attempt(task, worlds[ranks])
        everyone.agree(False)  # wait for the others


def attempt(task, world) -> None:
    """Compute a task, only its next round if it has `stop`; write the error into a file."""
    LOADED.clear()
    forget_modules()  # as in a process of its own: no module keeps anything of a run before
    Heard.at, Heard.name, error_text = time.monotonic() * task["stop"], "a test", ""
    try:
        with contextlib.suppress(Leave):
            train(*share_settings(world, lambda: api.checked(task["settings"])), world)
    except Exception as error:
        error_text = str(error)
        if not isinstance(error, UserError):
            error_text = f"{type(error).__name__}: {' '.join(error_text.split())[:LONGEST]}"
        if not world.all_stop():
            world.abort(1, f"error: {error_text}")
    finally:
        Heard.at = 0.0
    if world.root:
        Path(f"{task['settings']['out']}.error").write_text(error_text)


if __name__ == "__main__":
    compute(sys.argv[1])
