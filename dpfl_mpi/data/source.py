"""A data set as a run sees it: labels and facts at once, images only those asked for."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import able, no_data, partition_file, prepare_command
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, refused_as

AT_ONCE = 4096  # images
GAP = 64  # rows: reading them costs less than asking for the next piece by itself
FORMAT = "dpfl_mpi data 1"  # of prepared files
MOST_LISTED = 1000  # entries of a list that is an attribute of a result: HDF5 gives one 64 KiB
TINY = float(np.finfo(np.float32).tiny)  # float32 holds smaller numbers with fewer digits
KINDS = {"uint8": "images", "float32": "numbers", "int32": "tokens"}  # what samples are, by their dtype
ALLOWED = ((4, "uint8"), (4, "float32"), (2, "float32"), (2, "int32"))  # axes and dtype of images, vectors, tokens
SAMPLES = "allowed are uint8 or float32 [M, H, W, C], float32 [M, F] or int32 [M, L], of one shape in both parts"
# the arrays of a prepared file, in the order of its hash
ARRAYS = ("train/images", "train/labels", "test/images", "test/labels", "train/clients", "test/clients")


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

    def stored(self) -> dict[str, np.ndarray]:
        """Return the arrays that there are by their names in a prepared file."""
        held = {name: getattr(self, name.replace("/", "_")) for name in ARRAYS}
        return {name: values for name, values in held.items() if values is not None}


@dataclass(frozen=True)
class Source:
    """A data set as a run sees it: labels and facts at once, images only those asked for."""

    shape: tuple[int, ...]  # of a sample: (H, W, C) of images, (F,) of vectors, (L,) of tokens
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: dict[str, Any]  # "train", "test": int64 [M], or `Stored`
    sha256: str
    images: Callable[[str, np.ndarray], np.ndarray]  # ("train"|"test", rows [n]) -> samples [n, *shape]
    clients: dict[str, np.ndarray] = field(default_factory=dict)  # "train", "test": int64 [M], or nothing
    class_names: tuple[str, ...] = ()
    note: str = ""
    dtype: str = "uint8"  # of samples: uint8, float32 or int32
    vocabulary: int = 0  # one more than the largest token
    path: Path | None = None  # of the prepared file, None for data in memory
    unread: str = ""  # a warning of what a Run does not read: whose the samples are, some clients

    @property
    def kind(self) -> str:
        return KINDS[self.dtype]

    @property
    def size(self) -> str:
        """The shape of a sample in words, such as 28x28x1."""
        return "x".join(map(str, self.shape))


@dataclass(frozen=True)
class Stored:
    """Labels that stay in a prepared file: those asked for are read."""

    path: Path
    part: str

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return read_rows(self.path, self.part, rows, "labels").astype(np.int64)


def check(arrays: object, where: str, labelled: bool = True) -> Arrays:
    """Return a data set that a file's `load` or `read` made, or raise a `UserError` that names the field where it is none; `labelled`: it has labels here."""
    if not isinstance(arrays, Arrays):
        raise UserError(f"{where} returned a {type(arrays).__name__}; it must return Arrays, as arrays_of makes them")
    x = arrays.train_images
    if (arrays.train_clients is None) != (arrays.test_clients is None):
        raise UserError(f"{where}: train_clients and test_clients must both be there or neither")
    for part in ("train", "test"):
        images = getattr(arrays, f"{part}_images")
        shape, kind = images.shape[1:], (images.ndim, str(images.dtype))
        if kind not in ALLOWED or (shape, images.dtype) != (x.shape[1:], x.dtype) or 0 in shape:
            raise UserError(f"{where}: {part}_images are {images.dtype} {list(images.shape)}; {SAMPLES}")
        if isinstance(images, np.ndarray) and images.dtype == np.float32 and not np.isfinite(images).all():
            raise UserError(f"{where}: {part}_images hold a number that is missing or infinite")
        for what, names in (("labels", "class_names"), ("clients", "client_names")):
            values, below = getattr(arrays, f"{part}_{what}"), len(getattr(arrays, names))
            if values is None and (what == "clients" or not labelled):
                continue
            whole = np.shape(values) == (len(images),) and values.dtype == np.int64
            if not whole or values.min(initial=0) < 0 or values.max(initial=-1) >= below:
                allowed = f"int64 [{len(images)}], from 0 to {below - 1}: {names} has {below} names"
                raise UserError(f"{where}: {part}_{what} must be {allowed}")
    wanted = 0 if x.dtype == np.int32 else x.shape[-1]
    numbers = len(arrays.mean) == len(arrays.std) == wanted and np.isfinite([arrays.mean, arrays.std]).all()
    if not numbers or min(arrays.std, default=1) < TINY or max(arrays.std, default=1) > 1 / TINY:
        limits = f"std from {TINY:.2g} to {1 / TINY:.2g}"
        raise UserError(f"{where}: mean and std must have {wanted} numbers each, {limits}")
    return arrays


