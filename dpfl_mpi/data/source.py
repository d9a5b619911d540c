"""A data set as a run sees it: labels and facts at once, images only those asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.stored import load
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import failing_as, find, short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import no_data, prepare_command
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, is_there

LARGEST = 2**16  # pixels of a side
AT_ONCE = 4096  # images
GAP = 64  # rows: reading them costs less than asking for the next piece by itself
# of prepared files: of images in uint8; of any samples; and of anyone's own, whose hash is over names and normalisation, too
FORMATS = ("dpfl_mpi data 1", "dpfl_mpi data 2", "dpfl_mpi data 3")
MOST_LISTED = 1000  # entries of a list that is an attribute: HDF5 gives one 64 KiB
KINDS = {"uint8": "images", "float32": "numbers", "int32": "tokens"}  # what samples are, by their dtype


@dataclass(frozen=True)
class Arrays:
    """A data set in memory, as `prepare` writes it and `digits` has it: samples `[M, ...]`, labels int64 `[M]`.

    Samples ("images" in all names) are images uint8 or float32 `[M, H, W, C]`, vectors float32 `[M, F]`, or tokens int32 `[M, L]`, in which 0
    fills up short texts. Data with clients of their own (writers, say) name the client of every sample, int64 `[M]`, an index into `client_names`.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, or per number of a vector; of uint8 scaled to 0..1; of tokens none
    std: tuple[float, ...]
    train_clients: np.ndarray | None = None
    test_clients: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    note: str = ""  # what a reader of results must know about the data: one sentence

    @property
    def vocabulary(self) -> int:
        """One more than the largest token; 0 where the samples are no tokens."""
        if self.train_images.dtype != np.int32:
            return 0
        return 1 + max(int(x.max(initial=0)) for x in (self.train_images, self.test_images))


@dataclass(frozen=True)
class Source:
    """A data set as a run sees it: labels and facts at once, images only those asked for."""

    shape: tuple[int, ...]  # of a sample: (H, W, C) of images, (F,) of vectors, (L,) of tokens
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: dict[str, np.ndarray]  # "train", "test": int64 [M]
    sha256: str
    images: Callable[[str, np.ndarray], np.ndarray]  # ("train"|"test", rows [n]) -> samples [n, *shape]
    clients: dict[str, np.ndarray] = field(default_factory=dict)  # "train", "test": int64 [M], or nothing
    class_names: tuple[str, ...] = ()
    note: str = ""
    dtype: str = "uint8"  # of samples: uint8, float32 or int32
    vocabulary: int = 0  # one more than the largest token
    path: Path | None = None  # of the prepared file, None for data in memory

    @property
    def kind(self) -> str:
        """What the samples are, in a word."""
        return KINDS[self.dtype]

    @property
    def size(self) -> str:
        """The shape of a sample in words, such as 28x28x1."""
        return "x".join(map(str, self.shape))


def check(arrays: object, where: str) -> Arrays:
    """Return a data set that a file's `load` or `read` made.

    Raises:
        UserError: it is none; the sentence names the field.
    """
    if not isinstance(arrays, Arrays):
        raise UserError(
            f"{where} returned a {type(arrays).__name__}; it must return Arrays, as arrays_of(x, y) of dpfl_mpi.data.own makes them"
        )
    x, classes = arrays.train_images, len(arrays.class_names)
    for part in ("train", "test"):
        images, labels = getattr(arrays, f"{part}_images"), getattr(arrays, f"{part}_labels")
        if (
            str(images.dtype) not in ("uint8", "float32", "int32")
            or images.ndim not in (2, 4)
            or images.shape[1:] != x.shape[1:]
        ):
            raise UserError(
                f"{where}: {part}_images are {images.dtype} {list(images.shape)}; allowed are uint8 or float32 [M, H, W, C], float32 [M, F] or "
                "int32 [M, L], of one shape in both parts"
            )
        if (images.ndim, str(images.dtype)) in ((4, "int32"), (2, "uint8")):
            raise UserError(
                f"{where}: {part}_images are {images.dtype} {list(images.shape)}; images have 4 axes, vectors and tokens 2"
            )
        if images.dtype == np.float32 and not np.isfinite(images).all():
            raise UserError(f"{where}: {part}_images hold a number that is missing or infinite")
        if (
            labels.shape != (len(images),)
            or labels.dtype != np.int64
            or (len(labels) and not (labels.min() >= 0 and labels.max() < classes))
        ):
            raise UserError(
                f"{where}: {part}_labels must be int64 [{len(images)}], from 0 to {classes - 1}: class_names has {classes} names"
            )
        owners = getattr(arrays, f"{part}_clients")
        if owners is not None and (owners.shape != labels.shape or owners.dtype != np.int64):
            raise UserError(f"{where}: {part}_clients must be int64 [{len(labels)}], one client per sample")
    if (arrays.train_clients is None) != (arrays.test_clients is None):
        raise UserError(f"{where}: train_clients and test_clients must both be there or neither")
    wanted = 0 if x.dtype == np.int32 else x.shape[-1]
    if len(arrays.mean) != wanted or len(arrays.std) != wanted or not all(s > 0 for s in arrays.std):
        raise UserError(
            f"{where}: mean and std must have {wanted} numbers each, std above 0: one per channel of an image or number of a vector"
        )
    return arrays


