"""Keyed streams, mini-batches and augmentation, against plain loops over images."""

import zlib

import h5py
import numpy as np
import pytest
import torch
from launch import federation

from dpfl_mpi import streams

BASE = {"dataset": "image_folder", "clients": 6, "batch_size": 8, "seed": 3}


@pytest.fixture(scope="module")
def plain(digits_file):
    fields = {"data": str(digits_file), "model": "mlp", "augment": False, "classes_per_client": 3}
    with federation(BASE | fields) as fed:
        yield fed


@pytest.fixture(scope="module")
def augmented(colour_file):
    fields = {"data": str(colour_file), "augment": True, "classes_per_client": 2}
    with federation(BASE | fields) as fed:
        yield fed


def test_a_stream_depends_on_its_key_alone():
    def order(seed, client, number):
        return streams.stream(seed, streams.ORDER, client, number)

    first = order(1, 2, 3).random(4)
    order(1, 2, 4).random(1000)
    assert np.array_equal(first, order(1, 2, 3).random(4))
    others = [order(*words) for words in ((0, 2, 3), (1, 3, 3), (1, 2, 2))]
    others.append(streams.stream(1, streams.AUGMENT, 2, 3))
    assert not any(np.array_equal(first, other.random(4)) for other in others)
    names = ["INIT", "ORDER", "AUGMENT", "CANDIDATES", "COIN"]
    purposes = [getattr(streams, name) for name in names]
    assert purposes == [1, 2, 3, 4, 5]  # a purpose never changes its number: results depend on it
    # a pinned value: the generator behind all numbers has not changed
    twin = np.random.Generator(np.random.Philox(np.random.SeedSequence((42, 2, 7, 0))))
    drawn = order(42, 7, 0).permutation(100)
    assert np.array_equal(drawn, twin.permutation(100))
    assert zlib.crc32(drawn.astype("<i8").tobytes()) == 0xE7612BC7


def seen(fed, i, epochs, first):
    batches = fed.clients.batches(i, epochs, first, fed.run.batch_size)
    return [(batch.x, batch.y) for batch in batches]


def test_every_sample_once_an_epoch(plain):
    for i, k in enumerate(plain.ids):
        n, start = int(plain.clients.n_train[i]), int(plain.clients.start[i])
        x = plain.ensemble.normalise(plain.clients.x[start : start + n])
        y = plain.clients.y[start : start + n]
        steps = -(-n // 8)
        batches = seen(plain, i, 3, 0)
        sizes = [8] * (steps - 1) + [n - 8 * (steps - 1)]
        assert [len(labels) for _, labels in batches] == 3 * sizes
        orders = []
        for e in range(3):
            parts = zip(*batches[e * steps : (e + 1) * steps], strict=True)
            images, labels = parts
            order = streams.stream(3, streams.ORDER, int(k), e).permutation(n)
            assert sorted(order) == list(range(n))
            assert torch.equal(torch.cat(images), x[order])
            assert torch.equal(torch.cat(labels), y[order])
            orders.append(tuple(order))
        assert len(set(orders)) == 3


def crop_and_flip(image, dy, dx, flip):
    """As anyone would write it: 4 zeros around, a window of the old size, mirrored or not."""
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
            assert len(np.unique(offsets)) == 9 and set(flips) == {0, 1}  # all of them occur
        twin = augmented.ensemble.normalise(torch.from_numpy(np.stack(expected)))
        assert torch.equal(torch.cat([x for x, _ in seen(augmented, i, 2, 2)]), twin)


def test_schedules_of_several_clients_are_those_of_each(augmented):
    clients = augmented.clients
    first = np.arange(len(clients)) + 2
    for rows in (slice(1, 4), np.array([4, 0])):
        several = clients.schedules(rows, 3, first)
        for j, i in enumerate(np.arange(len(clients))[rows]):
            one = clients.schedules(np.array([i]), 3, first).of(0)
            assert one[0].shape == (3, clients.n_train[i])
            assert all(map(np.array_equal, several.of(j), one))


def test_scoring_does_not_augment(augmented):
    clients = augmented.clients
    scored, _ = next(clients.scored_samples(0, True, 1000))
    own = clients.score_x[: int(clients.n_val[0])]
    assert torch.equal(scored, augmented.ensemble.normalise(own))
