"""`Draws`: a client's random order of candidates and its coins. `Order`: an order by batches."""

import numpy as np
from numpy.random import Generator

from dpfl_mpi import streams
from dpfl_mpi.federation.members import Candidates, Members
from dpfl_mpi.graph import CollaborationGraph

AHEAD = 64  # batches of an order that are held; later ones are drawn again
MANY = 10_000  # candidates; of fewer all are drawn at once
MANY_TIMES = 50  # above so many candidates for one that is held, `Generator.choice` is faster
ORDERS = 1000  # streams of a client in a round
# validation loss of every candidate's model: [N] for one client, [K, N] for all local clients;
# None: candidates come in random order
Losses = np.ndarray | None


class Draws:
    """Random draws of the search, from streams keyed by client and round."""

    def __init__(self, members: Members, seed: int):
        self.members, self.seed = members, seed

    def shuffle(
        self,
        k: int,
        candidates: np.ndarray,
        repeat: int = 0,
        number: int | None = None,
        first: int | None = None,
    ) -> np.ndarray:
        """Return the candidates in client k's random order of this round, or of round `number`.

        With `first` these are that order's first so many; a few of many are drawn alone.
        """
        rng = self.stream(streams.CANDIDATES, k, repeat, number)
        if first is not None and few_of_many(first, candidates):
            return rng.choice(candidates, first, replace=False)
        return rng.permutation(candidates)[:first].copy()  # a view would keep the whole order

    def coins(self, block: slice) -> list[Generator]:
        """Return for each client of a block its generator of coins in [0, 1) in this round."""
        return [self.stream(streams.COIN, k) for k in self.members.ids[block]]

    def stream(self, purpose: int, k: int, repeat: int = 0, number: int | None = None) -> Generator:
        number = self.members.round if number is None else number
        return streams.stream(self.seed, purpose, int(k), number * ORDERS + repeat)


def few_of_many(few: int, candidates: np.ndarray) -> bool:
    """Return whether to draw a few candidates alone, as NumPy's shuffle of all is slow."""
    return len(candidates) > max(MANY, MANY_TIMES * few)


class Order:
    """The candidates of one client, in random order or by loss (line 9 of Algorithm 3).

    Only the next batches are held, since all orders would be N^2 numbers. Where the first are drawn
    alone (`few_of_many`), the others follow.
    """

    def __init__(self, draws: Draws, of: Candidates | CollaborationGraph, k: int, losses: Losses):
        """`of.of(k)` are the candidates. Their `losses` `[N]` sort them; None: random order."""
        self.draws, self.among, self.k, self.losses = draws, of, k, losses
        self.used = 0  # candidates that were returned
        self.left = 1  # candidates that were not; at least 1 until the first draw counts them
        self.ahead = np.zeros(0, np.int64)  # drawn, not yet returned

    def next(self, width: int) -> np.ndarray:
        """Return the next `width` candidates, or all that are left; the width never changes."""
        if width > len(self.ahead) and self.left > len(self.ahead):
            drawn, count = self._drawn(AHEAD * width)
            self.ahead = drawn[self.used : self.used + AHEAD * width].copy()
            self.left = count - self.used
        batch, self.ahead = self.ahead[:width], self.ahead[width:]
        self.used += len(batch)
        self.left -= len(batch)
        return batch

    def _drawn(self, few: int) -> tuple[np.ndarray, int]:
        """Return the order, of many candidates at first only `few`, and how many there are."""
        candidates = self.among.of(self.k)
        if self.losses is not None or not few_of_many(few, candidates):
            order = self.draws.shuffle(self.k, candidates)
            if self.losses is not None:  # smallest first, equal ones in random order
                order = order[np.argsort(self.losses[order], kind="stable")]
        else:
            rng = self.draws.stream(streams.CANDIDATES, self.k)
            order = rng.choice(candidates, few, replace=False)
            if self.used:
                rest = rng.permutation(np.setdiff1d(candidates, order))
                order = np.concatenate([order, rest])
        return order, len(candidates)
