"""Whose models are most alike, by sketches of a byte per entry that clients send in place of models (--candidates, `nearest`).

A sketch is a count sketch (Charikar, Chen and Farach-Colton, ICALP 2002) of what a client has learnt: each weight goes, with a sign, into one of a few
sums. Cosines of sketches come near those of the rows. Sums go by the weights' order, and products of the sketches are small whole numbers, exact in
float32 in any order: so the same bits on any processor and number of ranks.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from dpfl_mpi import streams

ENTRIES = 128  # of a sketch; up to 1024 sums of products stay below 2^24
COMPARED_CLIENTS = 16  # clients that are compared with all others at a time


def comparison_bytes(n: int) -> int:
    """Return the bytes in which the sketches of n clients are compared, as int8, float32 and cosines: 83 MB for 10^5 clients."""
    return n * ((1 + 4) * ENTRIES + (4 + 8) * COMPARED_CLIENTS)


def sketches(rows_KD: Tensor, start_D: Tensor, active: np.ndarray, seed: int, entries: int = ENTRIES) -> np.ndarray:
    """Return sketches of how far rows are from `start_D`, int8 `[K, E]` of E `entries`; those of rows that are not `active` `[K]` are 0."""
    out = np.zeros((len(rows_KD), entries), np.int8)
    drawn = streams.stream(seed, streams.SKETCH, 0, 0).integers(0, 2 * entries, len(start_D))
    place, sign = drawn % entries, np.where(drawn < entries, 1.0, -1.0)
    for i in np.flatnonzero(active):
        moved = (rows_KD[i] - start_D).detach().cpu().numpy()
        sums = np.bincount(place, sign * moved, entries)
        out[i] = np.rint(127 * (sums / max(abs(sums).max(), np.finfo(float).tiny)))
    return out


def nearest(
    ids: np.ndarray, sketches_NE: np.ndarray, candidates: Callable[[int], np.ndarray], most: int
) -> list[np.ndarray]:
    """Return for each of the clients `ids` the `most` of its candidates with the largest cosine, ascending; of equal ones the smaller numbers."""
    whole, out = sketches_NE.astype(np.float32), []
    length = np.sqrt(np.maximum(np.einsum("ne,ne->n", whole, whole), 1).astype(np.float64))
    for now in np.split(ids, range(COMPARED_CLIENTS, len(ids), COMPARED_CLIENTS)):
        for k, cosine in zip(now, (whole[now] @ whole.T) / length, strict=True):  # times its own length
            near = candidates(int(k))
            value, least = cosine[near], max(0, len(near) - most)
            edge = np.partition(value, least)[least] if least else -np.inf
            equal = np.flatnonzero(value == edge)[: most - int((value > edge).sum())]
            out.append(np.sort(np.append(near[value > edge], near[equal])))
    return out
