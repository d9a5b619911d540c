"""The search against Algorithms 2 and 3 in plain Python; its orders."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import differences, federation, reward_of, run_here

from dpfl_mpi import streams
from dpfl_mpi.federation import orders
from dpfl_mpi.federation.search import decide
from dpfl_mpi.graph import CollaborationGraph, named
from dpfl_mpi.mpi.placement import waves
from dpfl_mpi.settings.search import Rule

N = 7


@pytest.fixture(scope="module", params=["native", "torch"])
def fed(request, digits_file):
    fields = {"dataset": "image_folder", "data": str(digits_file), "model": "mlp"}
    fields |= {"clients": N, "augment": False}
    with federation(fields, kernels=request.param) as fed:
        yield fed


def test_decide():
    neither = [(0.0, 0.0, 0.0, True), (0.0, 0.0, 0.999999, True)]  # add, whatever the coin
    one = [(0.3, 0.0, 0.999999, True), (0.0, 0.3, 0.0, False)]  # p = 0: not with a coin of 0
    quarter = [(0.1, 0.3, 0.24, True), (0.1, 0.3, 0.25, False), (0.1, 0.3, 0.26, False)]
    small = [(1e-300, 1e-300, 0.49, True), (1e-300, 1e-300, 0.51, False)]
    for a, b, coin, added in (*neither, *one, *quarter, *small):
        assert decide(a, b, coin) is (coin < reference.probability(a, b)) is added


def rows_of(fed, seed, spread=1.0):
    """Models with a common and an own part, in row order and in client order."""
    rng = np.random.default_rng(seed)
    size = fed.ensemble.size
    models = (rng.normal(0, 0.3, size) + rng.normal(0, 0.3 * spread, (N, size))).astype(np.float32)
    w = fed.ensemble.zeros(len(fed.ids))
    w[:, :size] = torch.from_numpy(models[fed.ids])
    return w, models


def drawn(fed, k, candidates):
    """The order of client k's candidates, and its coins."""
    block = slice(int(fed.row_of[k]), int(fed.row_of[k]) + 1)
    return fed.shuffle(k, candidates).tolist(), fed.draws.coins(block)[0].random(N)


def start(fed, number, most):
    fed.begin_round(number)
    fed.members.limits.most_senders[:] = most


