"""The files that a Run names: they decide its numbers by their content, not by their path."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find
from dpfl_mpi.settings.values import file_of, is_file
from dpfl_mpi.storage.foreign import UNREADABLE, Hdf5, read_json, sha256

FILES = ("data", "partition", "budget", "reach", "available", "graphs")  # fields that may name one
GRAPHS = ("graph/chosen/indptr", "graph/chosen/senders")  # of a result
NO_PARTITION = 'is not a partition: JSON with "clients", a list of {"train", "val", "test"} index lists'


def named(filled: Mapping[str, Any], dataset: Any, gone: Mapping[str, str]) -> dict[str, str]:
    """Return the paths that the filled-in fields of a Run name, by field.

    The default path is left out: the data there are those of the data set. Data of one's own always count by their content.
    """
    out = {
        name: file_of(str(filled[name])) for name in ("budget", "reach") if getattr(filled[name], "kind", "") == "file"
    }
    own_data = getattr(dataset, "OWN_DATA", False) and (is_file(filled["data"]) or "data" in gone)
    if filled["data"] != dataset.DATA or own_data:
        out["data"] = filled["data"]
    out |= {name: str(filled[name]) for name in ("available", "graphs") if filled[name] is not None}
    if filled["partition"].kind == "file":
        out["partition"] = filled["partition"].path
    return out


def contents(filled: Mapping[str, Any], dataset: Any, gone: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each file that the filled-in fields of a Run name, by field, "file:" before that of a partition.

    Args:
        gone: what files held that are not here.

    Returns: "" stands for a file that is not there.
    """
    out = {}
    for name, path in named(filled, dataset, gone).items():
        held = file_sha256(Path(path)) if is_file(path) and name not in gone else ""
        out[name] = gone.get(name) or (f"file:{held}" if held and name == "partition" else held)
    return out


def file_sha256(path: Path) -> str:
    """Return the SHA-256 that names a file's content: of a prepared data file the one stored in it, of a result that of its graphs, else of its bytes."""
    if path.suffix in (".h5", ".hdf5"):
        sentence = f"{path} is not a readable HDF5 file; make it anew (data with `python -m dpfl_mpi.prepare`)"
        try:
            with Hdf5(path, "an HDF5 file") as file:
                if stored := file.attribute("sha256", str, default=""):
                    return str(stored)
                if GRAPHS[0] in file:  # a result computed again has the same graphs, but other seconds
                    held = [file.array(name, "iu").astype("<i8").tobytes() for name in GRAPHS]
                    return hashlib.sha256(b"".join(held)).hexdigest()
        except UserError:
            raise UserError(sentence) from None
    return sha256(path)


PARTS = ("train", "test")


class Facts(NamedTuple):
    """What a prepared file says of its samples, without reading them."""

    dtype: str
    shape: tuple[int, ...]  # of a sample
    held: tuple[np.ndarray, np.ndarray] | None  # training and test samples of each of the data's own clients


def prepare_command(dataset: str = "", out: str | Path = "") -> str:
    """Return the command that prepares a data set, or any where none is named; `out` only where nothing is there that it would replace."""
    needs = "" if dataset and hasattr(find("dataset", dataset), "DOWNLOAD") else " --source PATH"
    to = f" --out {out}" if out else ""
    return f"`python -m dpfl_mpi.prepare {dataset or 'DATASET'}{needs}{to}`"


def no_data(dataset: str, path: str | Path) -> UserError:
    """Return the error that a prepared file of a data set is not there, which says what makes it."""
    return UserError(f"--data is {path}; there is no such file: make it with {prepare_command(dataset, path)}")


def facts(path: str) -> Facts:
    """Return what a prepared file says of its samples.

    Raises:
        UserError: it is none.
    """
    stat = Path(path).stat()
    return read_facts(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=8)
def read_facts(path: str, _time: int, _size: int) -> Facts:
    """Return the facts of a file, read once."""
    sentence = f"--data is {path}, which is not a file of dpfl_mpi: prepare one with {prepare_command()}"
    try:
        with Hdf5(Path(path), "an HDF5 file") as file:
            images = file.dataset("train/images", "iuf")
            owners = [file.array(f"{part}/clients", "iu", (None,), 0) for part in PARTS if f"{part}/clients" in file]
            most = 1 + max((int(part.max(initial=-1)) for part in owners), default=-1)
            sizes = [np.bincount(part, minlength=most) for part in owners]
            return Facts(str(images.dtype), tuple(images.shape[1:]), (sizes[0], sizes[1]) if len(sizes) == 2 else None)
    except UserError:
        raise UserError(sentence) from None


def able(train: np.ndarray, test: np.ndarray, least: int) -> np.ndarray:
    """Return which of the data's own clients can take part: at least `least` samples (and 3), 2 to train and 1 to test."""
    return np.flatnonzero((train + test >= max(least, 3)) & (train >= 2) & (test >= 1))


def own_defaults(path: str, natural: bool, least: int) -> dict[str, Any]:
    """Return what of a Run follows from the file of one's own data: the model for its samples, and, where it is dealt by them, its clients.

    These are all clients of at least `least` samples.
    """
    about = facts(path)
    model = "text" if about.dtype == "int32" else "mlp" if len(about.shape) <= 1 or min(about.shape[:2]) < 16 else "cnn"
    if about.held is None:
        return {"model": model}
    clients = {"clients": max(1, len(able(*about.held, least)))} if natural else {}
    return {"model": model, "partition": "natural", **clients}


def no_partition(path: str, what: str) -> UserError:
    """Return the error of a partition file that is none."""
    return UserError(f"--partition is file:{path}, which {what}")


def partition_file(path: str) -> dict[str, Any]:
    """Return what a partition file holds; `clients` is a list of at least one, whose entries are as they are (see `data.stored`).

    Raises:
        UserError: there is no such file, or it is not one.
    """
    if not is_file(path):
        raise UserError(
            f"--partition is file:{path}; there is no such file (`python -m dpfl_mpi.describe --save {path}` makes one)"
        )
    try:
        held = dict(read_json(Path(path)))
        clients = len(held["clients"])
    except (UserError, *UNREADABLE):
        raise no_partition(path, NO_PARTITION) from None
    if clients == 0:
        raise no_partition(path, "holds no client")
    return held
