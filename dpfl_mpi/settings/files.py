"""The files that a Run names: they decide its numbers by their content, not by their path."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find
from dpfl_mpi.settings.values import is_file
from dpfl_mpi.storage.foreign import TEXT, UNREADABLE, Hdf5, read_json, refused_as, sha256

FILES = ("data", "partition", "budget", "reach", "available", "network", "churn", "graphs")  # fields that may name one
GRAPHS = ("graph/chosen/indptr", "graph/chosen/senders")  # of a result
NO_PARTITION = '--partition is file:{}, which is not a partition: JSON with "clients", a list of {{"train", "val", "test"}} index lists'


def contents(filled: Mapping[str, Any], dataset: Any, gone: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each file that the filled-in fields of a Run name, by field, "file:" before that of a partition; "": it is not there.

    `gone` is what files held that are not here. The default path of the data is left out: they are those of the data set. Data of one's own always count.
    """
    paths = {name: filled[name].path for name in FILES[1:-1] if filled[name]} | {"graphs": filled["graphs"]}
    own_data = getattr(dataset, "OWN_DATA", False) and (is_file(filled["data"]) or "data" in gone)
    if filled["data"] != dataset.DATA or own_data:
        paths["data"] = filled["data"]
    out = {}
    for name, path in paths.items():
        if path and (name in gone or not is_file(path)):
            out[name] = gone.get(name, "")
        elif path:
            held = getattr(filled[name], "sha256", "") or file_sha256(Path(path))
            out[name] = f"file:{held}" if name == "partition" else held
    return out


def file_sha256(path: Path) -> str:
    """Return the SHA-256 that names a file's content: of a prepared data file the one stored in it, of a result that of its graphs, else of its bytes.

    A result that is computed again has the same graphs, but other seconds.
    """
    if path.suffix not in (".h5", ".hdf5"):
        return sha256(path)
    what = "is not a readable HDF5 file; make it anew (data with `python -m dpfl_mpi.prepare`)"
    with refused_as(f"{path} {what}", (UserError,)), Hdf5(path, "an HDF5 file") as file:
        if GRAPHS[0] not in file:
            return file.attribute("sha256", str, default="") or sha256(path)
        held = [file.array(name, "iu").astype("<i8").tobytes() for name in GRAPHS]
        return hashlib.sha256(b"".join(held)).hexdigest()


def prepare_command(dataset: str = "", out: str | Path = "") -> str:
    """Return the command that prepares a data set, or any where none is named; `out` only where nothing is there that it would replace."""
    needs = "" if dataset and hasattr(find("dataset", dataset), "DOWNLOAD") else " --source PATH"
    to = f" --out {out}" if out else ""
    return f"`python -m dpfl_mpi.prepare {dataset or 'DATASET'}{needs}{to}`"


def no_data(dataset: str, path: str | Path) -> UserError:
    """Return the error that a prepared file of a data set is not there, which says what makes it."""
    return UserError(f"--data is {path}; there is no such file: make it with {prepare_command(dataset, path)}")


def able(train: np.ndarray, test: np.ndarray, least: int) -> np.ndarray:
    """Return which of the data's own clients can take part: at least `least` samples (and 3), 2 to train and 1 to test."""
    return np.flatnonzero((train + test >= max(least, 3)) & (train >= 2) & (test >= 1))


def own_defaults(path: str, natural: bool, least: int) -> dict[str, Any]:
    """Return what of a Run follows from a prepared file of one's own data: the model, and, where they name clients, that they are dealt `natural`.

    `clients` are then all that have at least `least` samples. A file that is none is a `UserError`.
    """
    parts = ("train/clients", "test/clients")
    what = f"which is not a file of dpfl_mpi: prepare one with {prepare_command()}"
    with refused_as(f"--data is {path}, {what}", (UserError,)), Hdf5(Path(path), "an HDF5 file") as file:
        images = file.dataset("train/images", "iuf")
        kind, shape = str(images.dtype), images.shape[1:]
        owners = [file.array(name, "iu", (None,), 0) for name in parts if name in file]
    model = "text" if kind == "int32" else "mlp" if len(shape) <= 1 or min(shape[:2]) < 16 else "cnn"
    if len(owners) < 2:
        return {"model": model}
    if (most := 1 + max(int(part.max(initial=-1)) for part in owners)) > TEXT:
        raise UserError(f"--data is {path}; it numbers clients up to {most - 1}, allowed are numbers below {TEXT}")
    sizes = [np.bincount(part, minlength=most) for part in owners]
    clients = {"clients": max(1, len(able(sizes[0], sizes[1], least)))} if natural else {}
    return {"model": model, "partition": "natural", **clients}


def partition_file(path: str) -> dict[str, Any]:
    """Return what a partition file holds; `clients` is a list of at least one, whose entries are as they are (see `data.partition.from_file`)."""
    if not is_file(path):
        how = f"`python -m dpfl_mpi.describe --save {path}` makes one"
        raise UserError(f"--partition is file:{path}; there is no such file ({how})")
    with refused_as(NO_PARTITION.format(path), (UserError, *UNREADABLE)):
        held = dict(read_json(Path(path)))
        clients = len(held["clients"])
    if clients == 0:
        raise UserError(f"--partition is file:{path}, which holds no client")
    return held
