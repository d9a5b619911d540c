"""The greedy search against all subsets."""

import itertools

import numpy as np
import optimality
import pytest
import tiny_result
import torch
from launch import federation, reward_of, run_here

from dpfl_mpi import streams
from dpfl_mpi.results import Result

N = 5
FIELDS = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("saved") / "run.h5", FIELDS, save_models=True)


def test_greedy_by_hand():
    """R by subset 000 to 111 of three others, in the order 0, 1, 2.

    0 is added (gain 2 against 0). 1: a = 3 - 2 = 1, b = R(101) - R(111) = 3: added with a coin
    below 1/4. With 0.3 it is not, and 2 is added (a = 3, b = 0). Then the budget is reached.
    """
    rewards = np.array([0.0, 2, 1, 3, 5, 5, 4, 2])
    for coin, most, chosen in ((0.2, 2, 0b011), (0.3, 2, 0b101), (0.2, 1, 0b001), (0.2, 0, 0)):
        coins = np.array([0.4, coin, 0.9])
        assert optimality.greedy(rewards, np.arange(3), coins, most) == chosen
    best = [optimality.best_subset(rewards, most) for most in (0, 1, 2, 3)]
    assert best == [0, 0b100, 0b100, 0b100]
    assert optimality.best_subset(np.array([0.0, 1, 1, 4]), 1) == 1


def test_it_is_the_search_of_the_runs(saved, said):
    with Result(saved) as result, federation(FIELDS) as fed:
        models = optimality.Models(result)
        w = models.rows[torch.from_numpy(fed.ids)]
        for t in (0, 1, 2):
            fed.begin_round(t)
            omega = fed.bggc(w)
            for k in range(N):
                others = np.delete(np.arange(N), k)
                order = np.searchsorted(others, fed.shuffle(k, others, 0))
                coins = streams.stream(fed.run.seed, streams.COIN, k, 1000 * t).random(N - 1)
                found = optimality.greedy(models.rewards(k), order, coins, 2)
                is_member = [found >> i & 1 == 1 for i in range(N - 1)]
                assert others[is_member].tolist() == omega.of(k).tolist()
        k, others = 2, [0, 1, 3, 4]
        rewards, R = models.rewards(k), reward_of(fed, k)
        p, best = result["client/p"], result["model/best"].astype(float)
        for size in range(5):
            for members in itertools.combinations(range(4), size):
                chosen = [k, *(others[m] for m in members)]
                row = (p[chosen] @ best[chosen]) / p[chosen].sum()
                assert rewards[sum(1 << m for m in members)] == pytest.approx(R(row), abs=1e-5)
        assert models.test_acc(k, 0) == pytest.approx(result["best/test_acc"][k])
        found = [models.search(k, 2, 30) for k in range(N)]
    gaps = np.array([each["gaps"] for each in found])
    assert (gaps >= 0).all() and all(each["greedy size"] <= 2 for each in found)
    out = said(optimality.main, saved, "--orders=30")
    assert "5 clients, 30 orders" in out
    assert f"in {100 * (gaps < 1e-12).mean():.1f} % of the orders" in out


NO_ORDERS = "--orders is 0; allowed is a whole number of at least 1"
MANY = "has 4 clients; all subsets are tried of 2 to 3"
OTHERS = "--reach or --metric batch, which searches otherwise"
REACH = {"reach": "groups:0,1;2,3"}


@pytest.mark.parametrize(("fields", "orders", "sentence"), [
    ({}, 0, NO_ORDERS), ({}, 2, MANY), (REACH, 2, OTHERS),
])  # fmt: skip
def test_mistakes(fields, orders, sentence, tmp_path, monkeypatch, said):
    monkeypatch.setattr(optimality, "MOST_CLIENTS", 4 if fields else 3)
    path = tiny_result.make(tmp_path / "a.h5", **fields)
    assert sentence in said(optimality.main, path, f"--orders={orders}", code=2)
