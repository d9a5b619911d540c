"""`Links`: numbers per edge of a graph. There may be N^2 edges: only those set are stored."""

import numpy as np


class Links:
    """A table of edges; an edge is the number receiver * N + sender."""

    def __init__(self, values: int = 1):
        """Store so many whole numbers per edge.

        `table` [E, 1 + values] is sorted by its first column, the edge.
        """
        self.table = np.zeros((0, 1 + values), np.int64)

    def set(self, edges: np.ndarray, *values: np.ndarray | int) -> None:
        """Set the values of edges `[E]`."""
        new = np.stack([edges, *(np.broadcast_to(value, edges.shape) for value in values)], 1)
        rows = np.concatenate([new, self.table])
        self.table = rows[np.unique(rows[:, 0], return_index=True)[1]]  # the newest

    def get(self, edges: np.ndarray, default: int) -> np.ndarray:
        """Return the first value of edges `[E]`, and the default for those that were not set."""
        if len(self.table) == 0:
            return np.full(edges.shape, default)
        at = np.minimum(np.searchsorted(self.table[:, 0], edges), len(self.table) - 1)
        return np.where(self.table[at, 0] == edges, self.table[at, 1], default)

    def trim(self, most: np.ndarray) -> None:
        """Keep at most `most` `[N]` edges per receiver, those with the largest last value.

        Of equal ones the smaller senders stay.
        """
        to = self.table[:, 0] // len(most)
        order = np.lexsort((self.table[:, 0], -self.table[:, -1], to))
        place = np.arange(len(order)) - np.searchsorted(to[order], to[order])
        self.table = self.table[np.sort(order[place < most[to[order]]])]
