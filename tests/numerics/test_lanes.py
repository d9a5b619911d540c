"""The kernels: gradients against torch's autograd, training, scores, the greedy search."""

import copy
import shutil
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from calls import OneClient, Rule, Seen
from hypothesis import given, settings
from hypothesis import strategies as st
from test_clients import crop_and_flip
from test_ensemble import row_from
from torch import nn

from dpfl_mpi.models import cnn, mlp
from dpfl_mpi.numerics import cpu
from dpfl_mpi.numerics.cpu import Cpu
from dpfl_mpi.numerics.ensemble import Ensemble, fixed_point
from dpfl_mpi.numerics.optimiser import SGD, Adam

if not cpu.LIBRARY.exists() and not any(map(shutil.which, ("cc", "gcc", "clang"))):
    pytest.skip("no C compiler built the kernels", allow_module_level=True)
FORMS = cpu.forms()
NETS = {
    "colour": (cnn, (32, 32, 3), 10),
    "grey": (cnn, (28, 28, 1), 62),
    "odd": (cnn, (17, 18, 3), 4),  # both pools floor
    "mlp": (mlp, (8, 8, 1), 10),
}
PLAIN = Rule(SGD(8, 0.9, 1e-2, 0.5), 0.05)  # clips most steps
BORDER = 4


class Setting:
    """A net with random weights in three ways, and its samples; images of bytes have a border."""

    def __init__(
        self, module, shape, classes, seed=0, form="", m=40, path=cpu.LIBRARY, dtype="uint8"
    ):
        moments = (0.4, 0.25) if dtype == "uint8" else (0.1, 1.5)
        mean, std = ((moment,) * shape[-1] for moment in moments)
        self.ensemble = Ensemble(module, mean, std, torch.device("cpu"), dtype=dtype)
        rng = np.random.default_rng(seed)
        self.row = self.ensemble.initial_row("kaiming", rng).clone()
        for name, layer in self.ensemble.layers(self.row[None]).items():
            if name.endswith("bias") or layer.dim() == 2:  # a norm's scale
                noise = rng.uniform(-0.2, 0.2, layer.shape[1:])
                layer[0] += torch.from_numpy(noise.astype(np.float32))
        self.module, self.shape, self.classes, self.m, self.dtype = module, shape, classes, m, dtype
        nn.utils.vector_to_parameters(self.row[: self.ensemble.size], module.parameters())
        draw = rng.normal if dtype == "float32" else rng.integers
        most = {"uint8": 256, "float32": 1, "int32": 17}[dtype]
        self.pixels = draw(0, most, (m, *shape)).astype(dtype)
        border = (0, 0), *[(BORDER, BORDER)] * 2, (0, 0)
        self.padded = np.pad(self.pixels, border) if dtype == "uint8" else self.pixels
        self.labels, self.rng = rng.integers(0, classes, m), rng
        make = partial(Cpu, form=form, path=path)
        self.client = OneClient(self.ensemble, self.shape, self.padded, self.labels, make)

    def compute_by(self, make):
        self.client.kernels.machine = make(self.client.kernels.plan, self.ensemble)

    def gradient(self, order, crop=None, row=None):
        """The kernels' loss and gradient."""
        g = torch.full_like(self.row, 7.0)
        row = self.row if row is None else row
        loss = self.client.gradient(row, g, numbers(order), crop)
        assert not g[self.ensemble.size :].any()
        return loss, g

    def autograd(self, order, dtype=torch.float64, crop=None):
        """The loss, the gradient and the logits of an nn.Module."""
        module, x = copy.deepcopy(self.module).to(dtype), self.pixels[order]
        if crop is not None:
            windows = zip(x, crop.T.tolist(), strict=True)
            x = np.stack([crop_and_flip(image, *window) for image, window in windows])
        x = torch.from_numpy(x)
        if self.dtype != "int32":
            x = x.to(dtype) * self.ensemble.scale.to(dtype) + self.ensemble.shift.to(dtype)
        logits = module(x.movedim(-1, 1) if x.dim() == 4 else x)
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(self.labels[order]))
        loss.backward()
        g = row_from([p.grad for p in module.parameters()], self.ensemble.width)
        return loss.item(), g, logits.detach()


def numbers(order):
    return np.asarray(order, np.int32)


