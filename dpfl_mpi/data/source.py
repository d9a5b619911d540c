"""A data set as a run sees it: labels and facts at once, images only those asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dpfl_mpi.config import Run
from dpfl_mpi.data.stored import load
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find

GAP = 64  # rows: reading them costs less than asking for the next piece by itself


@dataclass(frozen=True)
class Arrays:
    """A data set in memory, as `prepare` writes it and `digits` has it: images uint8 `[M, H, W, C]`, labels int64 `[M]`.

    Data with clients of their own (writers, say) name the client of every sample, int64 `[M]`, an index into `client_names`.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # of pixels scaled to 0..1, per channel
    std: tuple[float, ...]
    train_clients: np.ndarray | None = None
    test_clients: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    note: str = ""  # what a reader of results must know about the data: one sentence


@dataclass(frozen=True)
class Source:
    """A data set as a run sees it: labels and facts at once, images only those asked for."""

    shape: tuple[int, int, int]  # H, W, C
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: dict[str, np.ndarray]  # "train", "test": int64 [M]
    sha256: str
    images: Callable[[str, np.ndarray], np.ndarray]  # ("train"|"test", rows [n]) -> uint8 [n, H, W, C]
    clients: dict[str, np.ndarray] = field(default_factory=dict)  # "train", "test": int64 [M], or nothing
    class_names: tuple[str, ...] = ()
    note: str = ""


def open_source(run: Run, loaded: Callable[[Callable[[], Arrays]], Arrays] = lambda load: load()) -> Source:
    """Return the data of a resolved Run, from the prepared file or embedded.

    Args:
        loaded: calls the `load` of a data set that needs no file, where there are ranks on one of them for all.

    Raises:
        UserError: the file is missing, foreign, truncated or of another data set.
    """
    module = find("dataset", run.dataset)
    source = in_memory(loaded(module.load)) if hasattr(module, "load") else in_file(Path(str(run.data)), run.dataset)
    return pooled(source) if deals_test(run) else source


def deals_test(run: Run) -> bool:
    """Return whether a Run's partition deals the test sets out of the same pool as the training sets."""
    if run.partition_file:
        return load(run.partition_file).pooled
    return run.partition == "fedrep"


def pooled(source: Source) -> Source:
    """Return a source of which "train" and "test" are both one pool: its training samples, then its test samples."""
    whole = np.concatenate([source.labels["train"], source.labels["test"]])
    first = len(source.labels["train"])

    def images(_: str, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *source.shape), np.uint8)
        for part, mine, start in (("train", rows < first, 0), ("test", rows >= first, first)):
            out[mine] = source.images(part, rows[mine] - start)
        return out

    return replace(source, labels={"train": whole, "test": whole}, images=images, clients={})


def in_memory(arrays: Arrays) -> Source:
    """Return arrays as a `Source`."""
    parts = {"train": arrays.train_images, "test": arrays.test_images}
    return Source(
        shape=arrays.train_images.shape[1:],
        classes=len(arrays.class_names),
        mean=arrays.mean,
        std=arrays.std,
        labels={"train": arrays.train_labels, "test": arrays.test_labels},
        sha256=digest(arrays),
        images=lambda part, rows: parts[part][rows],
        clients={}
        if arrays.train_clients is None or arrays.test_clients is None
        else {"train": arrays.train_clients, "test": arrays.test_clients},
        class_names=arrays.class_names,
        note=arrays.note,
    )


def in_file(path: Path, name: str) -> Source:
    """Return a file of `python -m dpfl_mpi.prepare` as a `Source`; its images stay in the file until they are asked for."""
    import h5py

    again = f"make it with `python -m dpfl_mpi.prepare {name} --out {path}`"
    if not path.is_file():
        raise UserError(f"--data is {path}; there is no such file: {again}")
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != "dpfl_mpi data 1":
                raise UserError(f"--data is {path}, which was not made by dpfl_mpi: {again}")
            if file.attrs["dataset"] != name:
                raise UserError(f"--data is {path}, which holds {file.attrs['dataset']}; --dataset says {name}")
            _, h, w, c = file["train/images"].shape
            return Source(
                shape=(int(h), int(w), int(c)),
                classes=len(file.attrs["class_names"]),
                mean=tuple(file.attrs["mean"]),
                std=tuple(file.attrs["std"]),
                labels={part: file[part]["labels"][:].astype(np.int64) for part in ("train", "test")},
                sha256=str(file.attrs["sha256"]),
                images=lambda part, rows: read_rows(path, part, rows),
                clients={p: file[p]["clients"][:].astype(np.int64) for p in ("train", "test") if "clients" in file[p]},
                class_names=tuple(str(name) for name in file.attrs["class_names"]),
                note=str(file.attrs.get("note", "")),
            )
    except (OSError, KeyError, RuntimeError):
        raise UserError(f"--data is {path}, which is truncated or not an HDF5 file: {again}") from None


def read_rows(path: Path, part: str, rows: np.ndarray) -> np.ndarray:
    """Return images `[n, H, W, C]` by their row, read in contiguous pieces of at most 4096, of which only `rows` are kept.

    A gap of more than `GAP` rows is not read: each of many ranks reads about its clients' images, not the whole file.
    """
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        stored = file[part]["images"]
        out = np.empty((len(rows), *stored.shape[1:]), np.uint8)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        low = 0
        gaps = np.append(np.flatnonzero(np.diff(ascending) > GAP) + 1, len(rows))
        while low < len(rows):
            start = ascending[low]
            high = min(np.searchsorted(ascending, start + 4096), gaps[np.searchsorted(gaps, low, "right")])
            out[order[low:high]] = stored[start : ascending[high - 1] + 1][ascending[low:high] - start]
            low = high
    return out


def digest(arrays: Arrays) -> str:
    """Return the SHA-256 that names the content of a data set."""
    import hashlib

    sha = hashlib.sha256()
    clients = (arrays.train_clients, arrays.test_clients)
    for part in (arrays.train_images, arrays.train_labels, arrays.test_images, arrays.test_labels, *clients):
        if part is None:
            continue
        sha.update(str(part.shape).encode())
        if part.size:
            sha.update(np.ascontiguousarray(part).data)
    return sha.hexdigest()
