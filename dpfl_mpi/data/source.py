"""A data set as a run sees it: labels and facts are read at once, samples when asked for.

Samples are called images in all names, even where they are vectors or tokens. They are in two
halves, "train" and "test". A data set is either code with a function `load`, whose `Arrays` stay in
memory, or a prepared file, which `python -m dpfl_mpi.prepare` has made and `in_file` opens; both
become a `Source`. The engine and tools call `open_source`. A prepared file stores the SHA-256 of
its content (`digest`), which tells a damaged file and is part of the names of results.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import admitted, short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import no_data, prepare_command, who_can_take_part
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, encodable, refused_as

BORDER = 4  # pixels around an image before a random crop
PIECE_ROWS = 4096  # most samples that are read or hashed at once
GAP_ROWS = 64  # reading so many unwanted samples costs less than another call of HDF5
FORMAT = "dpfl_mpi data 1"  # of prepared files
MOST_LISTED = 1000  # entries of a list that a result stores as an attribute, of at most 64 KiB
TINY = float(np.finfo(np.float32).tiny)  # float32 holds smaller numbers with fewer digits
KINDS = {"uint8": "images", "float32": "numbers", "int32": "tokens"}  # of samples, by dtype
# how many axes an array of samples may have, and which dtype
ALLOWED = ((4, "uint8"), (4, "float32"), (2, "float32"), (2, "int32"))
SAMPLES = "allowed are uint8 or float32 [M, H, W, C], float32 [M, F] or int32 [M, L]"
NAMES = ("class_names", "client_names", "client_groups")  # lists of texts
HALVES = ("train", "test")
# returns the samples [n, *shape] of a half at row numbers [n]
ReadImages = Callable[[str, np.ndarray], np.ndarray]
# the arrays of a prepared file, in the order of its hash
ARRAYS = (
    *("train/images", "train/labels", "test/images", "test/labels"),
    *("train/clients", "test/clients"),
)


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: samples `[M, ...]` and labels int64 `[M]`.

    Samples are images uint8 or float32 `[M, H, W, C]`, vectors float32 `[M, F]`, or tokens int32
    `[M, L]`, in which 0 fills up short texts. Data with clients of their own, such as writers, have
    each sample's client, int64 `[M]`, an index into `client_names`.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]
    # of each channel or number, where uint8 is scaled to 0..1; () for tokens
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_clients: np.ndarray | None = None
    test_clients: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    client_groups: tuple[str, ...] = ()  # the group of each, such as its domain; () for none
    note: str = ""  # what a reader of results must know about the data: one sentence

    @property
    def vocabulary(self) -> int:
        """One more than the largest token; 0 if the samples are not tokens."""
        if self.train_images.dtype != np.int32:
            return 0
        return 1 + max(int(x.max(initial=0)) for x in (self.train_images, self.test_images))

    def stored(self) -> dict[str, np.ndarray]:
        """Return the arrays by their names in a prepared file."""
        arrays = {name: getattr(self, name.replace("/", "_")) for name in ARRAYS}
        return {name: values for name, values in arrays.items() if values is not None}


@dataclass(frozen=True)
class Source:
    """A data set whose samples are read when they are asked for."""

    shape: tuple[int, ...]  # of a sample: (H, W, C) of images, (F,) of vectors, (L,) of tokens
    classes: int
    mean: tuple[float, ...]  # of each channel, of values from 0 to 1 where they are pixels
    std: tuple[float, ...]
    labels: dict[str, Any]  # by half, the class of each of its M samples: int64 or `StoredLabels`
    sha256: str
    images: ReadImages
    clients: dict[str, np.ndarray] = field(default_factory=dict)  # by half, of each sample [M]
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()  # of the data's own clients
    client_groups: tuple[str, ...] = ()
    note: str = ""
    dtype: str = "uint8"  # of samples: uint8, float32 or int32
    vocabulary: int = 0  # one more than the largest token
    path: Path | None = None  # of the prepared file
    warning: str = ""  # that the Run leaves out clients of the data, or that their code changed
    pooled: bool = False  # both halves are one pool: the training samples, then the test samples

    @property
    def kind(self) -> str:
        return KINDS[self.dtype]

    @property
    def size(self) -> str:
        """The shape of a sample in words, such as 28x28x1."""
        return "x".join(map(str, self.shape))


@dataclass(frozen=True)
class StoredLabels:
    """Labels of a half that stay in a prepared file until some are asked for."""

    path: Path
    half: str

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return read_rows(self.path, self.half, rows, "labels").astype(np.int64)


def open_source(
    run: Resolved, arrays: Arrays | None = None, labelled: bool = True, verified: bool = True
) -> Source:
    """Return the data of a Run, from its prepared file or from the `load` of its data set.

    Args:
        arrays: what `load` returned on another rank; by default it is called here.
        labelled: read all labels and clients, which only dealing samples to clients needs.
        verified: compare the file's content with its SHA-256, which reads all of it.
    """
    if hasattr(run.found("dataset"), "load"):
        source = in_memory(arrays or load_arrays(run))
    else:
        source = in_file(run.data or "", run.dataset, labelled or run.deals_test, verified)
    check_images(run, source)
    warning = left_out_clients(run, source) or changed_code(run, source)
    return as_dealt(run, replace(source, warning=warning))


def load_arrays(run: Resolved) -> Arrays:
    """Return what the `load` of a Run's data set returns, checked."""
    return made_by(run.dataset, run.found("dataset"), "load")


