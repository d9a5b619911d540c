"""Each kind of layer in C against PyTorch in float64, and to the bit in every form."""

import contextlib
import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from launch import refused
from test_lanes import Setting, distance, numbers
from torch import nn
from torch.nn import functional

from dpfl_mpi.models import cnn, resnet, text
from dpfl_mpi.numerics.cpu import Cpu, forms
from dpfl_mpi.numerics.kernels import describe
from dpfl_mpi.numerics.native_backend import check_against_pytorch, try_native
from dpfl_mpi.numerics.optimiser import SGD

CLASSES = 5
conv = nn.Conv2d
padded = functools.partial(conv, kernel_size=3, padding=1)
IMAGE, LINES = ((9, 10, 3), "uint8"), ((1, 33, 4), "float32")
VECTOR, TOKENS = ((22,), "float32"), ((7,), "int32")


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
    """A case of NETS: a `Forward`, then a dense layer of all that it returns; its samples."""

    def build(shape):
        body = nn.Sequential(Forward(function, **parts), nn.Flatten())
        x = torch.zeros(2, *shape)
        if kind is TOKENS:
            x = x.long()
        features = body(x.movedim(-1, 1) if x.dim() == 4 else x).shape[1]
        return nn.Sequential(body, nn.Linear(features, CLASSES))

    return build, kind


def row(kind, *layers, pooled=False):
    """A case of NETS: layers one after the other, then the means over the pixels if `pooled`."""
    layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity())
    return of(kind, lambda s, x: s.layers(x), layers=layers)


def attend(s, t):
    x = (s.e(t % 13) + s.place) * s.gain
    q = s.f(x).view(len(x), 7, 3, 4).transpose(1, 2)
    y = functional.scaled_dot_product_attention(q, q, x.view(len(x), 7, 3, 4).transpose(1, 2))
    y = y.transpose(1, 2).reshape(len(x), 7, 12)
    here = (t > 0)[..., None].float()
    return (y * here).sum(1) / here.sum(1).clamp(min=1)


def split(s, x):
    a, b = s.c(x).chunk(2, 1)
    return (a * b.sigmoid() - a / 3).transpose(1, 2)


def cats(s, x):
    y = s.a(x).relu()
    return torch.cat([y, s.c(y), s.d(y).sigmoid()], 1)


def residual(s, x):
    y = s.a(x)
    return (y + s.c(y).relu()).relu().mean((2, 3))


def gates(s, x):
    y = s.a(x)
    return s.c(y * s.f(y.mean((2, 3))).sigmoid()[:, :, None, None]).mean((2, 3))


def squares(s, t):
    y = s.a(s.e(t).unsqueeze(1))
    return s.c((y @ y.transpose(2, 3)).softmax(3)).mean((2, 3))


def lines(x):
    return x.squeeze(2).transpose(1, 2)


def multi_head(s, x):
    y, z = s.a(lines(x)), s.b(lines(x))
    return s.m(y, z, z)[0].mean(1)


def pools(s, x):
    y = s.b(s.n(s.a(x.squeeze(2))))
    return torch.cat([pool(y) for pool in s.pools], 2)


def weighted(s, x):
    y = s.a(lines(x)).tanh()
    return (y * s.q(y).softmax(1) * s.g).sum(1)


def vit(s, x):
    y = s.c(x).flatten(2).transpose(1, 2)
    return s.m(torch.cat([s.token.expand(len(x), -1, -1), y], 1) + s.place)[:, 0]


def gpt(s, t):
    x = s.e(t) + s.place(torch.arange(7))
    q, k, v = s.qkv(s.n(x)).view(len(x), 7, 3, 2, 6).permute(2, 0, 3, 1, 4)
    score = (q @ k.transpose(-2, -1)) * 0.4
    share = score.masked_fill(s.mask[:, :, :7, :7] == 0, float("-inf")).softmax(-1)
    return (x + s.o((share @ v).transpose(1, 2).reshape(len(x), 7, 12)))[:, -1]


def masks(s, x):
    y = s.m(s.a(lines(x)[:, :9]).transpose(0, 1) + s.place, mask=s.after, is_causal=True)
    q = y.unflatten(2, (3, 4)).permute(1, 2, 0, 3)
    z = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    z = z + functional.scaled_dot_product_attention(q, z, q, attn_mask=s.some)
    return z + functional.scaled_dot_product_attention(q, q, z, attn_mask=s.bias)


