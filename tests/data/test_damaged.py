"""Prepared files that were damaged on purpose: one sentence each, when a Run is resolved and when its data are opened."""

import h5py
import numpy as np
import pytest

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import open_source, verify
from dpfl_mpi.errors import UserError
from dpfl_mpi.prepare import write
from dpfl_mpi.settings import Run

MANY = 2**40


@pytest.fixture
def path(tmp_path):
    y = np.arange(60) % 3
    write(
        arrays_of(np.arange(180.0).reshape(60, 3), y, client=np.arange(60) % 5), "arrays", tmp_path / "a.h5", own=True
    )
    return tmp_path / "a.h5"


@pytest.mark.parametrize(
    "name", ["train/clients", "test/clients", "train/labels", "class_names", "client_names", "mean", "std"]
)
@pytest.mark.parametrize(
    "value",
    [MANY, -1, np.full(48, MANY), np.full(48, -1), np.zeros((2, 2)), np.full(3, np.nan), b"text", "rows", None],
    ids=str,
)
def test_a_damaged_prepared_file_is_one_sentence(path, name, value):
    """An array of 2^40 rows, a number of 2^40, a scalar where an array belongs, another shape or type, or nothing at all."""
    with h5py.File(path, "r+") as file:
        del file[name]
        if isinstance(value, str):
            file.create_dataset(name, (MANY,), "i4", chunks=(2**20,), compression="gzip", fillvalue=0)
        elif value is not None:
            file[name] = value
    with pytest.raises(UserError) as error:
        verify(open_source(Run(dataset="arrays", data=str(path)).resolve()))
    assert str(path) in str(error.value) and "\n" not in str(error.value)
