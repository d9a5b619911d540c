"""The user's own samples as a data set: `arrays_of` finds their kind, a test part and the scaling.

`dpfl_mpi.run(data=(x, y))` and the data sets for the user's own files call it. `where` begins each
error, and names what is wrong. M samples, H x W pixels, C channels, F numbers, L tokens.
"""

from dataclasses import replace

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.errors import UserError

MOST_CLASSES = 65536
ROUNDED = 1e-4  # most standard deviations by which rounding to float32 may move a number
Column = np.ndarray | None  # one value per sample [M]


def arrays_of(
    x: np.ndarray,
    y: np.ndarray,
    client: Column = None,
    test: Column = None,
    where: str = "the data",
    note: str = "",
    group: Column = None,
) -> Arrays:
    """Return samples and labels as a data set; a `UserError` names what is wrong with them.

    Args:
        x: images uint8 or floats `[M, H, W]` or `[M, H, W, C]`; vectors, floats `[M, F]`; or
            tokens, whole numbers `[M, L]` from 0 to 2^31 - 1.
        y: one class per sample `[M]`, numbers or names.
        client: whom each sample belongs to `[M]`, numbers or names.
        test: which samples are the test part, bool or 0 and 1 `[M]`; by default a fixed fifth of
            every client's samples, or else of every class.
        where: what the sentence of an error begins with.
        note: what a reader of results must know about the data: one sentence.
        group: the group of each sample's client `[M]`, such as its domain, numbers or names.
    """
    samples = samples_of(where, np.asarray(x))
    labels, names = numbered(where, "y", y, len(samples))
    if not 2 <= len(names) <= MOST_CLASSES:
        raise UserError(f"{where}: y has {len(names)} classes; allowed are 2 to {MOST_CLASSES}")
    owners: np.ndarray = labels
    clients: tuple[str, ...] = ()
    if client is not None:
        owners, clients = numbered(where, "client", client, len(samples))
    elif group is not None:
        raise UserError(f"{where} has group but no client; a group is one of clients")
    is_test = fixed_fifth(labels, owners) if test is None else flags(where, test, len(samples))
    parts = ~is_test, is_test
    if not is_test.any() or is_test.all():
        counts = f"{parts[0].sum()} training and {parts[1].sum()} test samples"
        raise UserError(f"{where} has {counts}; both are needed")
    if len(unseen := np.setdiff1d(labels[is_test], labels[~is_test])):
        raise UserError(f"{where}: test has the label {names[unseen[0]]}, which training lacks")
    train_x, test_x = (samples[part] for part in parts)
    train_y, test_y = (labels[part] for part in parts)
    mean, std = moments(train_x)
    out = Arrays(train_x, train_y, test_x, test_y, names, mean, std, note=note)
    if client is None:
        return out
    train_clients, test_clients = (owners[part] for part in parts)
    groups = () if group is None else groups_of(where, group, owners, clients)
    out = replace(out, train_clients=train_clients, test_clients=test_clients)
    return replace(out, client_names=clients, client_groups=groups)