def without_padding(s, t):
    y = s.m(s.e(t), src_key_padding_mask=t == 0) * (t != 0).unsqueeze(-1)
    z = y.where((t != 0).unsqueeze(-1), 2.0)
    return (y.masked_fill((t == 0).unsqueeze(-1), -3.0) + z).mean(1)


def root_mean_square(s, x):
    y = s.a(lines(x))
    return s.n(y) + y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * s.gain


def powers(s, x):
    y = s.a(x)
    return 1 / (y**2 + 1) + (y.square() + 0.5).sqrt() * s.v[::2] - s.v[1::2] / (2 + y.tanh())


def pads(s, x):
    y = s.b(functional.pad(s.a(x), (1, 2, 0, 1), value=0.5))
    y = functional.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))
    return functional.pad(y, (2, 1, 0, 3), mode="replicate")


def recurrent(s, x):
    y = s.a(x).tanh() + x.new_ones(len(x), 1)
    for _ in range(3):
        y = s.h(y).tanh() @ s.w + s.gain * y
    return y.log_softmax(1)


def queries(s, x):
    y, q = s.a(lines(x)), s.f(s.q.repeat(len(x), 1, 1))
    k = y @ s.w.t() + torch.linspace(-1, 1, 33)[:, None]
    return (q @ k.transpose(1, 2)).softmax(-1) @ y


def two_ways(s, t):
    y, (last, _) = s.m(s.e(t))
    return torch.cat([y.mean(1), last[-1], last[-2]], 1)


def states(s, x):
    y, last = s.m(lines(x).transpose(0, 1))
    z, end = s.k(y.transpose(0, 1)[:, :7])
    return torch.cat([y[-1], last[0], z[:, 3], end.squeeze(0)], 1)


def encoder(heads, **settings):
    layer = nn.TransformerEncoderLayer(12, heads, 24, 0.0, **settings)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(12), enable_nested_tensor=False)