def make(kind, seed=0, form="", m=40, path=cpu.LIBRARY):
    model, shape, classes = NETS[kind]
    return Setting(model.build(shape, classes), shape, classes, seed, form, m, path)


def distance(g, reference):
    return float((g.double() - reference).norm() / reference.norm())


# gradients -----------------------------------------------------------------------------------
@settings(max_examples=40, derandomize=True)
@given(
    st.tuples(*map(st.integers, (16, 16, 1), (25, 25, 4))),
    st.tuples(*map(st.integers, (1, 1), (9, 9))),
    st.tuples(*map(st.integers, (1, 1), (21, 21))),
    st.integers(2, 12),
    st.integers(1, 20),
    st.sampled_from(FORMS),
)
def test_gradient_of_any_size(shape, channels, units, classes, size, form):
    net = Setting(cnn.CNN(shape, classes, channels, units), shape, classes, form=form)
    order = net.rng.permutation(net.m)[:size]
    loss, g = net.gradient(order)
    (want_loss, want, _), (_, single, _) = net.autograd(order), net.autograd(order, torch.float32)
    assert loss == pytest.approx(want_loss, rel=2e-6, abs=1e-7)
    assert distance(g, want) < max(2e-5, 3 * distance(single, want))


@pytest.mark.parametrize("kind", ["odd", "grey", "mlp"])
def test_crops_and_flips_at_the_borders(kind):
    """Every corner and side of the border of 4, mirrored and not, against copies by image."""
    net = make(kind)
    crop = np.array([(y, x, f) for y in (0, 3, 8) for x in (0, 4, 8) for f in (0, 1)], np.uint8).T
    order = net.rng.permutation(net.m)[: crop.shape[1]]
    loss, g = net.gradient(order, np.ascontiguousarray(crop))
    want_loss, want, _ = net.autograd(order, crop=crop)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert distance(g, want) < 2e-6
    assert distance(net.gradient(order)[1], want) > 1e-2


def test_ties_of_a_pool_go_to_the_first():
    """With whole numbers sums are exact, pools tie often, and each place has another gradient."""
    net = make("odd")
    rng = np.random.default_rng(3)
    weights = rng.integers(-1, 2, net.ensemble.size).astype(np.float32)
    net.row[: net.ensemble.size] = torch.from_numpy(weights)
    nn.utils.vector_to_parameters(net.row[: net.ensemble.size], net.module.parameters())
    net.pixels[:] = rng.integers(0, 2, net.pixels.shape)
    net.ensemble.scale.fill_(1.0)
    net.ensemble.shift.fill_(0.0)
    net.padded[:, BORDER:-BORDER, BORDER:-BORDER] = net.pixels
    order = np.arange(20)
    x = torch.from_numpy(net.pixels[order]).permute(0, 3, 1, 2).float()
    z = net.module.conv1(x)[:, :, :12, :14].unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    assert float(((z == z.amax(-1, keepdim=True)).sum(-1) > 1).float().mean()) > 0.1
    want = net.autograd(order, torch.float32)[1]
    assert float((net.gradient(order)[1] - want).abs().max()) <= 1e-5 * float(want.abs().max())


def test_empty_lanes_and_old_work_change_nothing():
    """A gradient has the same bits whatever was computed before."""
    net = make("odd")
    _, first = net.gradient(np.arange(5))
    net.client.kernels.machine.memory.view(np.float32)[:] = np.nan
    assert torch.equal(net.gradient(np.arange(5))[1], first)


def test_loss_at_any_size_of_logits():
    """exp and log: the loss from logits up to 300 apart, against float64."""
    net = make("mlp")
    for scale in (1e-3, 1.0, 30.0, 300.0):
        row = net.row.clone()
        row[-10 - 6 - 640 :] *= scale  # the head
        scores = net.client.score(row[None], np.arange(net.m), logits=True)
        found, labels = scores["logits"][0], torch.from_numpy(net.labels)
        logits = torch.from_numpy(found).double()
        exact = nn.functional.cross_entropy(logits, labels, reduction="none")
        error = (torch.from_numpy(scores["losses"][0]) - exact).abs()
        spread = torch.from_numpy(np.ptp(found, 1))
        assert bool((error <= 1.2e-7 * spread + 2e-7 * exact).all())


