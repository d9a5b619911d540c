"""`way_of`: how rows travel between the ranks here, by a trial of the window where nobody says."""

import threading

import numpy as np
from mpi4py import MPI

from dpfl_mpi.errors import Damaged, UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.window import Inbox, Way, route
from dpfl_mpi.mpi.world import LIBRARY, World
from dpfl_mpi.settings import Job

TRIAL_S = 10.0  # after which a window is considered hung
ROUNDS = 3  # of a trial


def way_of(job: Job, world: World, width: int) -> tuple[Way, str]:
    """Return how rows of `width` travel, and a line that says why; "" if that was asked for.

    Collective. `auto` takes a window that passes a trial, else messages. A trial that hangs goes
    on in its thread, and the world is `stuck`: MPI cannot be finalized.
    """
    exchange = "rma" if job.exchange == "auto" else job.exchange
    way = Way(exchange, job.window, job.check_rows)
    if job.exchange != "auto" or world.size == 1:
        return way, ""
    world.agree(False)  # the clock of the trial starts with the last rank
    why = [f"did not end in {TRIAL_S:g} s"]
    # its own communicators: ranks may leave the trial at different places
    trial = World(world.comm.Dup())
    thread = threading.Thread(target=_try, args=(trial, way, width, why), daemon=True)
    thread.start()
    # without other threads in MPI there is no time limit but --watchdog
    thread.join(TRIAL_S if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None)
    world.stuck = world.agree(thread.is_alive())
    if failed := world.first(why[-1] and f"on rank {world.rank} it {why[-1]}"):
        took = Way("sendrecv", job.window, job.check_rows)
        why_not = f"{took}, as {way} of {LIBRARY} fails here: {failed}"
        return took, f"{why_not}; --exchange sendrecv spares the trial"
    trial.free()
    return way, f"{way}, which passed a trial under {LIBRARY}"


def _try(world: World, way: Way, width: int, why: list[str]) -> None:
    """Try a way; add to `why` what went wrong, "" for nothing."""
    try:
        send_around(world, way, width)
        why.append("")
    except (MPI.Exception, Damaged, UserError) as error:
        text = error.Get_error_string() if isinstance(error, MPI.Exception) else str(error)
        why.append(f"ended with: {text}")


def send_around(world: World, way: Way, width: int) -> None:
    """Send a row of each rank to the next one, a few times; `Damaged` where it is another there."""
    rank, size = world.rank, world.size
    ring = CollaborationGraph.from_lists([[(k - 1) % size] for k in range(size)])
    step = route(ring, np.arange(size), np.zeros(size, np.int64), rank, size)
    row = np.zeros((1, width), np.float32)
    inbox = Inbox(world, row, 1, way)
    for number in range(ROUNDS):
        row[:] = size * number + rank
        inbox.exchange(step)
        if not (inbox.take(0) == size * number + (rank - 1) % size).all():
            raise Damaged("a row did not arrive as it was sent")
    inbox.close()