torch.manual_seed(0)  # what is no weight of a dense layer or convolution stays as it is made here
NETS = {
    "dense": row(IMAGE, nn.Flatten(), nn.Linear(270, 33), nn.ReLU(), nn.Linear(33, 9), nn.Tanh()),
    "lines of one byte": row(((3, 1, 1), "uint8"), nn.Flatten(), nn.Linear(3, 9), nn.ReLU()),
    "padding": row(IMAGE, padded(3, 7), nn.ReLU(), padded(7, 6), pooled=True),
    "stride": row(IMAGE, conv(3, 7, 3, 2, 1), nn.ReLU(), conv(7, 6, 3, 2), pooled=True),
    "a stride beyond the kernel": row(IMAGE, conv(3, 4, 1, 2), nn.GELU(), conv(4, 6, 2, 3)),
    "dilation": row(IMAGE, conv(3, 7, 3, 1, 2, 2), nn.LeakyReLU(0.1),
        conv(7, 6, (2, 3), (1, 2), (1, 0), (2, 1))),
    "groups": row(IMAGE, conv(3, 8, 3, padding="same", bias=False), nn.SiLU(),
        conv(8, 8, 3, groups=8, padding=1), conv(8, 6, 1), nn.GELU(),
        conv(6, 6, 5, 2, 2, groups=2)),
    "pools": row(IMAGE, padded(3, 8), nn.MaxPool2d(3, 2, 1), nn.Sigmoid(), nn.AvgPool2d(2, 1, 1),
        nn.AdaptiveAvgPool2d((3, 2))),
    "pools that round up": row(IMAGE, padded(3, 8), nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False), nn.AdaptiveMaxPool2d(2)),
    "GroupNorm": row(IMAGE, padded(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), padded(8, 8),
        nn.GroupNorm(2, 8)),
    "InstanceNorm, LayerNorm": row(IMAGE, padded(3, 8), nn.InstanceNorm2d(8, affine=True),
        nn.ReLU6(), conv(8, 4, 3), nn.LayerNorm([4, 7, 8]), nn.GELU("tanh"), nn.Flatten(),
        nn.LayerNorm(224)),
    "a norm of the sample, which has a bias alone": of(IMAGE,
        lambda s, x: functional.layer_norm(x.flatten(1), (270,), None, s.b),
        b=nn.Parameter(torch.randn(270))),
    "residual": of(IMAGE, residual, a=padded(3, 8), c=padded(8, 8)),
    "cat": of(IMAGE, cats, a=padded(3, 8), c=padded(8, 4), d=conv(8, 3, 1)),
    "gates of channels": of(IMAGE, gates, a=padded(3, 8), f=nn.Linear(8, 8), c=padded(8, 8)),
    "chunks": of(IMAGE, split, c=conv(3, 8, 3)),
    "stage": row(IMAGE, conv(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), padded(6, 8), nn.ReLU()),
    "a view between a convolution and its pool": of(IMAGE, c=conv(3, 6, 5),
        function=lambda s, x: functional.max_pool2d(s.c(x).relu().reshape(len(x), 12, 3, 5), 2)),
    "ReLU6 of what is 0": row(IMAGE, conv(3, 8, 1, padding=1, bias=False), nn.ReLU6(),
        conv(8, 6, 3), pooled=True),
    "a scalar that learns": of(IMAGE, lambda s, x: s.a(x.flatten(1)) * s.g, a=nn.Linear(270, 9),
        g=nn.Parameter(torch.tensor(1.5))),
    "one axis": of(LINES, lambda s, x: functional.max_pool1d(s.n(s.b(s.a(x.squeeze(2)))).relu(), 2),
        a=nn.Conv1d(4, 8, 5, padding=2), b=nn.Conv1d(8, 12, 3, 2), n=nn.GroupNorm(4, 12)),
    "vector": row(VECTOR, nn.Linear(22, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 30),
        nn.Hardtanh(-0.5, 0.5)),
    "attention": of(TOKENS, attend, e=nn.Embedding(17, 12, padding_idx=0), f=nn.Linear(12, 12),
        place=nn.Parameter(torch.randn(7, 12)), gain=nn.Parameter(torch.ones(12))),
    "padding around what is no convolution": of(TOKENS, squares, e=nn.Embedding(17, 12),
        a=padded(1, 1), c=padded(1, 4)),
    "nn.MultiheadAttention": of(LINES, multi_head, a=nn.Linear(4, 12), b=nn.Linear(4, 12),
        m=nn.MultiheadAttention(12, 3, bias=False, batch_first=True)),
    "nn.TransformerEncoderLayer": of(LINES, lambda s, x: s.m(s.a(lines(x))).mean(1),
        a=nn.Linear(4, 12), m=nn.TransformerEncoderLayer(12, 3, 24, 0.0, batch_first=True)),
    "ViT": of(IMAGE, vit, c=conv(3, 12, 3, 3), token=nn.Parameter(torch.randn(1, 1, 12)),
        place=nn.Parameter(torch.randn(10, 12)),
        m=encoder(3, activation="gelu", batch_first=True, norm_first=True)),
    "GPT": of(TOKENS, gpt, e=nn.Embedding(17, 12), place=nn.Embedding(9, 12), qkv=nn.Linear(12, 36),
        n=nn.LayerNorm(12, bias=False), o=nn.Linear(12, 12),
        mask=nn.Buffer(torch.ones(9, 9).tril().view(1, 1, 9, 9))),
    "masks": of(LINES, masks, a=nn.Linear(4, 12), place=nn.Parameter(torch.randn(9, 1, 12)),
        m=encoder(3), after=nn.Buffer(nn.Transformer.generate_square_subsequent_mask(9)),
        some=nn.Buffer(torch.eye(9) + torch.rand(9, 9) > 0.6),
        bias=nn.Buffer(torch.randn(3, 9, 9))),
    "a mask of padding": of(TOKENS, without_padding, e=nn.Embedding(17, 12),
        m=encoder(2, batch_first=True)),
    "RMSNorm, ELU": of(LINES, root_mean_square, a=nn.Linear(4, 12),
        gain=nn.Parameter(torch.randn(12)),
        n=nn.Sequential(nn.RMSNorm(12), nn.ELU(0.7), nn.RMSNorm((33, 12), eps=1e-3))),
    "powers and quotients": of(VECTOR, powers, a=nn.Linear(22, 8), v=nn.Parameter(torch.randn(16))),
    "pads": of(IMAGE, pads, a=conv(3, 4, 3, padding=1, padding_mode="reflect"),
        b=nn.Sequential(nn.ZeroPad2d(1), conv(4, 5, 3, padding=1, padding_mode="circular"))),
    "weights that are used three times": of(VECTOR, recurrent, a=nn.Linear(22, 12),
        h=nn.Linear(12, 10), w=nn.Parameter(torch.randn(10, 12)),
        gain=nn.Parameter(torch.randn(12))),
    "queries that learn": of(LINES, queries, a=nn.Linear(4, 12), f=nn.Linear(12, 12),
        q=nn.Parameter(torch.randn(1, 2, 12)), w=nn.Parameter(torch.randn(12, 12))),
    "LSTM": of(TOKENS, two_ways, e=nn.Embedding(17, 6),
        m=nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)),
    "GRU, RNN": of(LINES, states, m=nn.GRU(4, 9), k=nn.RNN(9, 6, bias=False, batch_first=True)),
    "pools of one axis": of(LINES, pools, a=nn.Conv1d(4, 8, 5, 2, 3, 2, groups=2),
        n=nn.InstanceNorm1d(8), b=nn.Conv1d(8, 4, 3, padding="same", dilation=2, groups=4),
        pools=nn.ModuleList([nn.AvgPool1d(3, 2, 1), nn.AdaptiveAvgPool1d(7),
            nn.AdaptiveMaxPool1d(5), nn.MaxPool1d(3, 2)])),
    "softmax over lines": of(LINES, weighted, a=nn.Linear(4, 10), q=nn.Linear(10, 1),
        g=nn.Parameter(torch.ones(1))),
    "text": (lambda shape: text.build(shape, CLASSES, 17, 16, 4, 0, 0.0), TOKENS),
    "CNN": (lambda shape: cnn.build(shape, CLASSES), ((32, 32, 3), "uint8")),
    "resnet": (lambda shape: resnet.build(shape, CLASSES, "8,12", 1, 4), IMAGE),
}  # fmt: skip


