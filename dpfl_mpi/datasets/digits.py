"""scikit-learn's handwritten digits, 1,797 real 8x8 images: the default run needs no file."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dpfl_mpi.data.recipes import train_val
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.errors import UserError

TITLE = "Digits"
# not in the paper: chosen so that collaboration shows within a minute on two cores
PAPER = {"clients": 32, "classes_per_client": 5, "budget": 8}


def load() -> Arrays:
    """Return the digits; a fixed stratified fifth is the test set (the original has none)."""
    installed = find_spec("sklearn")  # importing it takes 1 s, during which all ranks wait
    if not (installed and installed.origin):
        raise UserError("the digits are scikit-learn's: pip install scikit-learn")
    file = Path(installed.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.int64)  # 64 pixels from 0 to 16, the digit
    images = np.rint(table[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1]
    train, test = train_val(np.arange(len(labels)), labels, seed=0)
    parts = images[train], labels[train], images[test], labels[test]
    return Arrays(*parts, tuple("0123456789"), (0.305,), (0.376,))
