"""Arrays of one's own: an npz file with x and y, and optionally the client of every sample."""

import zipfile
from pathlib import Path

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries
from dpfl_mpi.datasets._pickles import read_npy
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import open_regular

OWN_DATA = True
SOURCE = "an npz file with x, y and optionally client, group and test"
NO_DOWNLOAD = "these are your own arrays: name them with --source PATH"
COLUMNS = ("x", "y", "client", "group")
KNOWN = (*COLUMNS, "test")


def read(source: Path) -> Arrays:
    with open_regular(source) as file:
        if not zipfile.is_zipfile(file):
            raise UserError(f"{source} is no whole npz file; np.savez(FILE, x=x, y=y) writes one")
    found: dict[str, np.ndarray] = {}
    for path, get in entries(source):
        if path.stem not in KNOWN:
            raise UserError(f"{source} holds {path.stem}; allowed are {', '.join(KNOWN)}")
        found[path.stem] = np.atleast_1d(read_npy(f"{source}: {path.stem}", get()))
    if not {"x", "y"} <= set(found):
        names = ", ".join(sorted(found)) or "nothing"
        raise UserError(f"{source} holds {names}; x and y are needed")
    return arrays_of(where=str(source), **found)  # type: ignore[arg-type]