def trial(build, kind, seed=0):
    """A net with random weights and 24 samples."""
    torch.manual_seed(seed)
    return Setting(build(kind[0]), kind[0], CLASSES, seed, m=24, dtype=kind[1])


def compare(net):
    """The kernels' gradient is as close to float64's as PyTorch's, and the same in every form."""
    order = numbers(net.rng.permutation(net.m)[:19])
    (loss, exact, logits), (_, single, _) = net.autograd(order), net.autograd(order, torch.float32)
    found = []
    for form in forms():
        net.compute_by(functools.partial(Cpu, form=form))
        # a work space that other numbers were computed in
        net.gradient(order[::-1].copy(), row=net.row * -2)
        rows = torch.stack([net.row, net.row * 0.9])
        scores = net.client.score(rows, order, logits=True)
        found.append((*net.gradient(order), torch.from_numpy(scores["logits"])))
        assert found[-1][0] == found[0][0], form
        assert all(map(torch.equal, found[-1][1:], found[0][1:])), form
    assert distance(found[0][1], exact) < max(1e-6, 3 * distance(single, exact))
    assert found[0][0] == pytest.approx(loss, rel=2e-6, abs=1e-6)
    torch.testing.assert_close(found[0][2][0].double(), logits, rtol=1e-5, atol=1e-5)
    assert float(exact.norm()) > 1e-3


@pytest.mark.parametrize("name", NETS)
def test_gradient_of_each_layer(name):
    compare(trial(*NETS[name]))


def test_attention_to_a_text_without_words():
    layer = nn.TransformerEncoderLayer(12, 3, 24, 0.0, batch_first=True)
    net = trial(*of(TOKENS, without_padding, e=nn.Embedding(17, 12), m=layer))
    net.pixels[::3] = 0
    compare(net)


def convolution(draw, channels):
    kernel, stride, dilation = (draw.choice(of) for of in ([1, 2, 3, 5], [1, 1, 2], [1, 1, 2]))
    padding, groups = draw.randint(0, (kernel - 1) * dilation), draw.choice([1, 1, 2])
    outputs, bias = draw.choice([4, 6, 8]), draw.random() < 0.7
    return conv(channels, outputs, kernel, stride, padding, dilation, groups, bias)


def normed(draw, channels):
    return nn.GroupNorm(draw.choice([1, 2]), channels, affine=draw.random() < 0.5)


# what a random program does with a value [B, C, H, W], and with two of one shape
OF_ONE = [
    lambda x: x / 2 - 1, lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), lambda x: x[:, ::2, 1:],
    lambda x: x.transpose(2, 3), lambda x: x.transpose(1, 2), lambda x: x.flatten(2).unsqueeze(2),
    lambda x: x - x.mean(1, keepdim=True), nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(),
    nn.Softmax(3), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d((4, 3)),
    *[convolution] * 10, *[normed] * 3,
]  # fmt: skip
OF_TWO = [
    lambda x, y: x * y, lambda x, y: x / (2 + y.tanh()) - y / 3, lambda x, y: torch.cat([x, y], 1),
    lambda x, y: x @ y.transpose(2, 3), lambda x, y: x * y.mean((2, 3), keepdim=True).sigmoid(),
    lambda x, y: functional.scaled_dot_product_attention(x, y, y),
]  # fmt: skip


