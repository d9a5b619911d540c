"""`Links`: numbers per edge of a graph. `Ages`: which row goes along each edge (--staleness).

A row is one client's model. `to` and `of` `[E]` are the receivers and the senders of edges.
"""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.placement import Placement


class Links:
    """Of N^2 edges only those set are stored; an edge is the number receiver * N + sender."""

    def __init__(self, values: int = 1):
        """Store so many whole numbers per edge."""
        self.table = np.zeros((0, 1 + values), np.int64)  # sorted by its first column, the edge

    def set(self, edges: np.ndarray, *values: np.ndarray | int) -> None:
        """Set the values of edges `[E]`."""
        new = np.stack([edges, *(np.broadcast_to(value, edges.shape) for value in values)], 1)
        rows = np.concatenate([new, self.table])
        self.table = rows[np.unique(rows[:, 0], return_index=True)[1]]  # the newest

    def get(self, edges: np.ndarray, default: int) -> np.ndarray:
        """Return the first value of edges `[E]`, and the default for those that were not set."""
        if len(self.table) == 0:
            return np.full(edges.shape, default)
        found = np.minimum(np.searchsorted(self.table[:, 0], edges), len(self.table) - 1)
        return np.where(self.table[found, 0] == edges, self.table[found, 1], default)

    def trim(self, most: np.ndarray) -> None:
        """Keep for each receiver the `most` `[N]` edges of largest last value, smallest senders."""
        to = self.table[:, 0] // len(most)
        order = np.lexsort((self.table[:, 0], -self.table[:, -1], to))
        rank = np.arange(len(order)) - np.searchsorted(to[order], to[order])  # within its receiver
        self.table = self.table[np.sort(order[rank < most[to[order]]])]


class Ages:
    """The numbers of rows, alike on every rank: j + a N is what client j sent a rounds ago."""

    def __init__(self, placement: Placement, staleness: int):
        self.placement, self.n, self.count = placement, placement.n, staleness + 1
        per_rank = placement.per_rank[placement.owner]
        # by number: the rank that has the row, and which of that rank's rows it is
        self.owner = np.tile(placement.owner, self.count)
        self.row_of = np.concatenate([placement.row_of + a * per_rank for a in range(self.count)])
        self.forget()

    def forget(self) -> None:
        """Let all receivers get rows of this round."""
        self.of_edge = Links()

    def set(self, to: np.ndarray, of: np.ndarray, ages: np.ndarray) -> None:
        """Let receivers of edges `[E]` get rows that are this many rounds old `[E]`."""
        self.of_edge.set(to * self.n + of, ages)

    def numbers(self, to: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows that go along edges `[E]`."""
        return of if self.count == 1 else of + self.of_edge.get(to * self.n + of, 0) * self.n

    def graph(self, graph: CollaborationGraph) -> CollaborationGraph:
        """Return the graph with numbers of rows as its senders."""
        if self.count == 1:
            return graph
        to = graph.receivers()
        rows = self.numbers(to, graph.senders)
        return CollaborationGraph.from_edges(self.n * self.count, to, rows)
