"""Scores of a classifier from its confusion matrix, client by client, and means of what is finite.

Axes: N clients, C classes; `confusion[..., i, j]` counts the images of class i that were taken for class j.
"""

import numpy as np

METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1"}  # and in words


def score(confusion: np.ndarray, metric: str) -> np.ndarray:
    """Return a score of `METRICS` from 0 to 1 for each matrix of counts `[..., C, C]`, nan where it has no image."""
    counts = np.asarray(confusion, np.float64)
    right = np.diagonal(counts, axis1=-2, axis2=-1)
    true, taken = counts.sum(-1), counts.sum(-2)  # images of a class; taken for it
    if metric == "accuracy":
        return share(right.sum(-1), true.sum(-1))
    # over the classes of the client's images; for F1 those that it was taken for, too
    return mean(share(right, true) if metric == "balanced_accuracy" else share(2 * right, true + taken))


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, nan where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def mean(values: np.ndarray, weights: np.ndarray | float = 1) -> np.ndarray:
    """Return the weighted mean of the finite values over the last axis, nan where there is none."""
    finite = np.isfinite(values)
    return share((np.where(finite, values, 0) * weights).sum(-1), (finite * weights).sum(-1))
