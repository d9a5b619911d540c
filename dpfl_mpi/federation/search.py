"""`Search`: the loop that Algorithms 2 and 3 share, for the clients of a block.

Line numbers are those of Algorithm 2. Algorithm 3 takes the same steps in its lines 12 to 25.
Client k is always in X and in Y, so the sets that are stored leave it out.
"""

from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.graph import Senders
from dpfl_mpi.settings.search import Rule
from dpfl_mpi.transport.mailroom import Arrived

# whether a > 0 and b > 0, in the order of `graph.CASES`
GAINS = [(True, False), (False, True), (False, False), (True, True)]
# a block of clients, sum p_i w_i over each client's Y, float64 [k, W], and sum p_i, [k]
Start = tuple[slice, Tensor, np.ndarray]


def decide(a: float, b: float, coin: float) -> bool:
    """Return whether to add: with probability a / (a + b), always where both are 0 (line 9)."""
    return a + b == 0 or coin < a / (a + b)


class Search:
    """(X, w^X) and (Y, w^Y) of the clients of a block.

    R(X) and R(Y) are carried over, so a candidate costs two evaluations.
    """

    def __init__(
        self,
        scoring: Scoring,
        rule: Rule,
        start: Start,
        w_KW: Tensor,
        *,
        room: np.ndarray,
        coins: list[Generator],
        averages_k2W: Tensor,
        in_place: bool,
    ):
        """Start from X = {k}, and from Y = S and k (line 1)."""
        block, y_kW, p_y = start
        self.scoring, self.rule, self.block = scoring, rule, block
        self.room = room  # how many clients may join X: B_c - 1, int64 [k]
        self.coins = coins  # of each client, one for each candidate
        self.averages = averages_k2W  # memory for the two averages that are scored
        self.ensemble, self.p = scoring.backend.ensemble, scoring.members.p
        self.ids = scoring.members.ids[block]
        self.models = 1 if rule.search == "forward" else 2  # scored for each candidate
        self.cases = scoring.log.notes["cases"][block]
        self.x, self.y = w_KW[block].double() * self.ensemble.column(self.p[self.ids]), y_kW.clone()
        self.p_x, self.p_y = self.p[self.ids].copy(), p_y.copy()
        self.chosen: list[list[int]] = [[] for _ in self.ids]
        self.stopped = np.zeros(len(self.ids), bool)
        self.r_x, self.r_y = np.zeros(len(self.ids)), np.zeros(len(self.ids))
        self.started = np.zeros(len(self.ids), bool)
        # where rows lie whole in the device's memory, the kernels decide all candidates at hand in
        # one call, with the same bits
        self.chooser: Any = None
        if in_place and not scoring.metric_batch and rule.decides_as_paper:
            sums = self.x, self.y, self.averages, self.p_x, self.p_y
            self.chooser = scoring.backend.chooser(block, sums, self.cases)

    def is_full(self, i: int) -> bool:
        """Whether |X| >= B_c for the block's i-th client, which is tested before each candidate."""
        # Paper: line 13 tests after the loop (Algorithm 2) or after a decision (Algorithm 3),
        # where B_c = 1 would never be met.
        return len(self.chosen[i]) >= self.room[i] or bool(self.stopped[i])

    def consider(self, here: Arrived, candidates: list[Senders]) -> None:
        """Decide each client's candidates in their order; `here` has all of their models."""
        if self.chooser is not None:
            self._consider_at_once(here, candidates)
            return
        for i, order in enumerate(candidates):
            for j in order:
                if self.is_full(i):
                    break
                self._step(here, i, int(j))

    def _step(self, here: Arrived, i: int, j: int) -> None:
        """Add candidate j to X of the block's i-th client, or remove it from Y."""
        own, column = slice(i, i + 1), self.ensemble.column
        x, y, pair = self.x[own], self.y[own], self.averages[own]
        p_x, p_y = self.p_x[own], self.p_y[own]
        if not self.started[i]:
            torch.div(x, column(p_x), out=pair[:, 0])
            torch.div(y, column(p_y), out=pair[:, 1])
            self.r_x[i], self.r_y[i] = self._rewards(i)  # lines 3, 5
            self.started[i] = True
        p_j = self.p[[j]]
        w_1W = here.rows([j], self.block.start + i)
        x_j, y_j = self.scoring.backend.candidate(x, y, w_1W, p_j, p_x + p_j, p_y - p_j, pair)
        r_xj, r_yj = self._rewards(i)  # R(X and j), R(Y without j): lines 4, 6
        gain_x, gain_y = r_xj - self.r_x[i], r_yj - self.r_y[i]
        a, b = max(gain_x, 0.0), max(gain_y, 0.0)  # lines 7, 8
        added = decide(a, b, self.coins[i].random())  # line 9
        if not self.rule.decides_as_paper:
            added = self._departs(i, gain_x, gain_y, added)
        self.cases[i, GAINS.index((a > 0, b > 0))] += 1
        if added:  # line 10
            self.chosen[i].append(j)
            self.x[i], self.p_x[i], self.r_x[i] = x_j[0], self.p_x[i] + p_j[0], r_xj
        else:  # line 12
            self.y[i], self.p_y[i], self.r_y[i] = y_j[0], self.p_y[i] - p_j[0], r_yj

    def _departs(self, i: int, gain_x: float, gain_y: float, added: bool) -> bool:
        """Return whether the method's rule adds where line 9 says `added`; it may end a search."""
        rule = self.rule
        if rule.search == "forward":
            added = gain_x >= rule.tolerance * self.r_x[i]  # R is the negative loss
        elif max(gain_x, gain_y) <= 0 and rule.neither != "add":
            added = rule.neither == "smaller" and gain_x >= gain_y
        self.stopped[i] = rule.stop and not added
        return bool(added)

    def _rewards(self, i: int) -> list[float]:
        """Return R of both averages; a forward search has no Y, whose R is 0."""
        scored = self.averages[i, : self.models].contiguous()
        r = self.scoring.rewards(self.block.start + i, scored).tolist()
        return [*r, 0.0][:2]

    def _consider_at_once(self, here: Arrived, candidates: list[Senders]) -> None:
        counts = np.array([0 if self.is_full(i) else len(c) for i, c in enumerate(candidates)])
        active = np.flatnonzero(counts)
        if len(active) == 0:
            return
        order = np.concatenate([candidates[i] for i in active]).astype(np.int64)
        coins = np.concatenate([self.coins[i].random(counts[i]) for i in active])
        to = self.block.start + np.repeat(np.arange(len(counts)), counts)
        room = self.room - [len(chosen) for chosen in self.chosen]
        models = here.addresses(order, to)
        decided = np.zeros(len(counts), np.int64)
        for i, added in enumerate(self.chooser.decide(models, self.p[order], coins, counts, room)):
            decided[i] = len(added)
            self.chosen[i] += np.asarray(candidates[i], np.int64)[: len(added)][added].tolist()
        self.scoring.count(self.block, 2 * (decided + ((counts > 0) & ~self.started)))
        self.r_x, self.started = self.chooser.rewards, self.started | (counts > 0)


def consider(searches: list[Search], here: Arrived, batch: list[Senders]) -> None:
    """Let each search decide its clients' candidates, which `batch` has client after client."""
    first = searches[0].block.start if searches else 0
    for search in searches:
        search.consider(here, batch[search.block.start - first : search.block.stop - first])
