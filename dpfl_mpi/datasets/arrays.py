"""Anyone's own arrays: an npz file with x and y, and optionally the client of every sample.

x        images [M, H, W] or [M, H, W, C], or vectors [M, F]: uint8, or floats in 0..1 (stored as 256 levels)
y        labels [M], whole numbers 0..C-1
client   optional: whom each sample belongs to [M], numbers or names; --partition natural then deals accordingly
test     optional: whether a sample belongs to the test set [M]; or x_test, y_test and client_test; else a fixed fifth is the test set
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import TOTAL, broken, check, moments
from dpfl_mpi.datasets.image_folder import PAPER as IMAGE_FOLDER
from dpfl_mpi.errors import UserError

PAPER = IMAGE_FOLDER | {"model": "mlp", "augment": False, "min_samples": 5}
DATA = "data/arrays.h5"
OWN_DATA = True
SOURCE = "an npz file with x, y and optionally client, test (or x_test, y_test, client_test)"
NO_DOWNLOAD = "these are your own arrays: name them with --source PATH"


def read(source: Path) -> Arrays:
    """Return the arrays of an npz file.

    Raises:
        UserError: an array is missing, of another length or type, holds a pickle, or a value out of its range.
    """
    found = unpack(source)
    if not {"x", "y"} <= set(found):
        raise UserError(f"{source} holds {', '.join(sorted(found)) or 'nothing'}; x and y are needed")
    if ("x_test" in found) != ("y_test" in found) or ("x_test" in found and "test" in found):
        raise UserError(f"{source}: the test set is either x_test and y_test, or test, a flag for every sample of x")
    x, y = pixels(source, "x", found["x"]), whole(source, "y", found["y"], len(found["x"]))
    client = aligned(source, "client", found["client"], len(y)) if "client" in found else None
    if "x_test" in found:
        x_test = pixels(source, "x_test", found["x_test"])
        y_test = whole(source, "y_test", found["y_test"], len(x_test))
        if x_test.shape[1:] != x.shape[1:]:
            raise UserError(f"{source}: x_test has samples of {x_test.shape[1:]}, x of {x.shape[1:]}")
        if (client is not None) != ("client_test" in found):
            raise UserError(f"{source}: client and client_test must both be there or neither")
        client_test = aligned(source, "client_test", found["client_test"], len(y_test)) if client is not None else None
    else:
        test = chosen(source, found, y)
        x_test, y_test, x, y = x[test], y[test], x[~test], y[~test]
        client, client_test = (client[~test], client[test]) if client is not None else (None, None)
    if len(y) == 0 or len(y_test) == 0:
        raise UserError(f"{source} has {len(y)} training and {len(y_test)} test samples; both are needed")
    classes = int(y.max()) + 1
    if y_test.max() >= classes:
        raise UserError(f"{source}: the test labels go to {y_test.max()}, the training labels to {y.max()}")
    mean, std = moments(x)
    arrays = Arrays(x, y, x_test, y_test, tuple(str(c) for c in range(classes)), mean, std)
    if client is None or client_test is None:
        return arrays
    names, numbers = np.unique(np.concatenate([client, client_test]).astype(str), return_inverse=True)
    mine, theirs = np.split(numbers.astype(np.int64), [len(client)])
    return replace(arrays, train_clients=mine, test_clients=theirs, client_names=tuple(names.tolist()))


def unpack(source: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file that `read` knows; a pickle is refused unread."""
    try:
        total = count = 0
        with zipfile.ZipFile(source) as archive:
            for info in archive.infolist():
                count, total = check(source, info.filename, info.file_size, count, total)
        with np.load(source, allow_pickle=False) as file:
            known = [n for n in file.files if n in ("x", "y", "client", "test", "x_test", "y_test", "client_test")]
            return {name: file[name] for name in known}
    except ValueError as error:
        if "allow_pickle" in str(error) or "Object arrays" in str(error):
            raise UserError(
                f"{source} holds pickled objects, which are never read; save plain numbers and strings"
            ) from None
        raise UserError(f"{source} is not a readable npz file: {error}") from None
    except MemoryError:
        raise UserError(f"{source} is larger than this machine's memory (allowed are {TOTAL >> 30} GiB)") from None
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError):
        raise broken(source) from None


def pixels(source: Path, name: str, x: np.ndarray) -> np.ndarray:
    """Return samples as uint8 `[M, H, W, C]`; a vector of F numbers becomes an image of 1xF."""
    if x.ndim not in (2, 3, 4) or x.size == 0:
        raise UserError(f"{source}: {name} is {x.shape}; allowed are [M, H, W, C], [M, H, W] or [M, F], not empty")
    shape = {2: (len(x), 1, x.shape[1], 1), 3: (*x.shape, 1), 4: x.shape}[x.ndim]
    if x.dtype == np.uint8:
        return x.reshape(shape)
    if x.dtype.kind != "f":
        raise UserError(f"{source}: {name} is {x.dtype}; allowed are uint8, or floats in 0..1")
    if not (np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1):
        raise UserError(f"{source}: {name} goes from {x.min():g} to {x.max():g}; allowed are finite floats in 0..1")
    return np.rint(x * 255).astype(np.uint8).reshape(shape)


def whole(source: Path, name: str, y: np.ndarray, length: int) -> np.ndarray:
    """Return labels as int64 `[M]`."""
    y = aligned(source, name, y, length)
    if y.dtype.kind not in "iub" or (len(y) and (y.min() < 0 or y.max() > 65535)):
        raise UserError(f"{source}: {name} must hold whole numbers from 0 (at most 65535)")
    return y.astype(np.int64)


def aligned(source: Path, name: str, values: np.ndarray, length: int) -> np.ndarray:
    """Return the array, which must have one value per sample."""
    if values.shape != (length,) or values.dtype.kind not in "iubUS":
        raise UserError(
            f"{source}: {name} is {values.dtype} of {values.shape}; one number or name per sample is needed, ({length},)"
        )
    return values


def chosen(source: Path, found: dict[str, np.ndarray], y: np.ndarray) -> np.ndarray:
    """Return which samples are the test set, bool `[M]`: the given ones, or a fixed fifth of every class."""
    if "test" in found:
        return aligned(source, "test", found["test"], len(y)).astype(bool)
    test = np.zeros(len(y), bool)
    rng = np.random.default_rng(0)
    for c in np.unique(y):
        mine = rng.permutation(np.flatnonzero(y == c))
        test[mine[: len(mine) // 5]] = True
    return test
