"""Choose how rows travel between the ranks here: as the user says, or by a trial of the window."""

import threading

import numpy as np
from mpi4py import MPI

from dpfl_mpi.errors import Damaged, UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.window import Inbox, Transfer, route
from dpfl_mpi.mpi.world import LIBRARY, World
from dpfl_mpi.settings import Job

TRIAL_S = 10.0  # after which a window is considered hung
ROUNDS = 3  # of a trial


def choose_transfer(job: Job, world: World, width: int) -> tuple[Transfer, str]:
    """Return how rows of `width` travel, and a line that says why; "" if that was asked for.

    Collective. `auto` takes a window that passes a trial, else messages. A trial that hangs goes on
    in its thread, and the world is `stuck`: MPI cannot be finalized.
    """
    exchange = "rma" if job.exchange == "auto" else job.exchange
    transfer = Transfer(exchange, job.window)
    if job.exchange != "auto" or world.size == 1:
        return transfer, ""
    world.agree(False)  # the clock of the trial starts with the last rank
    why = [f"did not end in {TRIAL_S:g} s"]
    # its own communicators: ranks may leave the trial at different places
    trial = World(world.comm.Dup())
    thread = threading.Thread(target=_try, args=(trial, transfer, width, why), daemon=True)
    thread.start()
    # without other threads in MPI there is no time limit but --watchdog
    thread.join(TRIAL_S if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None)
    world.stuck = world.agree(thread.is_alive())
    if failed := world.first(why[-1] and f"on rank {world.rank} it {why[-1]}"):
        took = Transfer("sendrecv", job.window)
        why_not = f"{took}, as {transfer} of {LIBRARY} fails here: {failed}"
        return took, f"{why_not}; --exchange sendrecv spares the trial"
    trial.free()
    return transfer, f"{transfer}, which passed a trial under {LIBRARY}"


def _try(world: World, transfer: Transfer, width: int, why: list[str]) -> None:
    """Try a transfer; add to `why` what went wrong, "" for nothing."""
    try:
        send_around(world, transfer, width)
        why.append("")
    except (MPI.Exception, Damaged, UserError) as error:
        text = error.Get_error_string() if isinstance(error, MPI.Exception) else str(error)
        why.append(f"ended with: {text}")


def send_around(world: World, transfer: Transfer, width: int) -> None:
    """Send a row of each rank to the next one, a few times; `Damaged` where it is another there."""
    rank, size = world.rank, world.size
    ring = CollaborationGraph.from_lists([[(k - 1) % size] for k in range(size)])
    step = route(ring, np.arange(size), np.zeros(size, np.int64), rank, size)
    row = np.zeros((1, width), np.float32)
    inbox = Inbox(world, row, 1, transfer)
    for number in range(ROUNDS):
        row[:] = size * number + rank
        inbox.exchange(step)
        if not (inbox.take(0) == size * number + (rank - 1) % size).all():
            raise Damaged("a row did not arrive as it was sent")
    inbox.close()
