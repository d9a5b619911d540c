"""The random draws of clients' local epochs: orders of samples, crops, and keys of dropout.

Each is drawn by a key of seed, client and epoch, in C (`lanes/draws.h`); without that library NumPy
draws the same numbers, more slowly. `Clients` calls these functions.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from dpfl_mpi.data.source import BORDER
from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.cpu import load
from dpfl_mpi.numerics.lanes.declared import DRAWS
from dpfl_mpi.streams import AUGMENT, DROPOUT, ORDER, stream

CORNERS = 2 * BORDER + 1  # rows, and columns, where a crop can start


class Schedules(NamedTuple):
    """What k clients train on, client after client: samples, and their crops (dy, dx, flip).

    Client j, of n samples, has `epochs * n` numbers of `order` and three times as many of `crops`.
    """

    order: np.ndarray  # the samples' numbers, int32 [epochs * sum of n]
    crops: np.ndarray  # uint8 [3 * epochs * sum of n], 0 without augmentation
    before: np.ndarray  # the sum of n of the clients before each one, int64 [k + 1]
    epochs: int

    def of(self, j: int) -> tuple[np.ndarray, np.ndarray]:
        """Return order `[epochs, n]` and crops `[3, epochs, n]` of the j-th client, as views."""
        start, end = (self.epochs * self.before[j : j + 2]).tolist()
        shape = self.epochs, int(self.before[j + 1] - self.before[j])
        crops = self.crops[3 * start : 3 * end].reshape(3, *shape)
        return self.order[start:end].reshape(shape), crops


def schedules(
    seed: int,
    clients: np.ndarray,
    first: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    epochs: int,
    augment: bool,
) -> Schedules:
    """Return what clients train on in `epochs` local epochs from number `first` on.

    A client sees its n samples from number `start` on, in an order of each epoch. All arrays are
    int64 `[k]`.
    """
    before = np.concatenate([[0], np.cumsum(n)]).astype(np.int64)
    size = epochs * int(before[-1])
    order, crops = np.empty(size, np.int32), np.zeros(3 * size, np.uint8)
    out = Schedules(order, crops, before, epochs)
    if library := _library():
        words, drawn = _words(seed), _columns(clients, first, n, start)
        key = words.ctypes.data, len(words), ORDER, AUGMENT, CORNERS
        outputs = order.ctypes.data, crops.ctypes.data if augment else None
        library.schedules(*key, drawn.ctypes.data, len(clients), epochs, *outputs)
        return out
    for j, client in enumerate(clients.tolist()):
        order, crops = out.of(j)
        for e, epoch in enumerate(range(int(first[j]), int(first[j]) + epochs)):
            order[e] = start[j] + stream(seed, ORDER, client, epoch).permutation(n[j])
            if augment:
                rng = stream(seed, AUGMENT, client, epoch)
                crops[:2, e] = rng.integers(0, CORNERS, (2, n[j]))
                crops[2, e] = rng.integers(0, 2, n[j])
    return out


def dropout_keys(
    seed: int, clients: np.ndarray, first: np.ndarray, steps: np.ndarray, epochs: int
) -> np.ndarray:
    """Return the dropout key of every step of each client, int64 `[k, epochs * most steps]`.

    Client i has `steps[i]` steps an epoch, from its epoch `first[i]` on; after its last step
    a row is filled up with 0.
    """
    out = np.zeros((len(clients), epochs * int(steps.max(initial=0))), np.int64)
    if library := _library():
        row_starts = out.shape[1] * np.arange(len(clients))
        words, drawn = _words(seed), _columns(clients, first, steps, row_starts)
        key = words.ctypes.data, len(words), DROPOUT
        library.keys(*key, drawn.ctypes.data, len(clients), epochs, out.ctypes.data)
        return out
    for j, client in enumerate(clients.tolist()):
        for e in range(epochs):
            rng = stream(seed, DROPOUT, client, int(first[j]) + e)
            out[j, e * steps[j] : (e + 1) * steps[j]] = rng.integers(0, 2**63, steps[j])
    return out


def _words(seed: int) -> np.ndarray:
    """Return the 32-bit words of a seed, the lowest first; there is at least one."""
    size = 4 * max(1, -(-seed.bit_length() // 32))
    return np.frombuffer(seed.to_bytes(size, "little"), np.uint32)


def _columns(*columns: np.ndarray) -> np.ndarray:
    """Return a `Drawn` of draws.h for each client: its four numbers, int64 `[k, 4]`."""
    return np.array(columns, np.int64).T.copy()


@functools.cache
def _library() -> Any:
    """Return the library, or None where it cannot be loaded."""
    try:
        library = load()
    except UserError:
        return None
    for name, (result, arguments) in DRAWS.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    return library
