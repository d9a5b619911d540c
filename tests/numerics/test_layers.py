"""Each kind of layer in C against PyTorch's gradient in float64, alone and in random networks, and to the bit in every form."""

import contextlib
import random
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from launch import refused
from test_lanes import Setting, distance, numbers
from torch import nn
from torch.nn import functional

from dpfl_mpi.models import cnn, mlp, resnet, text
from dpfl_mpi.numerics import native
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.ensemble import Block
from dpfl_mpi.numerics.native import MiniBatch, Native
from dpfl_mpi.numerics.native_backend import check_against_pytorch, try_native

CLASSES = 5
conv = nn.Conv2d
IMAGE, LINES, VECTOR, TOKENS = ((9, 10, 3), "uint8"), ((1, 33, 4), "float32"), ((22,), "float32"), ((7,), "int32")


class Forward(nn.Module):
    """A module whose forward is a function of itself and the sample."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def of(kind, function, **parts):
    """A case of NETS: a `Forward`, and its samples."""
    return lambda shape: Forward(function, **parts), kind


def head(kind, *layers, pooled=True):
    """A case of NETS: layers, then a mean over the pixels or a flat vector, and a head, whose inputs are found by a trial; its samples."""
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity(), nn.Flatten())

    def build(shape):
        x = torch.zeros(2, *shape)
        return nn.Sequential(body, nn.Linear(body(x.movedim(-1, 1) if x.dim() == 4 else x).shape[1], CLASSES))

    return build, kind


def split(s, x):
    a, b = s.c(x).chunk(2, 1)
    return s.h((a * b.sigmoid() - a / 3).transpose(1, 2).flatten(1))


def lines(x):
    return x.squeeze(2).transpose(1, 2)


def attend(s, t):
    x = (s.e(t % 13) + s.place) * s.gain
    q = s.f(x).view(len(x), 7, 3, 4).transpose(1, 2)
    y = functional.scaled_dot_product_attention(q, q, x.view(len(x), 7, 3, 4).transpose(1, 2))
    y = y.transpose(1, 2).reshape(len(x), 7, 12)
    here = (t > 0)[..., None].float()
    return s.h((y * here).sum(1) / here.sum(1).clamp(min=1))


torch.manual_seed(0)  # what is no weight of a dense layer or convolution stays as it is made here
NETS = {
    "dense": head(IMAGE, nn.Flatten(), nn.Linear(270, 33), nn.ReLU(), nn.Linear(33, 9), nn.Tanh(), pooled=False),
    "lines of one byte": head(((3, 1, 1), "uint8"), nn.Flatten(), nn.Linear(3, 9), nn.ReLU(), pooled=False),
    "padding": head(IMAGE, conv(3, 7, 3, padding=1), nn.ReLU(), conv(7, 6, 3, padding=1)),
    "stride": head(IMAGE, conv(3, 7, 3, 2, 1), nn.ReLU(), conv(7, 6, 3, 2)),
    "a stride beyond the kernel": head(IMAGE, conv(3, 4, 1, 2), nn.GELU(), conv(4, 6, 2, 3)),
    "dilation": head(
        IMAGE, conv(3, 7, 3, 1, 2, 2), nn.LeakyReLU(0.1), conv(7, 6, (2, 3), (1, 2), (1, 0), (2, 1)), pooled=False,
    ),
    "groups": head(
        IMAGE, conv(3, 8, 3, padding="same", bias=False), nn.SiLU(), conv(8, 8, 3, groups=8, padding=1), conv(8, 6, 1),
        nn.GELU(), conv(6, 6, 5, 2, 2, groups=2),
    ),
    "pools": head(
        IMAGE, conv(3, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.Sigmoid(), nn.AvgPool2d(2, 1, 1),
        nn.AdaptiveAvgPool2d((3, 2)), pooled=False,
    ),
    "pools that round up": head(
        IMAGE, conv(3, 8, 3, padding=1), nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False), nn.AdaptiveMaxPool2d(2), pooled=False,
    ),
    "GroupNorm": head(
        IMAGE, conv(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), conv(8, 8, 3, padding=1), nn.GroupNorm(2, 8),
    ),
    "InstanceNorm, LayerNorm": head(
        IMAGE, conv(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU6(), conv(8, 4, 3),
        nn.LayerNorm([4, 7, 8]), nn.GELU("tanh"), nn.Flatten(), nn.LayerNorm(224), pooled=False,
    ),
    "a norm of the sample, which has a bias alone": of(
        IMAGE, lambda s, x: s.h(functional.layer_norm(x.flatten(1), (270,), None, s.b)), b=nn.Parameter(torch.randn(270)), h=nn.Linear(270, CLASSES),
    ),
    "residual": of(
        IMAGE, lambda s, x: s.h((lambda y: y + s.c(y).relu())(s.a(x)).relu().mean((2, 3))),
        a=conv(3, 8, 3, padding=1), c=conv(8, 8, 3, padding=1), h=nn.Linear(8, CLASSES),
    ),
    "cat": of(
        IMAGE, lambda s, x: s.h((lambda y: torch.cat([y, s.c(y), s.d(y).sigmoid()], 1))(s.a(x).relu()).flatten(1)),
        a=conv(3, 8, 3, padding=1), c=conv(8, 4, 3, padding=1), d=conv(8, 3, 1), h=nn.Linear(1350, CLASSES),
    ),
    "gates of channels": of(
        IMAGE, lambda s, x: s.h(s.c((lambda y: y * s.f(y.mean((2, 3))).sigmoid()[:, :, None, None])(s.a(x))).mean((2, 3))),
        a=conv(3, 8, 3, padding=1), f=nn.Linear(8, 8), c=conv(8, 8, 3, padding=1), h=nn.Linear(8, CLASSES),
    ),
    "chunks": of(IMAGE, split, c=conv(3, 8, 3), h=nn.Linear(4 * 7 * 8, CLASSES)),
    "stage": head(
        IMAGE, conv(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), conv(6, 8, 3, padding=1), nn.ReLU(), pooled=False,
    ),
    "a view between a convolution and its pool": of(
        IMAGE, lambda s, x: s.h(functional.max_pool2d(s.c(x).relu().reshape(len(x), 12, 3, 5), 2).flatten(1)),
        c=conv(3, 6, 5), h=nn.Linear(24, CLASSES),
    ),
    "ReLU6 of what is 0": head(IMAGE, conv(3, 8, 1, padding=1, bias=False), nn.ReLU6(), conv(8, 6, 3)),
    "a scalar that learns": of(
        IMAGE, lambda s, x: s.h(x.flatten(1)) * s.g, h=nn.Linear(270, CLASSES), g=nn.Parameter(torch.tensor(1.5))
    ),
    "one axis": of(
        LINES, lambda s, x: s.h(functional.max_pool1d(s.n(s.b(s.a(x.squeeze(2)))).relu(), 2).flatten(1)),
        a=nn.Conv1d(4, 8, 5, padding=2), b=nn.Conv1d(8, 12, 3, 2), n=nn.GroupNorm(4, 12), h=nn.Linear(96, CLASSES),
    ),
    "vector": head(
        VECTOR, nn.Linear(22, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 30), nn.Hardtanh(-0.5, 0.5), pooled=False,
    ),
    "attention": of(
        TOKENS, attend, e=nn.Embedding(17, 12, padding_idx=0), f=nn.Linear(12, 12), h=nn.Linear(12, CLASSES),
        place=nn.Parameter(torch.randn(7, 12)), gain=nn.Parameter(torch.ones(12)),
    ),
    "padding around what is no convolution": of(
        TOKENS, lambda s, x: s.h(s.c((lambda y: (y @ y.transpose(2, 3)).softmax(3))(s.a(s.e(x).unsqueeze(1)))).mean((2, 3))),
        e=nn.Embedding(17, 12), a=conv(1, 1, 3, padding=1), c=conv(1, 4, 3, padding=1), h=nn.Linear(4, CLASSES),
    ),
    "nn.MultiheadAttention": of(
        LINES, lambda s, x: s.h((lambda y, z: s.m(y, z, z)[0])(s.a(lines(x)), s.b(lines(x))).mean(1)),
        a=nn.Linear(4, 12), b=nn.Linear(4, 12), m=nn.MultiheadAttention(12, 3, bias=False, batch_first=True), h=nn.Linear(12, CLASSES),
    ),
    "nn.TransformerEncoderLayer": of(
        LINES, lambda s, x: s.h(s.m(s.a(lines(x))).mean(1)),
        a=nn.Linear(4, 12), m=nn.TransformerEncoderLayer(12, 3, 24, 0.0, batch_first=True), h=nn.Linear(12, CLASSES),
    ),
    "pools of one axis": of(
        LINES, lambda s, x: s.h((lambda y: torch.cat([p(y) for p in s.pools], 2))(s.b(s.n(s.a(x.squeeze(2))))).flatten(1)),
        a=nn.Conv1d(4, 8, 5, 2, 3, 2, groups=2), n=nn.InstanceNorm1d(8), b=nn.Conv1d(8, 4, 3, padding="same", dilation=2, groups=4),
        pools=nn.ModuleList([nn.AvgPool1d(3, 2, 1), nn.AdaptiveAvgPool1d(7), nn.AdaptiveMaxPool1d(5), nn.MaxPool1d(3, 2)]),
        h=nn.Linear(4 * 27, CLASSES),
    ),
    "softmax over lines": of(
        LINES, lambda s, x: s.h((lambda y: y * s.q(y).softmax(1) * s.g)(s.a(lines(x)).tanh()).sum(1)),
        a=nn.Linear(4, 10), q=nn.Linear(10, 1), g=nn.Parameter(torch.ones(1)), h=nn.Linear(10, CLASSES),
    ),
    "text": (lambda shape: text.build(shape, CLASSES, 17, 16, 4, 0, 0.0), TOKENS),
    "CNN": (lambda shape: cnn.build(shape, CLASSES), ((32, 32, 3), "uint8")),
    "CNN, grey": (lambda shape: cnn.build(shape, CLASSES), ((28, 28, 1), "uint8")),
    "CNN, both pools floor": (lambda shape: cnn.build(shape, CLASSES), ((17, 18, 3), "uint8")),
    "perceptron": (lambda shape: mlp.build(shape, CLASSES), ((8, 8, 1), "uint8")),
    "resnet": (lambda shape: resnet.build(shape, CLASSES, "8,12", 1, 4), IMAGE),
}  # fmt: skip


def trial(build, kind, seed=0):
    """A net with random weights and 24 samples."""
    torch.manual_seed(seed)
    return Setting(build(kind[0]), kind[0], CLASSES, seed, m=24, dtype=kind[1])


def compare(net):
    """Assert that the kernels' gradient is as close to float64's as PyTorch's, and the same in every form."""
    order = numbers(net.rng.permutation(net.m)[:19])
    (loss, exact, logits), (_, single, _) = net.autograd(order), net.autograd(order, torch.float32)
    found = []
    for form in native.forms():
        net.native = Native(net.ensemble, net.shape, form)
        net.gradient(order[::-1].copy(), row=net.row * -2)  # a work space that other numbers were computed in
        scores = net.native.score(torch.stack([net.row, net.row * 0.9]), net.images, order, logits=True)
        found.append((*net.gradient(order), torch.from_numpy(scores.logits)))
        assert found[-1][0] == found[0][0] and all(map(torch.equal, found[-1][1:], found[0][1:])), form
    assert distance(found[0][1], exact) < max(1e-6, 3 * distance(single, exact))
    assert found[0][0] == pytest.approx(loss, rel=2e-6, abs=1e-6)
    torch.testing.assert_close(found[0][2][0].double(), logits, rtol=1e-5, atol=1e-5)
    assert float(exact.norm()) > 1e-3


