"""Which rank computes a client (`Placement`), and how many models a window takes.

`describe` plans a run with the functions, without MPI.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph, Senders

if TYPE_CHECKING:
    from dpfl_mpi.mpi.world import World

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

    `wanted` `[ranks]`: how many models each rank's clients ask for. One that several of them want
    comes once in each of its `versions`.
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
    """Return in how many groups clients search Omega, the same on all ranks.

    `clients` is how many each rank has.
    """
    return max(1, min(WAVES, int(clients.max()) // WAVE))


def rows_per_pass(limit: np.ndarray, clients: np.ndarray, most: int) -> int:
    """Return how many rows, 1 to `most`, go to all ranks that have clients in one pass."""
    return max(1, int(np.minimum(limit, most)[clients > 0].min()))


def too_narrow(window_gb: float, row: int, clients: np.ndarray) -> UserError:
    """Return the error of a window that cannot hold one row of `row` bytes per client of a rank."""
    gib = 1.006 * clients.max() * row / 2**30  # rounded to three digits, it is still enough
    need = f"one row of {row} bytes per client, {gib:.3g} GiB per rank"
    return UserError(f"--window_gb is {window_gb:g}; a pass needs {need}")


class Placement:
    """Which rank computes each client. Every rank has the same values, but for `ids`."""

    def __init__(self, world: "World", n_train: np.ndarray):
        """Place clients by their training sizes `[N]`."""
        self.world, self.n = world, len(n_train)
        self.owner = place(n_train, world.size)  # the rank of every client [N]
        # all clients, rank by rank and heaviest first; the row of every client on its rank
        self.rank_by_rank, self.row_of = rows_of(self.owner, n_train)
        on_this_rank = self.owner[self.rank_by_rank] == world.rank
        self.ids = self.rank_by_rank[on_this_rank]  # of this rank [K]
        self.per_rank = np.bincount(self.owner, minlength=world.size)  # K of every rank

    def graph_of(self, senders: Sequence[Senders]) -> CollaborationGraph:
        """Return on every rank the graph of all ranks' lists of senders `[K]`. Collective."""
        lengths = np.array([len(s) for s in senders], np.int64)
        degrees = self.world.gather(lengths, self.owner, everywhere=True)
        receivers = np.repeat(self.rank_by_rank, degrees)
        flat = np.concatenate([np.zeros(0, np.int64), *map(np.asarray, senders)]).astype(np.int64)
        flat = self.world.gather(flat, self.owner[receivers], everywhere=True)
        return CollaborationGraph.from_edges(self.n, receivers, flat)

    def to_root(self, rows: np.ndarray, clients: slice | None = None) -> np.ndarray | None:
        """Return on root `[N, ...]` of these clients, in order, from all `[K, ...]`. Collective."""
        first, end = (0, self.n) if clients is None else (clients.start, clients.stop)
        order = self.rank_by_rank[(self.rank_by_rank >= first) & (self.rank_by_rank < end)]
        local = rows[(self.ids >= first) & (self.ids < end)]
        gathered = self.world.gather(local, self.owner[first:end])
        return gathered[np.argsort(order)] if self.world.root else None

    def gather(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return on root `[N, ...]` of each name's `[K, ...]`, else {}. Collective."""
        k = len(self.ids)
        widths = [int(np.prod(values.shape[1:], dtype=np.int64)) for values in arrays.values()]
        flat = [values.reshape(k, w) for values, w in zip(arrays.values(), widths, strict=True)]
        # one message per rank; float64 holds whole numbers up to 2^53
        table = self.to_root(np.concatenate(flat, 1, dtype=np.float64))
        if table is None:
            return {}
        pieces = np.split(table, np.cumsum(widths)[:-1], 1)
        return {
            name: piece.reshape(self.n, *values.shape[1:]).astype(values.dtype)
            for (name, values), piece in zip(arrays.items(), pieces, strict=True)
        }

    def of_all(self, rows: np.ndarray) -> np.ndarray:
        """Return `[N, ...]` in client order from every rank's `[K, ...]`. Collective."""
        gathered = self.world.gather(rows, self.owner, everywhere=True)
        return gathered[np.argsort(self.rank_by_rank)]