def made_by(dataset: str, module: Any, function: str, *arguments: Any, **options: Any) -> Arrays:
    """Return the data set that `load` or `read` of its `module` makes, checked."""
    where, made = f"{function} of the data set {short(dataset)}", getattr(module, function)(*arguments, **options)
    what = "NumPy arrays, lists of names, and of numbers as mean and std, and a note that is a text"
    with refused_as(f"{where} returned Arrays with a field of another type; allowed are {what}"):
        if isinstance(made, Arrays):
            kinds = {"class_names": str, "client_names": str, "mean": float, "std": float}
            fields: Any = {name: tuple(map(kind, getattr(made, name))) for name, kind in kinds.items()}
            made = replace(made, note=made.note + "", **fields)
        return check(made, where)


def open_source(
    run: Resolved, loaded: Callable[[Callable[[], Arrays]], Arrays] = lambda load: load(), deals: bool = True
) -> Source:
    """Return the data of a resolved Run, from the prepared file or embedded; `loaded` calls a `load`, where there are ranks on one of them for all.

    A rank that does not deal the samples leaves the labels in the file.
    """
    dataset = run.found("dataset")
    if hasattr(dataset, "load"):
        source = in_memory(loaded(lambda: made_by(run.dataset, dataset, "load")))
    else:
        source = in_file(Path(str(run.data)), short(run.dataset), run.dataset, deals or deals_test(run))
    check_images(run, source)
    source = replace(source, unread=unread_clients(run, source))
    return pooled(source) if deals_test(run) else source


def check_images(run: Resolved, source: Source) -> None:
    """Raise `UserError` where a Run changes images, and the data are none, or none of bytes."""
    images = len(source.shape) == 3
    if run.augment and not images:
        raise UserError("--augment crops and flips images; these data have none: use --no-augment")
    if run.attack and run.attack.kind == "backdoor" and not (images and source.dtype == "uint8"):
        have = "none" if not images else "images of floats"
        raise UserError(f"--attack backdoor needs images of 8 bits; these data have {have}: use another kind of attack")


def unread_clients(run: Resolved, source: Source) -> str:
    """Return a sentence where a Run takes all clients of the data that can take part, and some cannot; else "".

    Also where a file's `load` names the clients, and its `PAPER` leaves open that they are dealt anew.
    Of a prepared file they would be the default; what `load` returns is known too late to decide one.
    """
    if run.partition.kind == "natural" and source.clients:
        train, test = client_sizes(source.clients)
        everyone, can = len(train), len(able(train, test, run.min_samples))
        least = f"{max(run.min_samples, 3)} samples (--min_samples), 2 to train and 1 to test"
        left_out = f"{everyone - can} of the {everyone} clients in the data do not take part"
        return f"{left_out}: each needs {least}" if run.clients == can < everyone else ""
    asked = run.partition.kind != "pathological" or "partition" in run.found("dataset").SAID
    if asked or source.path or not source.clients:
        return ""
    instead = f'--partition natural does, and so does "partition": "natural" in PAPER of {short(run.dataset)}'
    return f"the data name the client of each sample, which --partition {run.partition} does not read; {instead}"


