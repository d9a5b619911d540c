"""Anyone's own arrays: an npz file with x and y, and optionally the client of every sample."""

import zipfile
from pathlib import Path

import numpy as np

from dpfl_mpi.data.own import aligned, arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import entries, npy
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import memory, open_regular

OWN_DATA = True
SOURCE = "an npz file with x, y and optionally client, test (or x_test, y_test, client_test)"
NO_DOWNLOAD = "these are your own arrays: name them with --source PATH"
KNOWN = ("x", "y", "client", "test", "x_test", "y_test", "client_test")


def read(source: Path) -> Arrays:
    with open_regular(source) as file:
        if not zipfile.is_zipfile(file):
            raise UserError(f"{source} is no whole npz file; allowed is what np.savez(FILE, x=x, y=y) writes")
    found: dict[str, np.ndarray] = {}
    for path, get in entries(source, memory()):
        if path.stem not in KNOWN:
            raise UserError(f"{source} holds {path.stem}, which is not read; allowed are {', '.join(KNOWN)}")
        found[path.stem] = np.atleast_1d(npy(f"{source}: {path.stem}", get()))
    if not {"x", "y"} <= set(found):
        raise UserError(f"{source} holds {', '.join(sorted(found)) or 'nothing'}; x and y are needed")
    if ("x_test" in found) != ("y_test" in found) or ("x_test" in found and "test" in found):
        raise UserError(f"{source}: the test set is either x_test and y_test, or test, a flag for every sample of x")
    if "x_test" not in found:
        return arrays_of(found["x"], found["y"], found.get("client"), found.get("test"), str(source))
    if ("client" in found) != ("client_test" in found):
        raise UserError(f"{source}: client and client_test must both be there or neither")
    x, x_test = found["x"], found["x_test"]
    if x_test.shape[1:] != x.shape[1:] or x_test.dtype.kind != x.dtype.kind:
        raise UserError(f"{source}: x_test has samples of {x_test.dtype} {x_test.shape[1:]}, x {x.dtype} {x.shape[1:]}")
    lengths = [len(x), len(x_test)]
    for name, length in zip(("y", "y_test", "client", "client_test"), 2 * lengths, strict=True):
        if name in found:
            aligned(str(source), name, found[name], length)
    names = [name for name in ("x", "y", "client") if name in found]
    for name in names:
        a, b = found[name].dtype, found[f"{name}_test"].dtype
        rounded = {a.kind, b.kind} == {"i", "u"} and np.result_type(a, b).kind == "f"
        if rounded or {a.kind, b.kind} == {"S", "U"} or (name == "x" and (a == np.uint8) != (b == np.uint8)):
            raise UserError(f"{source}: {name} is {a} and {name}_test {b}; save both as one type")
    both = {name: np.concatenate([found[name], found[f"{name}_test"]]) for name in names}
    return arrays_of(both["x"], both["y"], both.get("client"), np.repeat([False, True], lengths), str(source))
