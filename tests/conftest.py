"""What all tests share: one thread, and a small data file that ranks read without importing scikit-learn."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: bitwise equality holds for one thread per rank

import pytest


@pytest.fixture(scope="session")
def digits_file(tmp_path_factory):
    """The embedded digits as a prepared file: an own data set of 8x8 grey images."""
    from dpfl_mpi import prepare
    from dpfl_mpi.datasets import digits

    path = tmp_path_factory.mktemp("data") / "digits.h5"
    prepare.write(digits.load(), "image_folder", path)
    return path


@pytest.fixture(scope="session")
def colour_file(tmp_path_factory):
    """600 training and 200 test images of 17x18 colour pixels in four classes that a CNN can tell apart."""
    import numpy as np

    from dpfl_mpi import prepare
    from dpfl_mpi.data.source import Arrays

    rng = np.random.default_rng(0)
    patterns = rng.integers(40, 215, (4, 17, 18, 3))
    parts = []
    for m in (600, 200):
        labels = np.arange(m) % 4
        parts += [np.clip(patterns[labels] + rng.normal(0, 60, (m, 17, 18, 3)), 0, 255).astype(np.uint8), labels]
    path = tmp_path_factory.mktemp("data") / "colour.h5"
    prepare.write(Arrays(*parts, tuple("abcd"), (0.5,) * 3, (0.25,) * 3), "image_folder", path)
    return path