def made_by(dataset: str, module: Any, function: str, *arguments: Any, **options: Any) -> Arrays:
    """Call `load` or `read` of a data set's module and return its data, checked."""
    # `prepare` calls `read`, which takes the files of the user; a run calls `load`
    where = f"{function} of the data set {short(dataset)}"
    made = getattr(module, function)(*arguments, **options)
    if not isinstance(made, Arrays):
        kind = type(made).__name__
        raise UserError(
            f"{where} returned a {kind}; it must return Arrays, as arrays_of makes them"
        )
    allowed = "NumPy arrays, lists of names, mean and std lists of numbers, note a text"
    with refused_as(f"{where} returned Arrays with a field of another type; allowed are {allowed}"):
        kinds = dict.fromkeys(NAMES, str) | {"mean": float, "std": float}
        fields: Any = {name: tuple(map(kind, getattr(made, name))) for name, kind in kinds.items()}
        made = replace(made, note=str.strip(made.note), **fields)
        check(made, where)
    return made


def check(arrays: Arrays, where: str) -> None:
    """Raise `UserError`, naming the field, if shapes, types, numbers or names do not fit."""
    # `where` begins the sentence. Samples still in a file are compared by shape and dtype alone.
    train = arrays.train_images
    if (arrays.train_clients is None) != (arrays.test_clients is None):
        raise UserError(f"{where}: train_clients and test_clients must both be there or neither")
    for half in HALVES:
        images = getattr(arrays, f"{half}_images")
        kind = (images.ndim, str(images.dtype))
        alike = images.shape[1:] == train.shape[1:] and images.dtype == train.dtype
        if kind not in ALLOWED or not alike or 0 in images.shape[1:]:
            what = f"{half}_images are {images.dtype} {list(images.shape)}"
            raise UserError(f"{where}: {what}; {SAMPLES}, of one shape in both parts")
        floats = isinstance(images, np.ndarray) and images.dtype == np.float32
        if floats and not np.isfinite(images).all():
            raise UserError(f"{where}: {half}_images hold a number that is missing or infinite")
        for what, names in (("labels", "class_names"), ("clients", "client_names")):
            values, count = getattr(arrays, f"{half}_{what}"), len(getattr(arrays, names))
            if isinstance(values, StoredLabels) or (values is None and what == "clients"):
                continue
            fits = np.shape(values) == (len(images),) and values.dtype == np.int64
            if not fits or values.min(initial=0) < 0 or values.max(initial=-1) >= count:
                allowed = f"int64 [{len(images)}], from 0 to {count - 1}: {names} has {count} names"
                raise UserError(f"{where}: {half}_{what} must be {allowed}")
    groups, count = len(arrays.client_groups), len(arrays.client_names)
    if groups not in (0, count):
        raise UserError(f"{where}: client_groups has {groups} texts; allowed are {count}, or none")
    for text in (*chain.from_iterable(getattr(arrays, name) for name in NAMES), arrays.note):
        if "\0" in text or not encodable(text):
            raise UserError(f"{where} holds the name {text!r}, which is not UTF-8; rename it")
    count = 0 if train.dtype == np.int32 else train.shape[-1]
    numbers = len(arrays.mean) == len(arrays.std) == count
    divides = all(TINY <= std <= 1 / TINY for std in arrays.std)
    if not (numbers and divides and np.isfinite(arrays.mean).all()):
        limits = f"std from {TINY:.2g} to {1 / TINY:.2g}"
        raise UserError(f"{where}: mean and std must have {count} numbers each, {limits}")


