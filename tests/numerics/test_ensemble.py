"""Rows against plain PyTorch modules, one per client; exact sums; sketches."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from launch import refused
from torch import nn
from torch.nn.utils import parameters_to_vector

from dpfl_mpi import streams
from dpfl_mpi.models import cnn, mlp
from dpfl_mpi.numerics import ensemble as rows_of
from dpfl_mpi.numerics import sketches
from dpfl_mpi.numerics.ensemble import Ensemble, fixed_point, from_fixed_point
from dpfl_mpi.numerics.sketches import ENTRIES

CPU = torch.device("cpu")


def build(kind):
    if kind == "plain":
        norms = nn.GroupNorm(1, 3), nn.GroupNorm(2, 4)
        head = nn.Flatten(), nn.Linear(4 * 6 * 6, 5)
        return nn.Sequential(norms[0], nn.Conv2d(3, 4, 3), norms[1], nn.Tanh(), *head), (8, 8, 3), 5
    if kind == "mlp":
        return mlp.build((8, 8, 1), 10), (8, 8, 1), 10
    return cnn.build((32, 32, 3), 10), (32, 32, 3), 10


def row_from(tensors, width):
    row = parameters_to_vector(tensors).detach()
    return nn.functional.pad(row, (0, width - len(row)))


def ensemble_of(module, colours, **how):
    return Ensemble(module, (0.5,) * colours, (0.25,) * colours, CPU, **how)


@pytest.mark.parametrize("kind", ["cifar", "mlp"])
@pytest.mark.parametrize(("init", "numerator"), [("kaiming", 6), ("torch", 1)])
def test_initial_row(kind, init, numerator):
    """Weights are U(+-sqrt(numerator / fan_in)), up to their bounds; Kaiming's biases are 0."""
    module, shape, _ = build(kind)
    ensemble = ensemble_of(module, shape[2])
    row = ensemble.initial_row(init, np.random.default_rng(0))
    assert bool((row[ensemble.size :] == 0).all())
    for name, values in ensemble.layers(row[None]).items():
        weight = module.get_submodule(name.rpartition(".")[0]).weight
        bound = math.sqrt(numerator / math.prod(weight.shape[1:]))
        if name.endswith("bias") and init == "kaiming":
            assert bool((values == 0).all())
            continue
        assert float(values.abs().max()) <= bound
        if values.numel() > 200:
            assert float(values.max()) > 0.97 * bound and float(values.min()) < -0.97 * bound
            assert abs(float(values.mean())) < 5 * bound / math.sqrt(3 * values.numel())


def test_parameter_counts_of_the_paper():
    assert ensemble_of(cnn.build((32, 32, 3), 10), 3).size == 62_006
    grey = ensemble_of(cnn.build((28, 28, 1), 10), 1)
    assert grey.size == 37_586
    assert grey.width % 16 == 0 and 0 <= grey.width - grey.size < 16


def test_buffers_exist_once():
    """A frozen backbone may be large: what trains and what scores share it, not their weights."""
    network = mlp.build((4, 4, 1), 3)
    network.register_buffer("base", torch.ones(5))
    made = ensemble_of(network, 1)
    assert made.learner.base is made.module.base is network.base
    assert made.learner.head.weight is not made.module.head.weight


def test_fixed_point():
    rng = np.random.default_rng(0)
    w = torch.from_numpy(rng.normal(0, 10, (50, 33)).astype(np.float32))
    p = torch.from_numpy(rng.dirichlet(np.ones(50)))
    terms = fixed_point(w, p)
    assert terms.dtype == torch.int64
    reverse = terms.flip(0)
    assert torch.equal(terms.sum(0), reverse[:20].sum(0) + reverse[20:].sum(0))
    off = from_fixed_point(terms.sum(0)) - (w.double() * p[:, None]).sum(0)
    assert float(off.abs().max()) <= 50 * 2.0**-51 + 1e-14
    rows_of.check_fixed_point(torch.full((1, 4), 4095.9))
    rows_of.check_fixed_point(torch.zeros(0, 4))
    refused("beyond 4096", rows_of.check_fixed_point, torch.tensor([[0.0, -4096.0]]))


