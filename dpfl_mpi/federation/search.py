"""`Search`: the greedy search for collaborators that Algorithms 2 and 3 share.

Client k has two sets: X, which begins as {k}, and Y, which begins as k and all candidates. For each
candidate j in turn it compares how much better the average model gets when j joins X, and when j
leaves Y; then it does one of both. In the end X has the chosen ones. R is a model's reward, i.e.
minus its validation loss. Line numbers are those of Algorithm 2; Algorithm 3 takes the same steps
in lines 12 to 25. greedy.py makes a search for each block of clients, and calls `consider`.
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

# whether the gains a and b of adding and removing are positive, in the order of `graph.CASES`
GAINS = [(True, False), (False, True), (False, False), (True, True)]
# a block, sum p_i w_i over each of its clients' Y, float64 [k, W], and sum p_i, [k]
Start = tuple[slice, Tensor, np.ndarray]


def decide(a: float, b: float, coin: float) -> bool:
    """Return whether to add (line 9): with probability a / (a + b), or always if both are 0."""
    return a + b == 0 or coin < a / (a + b)


class Search:
    """The searches of a block's clients, i.e. of `block`, a slice of this rank's clients.

    For each client, `x` and `p_x` are sum p_i w_i and sum p_i over X, `y` and `p_y` over Y. `r_x`
    and `r_y` are R of their quotients, which are kept, so a candidate costs two evaluations.
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
        """Start from X = {k}, and from a Y whose sums are in `start` (line 1)."""
        block, y_kW, p_y = start
        self.scoring, self.rule, self.block = scoring, rule, block
        self.room = room  # how many candidates may join X: B_c - 1, int64 [k]
        self.coins = coins  # each client's random numbers in [0, 1), one for each candidate
        self.averages = averages_k2W  # memory for the two averages that a candidate leads to
        self.ensemble, self.p = scoring.backend.ensemble, scoring.members.p
        self.ids = scoring.members.ids[block]
        self.models = 1 if rule.search == "forward" else 2  # averages scored for each candidate
        self.cases = scoring.log.notes["cases"][block]  # decisions by `graph.CASES`, [k, 4]
        self.x, self.y = w_KW[block].double() * self.ensemble.column(self.p[self.ids]), y_kW.clone()
        self.p_x, self.p_y = self.p[self.ids].copy(), p_y.copy()
        self.chosen: list[list[int]] = [[] for _ in self.ids]  # X without the client itself
        self.stopped = np.zeros(len(self.ids), bool)  # by the rule, before X is full
        self.r_x, self.r_y = np.zeros(len(self.ids)), np.zeros(len(self.ids))
        self.started = np.zeros(len(self.ids), bool)  # whether r_x and r_y are known
        # where rows lie whole in the device's memory (`in_place`), kernels decide all candidates
        # that have arrived in one call, with the same bits
        self.chooser: Any = None
        if in_place and not scoring.metric_batch and rule.decides_as_paper:
            sums = self.x, self.y, self.averages, self.p_x, self.p_y
            self.chooser = scoring.backend.chooser(block, sums, self.cases)

    def is_full(self, i: int) -> bool:
        """Return whether the block's i-th client decides on no more candidates, as |X| >= B_c."""
        # tested before each candidate. Paper: line 13 tests after the loop (Algorithm 2) or after
        # a decision (Algorithm 3), where B_c = 1 would never be met.
        return len(self.chosen[i]) >= self.room[i] or bool(self.stopped[i])

    def consider(self, arrived: Arrived, candidates: list[Senders]) -> None:
        """Decide each client's candidates in their order; `arrived` has all of their models."""
        if self.chooser is not None:
            self._consider_at_once(arrived, candidates)
            return
        for i, order in enumerate(candidates):
            for j in order:
                if self.is_full(i):
                    break
                self._step(arrived, i, int(j))

    def _step(self, arrived: Arrived, i: int, j: int) -> None:
        """Add candidate j to X of the block's i-th client, or remove it from Y."""
        client, column = slice(i, i + 1), self.ensemble.column
        x, y, pair = self.x[client], self.y[client], self.averages[client]
        p_x, p_y = self.p_x[client], self.p_y[client]
        if not self.started[i]:
            torch.div(x, column(p_x), out=pair[:, 0])
            torch.div(y, column(p_y), out=pair[:, 1])
            self.r_x[i], self.r_y[i] = self._rewards(i)  # lines 3, 5
            self.started[i] = True
        p_j = self.p[[j]]
        w_1W = arrived.rows([j], self.block.start + i)
        # the sums of X and j and of Y without j, whose quotients are written to `pair`
        shares = p_j, p_x + p_j, p_y - p_j
        x_j, y_j = self.scoring.backend.candidate(x, y, w_1W, shares, pair)
        r_xj, r_yj = self._rewards(i)  # R(X and j), R(Y without j): lines 4, 6
        gain_x, gain_y = r_xj - self.r_x[i], r_yj - self.r_y[i]
        a, b = max(gain_x, 0.0), max(gain_y, 0.0)  # lines 7, 8
        added = decide(a, b, self.coins[i].random())  # line 9
        if not self.rule.decides_as_paper:
            added = self._by_rule(i, gain_x, gain_y, added)
        self.cases[i, GAINS.index((a > 0, b > 0))] += 1
        if added:  # line 10
            self.chosen[i].append(j)
            self.x[i], self.p_x[i], self.r_x[i] = x_j[0], self.p_x[i] + p_j[0], r_xj
        else:  # line 12
            self.y[i], self.p_y[i], self.r_y[i] = y_j[0], self.p_y[i] - p_j[0], r_yj

    def _by_rule(self, i: int, gain_x: float, gain_y: float, added: bool) -> bool:
        """Return whether a rule other than the paper's adds, which says `added`; it may stop."""
        rule = self.rule
        if rule.search == "forward":
            added = gain_x >= rule.tolerance * self.r_x[i]  # R is the negative loss
        elif max(gain_x, gain_y) <= 0 and rule.neither != "add":
            added = rule.neither == "smaller" and gain_x >= gain_y
        self.stopped[i] = rule.stop and not added
        return bool(added)

    def _rewards(self, i: int) -> list[float]:
        """Return R of the client's averages of X and Y; a forward search has no Y: its R is 0."""
        scored = self.averages[i, : self.models].contiguous()
        r = -self.scoring.validation_losses(self.block.start + i, scored)  # equation 6
        return [*r.tolist(), 0.0][:2]

    def _consider_at_once(self, arrived: Arrived, candidates: list[Senders]) -> None:
        """Do what `consider` does by one call of the kernels for all clients of the block."""
        counts = np.array([0 if self.is_full(i) else len(c) for i, c in enumerate(candidates)])
        active = np.flatnonzero(counts)
        if len(active) == 0:
            return
        order = np.concatenate([candidates[i] for i in active]).astype(np.int64)
        coins = np.concatenate([self.coins[i].random(counts[i]) for i in active])
        receivers = self.block.start + np.repeat(np.arange(len(counts)), counts)
        room = self.room - [len(chosen) for chosen in self.chosen]
        models = arrived.addresses(order, receivers)
        decided = np.zeros(len(counts), np.int64)
        # for each client whether each of its candidates was added, until X was full
        for i, added in enumerate(self.chooser.decide(models, self.p[order], coins, counts, room)):
            decided[i] = len(added)
            self.chosen[i] += np.asarray(candidates[i], np.int64)[: len(added)][added].tolist()
        # a client's first call also scores the averages of its first X and Y
        self.scoring.count(self.block, 2 * (decided + ((counts > 0) & ~self.started)))
        self.r_x, self.started = self.chooser.rewards, self.started | (counts > 0)


def consider(searches: list[Search], arrived: Arrived, batch: list[Senders]) -> None:
    """Let each search decide its clients' candidates, which `batch` has client after client."""
    first = searches[0].block.start if searches else 0
    for search in searches:
        search.consider(arrived, batch[search.block.start - first : search.block.stop - first])
