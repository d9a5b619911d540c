"""Recorded steps against the plain loop: what a GPU replays, called here without a recording."""

import itertools

import numpy as np
import pytest
import torch
from launch import federation

from dpfl_mpi.models import mlp
from dpfl_mpi.numerics.backend import SGD, Backend
from dpfl_mpi.numerics.clients import Batch
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.recorded import RecordedBackend, RecordedSteps, block_sizes


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
        every = [c for r in range(1, most + 1) for c in itertools.combinations(range(1, k + 1), r) if c[-1] == k]
        assert cost(steps, sizes) == min(cost(steps, c) for c in every)


def test_rows_behind_the_batch_keep_every_bit():
    ensemble = Ensemble(mlp.build((8, 8, 1), 10), (0.5,), (0.25,), torch.device("cpu"))
    rec = RecordedSteps(ensemble, np.array([9, 6, 5, 1]), (8, 8, 1), SGD(4, 0.9, 1e-2, 20.0))
    assert rec.sizes == [1, 2, 3, 4]
    torch.manual_seed(0)
    w, m = torch.randn(4, ensemble.width) * 0.1, torch.randn(4, ensemble.width)
    w[:, ensemble.size :] = m[:, ensemble.size :] = 0
    rec.sizes = [4]  # whatever is left runs in a block of four
    rec.load(w, m, lr=0.1)
    batch = Batch(2, 0, torch.randn(2, 4, 8, 8, 1), torch.randint(10, (2, 4)), torch.full((2, 4), 0.25))
    rec.step(batch)
    assert torch.equal(rec.block.w[2:], w[2:]) and torch.equal(rec.block.momentum[2:], m[2:])
    assert bool((rec.block.w[:2] != w[:2]).any(1).all()) and rec.loss[2:].tolist() == [0, 0]
    assert bool((rec.block.w[:, ensemble.size :] == 0).all())


@pytest.mark.parametrize("present", [1.0, 0.5])
@pytest.mark.parametrize("block", [1, 3, 6])
def test_replayed_training_is_the_plain_loop(present, block, digits_file):
    fields = {"dataset": "image_folder", "data": str(digits_file), "model": "mlp", "clients": 6, "batch_size": 8}
    fields |= {"seed": 3, "classes_per_client": 3, "augment": False, "method": "local"}
    fields |= {"participation": present, "lr_decay": 0.5}
    seen = []
    for kind in (Backend, RecordedBackend):
        with federation(fields, block=block) as fed:
            fed.training.backend = kind(fed.ensemble, fed.clients, fed.backend.sgd, block)
            w = fed.common_row()
            for number in (9, 10, 11):
                fed.begin_round(number)
                w = fed.local_opt(w, 2)
            assert kind is Backend or fed.training.backend.recorded
            done = fed.training
            seen.append((w, done.momentum["w"], fed.notes["train_loss"], done.steps, done.epochs))
    (w, m, loss, steps, epochs), (rw, rm, rloss, rsteps, repochs) = seen
    assert float((w - rw).abs().max()) <= 1e-5 and float((m - rm).abs().max()) <= 1e-4
    np.testing.assert_allclose(rloss, loss, rtol=1e-4)
    assert np.array_equal(steps, rsteps) and np.array_equal(epochs, repochs) and steps.max() > steps.min()
