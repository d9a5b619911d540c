"""How the collaboration graph is chosen: `ggc` (Algorithm 2), `bggc` (Algorithm 3), and the step they share.

Sets hold clients other than k; k itself is always in X and Y. Line numbers are those of the paper's algorithms.

Axes: N clients, k clients of a block in lock-step, W row width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from dpfl_mpi.federation import Federation
    from dpfl_mpi.federation.mail import Received
from dpfl_mpi.graph import CollaborationGraph, Senders


def decide(a: float, b: float, coin: float) -> bool:
    """Return whether to add: with probability a / (a + b), and surely where both gains are 0 (Algorithm 2, line 9)."""
    return a + b == 0 or coin < a / (a + b)


class Search:
    """The running pair (X, w^X) and (Y, w^Y) of Algorithms 2 and 3, for the clients of a block in lock-step.

    R(X) and R(Y) are carried over from the step before, so a candidate costs two evaluations, not four. Running sums are float64.
    """

    def __init__(
        self,
        fed: Federation,
        block: slice,
        w_KW: Tensor,
        start_sum_kW: Tensor,
        start_p: np.ndarray,
        coins: list[np.random.Generator],
    ):
        """Start from X = {k} and Y = S and k, whose weighted sum is `start_sum` `[k, W]` and sum of p `start_p` `[k]`."""
        self.fed, self.block, self.coins = fed, block, coins
        self.ids = fed.ids[block]
        self.x = w_KW[block].double() * fed.column(fed.p[self.ids])
        self.y = start_sum_kW
        self.p_x, self.p_y = fed.p[self.ids].copy(), start_p.copy()
        self.chosen: list[list[int]] = [[] for _ in self.ids]
        self.r_x = self.r_y = np.zeros(len(self.ids))
        self.started = False

    def full(self, i: int) -> bool:
        """Whether |X| >= B_c for the block's i-th client; tested before each candidate, the first included."""
        # Paper: line 13 tests after the loop (Algorithm 2) or after a decision (Algorithm 3), which B_c = 1 would never meet.
        return len(self.chosen[i]) >= self.fed.budget[self.ids[i]]

    def consider(self, received: Received, candidates: list[Senders]) -> None:
        """Decide the candidates of each client in their order (lines 2-12); all of them are in `received`."""
        fed, p = self.fed, self.fed.p
        for position in range(max((len(c) for c in candidates), default=0)):
            active = [position < len(c) and not self.full(i) for i, c in enumerate(candidates)]
            if not any(active):
                return
            if not self.started:  # R({k}) and R(S and k)
                self.r_x, self.r_y = self._rewards(self.x, self.p_x, self.y, self.p_y, active)
                self.started = True
            j = [
                int(c[position]) if on else int(self.ids[i])
                for i, (c, on) in enumerate(zip(candidates, active, strict=True))
            ]
            p_j = np.where(active, p[j], 0.0)
            w_j, share = received.rows(j).double(), fed.column(p_j)
            x_j, y_j = self.x.addcmul(w_j, share), self.y.addcmul(w_j, share, value=-1)
            # R(X and j), R(Y without j): lines 4, 6
            r_xj, r_yj = self._rewards(x_j, self.p_x + p_j, y_j, self.p_y - p_j, active)
            added = np.zeros(len(active), bool)
            for i in np.flatnonzero(active):
                a = max(r_xj[i] - self.r_x[i], 0.0)  # line 7
                b = max(r_yj[i] - self.r_y[i], 0.0)  # line 8
                added[i] = decide(a, b, self.coins[i].random())  # line 9
                fed.count_case(self.block.start + i, a > 0, b > 0)
                if added[i]:
                    self.chosen[i].append(j[i])  # line 10
            removed = np.array(active) & ~added  # line 12
            self.x, self.p_x, self.r_x = (
                fed.keep(added, x_j, self.x),
                np.where(added, self.p_x + p_j, self.p_x),
                np.where(added, r_xj, self.r_x),
            )
            self.y, self.p_y, self.r_y = (
                fed.keep(removed, y_j, self.y),
                np.where(removed, self.p_y - p_j, self.p_y),
                np.where(removed, r_yj, self.r_y),
            )

    def _rewards(
        self, x: Tensor, p_x: np.ndarray, y: Tensor, p_y: np.ndarray, active: list[bool]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return R of both averages, float64 `[k]` each, in one evaluation of two models a client."""
        fed = self.fed
        pair = fed.ensemble.zeros(2 * len(self.ids)).view(len(self.ids), 2, -1)
        pair[:, 0] = x / fed.column(p_x)
        pair[:, 1] = y / fed.column(p_y)
        rewards = fed.reward(self.block, pair, active)
        return rewards[:, 0], rewards[:, 1]


class Order:
    """The candidates of one client in its random order (line 9 of Algorithm 3), of which only the next few are kept.

    A search ends early, after some dozens of candidates: all orders whole would be N^2 numbers.
    """

    AHEAD = 64  # batches kept; what comes later is drawn again

    def __init__(self, fed: Federation, k: int, repeat: int):
        self.fed, self.k, self.repeat = fed, k, repeat
        self.done, self.left = 0, 1  # candidates handed out, and not yet
        self.kept = np.zeros(0, np.int64)

    def next(self, width: int) -> np.ndarray:
        """Return the next `width` candidates, or what is left of them."""
        if width > len(self.kept) and self.left > len(self.kept):
            whole = self.fed.shuffle(self.k, self.fed.reachable(self.k), self.repeat)
            self.kept = whole[self.done : self.done + self.AHEAD * width].copy()
            self.left = len(whole) - self.done
        now, self.kept = self.kept[:width], self.kept[width:]
        self.done, self.left = self.done + len(now), self.left - len(now)
        return now


def best_of(repeats: list[list[Search]]) -> list[list[int]]:
    """Return the chosen set of each local client: of m independent repeats the one with the largest R(X)."""
    out: list[list[int]] = []
    for searches in zip(*repeats, strict=True):
        for i in range(len(searches[0].ids)):
            best = int(np.argmax([s.r_x[i] for s in searches]))
            out.append(searches[best].chosen[i])
    return out


def ggc(fed: Federation, w_KW: Tensor, received: Received) -> CollaborationGraph:
    """Return C_k of every client, chosen among the models received (Algorithm 2)."""
    repeats = []
    sums, p_sums = received.start_sums()
    for repeat in range(fed.run.ggc_repeats):
        orders = [fed.shuffle(k, received.graph.of(k), repeat) for k in fed.ids]
        searches = [Search(fed, b, w_KW, sums[b], p_sums[b], fed.coins(b, repeat)) for b in fed.blocks]
        for held, now in received.in_order(orders):  # one pass, unless the graph is wider than the window
            for search in searches:
                search.consider(held, now[search.block])
        repeats.append(searches)
    return fed.collect(best_of(repeats))


def bggc(fed: Federation, w_KW: Tensor) -> CollaborationGraph:
    """Return Omega_k of every client, chosen among all others in phases of at most B_c models (Algorithm 3)."""
    repeats = []
    for repeat in range(fed.run.ggc_repeats):
        orders = [Order(fed, int(k), repeat) for k in fed.ids]  # line 9
        sums, p_sums = fed.sum_of_all(w_KW)  # lines 1-7
        searches = [Search(fed, b, w_KW, sums[b], p_sums[b], fed.coins(b, repeat)) for b in fed.blocks]
        full = fed.budget[fed.ids] == 0
        while True:  # line 10
            batch = [order.next(0 if f else fed.budget[k]) for order, f, k in zip(orders, full, fed.ids, strict=True)]
            graph = fed.collect(batch)  # line 11; a rank draws its own clients' candidates, and says who they are
            if len(graph.senders) == 0:
                break
            received = fed.exchange(w_KW, graph)
            for held, now in received.in_order(batch):
                for search in searches:
                    search.consider(held, now[search.block])  # lines 12-25
            full = np.array([s.full(i) for s in searches for i in range(len(s.ids))], bool)
        repeats.append(searches)
    return fed.collect(best_of(repeats))