@pytest.mark.parametrize("most", [0, 1, 2, 4, N - 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bggc_is_algorithm_3(fed, most, seed):
    start(fed, seed, most)
    w, models = rows_of(fed, seed)
    omega = fed.bggc(w)
    for k in range(N):
        order, coins = drawn(fed, k, np.delete(np.arange(N), k))
        X = reference.bggc(k, order, models, fed.p, reward_of(fed, k), most + 1, coins)
        assert list(omega.of(k)) == sorted(X - {k}) and len(X) <= most + 1


@pytest.mark.parametrize("most", [0, 1, 3, N - 1])
@pytest.mark.parametrize("seed", [3, 4])
def test_ggc_is_algorithm_2(fed, most, seed):
    start(fed, seed, most)
    w, models = rows_of(fed, seed)
    rng = np.random.default_rng(seed)
    others, size = [np.delete(np.arange(N), k) for k in range(N)], min(most + 1, N - 1)
    omega = CollaborationGraph.from_lists(rng.choice(each, size, replace=False) for each in others)
    chosen = fed.ggc(w, fed.exchange(w, omega))
    for k in range(N):
        order, coins = drawn(fed, k, omega.of(k))
        X = reference.ggc(k, order, models, fed.p, reward_of(fed, k), most + 1, coins)
        assert list(chosen.of(k)) == sorted(X - {k}) and len(X) <= most + 1


RULES = [
    {"order": "loss"},
    {"neither": "keep_out"},
    {"neither": "smaller", "order": "loss"},
    {"stop": True},
    {"search": "forward", "order": "loss", "tolerance": 0.02},
    {"search": "forward", "stop": True},
]


def departing(order, coins, models, p, R, most, rule):
    """X of Algorithm 2 by a rule, in plain Python; every average is computed anew."""
    X, Y = [], list(order)
    for j, coin in zip(order, coins, strict=False):
        if len(X) >= most:
            break
        more, less = [*X, j], [i for i in Y if i != j]
        sets = ({*s, len(p) - 1} for s in (X, more, Y, less))  # the client itself stands last
        x, x_j, y, y_j = (R(reference.average(p, models, s)) for s in sets)
        a, b = max(x_j - x, 0), max(y_j - y, 0)
        add = coin < reference.probability(a, b)
        if rule.search == "forward":
            add = -x_j <= -x * (1 + rule.tolerance)
        elif a == b == 0 and rule.neither != "add":
            add = rule.neither == "smaller" and x_j - x >= y_j - y
        X, Y = (more, Y) if add else (X, less)
        if rule.stop and not add:
            break
    return sorted(X)


@pytest.mark.parametrize("spread", [1.0, 0.05])  # far and near models: gains of all signs
@pytest.mark.parametrize("rule", RULES)
def test_a_search_may_depart_from_the_algorithms(fed, rule, spread, monkeypatch):
    start(fed, 5, 3)
    rule = Rule(**rule)
    monkeypatch.setattr(fed.greedy, "rule", rule)
    w, models = rows_of(fed, 5, spread=spread)
    fed.notes["evaluations"][:] = 0
    before = fed.notes["cases"].sum(1)
    omega = fed.bggc(w)
    of_bggc, decided = fed.notes["evaluations"].copy(), fed.notes["cases"].sum(1) - before
    chosen = fed.ggc(w, fed.exchange(w, omega))
    for k in range(N):
        reward = reward_of(fed, k)
        last, p = [*models, models[k]], np.append(fed.p, fed.p[k])
        for found, candidates in ((omega, np.delete(np.arange(N), k)), (chosen, omega.of(k))):
            order, coins = drawn(fed, k, candidates)
            if rule.order == "loss":
                order = sorted(order, key=lambda j, reward=reward: -reward(models[j]))
            expected = departing(order, coins, last, p, reward, 3, rule) if order else []
            assert found.of(k).tolist() == expected
    alone = (N - 1) * (rule.order == "loss")
    scored = (1 if rule.search == "forward" else 2) * (1 + decided) + alone
    assert of_bggc.tolist() == scored.tolist()


def of_clients(low, high):
    return st.lists(st.integers(low, high), min_size=N, max_size=N)


FIXTURE = [HealthCheck.function_scoped_fixture]


@settings(max_examples=40, suppress_health_check=FIXTURE)
@given(
    seed=st.integers(0, 10**6),
    number=st.integers(0, 99),
    most=of_clients(0, N - 1),
    twins=of_clients(0, N - 1),
    shares=of_clients(1, 1000),
    spread=st.sampled_from([1e-6, 1e-3, 1.0]),
)
def test_theorem_1(fed, seed, number, most, twins, shares, spread):
    """Equal models (`twins`) make gains of nearly 0, where one rounding would decide."""
    fed.members.p[:] = np.array(shares) / sum(shares)
    w, _ = rows_of(fed, seed, spread=spread)
    w = w[[int(fed.row_of[twins[k]]) for k in fed.ids]]
    start(fed, number, most)
    together = fed.ggc(w, fed.exchange(w, named("complete", N)))
    evaluations = fed.notes["evaluations"].copy()
    start(fed, number, most)
    batched = fed.bggc(w)
    assert np.array_equal(together.matrix(), batched.matrix())
    assert np.array_equal(evaluations, fed.notes["evaluations"])
    assert (batched.degrees() <= most).all()


GROUPED = [{}, {"reach": "geometric:0.7"}, {"budget": 3, "omega_period": 2}]


@pytest.mark.parametrize("fields", [*GROUPED, {"budget": "file"}])
def test_in_groups_the_search_finds_the_same(fields, tmp_path, monkeypatch):
    if fields.get("budget") == "file":  # with which the first group asks nobody
        with federation({"clients": N, "budget": 3}) as fed:
            budgets = np.where(np.isin(np.arange(N), fed.ids[:3]), 1, 3)
        np.savetxt(tmp_path / "budgets", budgets, "%d")
        fields = {"budget": str(tmp_path / "budgets")}
    fields = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": "inf"} | fields
    for name, least in (("whole.h5", 256), ("groups.h5", 2)):
        monkeypatch.setattr("dpfl_mpi.mpi.placement.WAVE", least)
        run_here(tmp_path / name, fields)
    assert waves(np.array([N])) == N // 2
    different = set(differences(tmp_path / "whole.h5", tmp_path / "groups.h5"))
    assert different <= {"traffic/bytes_collective"}


def test_evaluations_are_two_a_candidate_and_none_with_budget_one(fed):
    start(fed, 0, [0] * (N - 1) + [3])
    w, _ = rows_of(fed, 0)
    omega = fed.bggc(w)
    assert omega.degrees()[:-1].tolist() == [0] * (N - 1)
    alone = np.array([int(fed.row_of[k]) for k in range(N - 1)])
    assert (fed.notes["evaluations"][alone] == 0).all()
    assert (fed.notes["models_received"][alone] == 0).all()
    assert fed.notes["evaluations"][fed.row_of[N - 1]] > 0
    assert torch.equal(fed.average(w, omega)[alone], w[alone])
    # R(X) and R(Y) are carried over: 2 to start with, then 2 and one case per candidate
    start(fed, 0, N - 1)
    fed.bggc(w)
    decided = fed.notes["cases"].sum(1)
    assert np.array_equal(fed.notes["evaluations"], 2 + 2 * decided) and decided.max() == N - 1


@pytest.mark.parametrize("ahead", [1, 2, 64])
def test_an_order_drawn_in_parts_is_the_whole_order(fed, monkeypatch, ahead):
    monkeypatch.setattr(orders, "AHEAD", ahead)
    fed.begin_round(4)
    for k in range(N):
        order = orders.Order(fed.draws, fed.candidates(), k, None)
        batches = [order.next(width).tolist() for width in (0, 2, 2, 2, 2, 2)]
        whole = fed.shuffle(k, fed.reachable(k), 0).tolist()
        assert [j for batch in batches for j in batch] == whole
        assert [len(batch) for batch in batches] == [0, 2, 2, 2, 0, 0]
        assert fed.shuffle(k, fed.reachable(k), first=4).tolist() == whole[:4]


@pytest.mark.parametrize("ahead", [1, 2])
def test_of_many_candidates_the_first_are_drawn_alone(fed, monkeypatch, ahead):
    for name, value in (("AHEAD", ahead), ("MANY", 1), ("MANY_TIMES", 1)):
        monkeypatch.setattr(orders, name, value)
    whole = []
    for t in range(1, 300):
        fed.begin_round(t)
        order, reachable = orders.Order(fed.draws, fed.candidates(), 0, None), fed.reachable(0)
        first, rng = order.next(2).tolist(), fed.draws.stream(streams.CANDIDATES, 0, 0)
        assert first == rng.choice(reachable, 2 * ahead, replace=False)[:2].tolist()
        rng = fed.draws.stream(streams.CANDIDATES, 0, 0)
        few = fed.shuffle(0, reachable, first=3)
        assert few.tolist() == rng.choice(reachable, 3, replace=False).tolist()
        whole.append(first + [j for _ in range(N) for j in order.next(2).tolist()])
        assert sorted(whole[-1]) == reachable.tolist()
    # each candidate at each place 299 / (N - 1) times, within four standard deviations
    times = np.array([np.bincount(place, minlength=N)[1:] for place in zip(*whole, strict=True)])
    expected = 299 / (N - 1)
    assert np.abs(times - expected).max() < 4 * np.sqrt(expected)
