"""The greedy search against all subsets: by hand, and the run's own search as a twin."""

import contextlib
import csv
import itertools

import numpy as np
import pytest
import torch
from launch import federation, run_here, validation
from torch.nn.functional import cross_entropy

from dpfl_mpi import streams
from dpfl_mpi.models import mlp
from dpfl_mpi.results import Result
from dpfl_mpi.studies import optimality

N = 5
FIELDS = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("saved") / "run.h5", FIELDS, save_models=True)


def test_greedy_by_hand():
    """Three others; R by subset 000 to 111. The order 0, 1, 2 takes 0 (gain 2 against 0), then 1 by a coin, and then it is full."""
    rewards = np.array([0.0, 2, 1, 3, 5, 5, 4, 2])
    # 0: a = 2, b = R(110) - R(111) = 2: a coin below 1/2 adds. 1: a = 3 - 2 = 1, b = R(101) - R(111) = 3: below 1/4 adds;
    # with a coin of 0.3 not 1; then 2: a = 3, b = 0: added
    for coin, most, chosen in ((0.2, 2, 0b011), (0.3, 2, 0b101), (0.2, 1, 0b001), (0.2, 0, 0)):
        assert optimality.greedy(rewards, np.arange(3), np.array([0.4, coin, 0.9]), most) == chosen
    assert [optimality.best_subset(rewards, most) for most in (0, 1, 2, 3)] == [0, 0b100, 0b100, 0b100]
    assert optimality.best_subset(np.array([0.0, 1, 1, 4]), 1) == 1


def test_rewards_are_losses_of_averages(saved):
    with Result(saved) as result, contextlib.closing(federation(FIELDS)) as fed:
        models, k = optimality.Models(result, None), 2
        rewards, others = models.rewards(k), [0, 1, 3, 4]
        p, module = result["client/p"], mlp.build((8, 8, 1), 10)
        images, labels = validation(fed, k)
        best = result["model/best"].astype(float)
        for size in range(5):
            for members in itertools.combinations(range(4), size):
                chosen = [k, *(others[m] for m in members)]
                row = (p[chosen] @ best[chosen]) / p[chosen].sum()
                torch.nn.utils.vector_to_parameters(torch.from_numpy(row).float(), module.parameters())
                loss = cross_entropy(module(images), labels).item()
                assert rewards[sum(1 << m for m in members)] == pytest.approx(-loss, abs=1e-5)
        assert models.test_acc(k, 0) == pytest.approx(result["best/test_acc"][k])


def test_it_is_the_search_of_the_runs(saved):
    with Result(saved) as result, contextlib.closing(federation(FIELDS)) as fed:
        models = optimality.Models(result, None)
        w = models.rows[torch.from_numpy(fed.ids)]
        for t in (0, 1, 2):
            fed.begin_round(t)
            omega = fed.bggc(w)
            for k in range(N):
                others = np.delete(np.arange(N), k)
                order = np.searchsorted(others, fed.shuffle(k, others, 0))
                coins = streams.stream(fed.run.seed, streams.COIN, k, 1000 * t).random(N - 1)
                found = optimality.greedy(models.rewards(k), order, coins, 2)
                assert others[[found >> i & 1 == 1 for i in range(N - 1)]].tolist() == omega.of(k).tolist()


def test_the_report(saved, tmp_path, capsys):
    assert optimality.main([str(saved), "--orders", "30", "--out", str(tmp_path / "o.csv")]) == 0
    out = capsys.readouterr().out
    assert "5 clients, B_c = 3, 16 subsets per client, 30 orders" in out
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    assert len(rows) == 5 * 31 and all(float(r["gap"]) >= 0 and len(r["collaborators"].split()) <= 2 for r in rows)
    assert all(float(r["gap"]) == 0 for r in rows if r["order"] == "-1")
    found = 100 * np.mean([float(r["gap"]) < 1e-12 for r in rows if r["order"] != "-1"])
    assert f"in {found:.1f} % of the orders" in out


NARROW = {"clients": 4, "rounds": 1, "reach": "groups:0,1;2,3", "metric": "batch"}


@pytest.mark.parametrize(
    ("fields", "orders", "code", "sentences"),
    [
        ({"rounds": 0}, 0, 2, ["--orders is 0; allowed is a whole number of at least 1"]),
        ({"rounds": 0, "clients": 17}, 2, 2, ["has 17 clients; all subsets are tried of 2 to 16"]),
        (NARROW, 2, 0, ["in the run it reached fewer (--reach)", "took means over mini-batches (--metric batch)"]),
    ],
)
def test_mistakes_and_what_the_run_does_otherwise_are_said(fields, orders, code, sentences, tmp_path, capsys):
    path = run_here(tmp_path / "a.h5", FIELDS | fields, save_models=True)
    assert optimality.main([str(path), f"--orders={orders}"]) == code
    said = capsys.readouterr()[code > 0]
    assert all(sentence in said for sentence in sentences)
