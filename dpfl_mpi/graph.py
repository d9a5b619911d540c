"""`CollaborationGraph`: whose models each client receives, and measures of such graphs.

An edge goes from a sender to a receiver, which averages its own model with its senders' models.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dpfl_mpi.errors import UserError

Senders = Sequence[int] | np.ndarray  # clients, in an order that may matter
# decisions of the greedy search on a candidate, by its gains when it is added (a) and removed (b)
CASES = ("a > 0, b = 0: add", "a = 0, b > 0: remove", "a = b = 0: add", "a > 0, b > 0: coin")
NAMED = ("ring", "grid", "complete")  # see `named`


@dataclass(frozen=True, eq=False)
class CollaborationGraph:
    """Each receiver's senders, ascending: receiver k has `senders[indptr[k] : indptr[k + 1]]`."""

    indptr: np.ndarray  # int64 [N + 1]
    senders: np.ndarray  # int64 [E]

    @classmethod
    def from_lists(cls, lists: Iterable[Senders]) -> Self:
        """Return the graph with these senders of receiver 0, 1, ..., in any order."""
        arrays = [np.asarray(senders, np.int64) for senders in lists]
        receivers = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])
        senders = np.concatenate([np.zeros(0, np.int64), *arrays])
        return cls.from_edges(len(arrays), receivers, senders)

    @classmethod
    def from_edges(cls, n: int, receivers: np.ndarray, senders: np.ndarray) -> Self:
        """Return the graph of n clients with these edges `[E]`; `UserError` for other senders."""
        if len(senders) and not 0 <= senders.min() <= senders.max() < n:
            wrong = senders[(senders < 0) | (senders >= n)][0]
            raise UserError(f"a graph has the sender {wrong}; clients are 0 to {n - 1}")
        degrees = np.bincount(receivers, minlength=n)
        indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
        # sorted by receiver, then by sender
        return cls(indptr, np.sort(receivers * n + senders) % max(n, 1))

    @classmethod
    def empty(cls, n: int) -> Self:
        return cls(np.zeros(n + 1, np.int64), np.zeros(0, np.int64))

    @property
    def n(self) -> int:
        return len(self.indptr) - 1

    def of(self, k: int) -> np.ndarray:
        """Return the senders of receiver k, ascending."""
        return self.senders[self.indptr[k] : self.indptr[k + 1]]

    def degrees(self) -> np.ndarray:
        """Return how many senders each receiver has, int64 `[N]`."""
        return np.diff(self.indptr)

    def receivers(self) -> np.ndarray:
        """Return the receiver of every edge, int64 `[E]`."""
        return np.repeat(np.arange(self.n), self.degrees())

    def only(self, edges: np.ndarray) -> Self:
        """Return the graph of the edges that bool `[E]` marks."""
        return self.from_edges(self.n, self.receivers()[edges], self.senders[edges])

    def where(self, receivers: np.ndarray, other: Self) -> Self:
        """Return this graph's edges to `receivers`, bool `[N]`, and the other's to the rest."""
        if receivers.all():
            return self
        return self.only(receivers[self.receivers()]) | other.only(~receivers[other.receivers()])

    def __or__(self, other: Self) -> Self:
        """Return the graph with the edges of both, which share none."""
        receivers = np.concatenate([self.receivers(), other.receivers()])
        return self.from_edges(self.n, receivers, np.concatenate([self.senders, other.senders]))

    def within(self, other: Self) -> bool:
        """Return whether every edge is in the other graph; it needs no memory for all edges."""
        for k in range(self.n):
            mine, theirs = self.of(k), other.of(k)
            if len(mine) > len(theirs):
                return False
            if (theirs.take(theirs.searchsorted(mine), mode="clip") != mine).any():
                return False
        return True

    def matrix(self) -> np.ndarray:
        """Return bool `[N, N]`: element (k, j) says that k receives from j."""
        out = np.zeros((self.n, self.n), bool)
        out[self.receivers(), self.senders] = True
        return out


def named(name: str, n: int) -> CollaborationGraph:
    """Return one of the graphs `NAMED` of n clients, whose edges go both ways.

    The grid has rows of about sqrt(n) clients, in their order, and ends at its borders.
    """
    k, side = np.arange(n), math.ceil(math.sqrt(n))
    if name == "complete" or n < 3:
        a, b = np.triu_indices(n, 1)
    elif name == "ring":
        a, b = k, (k + 1) % n
    else:  # to the right, and down
        right, down = k[(k % side < side - 1) & (k < n - 1)], k[: max(n - side, 0)]
        a, b = np.concatenate([right, down]), np.concatenate([right + 1, down + side])
    return CollaborationGraph.from_edges(n, np.concatenate([a, b]), np.concatenate([b, a]))


def rewired(graph: CollaborationGraph, rng: np.random.Generator) -> CollaborationGraph:
    """Return a random graph with the in- and out-degrees of this one.

    The switching method (Milo et al., arXiv cond-mat/0312028): 20 tries per edge to exchange the
    senders of two edges. A try that would repeat an edge or give a client itself is skipped.
    """
    receivers, senders = graph.receivers().tolist(), graph.senders.tolist()
    edges = set(zip(receivers, senders, strict=True))
    count = len(senders)
    # pairs of edges; a generator, as a list of all tries would take 160 bytes each
    tries = (rng.integers(0, max(count, 1), (count, 2)).tolist() for _ in range(20))
    for a, b in itertools.chain.from_iterable(tries):
        new_a, new_b = (receivers[a], senders[b]), (receivers[b], senders[a])
        if new_a[0] == new_a[1] or new_b[0] == new_b[1] or new_a in edges or new_b in edges:
            continue
        edges -= {(receivers[a], senders[a]), (receivers[b], senders[b])}
        edges |= {new_a, new_b}
        senders[a], senders[b] = senders[b], senders[a]
    return CollaborationGraph.from_edges(graph.n, np.array(receivers, int), np.array(senders, int))


def sparsity(graph: CollaborationGraph) -> float:
    """Return 1 - (edges + N) / N^2."""
    return 1 - (len(graph.senders) + graph.n) / graph.n**2


def within(graph: CollaborationGraph, groups: np.ndarray) -> tuple[float, float]:
    """Return which share of edges is inside one of the `groups` `[N]`, and which of all pairs."""
    edges, sizes = len(graph.senders), np.unique(groups, return_counts=True)[1]
    inside = int((groups[graph.receivers()] == groups[graph.senders]).sum())
    pairs = int((sizes * (sizes - 1)).sum())
    return inside / edges if edges else np.nan, pairs / max(graph.n * (graph.n - 1), 1)


def asymmetry(graph: CollaborationGraph) -> tuple[float, float]:
    """Return the share of edges without their reverse, and of unordered pairs with A_ij != A_ji."""
    n, edges, receivers = graph.n, len(graph.senders), graph.receivers()
    both_ways = np.isin(receivers * n + graph.senders, graph.senders * n + receivers)
    one_way = int((~both_ways).sum())
    return one_way / max(edges, 1), one_way / max(n * (n - 1) / 2, 1)