@pytest.mark.parametrize("name", NETS)
def test_gradient_of_each_layer(name):
    compare(trial(*NETS[name]))


def convolution(draw, channels):
    kernel, stride, dilation = draw.choice([1, 2, 3, 5]), draw.choice([1, 1, 2]), draw.choice([1, 1, 2])
    padding, groups = draw.randint(0, (kernel - 1) * dilation), draw.choice([1, 1, 2])
    return conv(channels, draw.choice([4, 6, 8]), kernel, stride, padding, dilation, groups, draw.random() < 0.7)


def normed(draw, channels):
    return nn.GroupNorm(draw.choice([1, 2]), channels, affine=draw.random() < 0.5)


OF_ONE = [  # what a random program does with a value [B, C, H, W], and with two of one shape
    lambda x: x / 2 - 1,
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: x[:, ::2, 1:],
    lambda x: x.transpose(2, 3),
    lambda x: x.transpose(1, 2),
    lambda x: x.flatten(2).unsqueeze(2),
    lambda x: x - x.mean(1, keepdim=True),
    nn.ReLU(),
    nn.GELU(),
    nn.SiLU(),
    nn.Tanh(),
    nn.Softmax(3),
    nn.MaxPool2d(3, 2, 1),
    nn.AvgPool2d(3, 1, 1),
    nn.AdaptiveAvgPool2d((4, 3)),
    *[convolution] * 10,
    *[normed] * 3,
]
OF_TWO = [
    lambda x, y: x * y, lambda x, y: x / (2 + y.tanh()) - y / 3, lambda x, y: torch.cat([x, y], 1), lambda x, y: x @ y.transpose(2, 3),
    lambda x, y: x * y.mean((2, 3), keepdim=True).sigmoid(), lambda x, y: functional.scaled_dot_product_attention(x, y, y),
]  # fmt: skip