def check_images(run: Resolved, source: Source) -> None:
    """Raise `UserError` if a setting of the Run changes images, which the data must then have."""
    images = len(source.shape) == 3
    if run.augment and not images:
        raise UserError("--augment crops and flips images; these data have none: use --no-augment")
    if run.augment and min(source.shape[:2]) <= BORDER:
        low = f"these of {source.size} could vanish: use --no-augment"
        raise UserError(f"--augment moves images by up to {BORDER} pixels; {low}")
    if run.attack and run.attack.kind == "backdoor" and not (images and source.dtype == "uint8"):
        raise UserError("--attack backdoor needs images of 8 bits; use another kind of attack")


def left_out_clients(run: Resolved, source: Source) -> str:
    """Return a warning if the Run leaves out clients that the data name, else ""."""
    if not source.clients:
        return ""
    if run.partition.kind == "natural":
        train, test = (source.clients[half] for half in HALVES)
        count, able = who_can_take_part(train, test, run.min_samples)
        least = f"{max(run.min_samples, 3)} samples (--min_samples), 2 to train and 1 to test"
        left_out = f"{count - len(able)} of the {count} clients in the data do not take part"
        return f"{left_out}: each needs {least}" if run.clients == len(able) < count else ""
    # The default for prepared data that name clients is `natural`. Data of `load` are known too
    # late for that, so a user who chose no partition is told.
    chosen = run.partition.kind != "pathological" or "partition" in run.found("dataset").SAID
    if source.path or chosen:
        return ""
    unread = f"the data name each sample's client, which --partition {run.partition} does not read"
    return f"{unread}; --partition natural does"


def changed_code(run: Resolved, source: Source) -> str:
    """Return a warning if the user's code is not that which made the prepared file, else ""."""
    code = admitted("dataset", run.dataset)
    if not (code and source.path):
        return ""
    with Hdf5(source.path, "an HDF5 file") as file:
        if file.attribute("code", str, default=code) == code:
            return ""
    return f"{source.path} was made before {run.dataset} was changed; prepare it again"


def as_dealt(run: Resolved, source: Source) -> Source:
    """Return the data, as one pool if the Run deals both training and test sets out of it."""
    if not run.deals_test:
        return source
    labels = np.concatenate([source.labels[half] for half in HALVES])
    n_train = len(source.labels["train"])

    def images(_: str, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *source.shape), source.dtype)
        in_train = rows < n_train
        out[in_train] = source.images("train", rows[in_train])
        out[~in_train] = source.images("test", rows[~in_train] - n_train)
        return out

    of_both = dict.fromkeys(HALVES, labels)
    return replace(source, labels=of_both, images=images, clients={}, pooled=True)


def in_memory(arrays: Arrays) -> Source:
    stored = arrays.stored()
    images = lambda half, rows: stored[f"{half}/images"][rows]  # noqa: E731
    return source_of(arrays, digest(stored.values(), arrays), arrays.vocabulary, images)


def source_of(
    arrays: Arrays, sha256: str, vocabulary: int, images: ReadImages, path: Path | None = None
) -> Source:
    clients = {half: getattr(arrays, f"{half}_clients") for half in HALVES}
    facts = {name: getattr(arrays, name) for name in ("mean", "std", "note", *NAMES)}
    return Source(
        shape=arrays.train_images.shape[1:],
        dtype=str(arrays.train_images.dtype),
        classes=len(arrays.class_names),
        labels={half: getattr(arrays, f"{half}_labels") for half in HALVES},
        clients={} if clients["train"] is None else clients,
        sha256=sha256,
        vocabulary=vocabulary,
        images=images,
        path=path,
        **facts,
    )


