"""Whose models are most alike, by sketches that clients send in place of models.

They are for --candidates, `nearest` and `spectral`. A count sketch (Charikar, Chen and
Farach-Colton, ICALP 2002) adds each weight, with a drawn sign, to one of a few sums; cosines of
sketches come near those of the rows. The sums go by the weights' order, and products of sketches
are small whole numbers, exact in float32: so the bits are the same on any processor.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from dpfl_mpi import streams

ENTRIES = 128  # bytes of a sketch; up to 1024 sums of products stay below 2^24
COMPARED_CLIENTS = 16  # with all others, at a time


def comparison_bytes(n: int) -> int:
    """Return the memory in which sketches of n clients are compared: 83 MB for 10^5."""
    return n * ((1 + 4) * ENTRIES + (4 + 8) * COMPARED_CLIENTS)


def sketches(
    rows_KD: Tensor, start_D: Tensor, active: np.ndarray, seed: int, entries: int = ENTRIES
) -> np.ndarray:
    """Return sketches of rows - `start_D`, int8 `[K, entries]`; 0 where not `active` `[K]`."""
    out = np.zeros((len(rows_KD), entries), np.int8)
    rng = streams.stream(seed, streams.SKETCH, 0, 0)
    drawn = rng.integers(0, 2 * entries, len(start_D))
    place, sign = drawn % entries, np.where(drawn < entries, 1.0, -1.0)
    for i in np.flatnonzero(active):
        moved = (rows_KD[i] - start_D).detach().cpu().numpy()
        sums = np.bincount(place, sign * moved, entries)
        out[i] = np.rint(127 * (sums / max(abs(sums).max(), np.finfo(float).tiny)))
    return out


def nearest(
    ids: np.ndarray, sketches_NE: np.ndarray, candidates: Callable[[int], np.ndarray], most: int
) -> list[np.ndarray]:
    """Return for each of the clients `ids` the `most` candidates of largest cosine, ascending.

    Of equal ones the smaller numbers are taken.
    """
    rows, out = sketches_NE.astype(np.float32), []
    squares = np.maximum(np.einsum("ne,ne->n", rows, rows), 1).astype(np.float64)
    length = np.sqrt(squares)
    for now in np.split(ids, range(COMPARED_CLIENTS, len(ids), COMPARED_CLIENTS)):
        # cosines times k's own length
        for k, cosine in zip(now, (rows[now] @ rows.T) / length, strict=True):
            found = candidates(int(k))
            value, least = cosine[found], max(0, len(found) - most)
            edge = np.partition(value, least)[least] if least else -np.inf
            equal = np.flatnonzero(value == edge)[: most - int((value > edge).sum())]
            out.append(np.sort(np.append(found[value > edge], found[equal])))
    return out
