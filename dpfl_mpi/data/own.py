"""Anyone's own samples as a data set: `arrays_of(x, y)` says what they are, checks them, sets a test part aside and finds the normalisation.

Axes: M samples, H W C image, F numbers of a vector, L tokens of a text.
"""

from __future__ import annotations

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.errors import UserError

CLASSES = 65536  # most


def arrays_of(
    x: np.ndarray,
    y: np.ndarray,
    client: np.ndarray | None = None,
    test: np.ndarray | None = None,
    where: str = "the data",
    note: str = "",
) -> Arrays:
    """Return samples and labels as a data set.

    Args:
        x: images uint8 or floats `[M, H, W]` or `[M, H, W, C]`; vectors, floats `[M, F]`; or tokens, whole numbers `[M, L]` from 0 to 2^31 - 1.
        y: one class per sample `[M]`, numbers or names.
        client: whom each sample belongs to `[M]`, numbers or names.
        test: which samples are the test part, bool or 0 and 1 `[M]`; without it a fixed fifth: of every client's samples, or else of every class.
        where: what the sentence of an error begins with.
        note: what a reader of results must know about the data: one sentence.

    Raises:
        UserError: an array has another length or type, or a value is out of its range.
    """
    samples = samples_of(where, "x", np.asarray(x))
    labels, names = labels_of(where, "y", aligned(where, "y", y, len(samples)))
    owners: np.ndarray | None = None
    clients: tuple[str, ...] = ()
    if client is not None:
        owners, clients = owners_of(where, aligned(where, "client", client, len(samples)))
    if test is None:
        test = a_fifth(labels if owners is None else owners)
        test &= np.isin(labels, labels[~test])  # a class of one client's fifth alone stays to train
    else:
        test = flags_of(where, aligned(where, "test", test, len(samples)))
    if not test.any() or test.all():
        raise UserError(f"{where} has {(~test).sum()} training and {test.sum()} test samples; both are needed")
    unseen = np.setdiff1d(labels[test], labels[~test])
    if len(unseen):
        raise UserError(f"{where}: the test labels hold {names[unseen[0]]}, which no training label is")
    mean, std = moments(samples[~test])
    return Arrays(
        samples[~test], labels[~test], samples[test], labels[test], names, mean, std,
        None if owners is None else owners[~test],
        None if owners is None else owners[test],
        clients, note,
    )  # fmt: skip


def samples_of(where: str, name: str, x: np.ndarray) -> np.ndarray:
    """Return samples as a data set holds them: images uint8 or float32 `[M, H, W, C]`, vectors float32 `[M, F]`, tokens int32 `[M, L]`.

    Floats of images that are all n / 255 are kept as the n, uint8: the same numbers in a quarter of the space. Bytes `[M, F]` are images of 1xF.
    """
    if x.ndim not in (2, 3, 4) or x.size == 0:
        raise UserError(
            f"{where}: {name} is {x.shape}; allowed are [M, H, W, C], [M, H, W], [M, F] or [M, L], not empty"
        )
    if x.ndim == 4 and channels_first(*x.shape[1:]):
        raise UserError(
            f"{where}: {name} is {x.shape}, which looks like channels first; images are [M, H, W, C]: save {name}.transpose(0, 2, 3, 1)"
        )
    image = {2: (len(x), 1, x.shape[1], 1), 3: (*x.shape, 1), 4: x.shape}[x.ndim]
    if x.dtype == np.uint8:
        return x.reshape(image)
    if x.dtype.kind in "fb":
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise UserError(
                f"{where}: {name} holds a value that is missing, infinite or beyond float32; allowed are finite numbers"
            )
        if x.ndim == 2:
            return x
        levels = np.rint(x * 255)
        if x.min() >= 0 and x.max() <= 1 and np.abs(x * 255 - levels).max() < 1e-3:
            return levels.astype(np.uint8).reshape(image)
        return x.reshape(image)
    if x.dtype.kind not in "iu":
        raise UserError(
            f"{where}: {name} is {x.dtype}; allowed are uint8 (images), floats (images, vectors) and whole numbers (tokens)"
        )
    low, high = int(x.min()), int(x.max())
    if x.ndim == 2 and low >= 0 and high < 2**31:
        return x.astype(np.int32)
    if x.ndim == 2:
        raise UserError(
            f"{where}: {name} goes from {low} to {high}; whole numbers are tokens from 0 to 2147483647: save other numbers as floats"
        )
    if low >= 0 and high < 256:
        return x.astype(np.uint8).reshape(image)
    raise UserError(
        f"{where}: {name} goes from {low} to {high}; whole numbers of an image are 0 to 255: save other numbers as floats"
    )


