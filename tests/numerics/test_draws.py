"""The draws of clients' epochs in C, number for number against NumPy's generators."""

import numpy as np
import pytest

from dpfl_mpi import streams
from dpfl_mpi.numerics import draws

SEEDS = [0, 42, 2**32 - 1, 2**32, 3 * 2**40 + 5, 2**64 - 1, 2**100 + 2**64, 7 << 200]
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 255, 256, 257, 400, 512, 1023, 1024, 1025]


@pytest.fixture(params=["C", "NumPy"])
def drawn_by(request, monkeypatch):
    """The library, and what draws where it cannot be loaded."""
    if request.param == "NumPy":
        monkeypatch.setattr(draws, "_library", lambda: None)
    elif draws._library() is None:
        pytest.skip("the kernels are not built here")
    return request.param


def compare(seed, clients, first, sizes, epochs, augment):
    """Draw schedules, compare each with NumPy's streams, and return how many numbers that were."""
    n, count = np.array(sizes, np.int64), 0
    start = np.cumsum(n) - n
    given = np.array(clients, np.int64), np.array(first, np.int64), start, n
    out = draws.schedules(seed, *given, epochs, augment)
    assert out.order.dtype == np.int32 and out.crops.dtype == np.uint8
    assert len(out.crops) == 3 * len(out.order) == 3 * epochs * n.sum()
    for j, (client, size) in enumerate(zip(clients, sizes, strict=True)):
        order, crops = out.of(j)
        assert order.shape == (epochs, size) and crops.shape == (3, epochs, size)
        for e in range(epochs):
            rng = streams.stream(seed, streams.ORDER, client, first[j] + e)
            assert np.array_equal(order[e], start[j] + rng.permutation(size))
            expected = np.zeros((3, size), np.uint8)
            if augment:
                rng = streams.stream(seed, streams.AUGMENT, client, first[j] + e)
                corners, flips = rng.integers(0, draws.CORNERS, (2, size)), rng.integers(0, 2, size)
                expected = np.concatenate([corners, flips[None]]) % 256
            assert np.array_equal(crops[:, e], expected)
        count += order.size + crops.size
    return count


def test_schedules(drawn_by):
    """Of every number of images, seeds and counters of one word and of more, many clients."""
    rng, count = np.random.default_rng(0), 0
    for seed in SEEDS:
        clients = rng.permutation(len(SIZES)).tolist()
        clients[:3] = 2**32 - 1, 2**32, 2**62 + 3
        first = rng.integers(0, 50, len(SIZES)).tolist()
        first[2:5] = 2**32 - 2, 2**31, 2**62  # the first one goes on to a second word
        count += compare(seed, clients, first, SIZES, 4, True)
    many = rng.integers(0, 700, 300).tolist()
    count += compare(3, range(300), [5] * 300, many, 2, True)
    compare(3, range(300), [5] * 300, many, 2, False)
    count += compare(1, [6, 7, 8], [0, 9, 1], [2**17, 2**18 + 1, 99_999], 1, True)
    assert count > 10**6
    for nothing in ([], [0, 0]):
        assert compare(1, range(len(nothing)), nothing, nothing, 3, True) == 0
    assert compare(1, [4], [0], [5], 0, True) == 0


def test_numbers_that_are_drawn_again(drawn_by, monkeypatch):
    """A bound of 9 hardly ever refuses a number; this one refuses a quarter of them."""
    monkeypatch.setattr(draws, "CORNERS", 3 * 2**30)
    compare(5, [1, 2], [3, 4], [1000, 1001], 3, True)


def test_dropout_keys(drawn_by):
    steps, first = np.array([0, 1, 13, 31, 32, 33, 64, 700]), np.arange(8) + 2**32 - 3
    clients, count = np.arange(8)[::-1] * 1000, 0
    for seed in SEEDS:
        out = draws.dropout_keys(seed, clients, first, steps, 3)
        assert out.dtype == np.int64 and out.shape == (8, 3 * 700)
        for j, row in enumerate(out):
            epochs = range(first[j], first[j] + 3)
            keys = (streams.stream(seed, streams.DROPOUT, int(clients[j]), e) for e in epochs)
            expected = [rng.integers(0, 2**63, steps[j]) for rng in keys]
            assert np.array_equal(row[: 3 * steps[j]], np.concatenate(expected))
            assert not row[3 * steps[j] :].any()
            count += len(row)
    assert count > 10**5
    none = np.zeros(0, np.int64)
    assert draws.dropout_keys(1, none, none, none, 3).shape == (0, 0)