class Program(nn.Module):
    """Random steps of earlier values, by a fixed seed; the head reads what no step reads."""

    def __init__(self, seed, shape):
        super().__init__()
        draw, values = random.Random(seed), [torch.zeros(2, 3, *shape[:2])]
        self.steps, self.parts = [], nn.ModuleList()
        while len(values) < 8:
            latest_most_often = range(1, len(values) + 1)
            x, y = draw.choices(range(len(values)), latest_most_often, k=2)
            two = draw.random() < 0.3 and values[x].shape == values[y].shape
            step, reads = draw.choice(OF_TWO if two else OF_ONE), ([x, y] if two else [x])
            with contextlib.suppress(RuntimeError, ValueError):  # where the shape does not fit
                step = step(draw, values[x].shape[1]) if step in (convolution, normed) else step
                value = step(*(values[i] for i in reads))
                if 20 < value[0].numel() < 3000:
                    values.append(value)
                    self.steps.append((step, reads))
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


DROPPING = {
    "layers": row(IMAGE, conv(3, 8, 3), nn.Dropout(0.3), nn.ReLU(), nn.Dropout2d(0.5),
        conv(8, 6, 3)),
    "attention": of(TOKENS, without_padding, e=nn.Embedding(17, 12),
        m=nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)),
}  # fmt: skip


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_draws_as_keyed(name, form):
    """With a key the gradient is that of `Ensemble.gradient`; scoring drops nothing."""
    net = trial(*DROPPING[name])
    if name == "attention":
        net.pixels[::3] = 0  # texts without words
    net.compute_by(functools.partial(Cpu, form=form))
    check_against_pytorch(net.client.kernels, net.ensemble)
    order, key = numbers(net.rng.permutation(net.m)[:19]), np.array([2**62 + 12345])
    g, y = torch.zeros_like(net.row), torch.from_numpy(net.labels[order])
    x = net.ensemble.normalise(torch.from_numpy(net.pixels[order]))
    right, loss = net.ensemble.gradient(net.row, x, y, torch.from_numpy(key)[0])
    want = float(loss)
    loss = net.client.gradient(net.row, g, order, key=key)
    assert loss == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(g, right, rtol=1e-4, atol=1e-6)
    assert net.gradient(order)[0] != pytest.approx(want, rel=1e-3)
    scores = net.client.score(net.row[None], order, logits=True)["logits"][0]
    logits = net.autograd(order, torch.float32)[2]
    torch.testing.assert_close(torch.from_numpy(scores), logits, rtol=1e-4, atol=1e-5)


EXCEED = "an embedding of 17 rows, which tokens may exceed"
START = "a recurrent layer with a first state"
STOPPED = "no layer for a gradient that is stopped"
TWICE = "no layer for a weight that is used twice in n (test_layers.py, line "


@pytest.mark.parametrize(("function", "sentence"), [
    (lambda s, t: s.e(t + 1), "arithmetic with tokens"),
    (lambda s, t: s.e(t % 20), EXCEED),
    (lambda s, t: s.e(t[:, 1:].contiguous()), EXCEED),
    (lambda s, t: s.e(t) * (t != 3)[..., None], "a comparison with another token than 0"),
    (lambda s, t: (y := s.e(t)).where((t > 0)[..., None], y * 2), "where of two tensors"),
    (lambda s, t: s.e(t).masked_fill((t == 0)[..., None], s.h.fill), "masked_fill by a parameter"),
    (lambda s, t: s.e(t) * ((t > 0) + (t > 0))[..., None], "add of yes and no"),
])  # fmt: skip
def test_what_has_no_layer_for_tokens_is_named(function, sentence):
    parts = {"e": nn.Embedding(17, 8), "h": nn.Linear(8, CLASSES)}
    parts["h"].fill = nn.Parameter(torch.zeros(()))
    module = Forward(lambda s, t: s.h(function(s, t).mean(1)), **parts)
    refused(sentence, describe, module, *TOKENS)


