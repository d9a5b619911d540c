"""The files that a Run names: their content decides its numbers, so its SHA-256 is in the key.

`filled` has the fields of the Run by name, as `Run.resolve` fills them in. A prepared file is one
that `python -m dpfl_mpi.prepare` made of a data set.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import NAMED
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.settings.values import SHAPES, is_file
from dpfl_mpi.storage.foreign import UNREADABLE, Hdf5, read_json, refused_as, sha256

TEXTS = ("partition", *SHAPES)  # fields that may name a text file
FILES = ("data", *TEXTS, "graphs")  # fields that may name a file
MOST_CLIENTS = 2**28  # in a data file; counting them takes 8 bytes each
GRAPHS = ("graph/chosen/indptr", "graph/chosen/senders")  # where a result stores its graphs
NO_PARTITION = (
    "--partition is file:{}, which is not a partition: "
    'JSON with "clients", a list of {{"train", "val", "test"}} index lists'
)


def contents(filled: Mapping[str, Any], dataset: Any, gone: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each file that the fields of a Run name, by field.

    It is "" where there is no file; `gone` has the hashes, by field, of files that no longer exist.
    That of a partition begins with "file:". Data at the default path are left out, unless they are
    the user's own.
    """
    paths = {name: filled[name].path for name in TEXTS if filled[name]}
    paths["graphs"] = None if filled["graphs"] in NAMED else filled["graphs"]
    is_there = is_file(filled["data"]) or "data" in gone
    if filled["data"] != dataset.DATA or (getattr(dataset, "OWN_DATA", False) and is_there):
        paths["data"] = filled["data"]
    out = {}
    for name, path in paths.items():
        if path and (name in gone or not is_file(path)):
            out[name] = gone.get(name, "")
        elif path:
            # a text file was hashed when it was parsed
            digest = getattr(filled[name], "sha256", "") or file_sha256(Path(path))
            out[name] = f"file:{digest}" if name == "partition" else digest
    return out


def file_sha256(path: Path) -> str:
    """Return the SHA-256 that stands for a file's content.

    A prepared file stores it. Of a result only the graphs count, which a Run reads from it; other
    arrays differ when it is computed again.
    """
    if path.suffix not in (".h5", ".hdf5"):
        return sha256(path)
    make = "make it again (data with `python -m dpfl_mpi.prepare`)"
    what = f"{path} is not a readable HDF5 file; {make}"
    with refused_as(what, (UserError,)), Hdf5(path, "an HDF5 file") as file:
        if GRAPHS[0] not in file:
            return file.attribute("sha256", str, default="") or sha256(path)
        graphs = [file.array(name, "iu").astype("<i8").tobytes() for name in GRAPHS]
        return hashlib.sha256(b"".join(graphs)).hexdigest()


def prepare_command(dataset: str = "", out: str | Path = "") -> str:
    """Return the command that prepares a data set, or any; `out` only if it replaces nothing."""
    downloads = dataset in shipped("dataset") and hasattr(find("dataset", dataset), "DOWNLOAD")
    words = [dataset or "DATASET", *([] if downloads else ["--source PATH"])]
    words += [f"--out {out}"] if out else []
    return f"`python -m dpfl_mpi.prepare {' '.join(words)}`"


def no_data(dataset: str, path: str | Path) -> UserError:
    """Return the error that there is no prepared file, with the command that makes it."""
    command = prepare_command(dataset, path)
    return UserError(f"--data is {path}; there is no such file: make it with {command}")


def who_can_take_part(
    train_clients: np.ndarray, test_clients: np.ndarray, least: int
) -> tuple[int, np.ndarray]:
    """Return how many clients the data have, and which of them can take part.

    They need `least` samples in all, and always 2 to train and 1 to test. The arguments have the
    client of each sample.
    """
    parts = train_clients, test_clients
    count = 1 + max(int(part.max(initial=-1)) for part in parts)
    train, test = (np.bincount(part, minlength=count) for part in parts)
    able = (train + test >= max(least, 3)) & (train >= 2) & (test >= 1)
    return count, np.flatnonzero(able)


def own_defaults(path: str, natural: bool, least: int) -> dict[str, Any]:
    """Return the defaults of a Run that follow from a prepared file of the user's own data.

    These are the model, the partition if the data name clients, and if that is `natural` how many
    clients there are. `least` is the fewest samples of a client.
    """
    parts = ("train/clients", "test/clients")
    what = f"which is not a file of dpfl_mpi: prepare one with {prepare_command()}"
    what = f"--data is {path}, {what}"
    with refused_as(what, (UserError,)), Hdf5(Path(path), "an HDF5 file") as file:
        images = file.dataset("train/images", "iuf")
        kind, shape = str(images.dtype), images.shape[1:]
        owners = [file.array(name, "iu", (None,), 0) for name in parts if name in file]
    small = len(shape) <= 1 or min(shape[:2]) < 16
    model = "text" if kind == "int32" else "mlp" if small else "cnn"
    if len(owners) < 2:
        return {"model": model}
    highest = max(int(part.max(initial=-1)) for part in owners)
    if highest >= MOST_CLIENTS:
        why = f"it numbers clients up to {highest}, allowed are numbers below {MOST_CLIENTS}"
        raise UserError(f"--data is {path}; {why}")
    _, able = who_can_take_part(owners[0], owners[1], least)
    clients = {"clients": max(1, len(able))} if natural else {}
    return {"model": model, "partition": "natural", **clients}


def partition_file(path: str) -> dict[str, Any]:
    """Return what a partition file holds; `clients` is a list of at least one, not checked."""
    if not is_file(path):
        make = f"`python -m dpfl_mpi.describe --save {path}` makes one"
        raise UserError(f"--partition is file:{path}; there is no such file ({make})")
    with refused_as(NO_PARTITION.format(path), (UserError, *UNREADABLE)):
        out = dict(read_json(Path(path)))
        clients = len(out["clients"])
    if clients == 0:
        raise UserError(f"--partition is file:{path}, which holds no client")
    return out
