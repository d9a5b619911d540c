"""Anyone's own samples as a data set: `arrays_of(x, y)` says what they are, checks them, sets a test part aside and finds the normalisation."""

import sys

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.errors import UserError

CLASSES = 65536  # most
ROUNDED = 1e-4  # standard deviations: the most that float32, which has 7 digits, may move a number
Column = np.ndarray | None  # [M]


def arrays_of(
    x: np.ndarray, y: np.ndarray, client: Column = None, test: Column = None, where: str = "the data", note: str = ""
) -> Arrays:
    """Return samples and labels as a data set; `UserError` where an array has another length or type, or a value is out of its range.

    Args:
        x: images uint8 or floats `[M, H, W]` or `[M, H, W, C]`; vectors, floats `[M, F]`; or tokens, whole numbers `[M, L]` from 0 to 2^31 - 1.
        y: one class per sample `[M]`, numbers or names.
        client: whom each sample belongs to `[M]`, numbers or names.
        test: which samples are the test part, bool or 0 and 1 `[M]`; without it a fixed fifth: of every client's samples, or else of every class.
        where: what the sentence of an error begins with.
        note: what a reader of results must know about the data: one sentence.
    """
    samples = samples_of(where, np.asarray(x))
    labels, names = numbered(where, "y", y, len(samples))
    if len(names) < 2:
        raise UserError(f"{where}: y holds one class, {names[0]}; at least 2 are needed")
    if len(names) > CLASSES:
        raise UserError(f"{where}: y holds {len(names)} different labels; allowed are at most {CLASSES} classes")
    owners, clients = (None, ()) if client is None else numbered(where, "client", client, len(samples))
    if test is None:
        flags = a_fifth(labels if owners is None else owners)
        flags &= np.isin(labels, labels[~flags])  # a class of one client's fifth alone stays to train
    else:
        test = aligned(where, "test", test, len(samples))
        odd = test if test.dtype.kind in "US" else test[~np.isin(test, (0, 1))]
        if len(odd):
            raise UserError(f"{where}: test holds {text(odd[0])}; allowed are true and false, or 1 and 0")
        flags = test.astype(bool)
    if not flags.any() or flags.all():
        raise UserError(f"{where} has {(~flags).sum()} training and {flags.sum()} test samples; both are needed")
    if len(unseen := np.setdiff1d(labels[flags], labels[~flags])):
        raise UserError(f"{where}: the test labels hold {names[unseen[0]]}, which no training label is")
    parts = [(samples[part], labels[part], None if owners is None else owners[part]) for part in (~flags, flags)]
    (x_train, y_train, train_clients), (x_test, y_test, test_clients) = parts
    mean, std = moments(x_train)
    return Arrays(x_train, y_train, x_test, y_test, names, mean, std, train_clients, test_clients, clients, note)


def samples_of(where: str, x: np.ndarray) -> np.ndarray:
    """Return samples as a data set holds them: images uint8 or float32 `[M, H, W, C]`, vectors float32 `[M, F]`, tokens int32 `[M, L]`.

    Bytes `[M, F]` are images of 1xF.
    """
    where = f"{where}: x"
    if x.ndim not in (2, 3, 4) or x.size == 0:
        raise UserError(f"{where} is {x.shape}; allowed are [M, H, W, C], [M, H, W], [M, F] or [M, L], not empty")
    image = {2: (len(x), 1, x.shape[1], 1), 3: (*x.shape, 1), 4: x.shape}[x.ndim]
    _, h, w, c = image
    if c > 4 and (h == 3 or (h == 1 and w == c)):  # [M, 1, W, C] is a series of W moments
        raise UserError(f"{where} is {x.shape}, channels first; images are [M, H, W, C]: save x.transpose(0, 2, 3, 1)")
    if x.dtype.kind in "fb":
        return single(where, x if x.ndim == 2 else x.reshape(image))
    if x.dtype.kind not in "iu":
        raise UserError(f"{where} is {x.dtype}; allowed are uint8 (images), floats (images, vectors), integers (text)")
    tokens = x.ndim == 2 and x.dtype != np.uint8
    low, high, most = int(x.min()), int(x.max()), 2**31 - 1 if tokens else 255
    if low < 0 or high > most:
        what = "whole numbers are tokens from" if tokens else "whole numbers of an image are"
        raise UserError(f"{where} goes from {low} to {high}; {what} 0 to {most}: save other numbers as floats")
    return x.astype(np.int32) if tokens else x.astype(np.uint8, copy=False).reshape(image)


