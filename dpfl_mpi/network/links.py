"""`Links`: what is known of edges, of which there may be N^2: only those that were set are kept."""

import numpy as np


class Links:
    def __init__(self, values: int = 1):
        """Keep so many whole numbers per edge; `table` [E, 1 + values] begins with the edge, receiver * N + sender, ascending."""
        self.table = np.zeros((0, 1 + values), np.int64)

    def set(self, edges: np.ndarray, *values: np.ndarray | int) -> None:
        new = np.stack([edges, *(np.broadcast_to(value, edges.shape) for value in values)], 1)
        both = np.concatenate([new, self.table])
        self.table = both[np.unique(both[:, 0], return_index=True)[1]]  # of an edge that is there twice the first

    def get(self, edges: np.ndarray, default: int) -> np.ndarray:
        """Return the first value of edges `[E]`, the default of those that were not set."""
        if len(self.table) == 0:
            return np.full(edges.shape, default)
        at = np.minimum(np.searchsorted(self.table[:, 0], edges), len(self.table) - 1)
        return np.where(self.table[at, 0] == edges, self.table[at, 1], default)

    def trim(self, room: np.ndarray) -> None:
        """Keep of each receiver the edges with the largest last values, as many as it has `room` `[N]`; of equal ones the smaller senders."""
        to = self.table[:, 0] // len(room)
        order = np.lexsort((self.table[:, 0], -self.table[:, -1], to))
        place = np.arange(len(order)) - np.searchsorted(to[order], to[order])
        self.table = self.table[np.sort(order[place < room[to[order]]])]
