"""Balanced accuracy and macro F1 against scikit-learn's, and where a user meets them."""

import csv
import warnings

import numpy as np
import pytest
from launch import run_here
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score
from test_analysis import module

from dpfl_mpi import export, show
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.results import scores as metrics


def test_scores_are_scikit_learns():
    """Clients of five classes, each of which holds some of them and mistakes them for any, in one call for all clients."""
    rng = np.random.default_rng(0)
    truth = [rng.choice(rng.choice(5, rng.integers(1, 6), replace=False), 30) for _ in range(20)]
    taken = [np.where(rng.random(30) < 0.6, y, rng.integers(0, 5, 30)) for y in truth]
    confusion = np.array(
        [np.bincount(5 * y + p, minlength=25).reshape(5, 5) for y, p in zip(truth, taken, strict=True)]
    )
    assert (confusion.sum(2) == 0).any(), "clients without some class"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and not there
        theirs = {
            "accuracy": [accuracy_score(y, p) for y, p in zip(truth, taken, strict=True)],
            "balanced_accuracy": [balanced_accuracy_score(y, p) for y, p in zip(truth, taken, strict=True)],
            "macro_f1": [f1_score(y, p, average="macro") for y, p in zip(truth, taken, strict=True)],
        }
    assert list(theirs) == list(metrics.METRICS)
    for metric, expected in theirs.items():
        np.testing.assert_allclose(metrics.score(confusion, metric), expected, rtol=1e-12)
    assert all(np.isnan(metrics.score(np.zeros((3, 3)), metric)) for metric in theirs)


def test_the_three_scores_by_hand():
    """Class 0: 3 of 4 right; class 1: 1 of 2, taken twice; class 2: not there, taken once."""
    confusion = np.array([[3, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert metrics.score(confusion, "accuracy") == 4 / 6
    assert metrics.score(confusion, "balanced_accuracy") == (3 / 4 + 1 / 2) / 2
    assert metrics.score(confusion, "macro_f1") == pytest.approx((6 / 7 + 2 / 4 + 0) / 3)


def test_where_a_user_meets_them(tmp_path, capsys):
    path = run_here(tmp_path / "run.h5", {"method": "local", "clients": 3, "rounds": 1})
    with Result(path) as result:
        assert np.array_equal(metrics.score(result["best/confusion"], "accuracy"), result.score("accuracy"))
        balanced, f1 = result.score("balanced_accuracy"), result.score("macro_f1")
        with pytest.raises(UserError, match="there is no score auc; allowed are accuracy, balanced_accuracy, macro_f1"):
            result.score("auc")
    assert show.main([str(path)]) == 0
    assert (
        f"balanced accuracy {100 * balanced.mean():.2f} %, macro F1 {100 * f1.mean():.2f} %" in capsys.readouterr().out
    )
    with Result(path) as result:
        drawing = module("accuracy_table").draw([result], score="macro_f1")
    assert "Test macro F1, %" in drawing.text and drawing.data["mean"].tolist() == [pytest.approx(100 * f1.mean())]
    assert export.main([str(path), "--format", "clients"]) == 0
    with open(tmp_path / "run.clients.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["macro_f1"]) for row in rows] == f1.tolist()
    assert [float(row["balanced_accuracy"]) for row in rows] == balanced.tolist()
    assert [row["client_id"] for row in rows] == ["0", "1", "2"]