@pytest.mark.parametrize("kind", ["cifar", "plain"])
def test_bfloat16_rounds_the_products_only(kind):
    module, shape, classes = build(kind)
    exact, rounded = (ensemble_of(module, shape[2], precision=p) for p in ("float32", "bf16"))
    rng = np.random.default_rng(1)
    w = exact.initial_row("torch", rng)[None]
    x = exact.normalise(torch.from_numpy(rng.integers(0, 256, (16, *shape), dtype=np.uint8)))
    y = torch.from_numpy(rng.integers(0, classes, 16))
    with torch.no_grad():
        logits = [ensemble.logits(w, x) for ensemble in (exact, rounded)]
    (g, loss), (g_rounded, rounded_loss) = (n.gradient(w[0], x, y) for n in (exact, rounded))
    assert g_rounded.dtype == torch.float32 and not torch.equal(g, g_rounded)
    torch.testing.assert_close(rounded_loss, loss, rtol=2e-2, atol=0)
    # a flipped maximum of a pool moves a gradient elsewhere
    assert float((g - g_rounded).norm() / g.norm()) < 0.1
    off = float((logits[0] - logits[1]).abs().max())
    assert 0 < off < 0.05 * float(logits[0].abs().max())


# sketches -----------------------------------------------------------------------------------------
def twin_sketch(row, start, seed):
    rng = streams.stream(seed, streams.SKETCH, 0, 0)
    sums, drawn = [0.0] * ENTRIES, rng.integers(0, 2 * ENTRIES, len(row))
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
    moved = rng.standard_normal((40, 700)) + rng.standard_normal(700)
    rows = start + torch.from_numpy(moved.astype(np.float32))
    rows[[5, 9, 30]] = rows[2].clone()  # equal ones go by their numbers
    rows[7] = start  # it has learnt nothing
    active = np.arange(40) != 11
    found = sketches.sketches(rows, start, active, 3)
    largest = np.abs(found[active & (np.arange(40) != 7)]).max(1)
    assert found.dtype == np.int8 and (largest == 127).all()
    expected = [twin_sketch(row, start.numpy(), 3) for row in rows.numpy()]
    expected[11] = [0] * ENTRIES
    assert found.tolist() == expected
    ids = rng.permutation(40)[:35]  # in slices
    among = {k: np.flatnonzero((np.arange(40) != k) & (rng.random(40) < 0.8)) for k in range(40)}
    for most in (1, 2, 7, 60):
        nearest = sketches.nearest(ids, found, among.__getitem__, most)
        for k, chosen in zip(ids, nearest, strict=True):

            def by_cosine(j, own=expected[k]):
                return (-alike(own, expected[j]), j)

            assert chosen.tolist() == sorted(sorted(among[k].tolist(), key=by_cosine)[:most])


def test_a_copy_on_a_cpu_draws_what_the_original_does():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 5))
    ensemble = ensemble_of(module, 3)
    ensemble.device = torch.device("cuda")
    here = ensemble.on_cpu()
    assert here is not ensemble and here.device == CPU and here.on_cpu() is here
    w, x, y = torch.rand(here.width), torch.rand(3, 4, 4, 3), torch.tensor([0, 4, 2])
    for number in (5, 6):
        key = torch.tensor(number)
        (g, loss), (g_here, loss_here) = (of.gradient(w, x, y, key) for of in (ensemble, here))
        assert torch.equal(g, g_here) and loss == loss_here and (g == 0).sum() > 5


class Experts(nn.Module):
    """Two layers; a sample's first number says which one it is for."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        if bool((x[:, 0] > 0).all()):
            return self.a(x)
        return self.b(x)


def test_a_layer_that_no_sample_uses_has_a_gradient_of_zeros():
    ensemble = Ensemble(Experts(), (0.0,), (1.0,), CPU, dtype="float32")
    row = row_from(list(ensemble.module.parameters()), ensemble.width)
    x, y = torch.rand(5, 4) + 1, torch.tensor([0, 1, 2, 0, 1])
    g, _ = ensemble.gradient(row, x, y, torch.zeros((), dtype=torch.int64))
    layers = ensemble.row_layers(g)
    assert layers["a.weight"].abs().sum() > 0
    assert not layers["b.weight"].any() and not layers["b.bias"].any()
