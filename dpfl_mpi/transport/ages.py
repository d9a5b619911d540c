"""`Ages`: which of a client's rows of the last rounds a receiver gets (--staleness)."""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.transport.links import Links
from dpfl_mpi.transport.placement import Placement


class Ages:
    """Rows have numbers: j + a N is what left client j a rounds ago. Every rank has the same."""

    def __init__(self, placement: Placement, staleness: int):
        self.n, self.count = placement.n, staleness + 1
        per_rank = placement.per_rank[placement.owner]
        # by number: the rank that has the row, and its place among the rows of that rank
        self.owner = np.tile(placement.owner, self.count)
        self.place = np.concatenate([placement.row_of + a * per_rank for a in range(self.count)])
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