# training ------------------------------------------------------------------------------------
def plan(net, n=21, epochs=2, seed=0):
    """The order and crops of two epochs, whose last mini-batch is smaller."""
    rng = np.random.default_rng(seed)
    order = np.stack([rng.permutation(n) for _ in range(epochs)]).astype(np.int32)
    crop = rng.integers(0, 9, (3, epochs, n)).astype(np.uint8)
    crop[2] %= 2
    return order, crop


def test_train_is_gradient_and_step():
    """A call for all epochs, for each epoch and for each step have the same bits.

    A mask leaves what it freezes.
    """
    net = make("odd")
    order, crop = plan(net)
    rows = [(net.row.clone(), torch.zeros_like(net.row)) for _ in range(4)]
    (a, m_a), (b, m_b), (c, m_c), (d, m_d) = rows
    g, losses = torch.zeros_like(a), 0.0
    loss = net.client.train(a, m_a, Seen(order, crop), PLAIN)
    for e in range(2):
        net.client.train(b, m_b, Seen(order[e : e + 1], crop[:, e : e + 1]), PLAIN)
        for at in range(0, 21, 8):
            now = slice(at, at + 8)
            losses += net.client.gradient(c, g, order[e, now], crop[:, e, now])
            net.client.step(c, m_c, g, PLAIN)
    masked = PLAIN._replace(trained=torch.ones(net.ensemble.width, dtype=torch.bool))
    assert loss == np.float32(losses) == net.client.train(d, m_d, Seen(order, crop), masked)
    for w, m in rows[1:]:
        assert torch.equal(a, w) and torch.equal(m_a, m)
    frozen = torch.arange(net.ensemble.width) % 3 == 0
    w, m = net.row.clone(), torch.full_like(a, 0.01)
    net.client.train(w, m, Seen(order, crop), PLAIN._replace(trained=~frozen))
    assert torch.equal(w[frozen], net.row[frozen]) and bool((m[frozen] == 0.01).all())
    assert not torch.equal(w[~frozen], net.row[~frozen])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.9)])
def test_adam_is_its_formula_rounded_operation_by_operation(form, decoupled, betas):
    """To the bit; PyTorch's root may round its last bit otherwise."""
    net, f = make("mlp", form=form), np.float32

    def fma(a, b, c):
        return f(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))

    adam, decay, lr = Adam(8, 0.0, 0.1, 0.0, betas, 1e-8, decoupled), f(0.1), f(0.01)
    width = len(net.row)
    w, memory = net.row.clone(), torch.zeros(2 * width + 1)
    row, (mean, square) = w.numpy().copy(), np.zeros((2, width), f)
    by_torch = w[None].clone(), memory[None].clone()
    take, keep, add = f(1 - betas[0]), f(betas[1]), f(1 - betas[1])
    for t in range(1, 6):
        g = torch.from_numpy(net.rng.normal(0, 0.1, width).astype(f))
        slope = g.numpy() if decoupled else fma(row, decay, g.numpy())
        apart = slope - mean
        mean = fma(take, apart, mean) if take < 0.5 else fma(take - f(1), apart, slope)
        square = fma(add * slope, slope, square * keep)
        first, second = f(1 - betas[0] ** t), f((1 - betas[1] ** t) ** 0.5)
        step = mean / ((np.sqrt(square) / second + f(1e-8)) * first)
        row = fma(-lr, fma(row, decay, step) if decoupled else step, row)
        adam.step(by_torch[0], g[None].clone(), by_torch[1], 0.01)
        net.client.step(w, memory, g, Rule(adam, 0.01))
        assert np.array_equal(w.numpy(), row)
        assert np.array_equal(memory.numpy(), np.r_[mean, square, f(t)])
    torch.testing.assert_close(w, by_torch[0][0], rtol=1e-5, atol=1e-6)
    later = f([[1 - betas[0] ** t, (1 - betas[1] ** t) ** 0.5] for t in (1000, 1001)])
    torch.testing.assert_close(adam.corrections(999, 2), later)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_weight_is_passed_on(value, form):
    """In any layer: the loss, hence the gradient and, after a step, the row are not finite."""
    net = make("odd", form=form)
    for name, layer in net.ensemble.layers(net.row.clone()[None]).items():
        at = layer.storage_offset() + int(layer[0].numel()) - 1
        row = net.row.clone()
        row[at] = value
        loss, g = net.gradient(np.arange(7), row=row)
        nn.utils.vector_to_parameters(row[: net.ensemble.size], net.module.parameters())
        want, _, _ = net.autograd(np.arange(7), torch.float32)
        assert np.isfinite(loss) == np.isfinite(want), name
        if not np.isfinite(want):
            assert not bool(torch.isfinite(g).all()), name
        net.client.step(row, torch.zeros_like(row), g, PLAIN)
        assert not bool(torch.isfinite(row).all()), name


