"""Rows against plain PyTorch, one nn.Module and one torch.optim.SGD per client; what a GPU replays, called here without a recording."""

import copy
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from launch import federation, refused
from torch import nn
from torch.nn.utils import parameters_to_vector

from dpfl_mpi import streams
from dpfl_mpi.models import cnn, mlp
from dpfl_mpi.numerics import sketches
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.clients import Batch
from dpfl_mpi.numerics.ensemble import (
    Block,
    Ensemble,
    check_fixed_point,
    fixed_point,
    from_fixed_point,
)
from dpfl_mpi.numerics.recorded import RecordedBackend, RecordedSteps, block_sizes
from dpfl_mpi.numerics.sketches import ENTRIES

CPU = torch.device("cpu")
SHAPES = {"cifar": (32, 32, 3), "femnist": (28, 28, 1), "odd": (19, 22, 3)}  # odd: both pools floor


def build(kind):
    if kind == "plain":  # a user's module: no stacked kernels
        norms = nn.GroupNorm(1, 3), nn.GroupNorm(2, 4)
        layers = norms[0], nn.Conv2d(3, 4, 3), norms[1], nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5)
        return nn.Sequential(*layers), (8, 8, 3), 5
    if kind == "mlp":
        return mlp.build((8, 8, 1), 10), (8, 8, 1), 10
    return cnn.build(SHAPES[kind], 10), SHAPES[kind], 10


def row_from(tensors, width):
    flat = parameters_to_vector(tensors).detach()
    return nn.functional.pad(flat, (0, width - len(flat)))


def setup(kind, k, seed=0):
    torch.manual_seed(seed)
    module, shape, classes = build(kind)
    ensemble = Ensemble(module, (0.5,) * shape[2], (0.25,) * shape[2], CPU)
    modules = [copy.deepcopy(module) for _ in range(k)]
    for p in itertools.chain.from_iterable(m.parameters() for m in modules):
        nn.init.uniform_(p, -0.15, 0.15)
    w = torch.stack([row_from(m.parameters(), ensemble.width) for m in modules])
    return ensemble, modules, w, shape, classes


def images(rng, k, s, shape, constant=False):
    """Random uint8 images; `constant`: most of each is one grey, so that all four phases of a pool tie."""
    x = rng.integers(0, 256, (k, s, *shape), dtype=np.uint8)
    if constant:
        x[:, :, 4:, :] = 100
    return torch.from_numpy(x)