def single(where: str, x: np.ndarray) -> np.ndarray:
    """Return floats `[..., C]` as float32; `UserError` where it does not hold them, or a column's differences."""
    with np.errstate(over="ignore"):
        out = x.astype(np.float32)
    if not np.isfinite(out).all():
        raise UserError(f"{where} holds what is missing, infinite or beyond float32; allowed are finite numbers")
    if x.dtype.itemsize > out.itemsize:
        columns = x.reshape(-1, x.shape[-1])
        moved, low, high = np.abs(columns - out.reshape(columns.shape)).max(0), columns.min(0), columns.max(0)
        lost = (moved > ROUNDED * columns.std(0)) & (low < high)
        if lost.any():
            c = int(lost.argmax())
            these = f"{low[c]:.10g} to {high[c]:.10g} in {'column' if x.ndim == 2 else 'channel'} {c}"
            raise UserError(
                f"{where} goes from {these}, too far from 0 for the 7 digits of float32; standardise it first"
            )
    return out


def numbered(where: str, name: str, values: np.ndarray, length: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return which of all values that occur each one is, int64 `[M]` from 0, and their names: numbers by size, texts by alphabet."""
    values = aligned(where, name, values, length)
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            numbers = "whole numbers" if name == "y" else "numbers"
            raise UserError(f"{where}: {name} holds a missing or infinite value; allowed are {numbers} or names")
        fractions = (values != np.rint(values)).any()
        if not fractions and (np.abs(values) < 2**63).all():  # larger ones would become one number
            values = values.astype(np.int64)
        elif fractions and name == "y":
            raise UserError(f"{where}: y holds fractions; allowed are whole numbers or names (no regression)")
    names, which = np.unique(values, return_inverse=True)
    return which.reshape(-1).astype(np.int64), tuple(map(text, names))


def text(value: np.generic) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def aligned(where: str, name: str, values: np.ndarray, length: int) -> np.ndarray:
    """Return the array, which must have one number or name per sample."""
    values = np.asarray(values)
    if values.shape != (length,) or values.dtype.kind not in "iubfUS":
        have = f"{name} is {values.dtype} of {values.shape}"
        raise UserError(f"{where}: {have}; one number or name per sample is needed, ({length},)")
    here = values.dtype.newbyteorder("=")
    if here.kind == "U" and values.astype(here).view(np.uint32).max(initial=0) > sys.maxunicode:
        raise UserError(f"{where}: {name} holds a text that is damaged")  # Python would fail on it
    return values


def a_fifth(of: np.ndarray) -> np.ndarray:
    """Return a fixed choice of a fifth of the samples of every client (or class), at least one of three, bool `[M]`."""
    test = np.zeros(len(of), bool)
    rng = np.random.default_rng(0)
    for each in np.split(np.argsort(of, kind="stable"), np.cumsum(np.bincount(of))[:-1]):
        mine = rng.permutation(each)
        test[mine[: len(mine) // 5 or len(mine) // 3]] = True
    return test


def moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of images (uint8: in pixels scaled to 0..1), or per number of vectors; of tokens nothing.

    The deviation of what is constant is 1: there is nothing to divide by.
    """
    if x.dtype == np.int32:
        return (), ()
    flat = x.reshape(-1, x.shape[-1])
    if x.dtype == np.uint8:
        # exact, and no float copy
        counts = [np.bincount(column, minlength=256) for column in flat.T]
        values = np.arange(256) / 255
        mean = np.array([n @ values / n.sum() for n in counts])
        deviation = np.array([np.sqrt(n @ (values - m) ** 2 / n.sum()) for n, m in zip(counts, mean, strict=True)])
    else:
        mean, deviation = flat.mean(0, dtype=np.float64), flat.std(0, dtype=np.float64)
    deviation[flat.min(0) == flat.max(0)] = 1.0  # it may be a rounding error
    return tuple(mean.tolist()), tuple(deviation.tolist())