def made_by(dataset: str, function: str, *arguments: Any, **options: Any) -> Arrays:
    """Return the data set that `load` or `read` of its file makes, checked.

    Raises:
        UserError: what it returns is no data set, or it fails and is code of one's own.
    """
    what = f"{function} of the data set {short(dataset)}"
    with failing_as(what, "dataset", dataset):
        arrays = getattr(find("dataset", dataset), function)(*arguments, **options)
    return check(arrays, what)


def open_source(run: Resolved, loaded: Callable[[Callable[[], Arrays]], Arrays] = lambda load: load()) -> Source:
    """Return the data of a resolved Run, from the prepared file or embedded.

    Args:
        loaded: calls the `load` of a data set that needs no file, where there are ranks on one of them for all.

    Raises:
        UserError: the file is missing, foreign, truncated or of another data set, or the Run does to samples what only images allow.
    """
    if hasattr(find("dataset", run.dataset), "load"):
        source = in_memory(loaded(lambda: made_by(run.dataset, "load")))
    else:
        source = in_file(Path(str(run.data)), short(run.dataset), run.dataset)
    check_images(run, source)
    return pooled(source) if deals_test(run) else source


def check_images(run: Resolved, source: Source) -> None:
    """Raise `UserError` where a Run changes images, and the data are none, or none of bytes."""
    images = len(source.shape) == 3
    if run.augment and not images:
        raise UserError("--augment crops and flips images; these data have none: use --no-augment")
    if run.attack and run.attack.kind == "backdoor" and not (images and source.dtype == "uint8"):
        have = "none" if not images else "images of floats"
        raise UserError(
            f"--attack backdoor puts a white square on images of 8 bits; these data have {have}: use another kind of attack"
        )


def unread_clients(run: Resolved, source: Source) -> str:
    """Return a sentence where a file's `load` names the clients, and its `PAPER` leaves open that they are dealt anew; else "".

    Of a prepared file they would be the default; what `load` returns is known too late to decide a default.
    """
    module = find("dataset", run.dataset)
    if not (
        source.clients
        and hasattr(module, "load")
        and run.partition.kind == "pathological"
        and "partition" not in module.SAID
    ):
        return ""
    return (
        f"the data name the client of each sample, which --partition {run.partition} does not read; --partition natural does, "
        f'and so does "partition": "natural" in PAPER of {short(run.dataset)}'
    )


def deals_test(run: Resolved) -> bool:
    """Return whether a Run's partition deals the test sets out of the same pool as the training sets."""
    return load(run.partition.path).pooled if run.partition.path else run.partition.kind == "fedrep"


def pooled(source: Source) -> Source:
    """Return a source of which "train" and "test" are both one pool: its training samples, then its test samples."""
    whole = np.concatenate([source.labels["train"], source.labels["test"]])
    first = len(source.labels["train"])

    def images(_: str, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *source.shape), source.dtype)
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
        dtype=str(arrays.train_images.dtype),
        vocabulary=arrays.vocabulary,
    )


def in_file(path: Path, name: str, dataset: str = "") -> Source:
    """Return a file of `python -m dpfl_mpi.prepare` as a `Source`; its images stay in the file until they are asked for.

    Args:
        name: the data set that the file must hold.
        dataset: what `prepare` calls it; "" where other data would do as well.
    """
    if not is_there(path):
        raise no_data(dataset, path)
    one = f"prepare one with {prepare_command(dataset)}"
    try:
        with Hdf5(path, "an HDF5 file") as file:
            made, of = (
                file.attribute("format", str, default="nothing"),
                file.attribute("dataset", str, default="nothing"),
            )
            if made not in FORMATS:
                raise UserError(f"--data is {path}, which was not made by dpfl_mpi: {one}")
            if of != name:
                raise UserError(f"--data is {path}, which holds {of}; --dataset says {name}")
            return read_source(path, file)
    except Unreadable as error:
        raise UserError(f"--data is {path}, which is truncated or damaged ({error}): {one}") from None