@pytest.mark.parametrize("constant", [False, True], ids=["noise", "ties"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ["cifar", "femnist", "odd", "mlp", "plain"])
def test_loss_gradient_and_logits(kind, k, constant):
    ensemble, modules, w, shape, classes = setup(kind, k)
    rng = np.random.default_rng(1)
    x = images(rng, k, 7, shape, constant)
    y = torch.from_numpy(rng.integers(0, classes, (k, 7)))
    weight = torch.full((k, 7), 1 / 7)
    if k > 1:  # padding: the last two samples of client 2 do not exist
        weight[2] = torch.tensor([0.2] * 5 + [0.0] * 2)
    block = Block(ensemble, w)
    with torch.no_grad():
        losses = ensemble.gradient(block, ensemble.normalise(x), y, weight)
        logits = ensemble.logits(ensemble.ready(w), ensemble.prepare(ensemble.normalise(x)))
    for i, m in enumerate(modules):
        real = int((weight[i] > 0).sum())
        out = m(((x[i].float() / 255 - 0.5) / 0.25).permute(0, 3, 1, 2))
        loss = nn.functional.cross_entropy(out[:real], y[i, :real])
        loss.backward()
        g = row_from([p.grad for p in m.parameters()], ensemble.width)
        torch.testing.assert_close(losses[i], loss.detach(), rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(logits[i], out.detach(), rtol=2e-5, atol=3e-6)
        assert float((block.g[i] - g).abs().max()) <= 3e-6 * max(1.0, float(g.abs().max()))
        assert float(g.abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["cifar", "mlp"])
@pytest.mark.parametrize(("init", "numerator"), [("kaiming", 6), ("torch", 1)])
def test_initial_row(kind, init, numerator):
    """Every weight in U(+-sqrt(numerator / fan_in)), reaching close to the bounds; Kaiming's biases are 0."""
    module, shape, _ = build(kind)
    ensemble = Ensemble(module, (0.5,) * shape[2], (0.25,) * shape[2], CPU)
    row = ensemble.initial_row(init, np.random.default_rng(0))
    assert bool((row[ensemble.size :] == 0).all())
    for name, values in ensemble.layers(row[None]).items():
        weight = dict(module.named_parameters())[name.rsplit(".", 1)[0] + ".weight"]
        bound = math.sqrt(numerator / math.prod(weight.shape[1:]))
        if name.endswith("bias") and init == "kaiming":
            assert bool((values == 0).all())
            continue
        assert float(values.abs().max()) <= bound
        if values.numel() > 200:
            assert float(values.max()) > 0.97 * bound and float(values.min()) < -0.97 * bound
            assert abs(float(values.mean())) < 5 * bound / math.sqrt(3 * values.numel())


def test_parameter_counts_of_the_paper():
    assert Ensemble(cnn.build((32, 32, 3), 10), (0.5,) * 3, (0.5,) * 3, CPU).size == 62_006
    grey = Ensemble(cnn.build((28, 28, 1), 10), (0.5,), (0.5,), CPU)
    assert grey.size == 37_586
    assert grey.width % 16 == 0 and 0 <= grey.width - grey.size < 16


def test_buffers_are_held_once():
    """A frozen backbone may be large: what trains and what scores share it, and have parameters of their own."""
    network = mlp.build((4, 4, 1), 3)
    network.register_buffer("base", torch.ones(5))
    made = Ensemble(network, (0.5,), (0.5,), torch.device("cpu"))
    assert made.learner.base is made.module.base is network.base
    assert made.learner.head.weight is not made.module.head.weight


def test_fixed_point():
    rng = np.random.default_rng(0)
    w = torch.from_numpy(rng.normal(0, 10, (50, 33)).astype(np.float32))
    p = torch.from_numpy(rng.dirichlet(np.ones(50)))
    terms = fixed_point(w, p)
    assert terms.dtype == torch.int64
    assert torch.equal(terms.sum(0), terms.flip(0)[:20].sum(0) + terms.flip(0)[20:].sum(0))
    expected = (w.double() * p[:, None]).sum(0)
    assert float((from_fixed_point(terms.sum(0)) - expected).abs().max()) <= 50 * 2.0**-51 + 1e-14
    check_fixed_point(torch.full((1, 4), 4095.9))
    check_fixed_point(torch.zeros(0, 4))
    refused("beyond 4096", check_fixed_point, torch.tensor([[0.0, -4096.0]]))


@pytest.mark.parametrize("kind", ["cifar", "plain"])
def test_bfloat16_rounds_the_products_only(kind):
    ensemble, _, w, shape, classes = setup(kind, 2)
    rounded = Ensemble(build(kind)[0], (0.5,) * shape[2], (0.25,) * shape[2], CPU, precision="bf16")
    rng = np.random.default_rng(1)
    x = ensemble.normalise(images(rng, 2, 16, shape))
    y, weight = torch.from_numpy(rng.integers(0, classes, (2, 16))), torch.full((2, 16), 1 / 16)
    exact, near = Block(ensemble, w), Block(rounded, w.clone())
    with torch.no_grad():
        losses = ensemble.gradient(exact, x, y, weight), rounded.gradient(near, x, y, weight)
    assert near.g.dtype == torch.float32 and not torch.equal(exact.g, near.g)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=0)
    # a flipped maximum of a pool moves a gradient elsewhere
    assert float((exact.g - near.g).norm() / exact.g.norm()) < 0.1
    with torch.no_grad():
        logits = [e.logits(e.ready(w), e.prepare(x)) for e in (ensemble, rounded)]
    assert 0 < float((logits[0] - logits[1]).abs().max()) < 0.05 * float(logits[0].abs().max())


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
    rec.step(Batch(2, 0, torch.randn(2, 4, 8, 8, 1), torch.randint(10, (2, 4)), torch.full((2, 4), 0.25)))
    assert torch.equal(rec.w[2:], w[2:]) and torch.equal(rec.momentum[2:], m[2:])
    assert bool((rec.w[:2] != w[:2]).any(1).all()) and rec.loss[2:].tolist() == [0, 0]
    assert bool((rec.w[:, ensemble.size :] == 0).all())


@pytest.mark.parametrize("present", [1.0, 0.5])
@pytest.mark.parametrize("block", [1, 3, 6])
def test_replayed_training_is_the_plain_loop(present, block):
    fields = {"clients": 6, "batch_size": 8, "seed": 3, "classes_per_client": 3, "method": "local"}
    fields |= {"participation": present, "lr_decay": 0.5}
    seen = []
    for kind in (Backend, RecordedBackend):
        with federation(fields, block=block) as fed:
            fed.training.backend = kind(fed.ensemble, fed.clients, fed.backend.optimiser, block)
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
