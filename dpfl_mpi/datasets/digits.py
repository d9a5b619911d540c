"""scikit-learn's handwritten digits, 1,797 real 8x8 images: the default run needs no file."""

import numpy as np

from dpfl_mpi.data.source import Arrays

TITLE = "Digits"
# not in the paper: chosen so that collaboration shows within a minute on two cores
PAPER = {"clients": 32, "classes_per_client": 5, "budget": 8}


def load() -> Arrays:
    """Return the digits; a fixed stratified fifth is the test set (the original has none)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    rows = np.arange(len(labels))
    train, test = train_test_split(rows, test_size=0.2, random_state=0, stratify=labels)
    parts = images[train], labels[train], images[test], labels[test]
    return Arrays(*parts, tuple("0123456789"), (0.305,), (0.376,))
