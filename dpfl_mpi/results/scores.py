"""Scores of a classifier from its confusion matrix, client by client.

Axes: N clients, C classes; `confusion[..., i, j]` counts the images of class i that were taken for class j.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError

METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1"}  # and in words


def of_result(result: Any, metric: str) -> np.ndarray:
    """Return a score of `METRICS` of each client's best model in a `results.Result` on its test images, 0 to 1, `[N]`.

    Raises:
        UserError: there is no such score, or, other than the accuracy, not before the end of the run.
    """
    if metric not in METRICS:
        raise UserError(f"there is no score {metric}; allowed are {', '.join(METRICS)}")
    if metric == "accuracy":
        return np.asarray(result["best/test_acc"])
    if "best/confusion" not in result:
        raise UserError(f"{result.path} is {result.state}: its confusion matrices, and so {metric}, come at the end")
    return score(result["best/confusion"], metric)


def score(confusion: np.ndarray, metric: str) -> np.ndarray:
    """Return a score from 0 to 1 for each matrix of counts `[..., C, C]`, nan where it has no image."""
    counts = np.asarray(confusion, np.float64)
    right = np.diagonal(counts, axis1=-2, axis2=-1)
    true, taken = counts.sum(-1), counts.sum(-2)  # images of a class; taken for it
    if metric == "accuracy":
        return share(right.sum(-1), true.sum(-1))
    if metric == "balanced_accuracy":
        return mean(share(right, true))
    return mean(share(2 * right, true + taken))


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, nan where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def mean(of_classes: np.ndarray) -> np.ndarray:
    """Return the mean over the classes that have a value `[..., C]`: those of the client's images, for F1 those it was taken for too."""
    there = np.isfinite(of_classes)
    return share(np.where(there, of_classes, 0).sum(-1), there.sum(-1))