class Program(nn.Module):
    """Random steps of earlier values, by a fixed seed. The head reads the values that no step reads."""

    def __init__(self, seed, shape):
        super().__init__()
        draw, values, self.steps, self.parts = random.Random(seed), [torch.zeros(2, 3, *shape[:2])], [], nn.ModuleList()
        while len(values) < 8:
            x, y = draw.choices(range(len(values)), range(1, len(values) + 1), k=2)  # the latest the most often
            two = draw.random() < 0.3 and values[x].shape == values[y].shape
            step, reads = draw.choice(OF_TWO if two else OF_ONE), ([x, y] if two else [x])
            with contextlib.suppress(RuntimeError, ValueError):  # where the shape does not fit
                step = step(draw, values[x].shape[1]) if step in (convolution, normed) else step
                value = step(*(values[i] for i in reads))
                if 20 < value[0].numel() < 3000:
                    values.append(value), self.steps.append((step, reads))
        self.parts.extend(step for step, _ in self.steps if isinstance(step, nn.Module))
        self.ends = sorted(set(range(1, 8)) - {i for _, reads in self.steps for i in reads})
        self.head = nn.Linear(sum(values[i][0].numel() for i in self.ends), CLASSES)

    def forward(self, x):
        values = [x]
        for step, reads in self.steps:
            values.append(step(*(values[i] for i in reads)))
        return self.head(torch.cat([values[i].flatten(1) for i in self.ends], 1))