# scores --------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 7, 16, 33])
@pytest.mark.parametrize("kind", NETS)
def test_scores_of_several_rows(kind, n):
    net = make(kind)
    rows = torch.stack([net.row, net.row * 0.9, net.row * -1.1])
    order = net.rng.permutation(net.m)[:n]
    scores = net.client.score(rows, order, head=True, logits=True)
    with torch.no_grad():
        x = net.ensemble.normalise(torch.from_numpy(net.pixels[order]))
        logits = net.ensemble.logits(rows, x)
        features = torch.stack([net.ensemble.features(row, x, "head") for row in rows])
    labels = torch.from_numpy(net.labels[order]).expand(3, n)
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(torch.from_numpy(scores["logits"]), logits, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(torch.from_numpy(scores["features"]), features, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(torch.from_numpy(scores["losses"]), losses, rtol=2e-5, atol=2e-5)
    assert np.array_equal(scores["predicted"], scores["logits"].argmax(2))
    assert np.array_equal(scores["predicted"], logits.argmax(2).numpy())
    # of equal logits the first is predicted
    assert not net.client.score(net.row[None] * 0, order)["predicted"].any()


# the greedy search ---------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMS)
def test_a_candidates_sums_are_rounded_once(form):
    """Against exact fractions: x + p w and y - p w are the nearest float64."""
    net = make("mlp", form=form)
    x, y = (torch.from_numpy(net.rng.normal(0, 1e-2, net.ensemble.width)) for _ in range(2))
    w = net.row.clone()
    w[:3] = torch.tensor([4000.0, 1e-30, 0.0])  # a large, a tiny and a zero weight
    p, p_x, p_y = 0.0123, 0.4567, 0.8901
    pair = torch.full((2, net.ensemble.width), 7.0)
    x_j, y_j = net.client.candidate(x, y, w, p, p_x, p_y, pair)
    for new, old, share, total, average in ((x_j, x, p, p_x, pair[0]), (y_j, y, -p, p_y, pair[1])):
        both = zip(old.tolist(), w.tolist(), strict=True)
        exact = [float(Fraction(a) + Fraction(share) * Fraction(b)) for a, b in both]
        assert new.tolist() == exact
        assert average.tolist() == [float(np.float32(a / total)) for a in exact]
        in_two = old.numpy() + share * w.double().numpy()
        # a product that is rounded by itself shows
        assert 0 < np.count_nonzero(in_two != new.numpy()) < len(w) / 5


@pytest.mark.parametrize("form", FORMS)
def test_averages_and_exact_sums_are_torchs(form):
    """To the bit what PyTorch makes of the rows one by one; a row without weight stays."""
    net, rng = make("mlp", form=form), np.random.default_rng(3)
    w = torch.from_numpy(rng.normal(0, 2, (5, net.ensemble.width)).astype(np.float32))
    w[:, ::7], w[3, 1::7] = -0.0, 1e-30
    picked, ends = np.array([0, 1, 2, 1, 3, 4, 0, 2]), np.array([0, 3, 4, 8, 8])
    p, whole = rng.random(len(picked)), np.array([0.7, 0.0, 1.3, 0.0])
    models = (w.data_ptr() + 4 * w.shape[1] * picked).astype(np.uint64)
    out = torch.full((4, net.ensemble.width), 7.0)
    net.client.kernels.machine.means(models, p, ends, whole, out)
    for row, first, last, total in zip(out, ends, ends[1:], whole, strict=False):
        shares = zip(picked[first:last], p[first:last], strict=True)
        terms = [w[j].double() * share for j, share in shares]
        expected = torch.full_like(row, 7.0)
        if total:
            expected = (sum(terms[1:], terms[0]) / total).float()
        assert row.numpy().tobytes() == expected.numpy().tobytes()  # -0 is not 0
    sums = torch.empty(net.ensemble.width, dtype=torch.int64)
    net.client.kernels.machine.fixed(models, p, sums)
    assert torch.equal(sums, fixed_point(w[picked], torch.from_numpy(p)).sum(0))
