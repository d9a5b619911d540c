"""Algorithms 1, 2 and 3 line by line in plain Python: a loop over clients, one nn.Module and one torch.optim.SGD per client.

Nothing of dpfl_mpi is used but the keyed random streams (so that batches, candidate orders and coins are the same) and the
partition. Sets are Python sets of client numbers, k included, as the paper writes them; a model is a float64 vector.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

Model = np.ndarray
Reward = Callable[[Model], float]


def average(p: np.ndarray, w: Sequence[Model], members: set[int]) -> Model:
    """Return sum p_i w_i / sum p_i over the members (equation 4)."""
    total = np.zeros_like(w[0], dtype=np.float64)
    weight = 0.0
    for i in sorted(members):
        total += p[i] * w[i].astype(np.float64)
        weight += p[i]
    return total / weight


def probability(a: float, b: float) -> float:
    """Return the probability to add a candidate."""
    if a == 0 and b == 0:
        return 1.0  # Paper: a / (a + b) is undefined here; the appendix's third case adds with probability 1
    return a / (a + b)


def ggc(
    k: int, S: Sequence[int], w: Sequence[Model], p: np.ndarray, R: Reward, B_c: float, coins: Sequence[float]
) -> set[int]:
    """Return X of Algorithm 2; `S` is in its shuffled order."""
    # Paper: where S = [N] it contains k; k is no candidate, else p_k w_k would be counted twice
    assert k not in S
    X, Y = {k}, set(S) | {k}  # line 1
    for j, coin in zip(S, coins, strict=False):  # line 2
        # Paper: lines 13-15 stop after the loop; the budget counts k and is tested before each candidate, the first included
        if len(X) >= B_c:
            break
        R_X = R(average(p, w, X))  # line 3
        R_Xj = R(average(p, w, X | {j}))  # line 4
        R_Y = R(average(p, w, Y))  # line 5
        # Paper: line 6 divides by the sum over Y without k; Algorithm 3 has it right, Y without j
        R_Yj = R(average(p, w, Y - {j}))  # line 6
        a = max(R_Xj - R_X, 0.0)  # line 7
        b = max(R_Yj - R_Y, 0.0)  # line 8
        if coin < probability(a, b):  # line 9
            X = X | {j}  # line 10
        else:
            Y = Y - {j}  # line 12
    return X


def ggc_repeated(k, S_orders, w, p, R, B_c, coins) -> set[int]:
    """Return the X with the largest reward of m independent repeats."""
    # Paper: m is an input of Algorithm 1 that no line uses; m repeats of which the best counts, the first of equally good ones
    found = [ggc(k, S, w, p, R, B_c, c) for S, c in zip(S_orders, coins, strict=True)]
    return max(found, key=lambda X: R(average(p, w, X)))


def bggc(
    k: int, S: Sequence[int], w: Sequence[Model], p: np.ndarray, R: Reward, B_c: float, coins: Sequence[float]
) -> set[int]:
    """Return X of Algorithm 3; `S` is in its shuffled order. At most B_c models are held at a time."""
    assert k not in S  # Paper: as in ggc
    n = len(S)
    width = int(min(max(B_c, 1), max(n, 1)))
    w_Y, p_Y = p[k] * w[k].astype(np.float64), p[k]  # line 1
    for s in range(math.ceil(n / width)):  # line 2
        for j in S[s * width : (s + 1) * width]:  # lines 3, 4
            w_Y = w_Y + p[j] * w[j]  # line 5
            p_Y += p[j]
    X = {k}
    w_X, p_X = p[k] * w[k].astype(np.float64), p[k]  # line 8
    step = 0
    for s in range(math.ceil(n / width)):  # line 10
        for j in S[s * width : (s + 1) * width]:  # lines 11, 12
            if len(X) >= B_c:  # Paper: tested before each candidate, as in ggc
                return X
            R_X = R(w_X / p_X)  # line 13
            R_Xj = R((w_X + p[j] * w[j]) / (p_X + p[j]))  # line 14
            R_Yj = R((w_Y - p[j] * w[j]) / (p_Y - p[j]))  # line 15
            R_Y = R(w_Y / p_Y)  # line 16
            a = max(R_Xj - R_X, 0.0)  # line 17
            b = max(R_Yj - R_Y, 0.0)  # line 18
            if coins[step] < probability(a, b):  # line 19
                X.add(j)
                w_X, p_X = w_X + p[j] * w[j], p_X + p[j]  # line 20
            else:
                w_Y, p_Y = w_Y - p[j] * w[j], p_Y - p[j]  # line 22
            step += 1
    return X


class DPFL:
    """Algorithm 1 for N clients in one process.

    `data[k]` has the tensors train_x, train_y, val_x, val_y, test_x, test_y (float images, channels first). `order(k, epoch)`
    permutes client k's training samples, `shuffle(k, candidates, t)` and `coins(k, t)` are the draws of round t.
    """

    def __init__(
        self,
        module,
        row: Model,
        data,
        p,
        B_c,
        order,
        shuffle,
        coins,
        clip_norm,
        batch_size,
        period=1,
        off_rounds="reuse",
        **sgd,
    ):
        self.data, self.p, self.B_c, self.N = data, p, B_c, len(data)
        self.order, self.shuffle, self.coins = order, shuffle, coins
        self.clip_norm, self.batch_size = clip_norm, batch_size
        self.period, self.off_rounds = period, off_rounds
        self.modules = [copy.deepcopy(module) for _ in range(self.N)]
        self.scratch = copy.deepcopy(module)
        # Paper: it does not say what happens to momentum between rounds; one optimiser per client for the whole run
        self.optimisers = [torch.optim.SGD(m.parameters(), **sgd) for m in self.modules]
        self.epochs = [0] * self.N
        for m in self.modules:
            self.load(m, row)
        self.val_acc: list[list[float]] = []
        self.test_acc: list[list[float]] = []
        self.chosen: list[list[list[int]]] = []

    def load(self, module, w: Model) -> None:
        """Write a vector into a module's parameters."""
        start = 0
        with torch.no_grad():
            for q in module.parameters():
                q.copy_(torch.from_numpy(w[start : start + q.numel()].astype(np.float32)).view(q.shape))
                start += q.numel()

    def vector(self, k: int) -> Model:
        """Return client k's model as a vector."""
        return np.concatenate([q.detach().numpy().ravel() for q in self.modules[k].parameters()])

    def local_opt(self, k: int, tau: int) -> None:
        """Train client k for tau epochs of mini-batch SGD."""
        x, y = self.data[k]["train_x"], self.data[k]["train_y"]
        for _ in range(tau):
            shuffled = self.order(k, self.epochs[k])
            for first in range(0, len(y), self.batch_size):
                batch = shuffled[first : first + self.batch_size]
                self.optimisers[k].zero_grad()
                torch.nn.functional.cross_entropy(self.modules[k](x[batch]), y[batch]).backward()
                if self.clip_norm:
                    torch.nn.utils.clip_grad_norm_(self.modules[k].parameters(), self.clip_norm)
                self.optimisers[k].step()
            self.epochs[k] += 1

    def reward(self, k: int) -> Reward:
        """Return R: minus client k's mean validation loss, as a function of a model."""

        def R(w: Model) -> float:
            self.load(self.scratch, w)
            with torch.no_grad():
                logits, labels = self.scratch(self.data[k]["val_x"]), self.data[k]["val_y"]
                return -float(torch.nn.functional.cross_entropy(logits, labels, reduction="none").double().mean())

        return R

    def score(self) -> None:
        """Record every client's accuracies."""
        for part, series in (("val", self.val_acc), ("test", self.test_acc)):
            row = []
            for k in range(self.N):
                with torch.no_grad():
                    right = self.modules[k](self.data[k][f"{part}_x"]).argmax(1) == self.data[k][f"{part}_y"]
                row.append(float(right.double().mean()))
            series.append(row)

    def mix(self, sets: list[set[int]]) -> None:
        """Average every client over its set."""
        w = [self.vector(k) for k in range(self.N)]
        # Paper: all clients average the same snapshot (the authors' code averages in place, client by client)
        for k in range(self.N):
            if sets[k] != {k}:
                self.load(self.modules[k], average(self.p, w, sets[k]))

    def run(self, T: int, tau_init: int, tau_train: int) -> None:
        """Preprocess, then T rounds."""
        # Paper: "t = 1, ..., T - 1" and "98 rounds"; T counts the rounds after preprocessing
        for k in range(self.N):  # line 1
            self.local_opt(k, tau_init)  # line 2
        self.score()
        w = [self.vector(k) for k in range(self.N)]
        omega: list[set[int]] = []
        for k in range(self.N):
            candidates = [j for j in range(self.N) if j != k]
            S = self.shuffle(k, candidates, 0)
            omega.append(bggc(k, S, w, self.p, self.reward(k), self.B_c, self.coins(k, 0)))  # line 3
        self.mix(omega)  # line 4
        self.chosen.append([sorted(omega[k] - {k}) for k in range(self.N)])
        last = omega
        for t in range(1, T + 1):  # line 6
            for k in range(self.N):  # line 7
                self.local_opt(k, tau_train)  # line 8
            self.score()  # the reported model: after local training, before averaging
            w = [self.vector(k) for k in range(self.N)]  # line 9
            if t % self.period == 0:
                S = [self.shuffle(k, sorted(omega[k] - {k}), t) for k in range(self.N)]
                last = [
                    ggc(k, S[k], w, self.p, self.reward(k), self.B_c, self.coins(k, t)) for k in range(self.N)
                ]  # line 10
                self.mix(last)  # line 11
            elif self.off_rounds == "reuse":
                self.mix(last)  # Paper: only line 10 is periodic (the authors' code skips line 11 as well)
            self.chosen.append([sorted(last[k] - {k}) for k in range(self.N)])
