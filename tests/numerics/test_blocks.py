"""Blocks of several clients, and steps recorded for a GPU, called here without a recording.

These are the tests of `numerics/recorded.py`, and of what other files do for it alone.
"""

import itertools

import numpy as np
import pytest
import torch
from launch import federation

from dpfl_mpi.models import mlp
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.clients import Batch
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.recorded import RecordedBackend, RecordedSteps, block_sizes

FIELDS = {"clients": 6, "batch_size": 8, "seed": 3, "classes_per_client": 3, "method": "local"}


def cost(steps, sizes):
    """Row-steps: each step costs the smallest size that holds the clients left."""
    left = [int((steps > t).sum()) for t in range(int(steps.max(initial=0)))]
    return sum(min(s for s in sizes if s >= n) for n in left)


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_block_sizes_are_the_cheapest(most):
    rng = np.random.default_rng(most)
    for _ in range(20):
        k = int(rng.integers(1, 9))
        steps = np.sort(rng.integers(1, 12, k))[::-1]
        sizes = block_sizes(steps, most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == k and len(sizes) <= most
        numbers, counts = range(1, k + 1), range(1, most + 1)
        every = itertools.chain(*(itertools.combinations(numbers, count) for count in counts))
        assert cost(steps, sizes) == min(cost(steps, c) for c in every if c[-1] == k)


def test_rows_behind_the_batch_keep_every_bit():
    ensemble = Ensemble(mlp.build((8, 8, 1), 10), (0.5,), (0.25,), torch.device("cpu"))
    sgd = SGD(4, 0.9, 1e-2, 20.0)
    rec = RecordedSteps(ensemble, np.array([9, 6, 5, 1]), (8, 8, 1), sgd)
    assert rec.sizes == [1, 2, 3, 4]
    torch.manual_seed(0)
    w, m = torch.randn(4, ensemble.width) * 0.1, torch.randn(4, ensemble.width)
    w[:, ensemble.size :] = m[:, ensemble.size :] = 0
    rec.sizes = [4]  # whatever is left runs in a block of four
    rec.load(w, m, lr=0.1)
    x, y = torch.randn(2, 4, 8, 8, 1), torch.randint(10, (2, 4))
    rec.step(Batch(2, 0, x, y, torch.full((2, 4), 0.25)))
    assert torch.equal(rec.w[2:], w[2:]) and torch.equal(rec.momentum[2:], m[2:])
    assert bool((rec.w[:2] != w[:2]).any(1).all()) and rec.loss[2:].tolist() == [0, 0]
    assert bool((rec.w[:, ensemble.size :] == 0).all())


@pytest.mark.parametrize("present", [1.0, 0.5])
@pytest.mark.parametrize("block", [1, 3, 6])
def test_replayed_training_is_the_plain_loop(present, block):
    seen = []
    for kind in (Backend, RecordedBackend):
        fields = FIELDS | {"participation": present, "lr_decay": 0.5}
        with federation(fields, block=block) as fed:
            backend = kind(fed.ensemble, fed.clients, fed.backend.optimiser, block)
            fed.training.backend = backend
            w = fed.common_row()
            for number in (9, 10, 11):
                fed.begin_round(number)
                w = fed.local_opt(w, 2)
            assert kind is Backend or backend.recorded
            done, loss = fed.training, fed.notes["train_loss"]
            seen.append((w, done.momentum["w"], loss, done.steps, done.epochs))
    (w, m, loss, steps, epochs), (rw, rm, rloss, rsteps, repochs) = seen
    assert float((w - rw).abs().max()) <= 1e-5 and float((m - rm).abs().max()) <= 1e-4
    np.testing.assert_allclose(rloss, loss, rtol=1e-4)
    assert np.array_equal(steps, rsteps) and steps.max() > steps.min()
    assert np.array_equal(epochs, repochs)


@pytest.mark.parametrize("augment", [False, True])
def test_a_block_is_its_clients_padded(augment, colour_file):
    """Its batches are those of each client alone; padding weighs 0, finished clients leave."""
    fields = FIELDS | {"dataset": "image_folder", "data": str(colour_file), "augment": augment}
    with federation(fields | {"classes_per_client": 2}) as fed:
        k, first = len(fed.ids), np.ones(len(fed.ids), np.int64)

        def batches(rows):
            return list(fed.clients.batches(rows, 2, first, 8))

        alone, together = [batches(slice(i, i + 1)) for i in range(k)], batches(slice(0, k))
    for step, batch in enumerate(together):
        for i in range(batch.k):
            own = alone[i][step]
            s = own.y.shape[1]
            assert torch.equal(batch.x[i, :s], own.x[0]) and torch.equal(batch.y[i, :s], own.y[0])
            assert torch.equal(batch.weight[i, :s], own.weight[0])
            assert not batch.weight[i, s:].any()
    widths = [batch.k for batch in together]
    assert widths == sorted(widths, reverse=True)
    assert [sum(width > i for width in widths) for i in range(k)] == [len(a) for a in alone]