def read_source(path: Path, file: Hdf5) -> Source:
    """Return a prepared file as a `Source`: every label and client is in its range, every image is there."""
    names = described(file, "class_names")
    clients = len(file.texts("client_names")) if "client_names" in file else 0
    stored = file.dataset("train/images", "iuf")
    axes, dtype = len(stored.shape), str(stored.dtype)
    if (axes, dtype) not in ((4, "uint8"), (4, "float32"), (2, "float32"), (2, "int32")):
        raise file.damaged("train/images", f"is {dtype} of {axes} axes")
    side = range(1, LARGEST)
    shape = file.dataset("train/images", "iuf", (None, side, side, range(1, 65)) if axes == 4 else (None, side)).shape[
        1:
    ]
    numbers = 0 if dtype == "int32" else shape[-1]  # that are normalised
    labels, own = {}, {}
    for part in ("train", "test"):
        images = file.dataset(f"{part}/images", "iuf", (None, *shape))
        if images.dtype != stored.dtype:
            raise file.damaged(f"{part}/images", f"is of type {images.dtype}")
        m = images.shape[0]
        labels[part] = file.array(f"{part}/labels", "iu", (m,), 0, len(names) - 1).astype(np.int64)
        if f"{part}/clients" in file:
            own[part] = file.array(f"{part}/clients", "iu", (m,), 0, clients - 1).astype(np.int64)
    with file.reading("mean and std"):
        mean, std = (np.array(described(file, n), np.float64) for n in ("mean", "std"))
        if not (
            mean.shape == std.shape == (numbers,)
            and np.isfinite(mean).all()
            and np.isfinite(std).all()
            and (std > 0).all()
        ):
            raise ValueError
    return Source(
        shape=tuple(int(n) for n in shape),
        classes=len(names),
        mean=tuple(mean),
        std=tuple(std),
        labels=labels,
        sha256=file.attribute("sha256", str),
        images=lambda part, rows: read_rows(path, part, rows),
        clients=own if len(own) == 2 else {},
        class_names=names,
        note=file.attribute("note", str, default=""),
        path=path,
        dtype=dtype,
        vocabulary=file.attribute("vocabulary", int, default=0),
    )


def described(file: Hdf5, name: str) -> tuple[Any, ...]:
    """Return class_names, mean or std of a prepared file: an attribute, or where they are many, an array of that name."""
    if name not in file:
        values = file.attribute(name, tuple)
        return tuple(map(str, values)) if name == "class_names" else values
    return tuple(file.texts(name) if name == "class_names" else file.array(name, "f", (None,)).tolist())


def verify(source: Source) -> None:
    """Read all of a prepared file and compare its content with the SHA-256 stored in it. Data in memory have none.

    It costs what reading and hashing cost: so it is done once per node and start.

    Raises:
        UserError: the content is not what `prepare` wrote.
    """
    if source.path is None:
        return
    found = content_sha256(source.path)
    if found != source.sha256:
        raise UserError(
            f"--data is {source.path}, which is damaged: its content has the sha256 {found[:12]}, and {source.sha256[:12]} was written; make it anew"
        )


def content_sha256(path: Path) -> str:
    """Return the SHA-256 of what a prepared file holds, as `digest` has it, reading `AT_ONCE` images at a time."""
    sha = hashlib.sha256()
    with Hdf5(path, "an HDF5 file") as file:
        names = [f"{part}/{kind}" for part in ("train", "test") for kind in ("images", "labels")]
        for name in names + [f"{part}/clients" for part in ("train", "test") if f"{part}/clients" in file]:
            stored = file.dataset(name, "iuf")
            sha.update(str(stored.shape).encode())
            with file.reading(name):
                for first in range(0, len(stored), AT_ONCE):
                    some = stored[first : first + AT_ONCE]
                    sha.update(np.ascontiguousarray(some if name.endswith("images") else some.astype(np.int64)).data)
        if file.attribute("format", str, default="") == FORMATS[2]:
            facts, mean, std = (described(file, name) for name in ("class_names", "mean", "std"))
            sha.update(description(facts, mean, std, file.attribute("vocabulary", int, default=0)))
    return sha.hexdigest()


def description(class_names: Sequence[str], mean: Sequence[float], std: Sequence[float], vocabulary: int) -> bytes:
    """Return as text what says how samples and labels are read, for a hash."""
    return json.dumps([list(class_names), *(list(map(float, values)) for values in (mean, std)), vocabulary]).encode()


def read_rows(path: Path, part: str, rows: np.ndarray) -> np.ndarray:
    """Return samples `[n, ...]` by their row, read in contiguous pieces of at most 4096, of which only `rows` are kept.

    A gap of more than `GAP` rows is not read: each of many ranks reads about its clients' images, not the whole file.
    """
    with Hdf5(path, "an HDF5 file") as file:
        stored = file.dataset(f"{part}/images", "iuf")
        out = np.empty((len(rows), *stored.shape[1:]), stored.dtype)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        low = 0
        gaps = np.append(np.flatnonzero(np.diff(ascending) > GAP) + 1, len(rows))
        with file.reading(f"{part}/images"):
            while low < len(rows):
                start = ascending[low]
                high = min(np.searchsorted(ascending, start + AT_ONCE), gaps[np.searchsorted(gaps, low, "right")])
                out[order[low:high]] = stored[start : ascending[high - 1] + 1][ascending[low:high] - start]
                low = high
    return out


def digest(arrays: Arrays, own: bool = False) -> str:
    """Return the SHA-256 that names the content of a data set; of one's `own` data also class names and normalisation, which nothing else names."""
    sha = hashlib.sha256()
    clients = (arrays.train_clients, arrays.test_clients)
    for part in (arrays.train_images, arrays.train_labels, arrays.test_images, arrays.test_labels, *clients):
        if part is None:
            continue
        sha.update(str(part.shape).encode())
        if part.size:
            sha.update(np.ascontiguousarray(part).data)
    if own:
        sha.update(description(arrays.class_names, arrays.mean, arrays.std, arrays.vocabulary))
    return sha.hexdigest()
