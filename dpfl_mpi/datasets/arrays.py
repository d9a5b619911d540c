"""Arrays of one's own: an npz file with x and y, and optionally the client of every sample."""

import zipfile
from pathlib import Path

import numpy as np

from dpfl_mpi.data.own import aligned, arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries
from dpfl_mpi.datasets._pickles import read_npy
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import memory, open_regular

OWN_DATA = True
SOURCE = "an npz file with x, y and optionally client, group, test (or x_test, y_test, client_test)"
NO_DOWNLOAD = "these are your own arrays: name them with --source PATH"
COLUMNS = ("x", "y", "client", "group")
KNOWN = (*COLUMNS, "test", *(f"{name}_test" for name in COLUMNS))


def read(source: Path) -> Arrays:
    with open_regular(source) as file:
        if not zipfile.is_zipfile(file):
            raise UserError(f"{source} is no whole npz file; np.savez(FILE, x=x, y=y) writes one")
    found: dict[str, np.ndarray] = {}
    for path, get in entries(source, memory()):
        if path.stem not in KNOWN:
            raise UserError(f"{source} holds {path.stem}; allowed are {', '.join(KNOWN)}")
        found[path.stem] = np.atleast_1d(read_npy(f"{source}: {path.stem}", get()))
    if not {"x", "y"} <= set(found):
        names = ", ".join(sorted(found)) or "nothing"
        raise UserError(f"{source} holds {names}; x and y are needed")
    tests = {name for name in found if name.endswith("_test")}
    if tests and ("test" in found or not {"x_test", "y_test"} <= tests):
        raise UserError(f"{source}: allowed are x_test and y_test, or test, a flag per sample")
    if tests:
        found = join_test(str(source), found)
    return arrays_of(where=str(source), **found)  # type: ignore[arg-type]


def join_test(where: str, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the `COLUMNS` with the test samples behind the others, and test."""
    for name in COLUMNS[2:]:
        if (name in found) != (f"{name}_test" in found):
            raise UserError(f"{where}: {name} and {name}_test must both be there or neither")
    lengths = [len(found["x"]), len(found["x_test"])]
    out = {"test": np.repeat([False, True], lengths)}
    for name in COLUMNS:
        if name not in found:
            continue
        train, test = found[name], found[f"{name}_test"]
        if train.dtype.kind != test.dtype.kind or (train.dtype == np.uint8) != (
            test.dtype == np.uint8
        ):
            kinds = f"{name} is {train.dtype} and {name}_test {test.dtype}"
            raise UserError(f"{where}: {kinds}; save both as one type")
        if train.shape[1:] != test.shape[1:]:
            raise UserError(f"{where}: {name} is {train.shape}, and {name}_test {test.shape}")
        if name != "x":
            aligned(where, name, train, lengths[0])
            aligned(where, f"{name}_test", test, lengths[1])
        out[name] = np.concatenate([train, test])
    return out
