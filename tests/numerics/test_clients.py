"""Keyed streams, batches and augmentation, against plain loops over images."""

import zlib

import h5py
import numpy as np
import pytest
import torch
from launch import federation

from dpfl_mpi import streams

BASE = {"dataset": "image_folder", "clients": 6, "batch_size": 8, "seed": 3, "classes_per_client": 2}


@pytest.fixture(scope="module")
def plain(digits_file):
    fields = BASE | {"data": str(digits_file), "model": "mlp", "augment": False, "classes_per_client": 3}
    with federation(fields) as fed:
        yield fed


@pytest.fixture(scope="module")
def augmented(colour_file):
    with federation(BASE | {"data": str(colour_file), "augment": True}) as fed:
        yield fed


def test_a_stream_depends_on_its_key_alone():
    first = streams.stream(1, streams.ORDER, 2, 3).random(4)
    streams.stream(1, streams.ORDER, 2, 4).random(1000)
    assert np.array_equal(first, streams.stream(1, streams.ORDER, 2, 3).random(4))
    others = (0, streams.ORDER, 2, 3), (1, streams.AUGMENT, 2, 3), (1, streams.ORDER, 3, 3), (1, streams.ORDER, 2, 2)
    for key in others:
        assert not np.array_equal(first, streams.stream(*key).random(4))
    purposes = [streams.INIT, streams.ORDER, streams.AUGMENT, streams.CANDIDATES, streams.COIN]
    assert purposes == [1, 2, 3, 4, 5]  # part of every result's numbers: a purpose never changes its number
    # a pinned value: the generator behind all numbers has not changed
    twin = np.random.Generator(np.random.Philox(np.random.SeedSequence((42, 2, 7, 0))))
    assert np.array_equal(streams.stream(42, streams.ORDER, 7, 0).permutation(100), twin.permutation(100))
    assert zlib.crc32(streams.stream(42, streams.ORDER, 7, 0).permutation(100).astype("<i8").tobytes()) == 0xE7612BC7


def seen(fed, i, epochs, first):
    batches = fed.clients.batches(slice(i, i + 1), epochs, np.full(len(fed.ids), first), fed.run.batch_size)
    return [(batch.x[0], batch.y[0], batch.weight[0]) for batch in batches]


def test_every_sample_once_an_epoch(plain):
    source_images, source_labels = plain.clients.x, plain.clients.y
    for i in range(len(plain.ids)):
        n, start = int(plain.clients.n_train[i]), int(plain.clients.start[i])
        own = plain.ensemble.normalise(source_images[start : start + n])
        steps = -(-n // 8)
        batches = seen(plain, i, 3, 0)
        assert [len(y) for _, y, _ in batches] == 3 * ([8] * (steps - 1) + [n - 8 * (steps - 1)])
        orders = []
        for e in range(3):
            part = batches[e * steps : (e + 1) * steps]
            x, y = torch.cat([b[0] for b in part]), torch.cat([b[1] for b in part])
            order = streams.stream(3, streams.ORDER, int(plain.ids[i]), e).permutation(n)
            assert torch.equal(x, own[order])
            assert torch.equal(y, source_labels[start : start + n][order])
            assert sorted(order) == list(range(n))
            orders.append(tuple(order))
            assert all(torch.equal(w, torch.full((len(w),), 1 / len(w))) for _, _, w in part)
        assert len(set(orders)) == 3


def crop_and_flip(image, dy, dx, flip):
    """One image, as anyone would write it: 4 zero pixels around, a window of the old size, mirrored or not."""
    h, w, c = image.shape
    padded = np.zeros((h + 8, w + 8, c), image.dtype)
    padded[4 : 4 + h, 4 : 4 + w] = image
    out = np.zeros_like(image)
    for y in range(h):
        for x in range(w):
            out[y, x] = padded[dy + y, dx + (w - 1 - x if flip else x)]
    return out


def test_augmentation_against_a_plain_loop(augmented, colour_file):
    with h5py.File(colour_file) as file:
        images = file["train/images"][:]
    for i in (0, len(augmented.ids) - 1):
        k, n = int(augmented.ids[i]), int(augmented.clients.n_train[i])
        own = images[augmented.partition.of("train", k)]
        expected = []
        for e in (2, 3):
            order = streams.stream(3, streams.ORDER, k, e).permutation(n)
            rng = streams.stream(3, streams.AUGMENT, k, e)
            offsets, flips = rng.integers(0, 9, (2, n)), rng.integers(0, 2, n)
            expected += [crop_and_flip(own[order[s]], *offsets[:, s], flips[s]) for s in range(n)]
            assert len(np.unique(offsets)) == 9 and set(flips) == {0, 1}  # all offsets and both flips occur
        got = torch.cat([x for x, _, _ in seen(augmented, i, 2, 2)])
        assert torch.equal(got, augmented.ensemble.normalise(torch.from_numpy(np.stack(expected))))


def test_scoring_does_not_augment(augmented):
    scored = next(iter(augmented.clients.scored_samples(slice(0, 1), True, 1000)))[0]
    n = int(augmented.clients.n_val[0])
    assert torch.equal(scored[0], augmented.ensemble.normalise(augmented.clients.score_x[:n]))


@pytest.mark.parametrize("name", ["plain", "augmented"])
def test_a_block_is_its_clients_padded(name, request):
    """The batches of a block of all clients are those of each client alone, padding has weight 0, finished clients leave."""
    fed = request.getfixturevalue(name)
    alone = [seen(fed, i, 2, 1) for i in range(len(fed.ids))]
    widths = []
    for step, batch in enumerate(fed.clients.batches(slice(0, len(fed.ids)), 2, np.ones(len(fed.ids), np.int64), 8)):
        widths.append(batch.k)
        for i in range(batch.k):
            x, y, weight = alone[i][step]
            s = len(y)
            assert torch.equal(batch.x[i, :s], x) and torch.equal(batch.y[i, :s], y)
            assert torch.equal(batch.weight[i, :s], weight) and not batch.weight[i, s:].any()
    assert widths == sorted(widths, reverse=True)
    assert [sum(w > i for w in widths) for i in range(len(fed.ids))] == [len(a) for a in alone]