def in_file(
    path: str | Path, dataset: str = "", labelled: bool = True, verified: bool = True
) -> Source:
    """Return a prepared file as a `Source`; its samples stay in the file."""
    # `dataset` is the one that it must hold, "" for any. `labelled`, `verified`: see `open_source`.
    path = Path(path)
    if not os.path.exists(path):
        raise no_data(dataset, path)
    remedy = f"prepare one with {prepare_command(dataset)}"
    try:
        with Hdf5(path, "an HDF5 file") as file:
            if file.attribute("format", str, default="") != FORMAT:
                raise UserError(f"--data is {path}, which is not a prepared data file: {remedy}")
            content = file.attribute("dataset", str)
            if dataset and content != short(dataset):
                raise UserError(f"--data is {path}, which holds {content}, not {short(dataset)}")
            arrays = arrays_in(file, labelled)
            check(arrays, f"--data is {path}, which is damaged")
            sha256, vocabulary = file.attribute("sha256", str), file.attribute("vocabulary", int)
            source = source_of(arrays, sha256, vocabulary, functools.partial(read_rows, path), path)
            if verified:
                verify(source, file)
            return source
    except Unreadable as error:
        damaged = f"--data is {path}, which is truncated or damaged ({error})"
        raise UserError(f"{damaged}: {remedy}") from None


def arrays_in(file: Hdf5, labelled: bool) -> Arrays:
    """Return a prepared file's arrays; samples stay in the file, and labels unless `labelled`."""
    fields: dict[str, Any] = {}
    for half in HALVES:
        fields[f"{half}_images"] = file.dataset(f"{half}/images", "iuf")
        fields[f"{half}_labels"] = StoredLabels(file.path, half)
        for what in ("labels", "clients") if labelled else ():
            if what == "labels" or f"{half}/clients" in file:
                values = file.array(f"{half}/{what}", "iu", (None,))
                fields[f"{half}_{what}"] = values.astype(np.int64)
    for name in ("mean", "std"):
        fields[name] = tuple(file.array(name, "f", (None,)).tolist())
    for name in NAMES:
        listed = name in file or name == "class_names"  # which every file has
        fields[name] = tuple(file.array(name, "OS", (None,)).tolist()) if listed else ()
    return Arrays(**fields, note=file.attribute("note", str))


def verify(source: Source, file: Hdf5) -> None:
    """Compare a prepared file's content with the SHA-256 stored in it; all of it is read."""
    own = file.attribute("own", bool)
    with file.reading("its content"):
        arrays = (file.dataset(name, "iuf") for name in ARRAYS if name in file)
        found = digest(arrays, source, own)
    if found != source.sha256:
        digests = f"its content has the sha256 {found[:12]}, and {source.sha256[:12]} was written"
        raise UserError(f"--data is {file.path}, which is damaged: {digests}; prepare it again")


def digest(stored: Iterable[Any], facts: Arrays | Source, own: bool = False) -> str:
    """Return the SHA-256 of a data set, whose arrays `stored` are in memory or in a file.

    It covers the groups of clients, and of the user's `own` data also the other facts that change
    numbers; those of the package's own data sets never change.
    """
    sha = hashlib.sha256()
    for values in stored:
        sha.update(str(values.shape).encode())
        for first in range(0, len(values), PIECE_ROWS):
            piece = values[first : first + PIECE_ROWS]
            piece = piece if piece.ndim > 1 else piece.astype(np.int64)  # labels and clients
            sha.update(np.ascontiguousarray(piece).data)
    if own:
        numbers = (list(map(float, values)) for values in (facts.mean, facts.std))
        sha.update(json.dumps([list(facts.class_names), *numbers, facts.vocabulary]).encode())
    if facts.client_groups:  # the method oracle chooses by them
        sha.update(json.dumps(facts.client_groups).encode())
    return sha.hexdigest()


def read_rows(path: Path, half: str, rows: np.ndarray, what: str = "images") -> np.ndarray:
    """Return the samples `[n, ...]` at row numbers `[n]`, or with `what` "labels" their labels."""
    # HDF5 is slow at reading scattered rows, so contiguous pieces that hold them are read
    with Hdf5(path, "an HDF5 file") as file:
        stored = file.dataset(f"{half}/{what}", "iuf")
        out = np.empty((len(rows), *stored.shape[1:]), stored.dtype)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        ends = (np.diff(ascending) > GAP_ROWS) | (np.diff(ascending // PIECE_ROWS) > 0)
        with file.reading(f"{half}/{what}"):
            for piece in np.split(order, np.flatnonzero(ends) + 1):
                if len(piece):
                    wanted = rows[piece]
                    first = wanted[0]
                    out[piece] = stored[first : wanted[-1] + 1][wanted - first]
    return out