def client_sizes(clients: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return how many training and how many test samples each of the data's own clients has."""
    everyone = 1 + max(int(part.max(initial=-1)) for part in clients.values())
    train, test = (np.bincount(clients[part], minlength=everyone) for part in ("train", "test"))
    return train, test


def deals_test(run: Resolved) -> bool:
    """Return whether a Run's partition deals the test sets out of the same pool as the training sets."""
    path = run.partition.path
    return partition_file(path).get("pooled") is True if path else run.partition.kind == "fedrep"


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


def in_memory(arrays: Arrays, **known: Any) -> Source:
    """Return arrays as a `Source`; of arrays that are still in a file, `known` are the fields that the file says."""
    held = arrays.stored()
    known = known or {"sha256": digest(held.values()), "vocabulary": arrays.vocabulary}
    known.setdefault("images", lambda part, rows: held[f"{part}/images"][rows])
    labels = {part: held[f"{part}/labels"] for part in ("train", "test") if f"{part}/labels" in held}
    clients = {part: held[f"{part}/clients"] for part in ("train", "test") if f"{part}/clients" in held}
    known |= {"class_names": arrays.class_names, "note": arrays.note, "dtype": str(arrays.train_images.dtype)}
    shape, classes = arrays.train_images.shape[1:], len(arrays.class_names)
    return Source(shape, classes, arrays.mean, arrays.std, labels, clients=clients, **known)


def in_file(path: Path, name: str = "", dataset: str = "", labelled: bool = True) -> Source:
    """Return a file of `python -m dpfl_mpi.prepare` as a `Source`: it keeps the contract of `check`, and its images stay in the file.

    `name` is the data set that it must hold, `dataset` what `prepare` calls it; "" where any will do. Unless `labelled`, labels stay in it too,
    and whose the samples are is not read.
    """
    if not os.path.exists(path):
        raise no_data(dataset, path)
    one = f"prepare one with {prepare_command(dataset)}"
    held: dict[str, Any] = {}
    try:
        with Hdf5(path, "an HDF5 file") as file:
            of = file.attribute("dataset", str, default="nothing")
            if file.attribute("format", str, default="") != FORMAT:
                raise UserError(f"--data is {path}, which was not made by dpfl_mpi: {one}")
            if name and of != name:
                raise UserError(f"--data is {path}, which holds {of}; --dataset says {name}")
            for array in (array for array in ARRAYS if array in file or not array.endswith("clients")):
                name_of = array.replace("/", "_")
                if array.endswith("images"):
                    held[name_of] = file.dataset(array, "iuf")
                else:
                    held[name_of] = file.array(array, "iu", (None,)).astype("i8") if labelled else None
            held |= {name: tuple(file.array(name, "f", (None,)).tolist()) for name in ("mean", "std")}
            held["class_names"] = tuple(file.texts("class_names"))
            held["client_names"] = tuple(file.texts("client_names")) if "client_names" in file else ()
            arrays = Arrays(**held, note=file.attribute("note", str))
            sha256, vocabulary = file.attribute("sha256", str), file.attribute("vocabulary", int)
            check(arrays, f"--data is {path}, which is damaged", labelled)
            images = functools.partial(read_rows, path)
            source = in_memory(arrays, sha256=sha256, vocabulary=vocabulary, images=images, path=path)
            left = {part: Stored(path, part) for part in ("train", "test")}
            return source if labelled else replace(source, labels=left)
    except Unreadable as error:
        raise UserError(f"--data is {path}, which is truncated or damaged ({error}): {one}") from None


def verify(source: Source) -> None:
    """Compare the content of a prepared file with the SHA-256 stored in it: all of it is read, so once per node and start."""
    if source.path and (found := content_sha256(source)) != source.sha256:
        digests = f"its content has the sha256 {found[:12]}, and {source.sha256[:12]} was written"
        raise UserError(f"--data is {source.path}, which is damaged: {digests}; make it anew")


def content_sha256(source: Source) -> str:
    """Return the SHA-256 of what the prepared file of a source holds, as `digest` has it."""
    assert source.path is not None
    with Hdf5(source.path, "an HDF5 file") as file:
        own = file.attribute("own", bool)
        with file.reading("its content"):
            return digest((file.dataset(name, "iuf") for name in ARRAYS if name in file), source if own else None)


def digest(stored: Iterable[Any], about: Arrays | Source | None = None) -> str:
    """Return the SHA-256 of a data set's arrays, in memory or in a file, and of what says `about` one's own data how they are read."""
    sha = hashlib.sha256()
    for values in stored:
        sha.update(str(values.shape).encode())
        for first in range(0, len(values), AT_ONCE):
            some = values[first : first + AT_ONCE]
            sha.update(np.ascontiguousarray(some if some.ndim > 1 else some.astype(np.int64)).data)
    if about:
        normal = (list(map(float, values)) for values in (about.mean, about.std))
        sha.update(json.dumps([list(about.class_names), *normal, about.vocabulary]).encode())
    return sha.hexdigest()


def read_rows(path: Path, part: str, rows: np.ndarray, what: str = "images") -> np.ndarray:
    """Return samples `[n, ...]`, or their labels, by their row, read in contiguous pieces of at most 4096; a gap of more than `GAP` rows is not read."""
    with Hdf5(path, "an HDF5 file") as file:
        stored = file.dataset(f"{part}/{what}", "iuf")
        out = np.empty((len(rows), *stored.shape[1:]), stored.dtype)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        ends = (np.diff(ascending) > GAP) | (np.diff(ascending // AT_ONCE) > 0)
        with file.reading(f"{part}/{what}"):
            for piece in np.split(np.arange(len(rows)), np.flatnonzero(ends) + 1):
                if len(mine := ascending[piece]):
                    out[order[piece]] = stored[mine[0] : mine[-1] + 1][mine - mine[0]]
    return out