def channels_first(h: int, w: int, c: int) -> bool:
    """Return whether images `[M, h, w, c]` must be `[M, C, H, W]`. One row of many channels is none: a series of W moments is `[M, 1, W, C]`."""
    return c > 4 and (h == 3 or (h == 1 and w == c))


def labels_of(where: str, name: str, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels int64 `[M]` from 0 to C - 1, and the names of the classes: all values that occur, numbers by size, names by alphabet."""
    if y.dtype.kind == "f":
        if not np.isfinite(y).all():
            raise UserError(
                f"{where}: {name} holds a label that is missing or infinite; allowed are whole numbers or names, one for every sample"
            )
        if not (y == np.rint(y)).all():
            raise UserError(
                f"{where}: {name} holds fractions; labels are classes, numbers or names (regression is not supported: put the values into classes)"
            )
        y = y.astype(np.int64)
    labels, classes = numbered(y)
    if len(classes) < 2:
        raise UserError(f"{where}: {name} holds one class, {classes[0]}; at least 2 are needed")
    if len(classes) > CLASSES:
        raise UserError(f"{where}: {name} holds {len(classes)} different labels; allowed are at most {CLASSES} classes")
    return labels, classes


def owners_of(where: str, client: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the client of every sample, int64 `[M]` from 0, and the names of the clients: numbers by size, names by alphabet."""
    if client.dtype.kind == "f":
        if not np.isfinite(client).all():
            raise UserError(f"{where}: client holds a value that is missing or infinite; allowed are numbers or names")
        if (client == np.rint(client)).all():
            client = client.astype(np.int64)
    return numbered(client)


def flags_of(where: str, test: np.ndarray) -> np.ndarray:
    """Return which samples are the test part, bool `[M]`."""
    odd = test if test.dtype.kind in "US" else test[~np.isin(test, (0, 1))]
    if len(odd):
        raise UserError(
            f"{where}: test holds {text(odd[0])}; allowed are true and false, or 0 and 1: 1 is the test part"
        )
    return test.astype(bool)


def numbered(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return which of all values that occur each one is, int64 `[M]` from 0, and their names: numbers by size, texts by alphabet."""
    names, which = np.unique(values, return_inverse=True)
    return which.reshape(-1).astype(np.int64), tuple(map(text, names))


def text(value: np.generic) -> str:
    """Return a label as a text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def aligned(where: str, name: str, values: np.ndarray, length: int) -> np.ndarray:
    """Return the array, which must have one number or name per sample."""
    values = np.asarray(values)
    if values.shape != (length,) or values.dtype.kind not in "iubfUS":
        raise UserError(
            f"{where}: {name} is {values.dtype} of {values.shape}; one number or name per sample is needed, ({length},)"
        )
    return values


def a_fifth(of: np.ndarray) -> np.ndarray:
    """Return a fixed choice of a fifth of the samples of every client (or class), at least one of three, bool `[M]`."""
    test = np.zeros(len(of), bool)
    rng = np.random.default_rng(0)
    for value in np.unique(of):
        mine = rng.permutation(np.flatnonzero(of == value))
        test[mine[: len(mine) // 5 or len(mine) // 3]] = True
    return test


def moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of images (uint8: in pixels scaled to 0..1), or per number of vectors; of tokens nothing."""
    if x.dtype == np.int32:
        return (), ()
    if x.dtype == np.uint8:
        channels = range(x.shape[-1])
        counts = [np.bincount(x[..., c].reshape(-1), minlength=256) for c in channels]  # exact, and no float copy
        values = np.arange(256) / 255
        mean = [float(n @ values / n.sum()) for n in counts]
        std = [float(np.sqrt(n @ (values - m) ** 2 / n.sum())) for n, m in zip(counts, mean, strict=True)]
        return tuple(mean), tuple(max(s, 1e-3) for s in std)
    flat = x.reshape(-1, x.shape[-1])
    mean = flat.mean(0, dtype=np.float64).tolist()
    std = flat.std(0, dtype=np.float64).tolist()
    constant = (flat.min(0) == flat.max(0)).tolist()  # its deviation may be a rounding error
    return tuple(mean), tuple(1.0 if same else s for s, same in zip(std, constant, strict=True))
