"""Which rank computes a client, and how many models a window takes: pure functions.

`describe` plans a run with them without MPI.
"""

import heapq

import numpy as np

from dpfl_mpi.errors import UserError

WAVE = 256  # clients of a rank that search Omega together, at least
WAVES = 8  # groups of these, at most
# rows per pass when every rank receives every model (about 64 MB of the CNN); a pass is one filling
# and reading of all windows
MAX_ROWS_PER_PASS = 256


def place(work: np.ndarray, ranks: int) -> np.ndarray:
    """Return each client's rank, int64 `[N]`: heaviest first, each to the rank with least work."""
    owner = np.zeros(len(work), np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    for k in np.lexsort((np.arange(len(work)), -work)):
        load, rank = heapq.heappop(loads)
        owner[k] = rank
        heapq.heappush(loads, (load + float(work[k]), rank))
    return owner


def rows_of(owner: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all clients rank by rank, heaviest first, and each one's row there, int64 `[N]`."""
    order = np.lexsort((np.arange(len(owner)), -work, owner))
    counts = np.bincount(owner)
    row = np.empty(len(owner), np.int64)
    row[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order, row


def window_slots(
    wanted: np.ndarray, clients: np.ndarray, versions: int, window_gb: float, row: int
) -> tuple[np.ndarray, int]:
    """Return the slots that each rank needs, and how many of `row` bytes --window_gb allows.

    A rank that wants so many models `[ranks]` receives each version of other ranks' clients once.
    """
    others = int(clients.sum()) - clients
    return np.minimum(wanted, others * versions), int(window_gb * 2**30 // row)


def models_per_pass(need: np.ndarray, capacity: np.ndarray, clients: np.ndarray) -> int | None:
    """Return how many models each client may receive in one pass; 0: not one. None: all fit.

    Of each rank `need` are the slots that it needs, and `capacity` those of its window.
    """
    narrow = need > capacity
    return int((capacity[narrow] // clients[narrow]).min()) if narrow.any() else None


def waves(clients: np.ndarray) -> int:
    """Return in how many groups, alike on all ranks, their so many `clients` search Omega."""
    return max(1, min(WAVES, int(clients.max()) // WAVE))


def rows_per_pass(limit: np.ndarray, clients: np.ndarray, most: int) -> int:
    """Return how many rows, 1 to `most`, go to all ranks that have clients in one pass."""
    return max(1, int(np.minimum(limit, most)[clients > 0].min()))


def too_narrow(window_gb: float, row: int, clients: np.ndarray) -> UserError:
    """Return the error of a window that cannot hold one row of `row` bytes per client of a rank."""
    gib = 1.006 * clients.max() * row / 2**30  # rounded to three digits, it is still enough
    need = f"one row of {row} bytes per client, {gib:.3g} GiB per rank"
    return UserError(f"--window_gb is {window_gb:g}; a pass needs {need}")
