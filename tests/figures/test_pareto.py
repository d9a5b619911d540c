"""analysis/pareto.py: costs and accuracies of a result whose every number was chosen by hand."""

import sys

import numpy as np
import pytest
import tiny_result
from launch import ROOT, run_here

pytest.importorskip("matplotlib")
sys.path.insert(0, str(ROOT / "analysis"))

import pareto

from dpfl_mpi.results import Result


def test_best_so_far():
    val = np.array([[0.5, np.nan], [0.5, 0.2], [0.4, 0.1], [np.nan, 0.9]])
    test = np.arange(8.0).reshape(4, 2)
    assert np.array_equal(pareto.best_so_far(val, test, True), [[0, np.nan], [2, 3], [2, 3], [2, 7]], equal_nan=True)
    assert pareto.best_so_far(val, test, False)[:, 0].tolist() == [0, 0, 0, 0]


def test_costs_by_hand(tmp_path):
    """Omega has 5 edges, asked twice; then 2 and 3 edges; 12, 5 and 5 decisions; 100 steps per round of four clients; 21 seconds."""
    with Result(tiny_result.make(tmp_path / "a.h5")) as result:
        curve = pareto.curves(result)
        assert {n: v.tolist() for n, v in curve.items() if n != "accuracy"} == {
            "models": [2.5, 3, 3.75], "evaluations": [6, 8.5, 11], "steps": [0, 25, 50], "seconds": [21, 42, 63],
        }  # fmt: skip
        assert curve["accuracy"] == pytest.approx([50, 60, 70])
        curve["accuracy"] = np.array([50.0, 60, 70])
        assert pareto.first_at(curve, 60) == {"models": 3, "evaluations": 8.5, "steps": 25, "seconds": 42}
        assert np.isnan(pareto.first_at(curve, 71)["models"])
        text = pareto.draw([result], reach=45).text
        assert "70.00 (1)" in text and "3.8" in text and "2.5" in text


def test_it_ends_where_the_result_does(tmp_path):
    """The end of a curve is what the result says of its best models, tuned, after a drift, with liars and newcomers."""
    fields = {"clients": 7, "rounds": 4, "tau_train": 1, "tau_init": 1, "budget": 3, "newcomers": 0.2, "drift": "0.5:3"}
    for i, more in enumerate(
        (
            {},
            {"method": "fedavg", "finetune_epochs": 2},
            {"attack": "noise:0.3", "tie": "earliest"},
            {
                "method": "pfedgraph",
                "rounds": 6,
                "clients": 8,
                "drift": None,
                "newcomers": 0,
            },  # which scores twice per round
        )
    ):
        with Result(run_here(tmp_path / f"{i}.h5", fields | more)) as result:
            curve = pareto.curves(result)
            assert curve["accuracy"][-1] == pytest.approx(100 * result["best/test_acc"][result.benign].mean())
            assert curve["models"][-1] == result["traffic/models_received"][:, result.benign].sum(0).mean()