@pytest.mark.parametrize("seed", range(40))
def test_gradient_of_random_programs(seed):
    side = random.Random(seed + 1000)
    kind = (side.randint(7, 12), side.randint(7, 12), 3), "uint8"
    compare(trial(lambda shape: Program(seed, shape), kind, seed))


@pytest.mark.parametrize("form", native.forms())
def test_dropout_draws_as_keyed(form):
    """Masks by key, step and layer: the gradient is `Ensemble.gradient`'s with the same key; scoring drops nothing."""
    body = conv(3, 8, 3), nn.Dropout(0.3), nn.ReLU(), nn.Dropout2d(0.5), conv(8, 6, 3)
    net = trial(*head(IMAGE, *body, pooled=False))
    net.native, key, g = Native(net.ensemble, net.shape, form), np.array([2**62 + 12345]), torch.zeros_like(net.row)
    check_against_pytorch(net.native, net.ensemble)
    order, block = numbers(net.rng.permutation(net.m)[:19]), Block(net.ensemble, net.row[None].clone())
    x = net.ensemble.normalise(torch.from_numpy(net.pixels[order])[None])
    y, weight = torch.from_numpy(net.labels[order])[None], torch.full((1, 19), 1 / 19)
    with torch.no_grad():
        want = float(net.ensemble.gradient(block, x, y, weight, torch.from_numpy(key)))
    assert net.native.gradient(net.row, g, MiniBatch(net.images, order, keys=key)) == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(g, block.g[0], rtol=1e-4, atol=1e-6)
    assert net.gradient(order)[0] != pytest.approx(want, rel=1e-3)
    scores = net.native.score(net.row[None], net.images, order, logits=True).logits[0]
    torch.testing.assert_close(torch.from_numpy(scores), net.autograd(order, torch.float32)[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "function", "sentence"), [
    (TOKENS, lambda s, t: s.h(s.e(t + 1).mean(1)), "arithmetic with tokens"),
    (TOKENS, lambda s, t: s.h(s.e(t % 20).mean(1)), "an embedding of 17 rows, which tokens may exceed"),
    (TOKENS, lambda s, t: s.h((s.e(t) * (t != 3)[..., None]).mean(1)), "a comparison with another token than 0"),
    (TOKENS, lambda s, t: s.h(s.e(t[:, 1:].contiguous()).mean(1)), "an embedding of 17 rows, which tokens may exceed"),
    (TOKENS, lambda s, t: s.h(s.e(t).where((t > 0)[..., None], 0.0).mean(1)), "where of two tensors"),
    (TOKENS, lambda s, t: s.h((s.e(t) * ((t > 0) + (t > 0))[..., None]).mean(1)), "add of yes and no"),
    (IMAGE, lambda s, x: s.h(x.flatten(1).cumsum(1)), "no layer for cumsum"),
    (IMAGE, lambda s, x: s.h((x - x.mean(0)).flatten(1)), "no layer for a sum over samples"),
    (IMAGE, lambda s, x: s.h(x.flatten(1)) if x.sum() > 0 else s.h(-x.flatten(1)), "no layer for "),
    (IMAGE, lambda s, x: s.h(functional.relu(x.flatten(1)) if s.training else x.flatten(1)), "does other things in training"),
    (IMAGE, lambda s, x: functional.linear(x.flatten(1), s.h.weight * 2), "no layer for a weight that is computed"),
    (IMAGE, lambda s, x: s.h(x.flatten(1)) + s.h(x.flatten(1) * 2), "no layer for a weight that is used twice in h"),
    (IMAGE, lambda s, x: s.h(x.flatten(1)) + s.h(x.flatten(1)).detach(), "no layer for a weight that is used twice in h"),
    (IMAGE, lambda s, x: s.h((x * 2).detach().flatten(1)), "no layer for a gradient that is stopped"),
    (IMAGE, lambda s, x: s.h((x * 2).data.flatten(1)), "no layer for a gradient that is stopped"),
    (IMAGE, lambda s, x: s.h(x.flatten(1)) * (1 // len(x.shape[4:])), "cannot be followed (ZeroDivisionError)"),
])  # fmt: skip
def test_what_has_no_layer_is_named(kind, function, sentence):
    parts = {"e": nn.Embedding(17, 8), "h": nn.Linear(8 if kind is TOKENS else 270, CLASSES)}
    refused(sentence, native.describe, Forward(function, **parts), *kind)


@pytest.mark.parametrize(("name", "sentence"), [
    ("layers.correlations", "no layer for conv of these sizes (ZeroDivisionError) in 0.0"),
    ("layers.back_margin", "cannot be followed (ZeroDivisionError) in 0.0"),
    ("plan.with_stages", "cannot plan Sequential (ZeroDivisionError: "),
])  # fmt: skip
def test_a_mistake_in_the_planning_is_a_sentence(monkeypatch, name, sentence):
    """Of ours: PyTorch then computes the model."""
    fails = lambda *_: 1 / 0  # noqa: E731
    monkeypatch.setattr(f"dpfl_mpi.numerics.lanes.{name}", (lambda *_: fails) if "corr" in name else fails)
    refused(sentence, native.describe, NETS["padding"][0](IMAGE[0]), *IMAGE)


def test_a_plan_that_is_wrong_is_found_before_the_first_step(monkeypatch):
    """Here a gate's gradient is not added to what is there: PyTorch then computes the model."""
    net = trial(*NETS["gates of channels"])
    pixels, labels = torch.from_numpy(net.pixels), torch.from_numpy(net.labels)
    clients = MagicMock(shape=net.shape, x=pixels, y=labels, score_x=pixels, score_y=labels)
    clients.__len__.return_value = 1
    assert try_native("auto", net.ensemble, clients, SGD(16, 0.9, 1e-3, 20.0))[1] == ""
    monkeypatch.setattr(
        "dpfl_mpi.numerics.lanes.plan.adding", lambda ops: [replace(o, adds=0) for o in ops]
    )
    backend, why = try_native("auto", net.ensemble, clients, SGD(16, 0.9, 1e-3, 20.0))
    assert backend is None and why.startswith("the CPU kernels' gradient or score of this model is not PyTorch's")


def test_a_wrong_layer_of_a_small_gradient_is_found():
    """Its gradient is a ten-thousandth of the other layer's, and twice what it is to be. So is a score that is not that of training."""
    parts = {"h": nn.Linear(270, CLASSES), "tiny": nn.Linear(270, CLASSES)}
    net = trial(lambda _: Forward(lambda s, x: s.h(x.flatten(1)) + 1e-4 * s.tiny(x.flatten(1)), **parts), IMAGE)
    check_against_pytorch(net.native, net.ensemble)
    right, first = net.native.gradient, 271 * CLASSES

    def wrong(row, g, batch):
        right(row, g, batch)
        g[first : 2 * first] *= 2

    net.native.gradient = wrong
    refused("gradient or score of this model is not PyTorch's", check_against_pytorch, net.native, net.ensemble)
    net = trial(lambda _: Forward(lambda s, x: s.h(x.flatten(1)) / (1 if s.training else 4), h=parts["h"]), IMAGE)
    refused("gradient or score of this model is not PyTorch's", check_against_pytorch, net.native, net.ensemble)
