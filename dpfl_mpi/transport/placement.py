"""`Placement`: which rank computes each client."""

from collections.abc import Mapping, Sequence

import numpy as np

from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi.placement import place, rows_of
from dpfl_mpi.mpi.world import World


class Placement:
    """Every rank has the same values, but for `ids`."""

    def __init__(self, world: World, n_train: np.ndarray):
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
