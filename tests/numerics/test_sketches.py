"""Sketches and the nearest of them, against plain Python."""

from fractions import Fraction

import numpy as np
import torch

from dpfl_mpi import streams
from dpfl_mpi.numerics import sketches
from dpfl_mpi.numerics.sketches import ENTRIES


def twin_sketch(row, start, seed):
    sums, drawn = [0.0] * ENTRIES, streams.stream(seed, streams.SKETCH, 0, 0).integers(0, 2 * ENTRIES, len(row))
    for place, a, b in zip(drawn.tolist(), row, start, strict=True):
        sums[place % ENTRIES] += float(a - b) * (1 if place < ENTRIES else -1)
    largest = max(map(abs, sums))
    return [round(127 * (s / largest)) if largest else 0 for s in sums]


def alike(a, b):
    """The square of the cosine with its sign, without the length of a: exact."""
    inner, square = (sum(x * y for x, y in zip(c, b, strict=True)) for c in (a, b))
    return Fraction(inner * abs(inner), max(square, 1))


def test_sketches_and_who_is_nearest():
    rng = np.random.default_rng(0)
    start = torch.from_numpy(rng.standard_normal(700).astype(np.float32))
    rows = start + torch.from_numpy((rng.standard_normal((40, 700)) + rng.standard_normal(700)).astype(np.float32))
    rows[[5, 9, 30]] = rows[2].clone()  # equal ones go by their numbers
    rows[7] = start  # it has learnt nothing
    active = np.arange(40) != 11
    told = sketches.sketches(rows, start, active, 3)
    assert told.dtype == np.int8 and (np.abs(told[active & (np.arange(40) != 7)]).max(1) == 127).all()
    expected = [twin_sketch(row, start.numpy(), 3) if k != 11 else [0] * ENTRIES for k, row in enumerate(rows.numpy())]
    assert told.tolist() == expected
    ids = rng.permutation(40)[:35]  # in slices
    among = {k: np.flatnonzero((np.arange(40) != k) & (rng.random(40) < 0.8)) for k in range(40)}
    for most in (1, 2, 7, 60):
        for k, found in zip(ids, sketches.nearest(ids, told, among.__getitem__, most), strict=True):
            order = sorted(among[k].tolist(), key=lambda j, own=expected[k]: (-alike(own, expected[j]), j))
            assert found.tolist() == sorted(order[:most])
