"""scikit-learn's embedded handwritten digits: 1,797 real 8x8 images. Needs no file, no network; the default run uses it."""

import numpy as np

from dpfl_mpi.data.source import Arrays

TITLE = "Digits"
# not in the paper: chosen so that collaboration shows within a minute on two cores
PAPER = {"clients": 32, "classes_per_client": 5, "budget": 8}


def load() -> Arrays:
    """Return the digits; a fixed stratified fifth of them is the test set (the original has none)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return Arrays(images[train], labels[train], images[test], labels[test], tuple("0123456789"), (0.305,), (0.376,))