@pytest.mark.parametrize(("function", "sentence"), [
    (lambda s, x: s.h(x.cumsum(1)), "no layer for cumsum"),
    (lambda s, x: s.h(functional.max_pool2d(x.view(-1, 27, 10), 1).flatten(1)),
     "no layer for a pool over samples"),
    (lambda s, x: s.h((x * 2).pow_(0.5)), "no layer for the power 0.5 in place"),
    (lambda s, x: s.h(x - x.mean(0)), "no layer for a sum over samples"),
    (lambda s, x: s.h(x) if x.sum() > 0 else s.h(-x), "no layer for "),
    (lambda s, x: s.h(functional.relu(x) if s.training else x), "does other things in training"),
    (lambda s, x: functional.linear(x, s.h.weight * 2), "no layer for mul of a parameter"),
    (lambda s, x: s.h(s.n(x) + s.n(x * 2)), TWICE),
    (lambda s, x: s.h(x + torch.tensor([1.0, 2, 3])[:, None]), "that differ between samples"),
    (lambda s, x: s.h(torch.ones(len(x), 270).mul_(x)), "no layer for mul (test_layers.py, line "),
    (lambda s, x: s.h(s.r(x[:, None], x.new_ones(1, len(x), 270))[0][:, 0]), START),
    (lambda s, x: s.h((x * 2).detach()), STOPPED),
    (lambda s, x: s.h((x * 2).data), STOPPED),
    (lambda s, x: s.h(x) * (1 // len(x.shape[2:])), "cannot be followed (ZeroDivisionError)"),
])  # fmt: skip
def test_what_has_no_layer_is_named(function, sentence):
    module = Forward(lambda s, x: function(s, x.flatten(1)), h=nn.Linear(270, CLASSES))
    module.n, module.r = nn.LayerNorm(270), nn.GRU(270, 270, batch_first=True)
    refused(sentence, describe, module, *IMAGE)


@pytest.mark.parametrize(("name", "sentence"), [
    ("layers.correlations", "no layer for conv of these sizes (ZeroDivisionError) in 0.0.layers.0"),
    ("layers.back_margin", "cannot be followed (ZeroDivisionError) in 0.0.layers.0"),
    ("plan.with_stages", "cannot plan Sequential (ZeroDivisionError: "),
])  # fmt: skip
def test_a_mistake_in_the_planning_is_a_sentence(monkeypatch, name, sentence):
    """Of ours: PyTorch then computes the model."""

    def fails(*_):
        return 1 / 0

    fault = (lambda *_: fails) if name == "layers.correlations" else fails
    module = NETS["padding"][0](IMAGE[0])
    monkeypatch.setattr(f"dpfl_mpi.numerics.lanes.{name}", fault)
    refused(sentence, describe, module, *IMAGE)


WRONG = "the kernels' gradient or score of this model is not PyTorch's"


def test_a_plan_that_is_wrong_is_found_before_the_first_step(monkeypatch):
    """Here a gate's gradient is not added to what is there: PyTorch then computes the model."""
    net = trial(*NETS["gates of channels"])
    arguments = "auto", net.ensemble, net.client.samples, SGD(16, 0.9, 1e-3, 20.0)
    assert try_native(*arguments)[1] == ""
    never = lambda ops: [replace(op, adds=0) for op in ops]  # noqa: E731
    monkeypatch.setattr("dpfl_mpi.numerics.lanes.plan.adding", never)
    backend, why = try_native(*arguments)
    assert backend is None and why.startswith(WRONG)


def test_a_wrong_layer_of_a_small_gradient_is_found():
    """Its gradient is a ten-thousandth of the other layer's, and twice what it should be.

    A score that is not that of training is found, too.
    """
    parts = {"h": nn.Linear(270, CLASSES), "tiny": nn.Linear(270, CLASSES)}
    function = lambda s, x: s.h(x.flatten(1)) + 1e-4 * s.tiny(x.flatten(1))  # noqa: E731
    net = trial(lambda _: Forward(function, **parts), IMAGE)
    kernels = net.client.kernels
    check_against_pytorch(kernels, net.ensemble)
    right, first = kernels.gradient, 271 * CLASSES

    def wrong(tasks, w, g):
        right(tasks, w, g)
        g[:, first : 2 * first] *= 2

    kernels.gradient = wrong
    refused(WRONG, check_against_pytorch, kernels, net.ensemble)
    function = lambda s, x: s.h(x.flatten(1)) / (1 if s.training else 4)  # noqa: E731
    net = trial(lambda _: Forward(function, h=parts["h"]), IMAGE)
    refused(WRONG, check_against_pytorch, net.client.kernels, net.ensemble)
