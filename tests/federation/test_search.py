"""A search that one call of C decides: the bits of its slow twin, the loop of `Search.consider`."""

import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import federation

from dpfl_mpi.federation import search as search_part
from dpfl_mpi.numerics.cpu import LIBRARY, forms

if not LIBRARY.exists():
    pytest.skip("the kernels were not built", allow_module_level=True)
N = 9


@pytest.fixture(scope="module", params=forms())
def fed(request, digits_file):
    fields = {"dataset": "image_folder", "data": str(digits_file), "model": "mlp"}
    fields |= {"clients": N, "augment": False}
    with federation(fields, kernels=request.param) as fed:
        yield fed


def models_of(fed, kind, seed):
    """Models of all clients that a search rarely meets."""
    rng = np.random.default_rng(seed)
    own = rng.normal(0, 1, (N, fed.ensemble.size))
    scale = {"equal": 0, "near": 1e-7, "wild": 40, "zero": 0}.get(kind, 0.3)
    w = rng.normal(0, 0.3, fed.ensemble.size) + scale * own
    if kind == "zero":
        w *= 0
    if kind == "large":
        w[3] *= 1e25
        w[5, ::3] = 3e38
    if kind == "no number":
        w[2, 7], w[4, -3], w[6, 100] = np.nan, np.inf, -np.inf
    out = fed.ensemble.zeros(N)
    out[:, : fed.ensemble.size] = torch.from_numpy(w.astype(np.float32))
    return out


def search(fed, w, order, coins, most, passes=1, at_once=True, y=None):
    """Let the first local client search; return all that it leaves: set, counts, numbers."""
    fed.begin_round(1)
    k = int(fed.ids[0])
    addresses = lambda j, to: (w.data_ptr() + 4 * w.shape[1] * j).astype(np.uint64)  # noqa: E731
    sender = SimpleNamespace(rows=lambda j, to: w[j].clone(), addresses=addresses)
    p = torch.from_numpy(fed.p[[k, *order]])[:, None]
    sums = (w[[k, *order]].double() * p).sum(0) if y is None else y
    given, p_y = sums.clone()[None], np.array([math.fsum(fed.p[[k, *order]])])
    room = np.full(N, most)
    (one,) = fed.greedy.searches([(slice(0, 1), given, p_y)], w[fed.ids], room)
    left = iter(coins)
    draw = lambda count=0: np.array([*islice(left, count)]) if count else next(left)  # noqa: E731
    one.coins = [SimpleNamespace(random=draw)]
    assert one.chooser is not None
    if not at_once:
        one.chooser = None
    with np.errstate(invalid="ignore"):  # of a gain that is infinity less infinity
        for part in np.array_split(np.array(order, np.int64), passes):
            one.consider(sender, [part])
    assert torch.equal(given[0].nan_to_num(1), sums.nan_to_num(1))  # unchanged
    numbers = [one.p_x[0], one.p_y[0], one.r_x[0], one.r_y[0]]
    if at_once:
        state = one.chooser.tasks.structs[0]
        numbers = [state["p_x"], state["p_y"], one.r_x[0], state["r_y"]]
    counts = fed.notes["evaluations"][0], fed.notes["cases"][0].tolist()
    averages = one.averages[0].flatten().double()
    return one.chosen[0], counts, np.concatenate([one.x[0], one.y[0], averages, numbers])


def same(a, b):
    assert a[:2] == b[:2]
    assert np.array_equal(a[2], b[2], equal_nan=True)
    number = ~np.isnan(a[2])
    assert np.array_equal(np.signbit(a[2][number]), np.signbit(b[2][number]))  # 0 and -0


@pytest.mark.parametrize("most", [0, 1, 3, N])
@pytest.mark.parametrize("kind", ["usual", "equal", "near", "wild", "zero", "large", "no number"])
def test_one_call_decides_as_python(fed, kind, most):
    for seed in range(4):
        rng = np.random.default_rng([seed, most])
        fed.members.p[:] = np.full(N, 1 / N) if seed % 2 else rng.dirichlet(np.ones(N))
        w = models_of(fed, kind, seed)
        order = [int(j) for j in rng.permutation(N) if j != fed.ids[0]]
        coins = np.where(rng.random(N) < 0.2, 0.0, rng.random(N))
        by_python = search(fed, w, order, coins, most, 1, at_once=False)
        for passes in (1, 3, 12):
            same(search(fed, w, order, coins, most, passes), by_python)
        chosen, (evaluations, cases), _ = by_python
        assert len(chosen) <= most and evaluations == (2 + 2 * sum(cases) if most else 0)
        # where only the candidates, not the sum over Y, have NaN, R(Y) stays finite
        finite = w[fed.ids[0]].double()
        same(*(search(fed, w, order, coins, most, 2, once, finite) for once in (True, False)))


def test_what_the_cases_are_for_happens(fed, monkeypatch):
    fed.members.p[:] = 1 / N
    order = [j for j in range(N) if j != fed.ids[0]]
    for most, n in ((N, 8), (3, 3)):  # both gains are 0: added, whatever the coin
        zero = models_of(fed, "zero", 0)
        chosen, (evaluations, cases), _ = search(fed, zero, order, np.ones(N), most)
        assert (chosen, evaluations, cases) == (order[:n], 2 + 2 * n, [0, 0, n, 0])
    w = models_of(fed, "usual", 0)
    w[order] = math.nan
    chosen, (_, cases), numbers = search(fed, w, order, np.zeros(N), N)
    assert (chosen, cases) == ([], [0, 0, 8, 0])  # no gain is above 0, no coin below NaN
    assert np.isfinite(numbers[-2]) and np.isnan(numbers[-1])
    met, tried = [], 0
    decide = search_part.decide
    noted = lambda a, b, coin: met.append((a, b)) or decide(a, b, coin)  # noqa: E731
    monkeypatch.setattr(search_part, "decide", noted)
    order = [j for j in range(N) if j != fed.ids[0]]
    for seed in range(12):
        w = models_of(fed, "usual", seed)
        met.clear()
        search(fed, w, order, np.full(N, 0.5), N, at_once=False)
        both = [i for i, (a, b) in enumerate(met) if a > 0 and b > 0]
        if not both:
            continue
        a, b = met[both[0]]
        for coin, added in ((a / (a + b), False), (np.nextafter(a / (a + b), 0), True)):
            coins = np.full(N, 0.5)
            coins[both[0]] = coin
            by_python = search(fed, w, order, coins, N, at_once=False)
            same(search(fed, w, order, coins, N), by_python)
            assert (order[both[0]] in by_python[0]) is added
        tried += 1
    assert tried > 2
