"""Algorithms 2 and 3 line by line in plain Python, with nothing of dpfl_mpi.

Sets hold client numbers, k included, as in the paper; a model is a float64 vector, `R` its reward.
"""

import math

import numpy as np


def average(p, w, members):
    """Return sum p_i w_i / sum p_i over the members (equation 4)."""
    total, weight = np.zeros_like(w[0], dtype=np.float64), 0.0
    for i in sorted(members):
        total += p[i] * w[i].astype(np.float64)
        weight += p[i]
    return total / weight


def probability(a: float, b: float) -> float:
    """Return the probability to add a candidate."""
    # Paper: a / (a + b) is undefined where both are 0; the appendix's third case always adds
    return 1.0 if a == 0 and b == 0 else a / (a + b)


def ggc(k, S, w, p, R, B_c, coins):
    """Return X of Algorithm 2; `S` is in its shuffled order."""
    # Paper: where S = [N] it contains k; k is no candidate, else p_k w_k would be counted twice
    assert k not in S
    X, Y = {k}, set(S) | {k}  # line 1
    for j, coin in zip(S, coins, strict=False):  # line 2
        # Paper: lines 13-15 stop after the loop; the budget counts k and is tested before each
        # candidate, also the first
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


def bggc(k, S, w, p, R, B_c, coins):
    """Return X of Algorithm 3; `S` is in its shuffled order."""
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