def fixed_fifth(labels: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the test part: a fifth of each owner's samples, at least one of three, bool `[M]`."""
    out, rng = np.zeros(len(owners), bool), np.random.default_rng(0)
    _, counts = np.unique(owners, return_counts=True)
    for rows in np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1]):
        order = rng.permutation(rows)
        out[order[: len(order) // 5 or len(order) // 3]] = True
    # a class that would have test samples alone stays in training
    return out & np.isin(labels, labels[~out])


def samples_of(where: str, x: np.ndarray) -> np.ndarray:
    """Return samples: images uint8 or float32 `[M, H, W, C]`, vectors float32, or tokens int32."""
    # bytes `[M, W]` are images of one row
    where = f"{where}: x"
    if x.ndim not in (2, 3, 4) or x.size == 0:
        allowed = "allowed are [M, H, W, C], [M, H, W], [M, F] or [M, L], not empty"
        raise UserError(f"{where} is {x.shape}; {allowed}")
    # the shape if they are images
    image = {2: (len(x), 1, x.shape[1], 1), 3: (*x.shape, 1), 4: x.shape}[x.ndim]
    _, h, w, c = image
    # [M, 1, W, C] of other types is a series of W moments
    if c > 4 and (h == 3 or (h == 1 and w == c) or (h <= 4 and x.dtype == np.uint8)):
        mend = "images are [M, H, W, C]: save x.transpose(0, 2, 3, 1)"
        raise UserError(f"{where} is {x.shape}, channels first; {mend}")
    if x.dtype.kind in "fb":
        return as_float32(where, x if x.ndim == 2 else x.reshape(image))
    if x.dtype.kind not in "iu":
        allowed = "allowed are uint8 (images), floats (images, vectors), integers (text)"
        raise UserError(f"{where} is {x.dtype}; {allowed}")
    tokens = x.ndim == 2 and x.dtype != np.uint8
    low, high, most = int(x.min()), int(x.max()), 2**31 - 1 if tokens else 255
    if low < 0 or high > most:
        what = "tokens are whole numbers from" if tokens else "whole numbers of an image are"
        allowed = f"{what} 0 to {most}: save other numbers as floats"
        raise UserError(f"{where} goes from {low} to {high}; {allowed}")
    return x.astype(np.int32) if tokens else x.astype(np.uint8, copy=False).reshape(image)


def as_float32(where: str, x: np.ndarray) -> np.ndarray:
    """Return floats `[..., C]` as float32; `UserError` if rounding would change a column's values.

    A column is a channel or a number of the samples.
    """
    with np.errstate(over="ignore"):
        out = x.astype(np.float32)
    if not np.isfinite(out).all():
        found = "a missing, infinite or too large number"
        raise UserError(f"{where} holds {found}; allowed are finite numbers of float32")
    if x.dtype.itemsize > out.itemsize:
        columns = x.reshape(-1, x.shape[-1])
        error = np.abs(columns - out.reshape(columns.shape)).max(0)
        too_large = (error > ROUNDED * columns.std(0)) & (np.ptp(columns, axis=0) > 0)
        if too_large.any():
            column = f"column (or channel) {too_large.argmax()}"
            mend = "too far from 0 for the 7 digits of float32; standardise it first"
            raise UserError(f"{where} has numbers in {column} {mend}")
    return out


def numbered(
    where: str, name: str, values: np.ndarray, length: int
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return `values` `[M]` as numbers 0, 1, ..., int64 `[M]`, and the name of each number."""
    # values that are numbers are in the order of their size, texts in that of the alphabet
    values = aligned(where, name, values, length)
    if values.dtype.kind == "f":
        finite = np.isfinite(values).all()
        whole = finite and (values == np.rint(values)).all()
        if not finite or (name == "y" and not whole):
            found = "fractions" if finite else "a missing or infinite value"
            allowed = "whole numbers" if name == "y" else "numbers"
            raise UserError(f"{where}: {name} holds {found}; allowed are {allowed} or names")
        if whole and (np.abs(values) < 2**63).all():  # larger ones would become one number
            values = values.astype(np.int64)
    names, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64), tuple(map(text, names))


def groups_of(
    where: str, group: np.ndarray, owners: np.ndarray, clients: tuple[str, ...]
) -> tuple[str, ...]:
    """Return each client's group; `UserError` if its samples have several."""
    numbers, names = numbered(where, "group", group, len(owners))
    _, first = np.unique(owners, return_index=True)  # the first sample of each client
    if len(unlike := np.flatnonzero(numbers != numbers[first][owners])):
        sample = unlike[0]
        several = " and ".join(names[numbers[row]] for row in (first[owners[sample]], sample))
        client = clients[owners[sample]]
        raise UserError(f"{where}: group of the client {client} is {several}; give one")
    return tuple(names[number] for number in numbers[first])


def text(value: np.generic) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def aligned(where: str, name: str, values: np.ndarray, length: int) -> np.ndarray:
    """Return an array, which must have one number or name per sample."""
    values = np.asarray(values)
    if values.shape != (length,) or values.dtype.kind not in "iubfUS":
        needed = f"one number or name per sample is needed, ({length},)"
        raise UserError(f"{where}: {name} is {values.dtype} of {values.shape}; {needed}")
    return values


def flags(where: str, test: np.ndarray, length: int) -> np.ndarray:
    test = aligned(where, "test", test, length)
    wrong = test if test.dtype.kind in "US" else test[~np.isin(test, (0, 1))]
    if len(wrong):
        raise UserError(f"{where}: test holds {text(wrong[0])}; allowed are true, false, 1, 0")
    return test.astype(bool)


def moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of each channel or number; () for tokens."""
    # Pixels of uint8 are scaled to 0..1 before. The deviation of a constant is 1.
    if x.dtype == np.int32:
        return (), ()
    columns = x.reshape(-1, x.shape[-1])
    if x.dtype == np.uint8:
        # from the counts of each value: exact, and no image is copied to floats
        counts = [np.bincount(column, minlength=256) for column in columns.T]
        values = np.arange(256) / 255
        mean = np.array([n @ values / n.sum() for n in counts])
        variances = [n @ (values - m) ** 2 / n.sum() for n, m in zip(counts, mean, strict=True)]
        deviation = np.array([np.sqrt(v) for v in variances])
    else:
        mean, deviation = columns.mean(0, dtype=np.float64), columns.std(0, dtype=np.float64)
    deviation[columns.min(0) == columns.max(0)] = 1.0  # computed, it may be a rounding error
    return tuple(mean.tolist()), tuple(deviation.tolist())
