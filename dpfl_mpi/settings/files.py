"""The files that a Run names: they decide its numbers by their content, not by their path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find
from dpfl_mpi.storage.files import sha256

FILES = ("data", "partition", "budget", "reach", "available")  # fields that may name one
NO_PARTITION = 'is not a partition: JSON with "clients", a list of {"train", "val", "test"} index lists'


def is_file(value: Any) -> bool:
    """Return whether a setting names a file that exists."""
    return isinstance(value, str) and Path(value).is_file()


def named(filled: Mapping[str, Any], gone: Mapping[str, str]) -> dict[str, str]:
    """Return the paths that the filled-in fields of a Run name, by field; those of `gone` need not exist.

    The data set's own path is no name: the data there are those of the data set. Data of one's own always count by their content.
    """
    dataset = find("dataset", filled["dataset"])
    out = {name: filled[name] for name in ("budget", "reach", "data") if name in gone or is_file(filled[name])}
    if filled["data"] != dataset.DATA:
        out["data"] = filled["data"]
    elif not getattr(dataset, "OWN_DATA", False):
        out.pop("data", None)
    if filled["available"] is not None:
        out["available"] = filled["available"]
    if filled["partition"].startswith("file:"):
        out["partition"] = filled["partition"][5:]
    return out


def contents(filled: Mapping[str, Any], gone: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each file that the filled-in fields of a Run name, by field, "file:" before that of a partition.

    "" stands for a file that is not there; `gone` has what some of these held.
    """
    out = {name: content(Path(path)) if is_file(path) else "" for name, path in named(filled, gone).items()}
    if out.get("partition"):
        out["partition"] = f"file:{out['partition']}"
    return out | {name: held for name, held in gone.items() if name in out}


def content(path: Path) -> str:
    """Return the SHA-256 of a file's content: the one stored in a prepared data file, else that of its bytes."""
    if path.suffix in (".h5", ".hdf5"):
        import h5py

        try:
            with h5py.File(path, "r", locking=False) as file:
                if "sha256" in file.attrs:
                    return str(file.attrs["sha256"])
        except OSError:
            raise UserError(
                f"--data is {path}, which is not a readable HDF5 file; make it anew with `python -m dpfl_mpi.prepare`"
            ) from None
    return sha256(path)


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
        held = json.loads(Path(path).read_bytes())
        clients = len(held["clients"])
    except (OSError, ValueError, TypeError, KeyError):
        raise no_partition(path, NO_PARTITION) from None
    if clients == 0:
        raise no_partition(path, "holds no client")
    return held
