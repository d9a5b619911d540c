"""The greedy search against all subsets, and how many partitions a difference takes."""

import itertools

import numpy as np
import optimality
import plan_power
import pytest
import tiny_result
import torch
from launch import federation, reward_of, run_here
from plan_power import Chance, chance_of, needed, power
from scipy.stats import ncf

from dpfl_mpi import streams
from dpfl_mpi.figures.tables import interval
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

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
    gaps = np.array([each.rewards[each.best] - each.rewards[each.chosen] for each in found])
    assert (gaps >= 0).all()
    assert all(int(subset).bit_count() <= 2 for f in found for subset in (f.best, *f.chosen))
    out = said(optimality.main, saved, "--orders=30")
    assert "5 clients, B_c = 3, 16 subsets per client, 30 orders" in out
    assert f"in {100 * (gaps < 1e-12).mean():.1f} % of the orders" in out


NO_ORDERS = "--orders is 0; allowed is a whole number of at least 1"
MANY = "has 17 clients; all subsets are tried of 2 to 16"
REACH, BATCH = "in the run it reached fewer (--reach)", "over mini-batches (--metric batch)"
NARROW = {"clients": 4, "rounds": 1, "reach": "groups:0,1;2,3", "metric": "batch"}


@pytest.mark.parametrize(("fields", "orders", "code", "sentences"), [
    ({"rounds": 0}, 0, 2, [NO_ORDERS]), ({"rounds": 0, "clients": 17}, 2, 2, [MANY]),
    (NARROW, 2, 0, [REACH, BATCH]),
])  # fmt: skip
def test_mistakes_and_differences_to_the_run(fields, orders, code, sentences, result_of, said):
    path = result_of(FIELDS | fields, save_models=True).path
    printed = said(optimality.main, path, f"--orders={orders}", code=code)
    assert [sentence for sentence in sentences if sentence not in printed] == []


def test_chance_and_power():
    """Means 2 and 6; within: (1 + 1 + 4 + 4) / 2 = 5, of a mean 5 / 2; between: 8 - 2.5."""
    parts = [np.array([1.0, 3.0]), np.array([4.0, 8.0])]
    chance = chance_of(parts)
    assert (chance.partitions, chance.clients) == (2, 2)
    assert chance.within**2 == pytest.approx(5) and chance.between**2 == pytest.approx(5.5)
    # one degree of freedom; the error of the mean is 2
    assert interval(parts) == (4, pytest.approx(12.706 * 2, rel=1e-4))
    one = [np.array([0.0, 1.0, 2.0, 5.0])]
    assert chance_of(one).between == 0
    assert interval(one)[1] == pytest.approx(3.1824 * np.sqrt(14 / 3 / 4), rel=1e-4)
    assert chance_of([np.array([1.0, 9.0]), np.array([5.1, 4.9])]).between == 0  # never below 0
    # A paired t-test of 10 has a power of 0.8031 for one standard deviation (G*Power 3.1).
    chance = Chance(within=2.0, between=0.0, partitions=1, clients=1)
    assert power(chance, 2.0, 10, 1) == pytest.approx(0.8031, abs=1e-4)
    for difference, count in ((2, 10), (-2, 10), (1.98, 11), (1e-3, 0)):
        assert needed(chance, difference, 1) == count  # 0: over 10,000
    assert power(chance, 1e-9, 10, 1) == pytest.approx(0.05, abs=1e-6)  # the level
    assert power(chance, 100.0, 5, 100) == 1
    # a partition's mean over 50 clients has the variance 2^2 + 5^2 / 50 = 15^2 / 50
    both, one = Chance(5.0, 2.0, 2, 50), Chance(15.0, 0.0, 2, 50)
    assert power(both, 1.5, 6, 50) == pytest.approx(power(one, 1.5, 6, 50))
    # two partitions, 8 deviations of their mean, as an F-test: 1 - F'(12.706^2; 1, 1, 64)
    f_test = ncf.sf(12.7062**2, 1, 1, 64)
    assert power(chance, 8 * 2 / 2**0.5, 2, 1) == pytest.approx(f_test, abs=1e-4)


@pytest.fixture
def paths(tmp_path):
    pairs = [(method, seed) for method in ("dpfl", "local") for seed in (42, 52)]
    return [str(tiny_result.make(tmp_path / f"{m}{s}.h5", m, s)) for m, s in pairs]


def test_power_from_results(paths, said):
    """Two partitions: (20, 0, 20, -20) with mean 5, and (30, 10, 10, -10) with mean 10."""
    out = said(plan_power.main, *paths, "--difference=5")
    assert "DPFL (B_c = 3) minus Local: +7.50 ± 31.77 points" in out  # 12.706 * 2.5
    assert "2 partitions, 4 clients each" in out
    assert "within a partition 17.80, between partitions 0.00" in out
    row = next(words for words in map(str.split, out.splitlines()) if words[:1] == ["100"])
    chance = chance_of([np.array([20.0, 0, 20, -20]), np.array([30.0, 10, 10, -10])])
    assert int(row[1]) == needed(chance, 5, 100) and int(row[2]) == 100 * int(row[1])
    assert max(map(len, out.splitlines())) <= 130
    one = said(plan_power.main, *paths[::2], "--difference=5")
    assert "between partitions unknown (one partition, taken as 0)" in one


def test_results_without_a_round_are_refused(tmp_path, said):
    tiny_result.empty(tmp_path / "a.h5", Run().resolve())
    printed = said(plan_power.main, tmp_path / "a.h5", "--difference=1", code=2)
    assert printed.endswith("error: none of these results has a recorded round yet\n")
    for study, flag in ((plan_power, "--difference"), (optimality, "--orders")):
        for digits in ("٣", "1_0"):
            assert f"{flag}: invalid" in said(study.main, "x.h5", f"{flag}={digits}", code=2)


@pytest.mark.parametrize(("second", "difference", "sentence"), [
    (1, 1, "these are results of 1 different Runs"), (3, 1, "no partition in common"),
    (2, 0, "--difference is 0; allowed is a number of points"),
])  # fmt: skip
def test_mistakes_are_sentences(paths, said, second, difference, sentence):
    words = [paths[0], paths[second], f"--difference={difference}"]
    assert sentence in said(plan_power.main, *words, code=2)
