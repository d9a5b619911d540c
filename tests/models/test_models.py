"""Models of any kind: where they start, keyed dropout, what is refused, the shipped ones."""

import copy
import math
import random
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import own
import pytest
import starts
import torch
from launch import federation, refused, run_here, run_many, text_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from dpfl_mpi import models, streams
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import in_memory
from dpfl_mpi.models import mlp, resnet, text
from dpfl_mpi.numerics.dropout import Draws, KeyedDropout, keyed
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.model_check import check_module
from dpfl_mpi.numerics.select_backend import check_deterministic
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

IMAGE, VECTOR, TEXT = ((8, 8, 1), "uint8"), ((12,), "float32"), ((10,), "int32")


def ensemble_of(module):
    return Ensemble(module, (0.5,), (0.25,), torch.device("cpu"))


@pytest.fixture(scope="module")
def help_texts(tmp_path_factory):
    """A data set of real text that every Python has: its help, of four topics, of six clients."""
    return own.write(tmp_path_factory.mktemp("text"), topics=own.example("topics")) / "topics.py"


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.gain = nn.Parameter(torch.full((4, 1, 1), 1.5))
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        return self.head((self.norm(self.conv(x)) * self.gain).relu().mean((2, 3)))


@pytest.mark.parametrize("init", ["kaiming", "torch", "own"])
def test_what_kaiming_does_not_speak_of_starts_as_it_was_built(init):
    module = Mixed()
    ensemble = ensemble_of(module)
    row = ensemble.initial_row(init, np.random.default_rng(0))
    w = ensemble.row_layers(row)
    assert w["norm.weight"].tolist() == [1] * 4 and w["norm.bias"].tolist() == [0] * 4
    assert w["gain"].unique().tolist() == [1.5]
    assert torch.equal(w["conv.weight"], module.conv.weight) is (init == "own")


def source(kind):
    (shape, dtype), rng = kind, np.random.default_rng(0)
    x = rng.integers(0, 9, (40, *shape)).astype(dtype)
    return in_memory(arrays_of(x + 0.5 if dtype == "float32" else x, np.arange(40) % 10))


def make(run, data):
    return models.make(run, data, streams.stream(run.seed, streams.INIT, 0, 1))


def test_a_model_is_the_same_on_every_rank_and_depends_on_the_seed():
    def words(state, seed=42):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        run = Run(model="text", dataset="digits", seed=seed).resolve()
        weight = make(run, source(TEXT)).words.weight
        assert torch.equal(before, torch.get_rng_state())
        return weight

    assert torch.equal(words(5), words(6)) and not torch.equal(words(5), words(5, seed=1))


def splitmix64(state, count):
    """The first outputs of the generator of Steele, Lea and Flood."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_draws_are_those_of_splitmix64():
    """First the known outputs of seed 1234567; each is the seed of the next layer's draws."""
    out = splitmix64(1234567, 3)
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    draws = Draws()
    draws.begin(torch.tensor(1234567))
    for start in out[:2]:  # the first two layers
        expected = [z >> 40 for z in splitmix64(start, 12)]
        assert draws.take((3, 4)).flatten().tolist() == expected
    draws = Draws()
    draws.begin(torch.tensor(3))
    x = torch.ones(4, 6, 5)
    assert not KeyedDropout(1.0, 0, draws)(x).any()
    assert KeyedDropout(0.3, 2, draws).shared_axes(x) == 1  # nn.Dropout2d of [S, C, L]
    assert KeyedDropout(0.3, 3, draws).shared_axes(x) == 2  # nn.Dropout3d of it: whole samples


@pytest.mark.parametrize("trailing", [0, 1, 2, 3])
def test_dropout_drops_a_share_and_keeps_the_mean(trailing):
    layer = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d][trailing]
    draws = Draws()
    dropout = keyed(nn.Sequential(layer(0.3)), draws)[0]
    x = torch.ones(400, 50, *(2,) * trailing)
    draws.begin(torch.tensor(3))
    y = dropout(x)
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1.0) * (1 / 0.7))}
    assert abs(float((y == 0).float().mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20_000)
    together = (y == 0).flatten(2).float().mean(2) if trailing else torch.zeros(1)
    assert set(together.unique().tolist()) <= {0.0, 1.0}  # of a channel all or nothing
    assert not torch.equal(dropout(x), y)  # a layer that is called twice draws twice
    draws.begin(torch.tensor(3))
    assert torch.equal(dropout(x), y)
    assert torch.equal(dropout.eval()(x), x)


CAUSAL, PADDED = torch.ones(5, 5).triu(1) > 0, torch.arange(5) > torch.tensor([[4], [2], [3]])
MASKS = {
    "none": {},
    "causal": {"attn_mask": CAUSAL, "key_padding_mask": PADDED, "is_causal": True},
    "numbers": {"attn_mask": torch.linspace(-1, 1, 150).view(6, 5, 5)},  # of samples and heads
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "settings", [{"batch_first": True}, {"kdim": 6, "vdim": 4}, {"bias": False}], ids="-".join
)
def test_weights_of_attention_are_dropped_as_drawn(settings, masks):
    """The layer's numbers are PyTorch's, but for the weights that the draws leave out."""
    torch.manual_seed(0)
    theirs, draws = nn.MultiheadAttention(8, 2, 0.25, **settings), Draws()
    mine = keyed(nn.Sequential(copy.deepcopy(theirs)), draws)[0]
    inputs = [torch.randn(3, 5, width) for width in (8, theirs.kdim, theirs.vdim)]
    if not theirs.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    right, plain = theirs.eval()(*inputs, **masks, average_attn_weights=False)
    torch.testing.assert_close(mine.eval()(*inputs, **masks), (right, plain.mean(1)))
    key = torch.tensor(3)
    draws.begin(key)
    y, shares = mine.train()(*inputs, **masks, average_attn_weights=False)
    draws.begin(key)
    kept = draws.take((3, 2, 5, 5)) >= 2**22  # p = 1/4
    torch.testing.assert_close(shares, torch.where(kept, plain / 0.75, 0.0))
    draws.begin(key)
    alone, none = mine(*inputs, **masks, need_weights=False)
    assert torch.equal(alone, y) and none is None and 0 < int(kept.sum()) < 150
    assert not torch.allclose(y, right, atol=1e-2)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.head = nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.drop(self.fc(x.flatten(1)).relu()))


LOCAL = {"clients": 4, "method": "local", "lr": 0.05, "classes_per_client": 3}


def gap(a, b):
    return float((a - b).abs().max())


def test_dropout_is_keyed_by_client_epoch_and_step_and_off_while_scoring(monkeypatch):
    monkeypatch.setattr(mlp, "build", lambda shape, classes: Dropping())
    fields = LOCAL | {"batch_size": 16, "seed": 3}
    with federation(fields, kernels="torch") as fed:
        w = fed.local_opt(fed.common_row(), 2)
        fed.evaluate(w)
        scores = fed.notes["test_acc"].copy()
        fed.evaluate(w)
        assert np.array_equal(scores, fed.notes["test_acc"])
    steps, client = -(-int(fed.clients.n_train[0]) // 16), int(fed.ids[0])

    def draw(e):
        return streams.stream(3, streams.DROPOUT, client, e).integers(0, 2**63, steps)

    assert [int(batch.key) for batch in fed.clients.batches(0, 2, 4, 16)] == [*draw(4), *draw(5)]
    batch = next(fed.clients.batches(0, 1, 0, 16))
    _, loss = fed.ensemble.gradient(w[0], batch.x, batch.y, batch.key)
    _, other = fed.ensemble.gradient(w[0], batch.x, batch.y, batch.key + 1)
    draws = Draws()
    draws.begin(batch.key)
    w = fed.ensemble.row_layers(w[0])
    h = F.linear(batch.x.flatten(1), w["fc.weight"], w["fc.bias"]).relu()
    h = torch.where(draws.take((len(h), 32)) >= 2**23, h * 2, 0.0)  # p = 1/2
    plain = F.cross_entropy(F.linear(h, w["head.weight"], w["head.bias"]), batch.y)
    assert float(loss) == pytest.approx(float(plain), rel=1e-5) and float(other) != float(loss)


INSIDE = {  # what comes before the one layer
    "rrelu": nn.Sequential(nn.ReLU(), nn.RReLU()),
    "noise": lambda x: x + torch.randn_like(x),
    "depth": lambda x: x * (random.random() > 0.5),
    "numpy": lambda x: x * float(np.random.rand()),  # noqa: NPY002
}


class Odd(nn.Module):
    """A model of 8x8 grey images in ten classes that does one thing wrong."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.fc = wrong, nn.Linear(64, 10)
        self.inside = INSIDE.get(wrong, nn.Identity())
        self.register_buffer("scale", torch.full((64,), 0.5))
        self.beside, double = [self.fc.weight], torch.zeros(3, dtype=torch.float64)
        if wrong == "nan":
            nn.init.constant_(self.fc.bias, math.nan)
        self.odd = nn.Parameter(double) if wrong == "double" else None
        if wrong == "hook":
            self.fc.weight.register_hook(lambda g: g * 0)
        if wrong == "tied":
            self.other = nn.Linear(64, 10)
            self.other.weight.data = self.fc.weight.data

    def forward(self, x):
        x = self.inside(x.flatten(1) * self.scale)
        if self.wrong == "functional":
            x = F.dropout(x, 0.5, self.training)
        if self.wrong == "buffer":
            self.scale.add_(1)
        if self.wrong == "ignores":
            return self.fc(self.scale.expand(len(x), 64))
        if self.wrong == "checkpoint":
            return checkpoint(self.fc, x, use_reentrant=False)
        if self.wrong == "beside":
            return x @ self.beside[0].T + self.fc(x)
        out = self.fc(x)
        return {"none": None, "one axis": out[:, 0], "squeezed": out.squeeze()}.get(self.wrong, out)


HEAD = nn.Flatten(), nn.Linear(64, 10)
RETURNED = "forward returned a"
ODD = {
    "double": "odd is float64; parameters must be float32",
    "nan": "fc.bias starts with a value that is not finite",
    "functional": "forward draws random numbers from a global generator",
    "noise": "forward draws random numbers from a global generator",
    **dict.fromkeys(("rrelu", "depth", "numpy"), "forward draws random numbers from a global"),
    "hook": "fc.weight has a hook on its gradient, which would not be called",
    "tied": "other.weight lies in the memory of fc.weight; assign the Parameter, not its data",
    "buffer": "forward changes the buffer scale",
    "none": f"{RETURNED} NoneType for 2 samples of 10 classes; ... logits, float [2, 10]",
    "one axis": f"{RETURNED} tensor [2] for 2 samples of 10 classes",
    "ignores": "forward gives all samples the same logits, as it does not read them",
    "squeezed": "forward gives a sample other logits when it is alone than beside another",
    "checkpoint": "the gradient of forward fails: RuntimeError: it hooks what is saved for the "
    "gradient (torch.utils.checkpoint)",
    "beside": "forward reads a parameter that it keeps beside its layers",
}
LAZY = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
TRACKED = nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), *HEAD)


@pytest.mark.parametrize(("module", "sentence"), [
    *((Odd(wrong), sentence) for wrong, sentence in ODD.items()),
    (TRACKED, "layer 0 (InstanceNorm2d) keeps batch statistics"),
    (nn.Sequential(nn.Dropout(inplace=True), *HEAD), "layer 0 has inplace=True; allowed is False"),
    (nn.Flatten(), "has no parameters; there is nothing to train"),
    (LAZY, "1.weight has no size yet (a Lazy layer)"),
], ids=lambda v: getattr(v, "wrong", None))  # fmt: skip
def test_modules_that_would_be_wrong_are_refused(module, sentence):
    assert refused(sentence, check_module, "mine", module, *IMAGE, 10, "").startswith("--model")


def test_a_build_that_fails(monkeypatch):
    monkeypatch.setattr(mlp, "build", lambda shape, classes: nn.Linear(shape[3], classes))
    sentence = "--model mlp: build failed for samples of 8x8x1: IndexError: "
    error = refused(sentence, make, Run().resolve(), source(IMAGE))
    assert re.search(r" \(test_models.py, line \d+\)$", error)


RESNET = {"model": "resnet"}
BLOCKS = "--model_options.blocks is 0; allowed is a whole number from 1"
WIDTHS = "--model_options.widths is 16,x; allowed are whole numbers"
HEADS = "--model_options.heads is 5; it must divide --model_options.width, 32"


@pytest.mark.parametrize(("fields", "kind", "sentence"), [
    ({"model": "text"}, VECTOR, "takes tokens, not numbers: use --model mlp"),
    ({"model": "cnn"}, VECTOR, "--model cnn needs images, these are vectors of 12 numbers"),
    ({"model": "cnn"}, ((15, 20, 1), "uint8"), "at least 16x16, these are 15x20"),
    (RESNET, VECTOR, "--model resnet needs images; use --model mlp for vectors"),
    (RESNET | {"model_options": {"blocks": 0}}, IMAGE, BLOCKS),
    (RESNET | {"model_options": {"widths": "16,x"}}, IMAGE, WIDTHS),
    ({"model": "text", "model_options": {"heads": 5}}, TEXT, HEADS),
])  # fmt: skip
def test_models_and_data_that_do_not_go_together(fields, kind, sentence):
    refused(sentence, lambda: make(Run(**fields).resolve(), source(kind)))


def test_model_options():
    plain, same = Run(model="resnet"), Run(model="resnet", model_options={"blocks": 2})
    assert plain.slug() == same.slug()
    deep = Run(model="resnet", model_options={"blocks": 3, "widths": 8})
    assert deep.slug() != plain.slug()
    assert deep.resolve().model_options == {"blocks": 3, "widths": "8"}
    data = in_memory(arrays_of(np.array([[2**31 - 1, 5]] * 10), np.arange(10) % 2))
    most = "an embedding has at most 131072 rows: set --model_options.rows"
    refused(f"tokens go to 2147483647, {most}", make, Run(model="text").resolve(), data)
    module = make(Run(model="text", model_options={"rows": 100}).resolve(), data)
    a, b = torch.tensor([[2**31 - 1, 5]]), torch.tensor([[(2**31 - 1) % 100, 105]])
    assert module.words.weight.shape == (100, 32) and torch.equal(module(a), module(b))


def test_a_budget_of_one_is_said_to_be_local(tmp_path, capsys):
    fields = {"clients": 6, "rounds": 0, "tau_init": 0, "budget": "0.1N"}
    run_here(tmp_path / "r.h5", fields, quiet=False)
    warning = "warning: --budget is 1 of 6 clients: B_c counts the client's own model"
    assert warning in capsys.readouterr().err


def test_a_layer_whose_gradient_changes_on_a_gpu_is_refused(monkeypatch):
    ensemble, clients = ensemble_of(Mixed()), SimpleNamespace(shape=IMAGE[0])
    check_deterministic(ensemble, clients)
    name = "adaptive_avg_pool2d_backward_cuda"
    fails = RuntimeError(f"{name} does not have a deterministic implementation, but you set")
    monkeypatch.setattr(ensemble, "gradient", Mock(side_effect=fails))  # PyTorch 2.11 on an H200
    sentence = f"--model: {name}, which...allowed are pools of"
    refused(sentence, check_deterministic, ensemble, clients)


class Named(nn.Module):
    """A layer whose parameter has two names."""

    def __init__(self):
        super().__init__()
        self.gain = self.scale = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x):
        return x * self.gain + self.scale


class Last(nn.GRU):
    """Its last output."""

    def forward(self, x):
        return super().forward(x)[0][:, -1]


TWICE = nn.PReLU()
ENCODER = nn.TransformerEncoderLayer(64, 2, 32, batch_first=True)
RIGHT = {
    "plain": Odd(""),
    "dropout": Dropping(),
    "group norm": Mixed(),
    "instance norm": nn.Sequential(nn.InstanceNorm2d(1), *HEAD),
    "a layer that is used twice": nn.Sequential(nn.Flatten(), TWICE, nn.Linear(64, 10), TWICE),
    "a parameter of two names": nn.Sequential(nn.Flatten(), Named(), nn.Linear(64, 10)),
    "transformer": nn.Sequential(nn.Flatten(2), ENCODER, *HEAD),
    "recurrent": nn.Sequential(nn.Flatten(1, 2), Last(8, 4, batch_first=True), nn.Linear(4, 10)),
}


@pytest.mark.parametrize("module", RIGHT.values(), ids=RIGHT)
def test_modules_that_are_right_pass_and_have_their_own_gradient(module):
    check_module("mine", module, *IMAGE, 10, "")
    ensemble, own = ensemble_of(module), [p.clone() for p in module.parameters()]
    rng = np.random.default_rng(0)
    x = ensemble.normalise(torch.from_numpy(rng.integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)))
    y, key = torch.from_numpy(rng.integers(0, 10, 5)), torch.tensor(7)
    row = ensemble.initial_row("torch", rng)
    g, loss = ensemble.gradient(row, x, y, key)
    with torch.no_grad():
        of_two = ensemble.logits(torch.stack([row * 0.5, row]), x)
    assert all(map(torch.equal, own, module.parameters()))  # no row stays in a layer
    learner = keyed(copy.deepcopy(module), draws := Draws())
    vector_to_parameters(row[: ensemble.size], learner.parameters())
    draws.begin(key)
    right = F.cross_entropy(learner.train()(ensemble.module_input(x)), y)
    gradients = torch.autograd.grad(right, list(learner.parameters()))
    torch.testing.assert_close(loss, right.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        g[: ensemble.size], parameters_to_vector(gradients), rtol=1e-4, atol=1e-6
    )
    for logits, share in zip(of_two, (0.5, 1), strict=True):
        vector_to_parameters(share * row[: ensemble.size], learner.parameters())
        torch.testing.assert_close(logits, learner.eval()(ensemble.module_input(x)).detach())


def test_resnet_by_hand_and_attention_of_pytorch():
    module = resnet.build((32, 32, 3), 10, "16,32,64", 2, 8)
    second = 32 + 4608 + 64 + 9216 + 512 + 64 + 9216 + 64 + 9216
    third = 64 + 18432 + 128 + 36864 + 2048 + 128 + 36864 + 128 + 36864
    first = 2 * (32 + 2304 + 32 + 2304)
    assert 432 + first + second + third + 128 + 650 == 175_066
    assert sum(p.numel() for p in module.parameters()) == 175_066
    block = module.stages[2]
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    normed = F.group_norm(x, 8).relu()
    inner = F.group_norm(F.conv2d(normed, block.conv1.weight, None, 2, 1), 8).relu()
    out = F.conv2d(normed, block.shortcut.weight, None, 2)
    out = out + F.conv2d(inner, block.conv2.weight, None, 1, 1)
    torch.testing.assert_close(block(x), out)
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    # With the weights of nn.MultiheadAttention; token 0 changes nothing about a text.
    torch.manual_seed(0)
    mine, theirs = text.Attention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    for ours, name in ((mine.inward, "in_proj_"), (mine.outward, "out_proj.")):
        values = {f"{name}{kind}": getattr(ours, kind) for kind in ("weight", "bias")}
        theirs.load_state_dict(values, strict=False)
    x, word = torch.randn(3, 7, 16), torch.arange(7) < torch.tensor([7, 3, 1])[:, None]
    torch.testing.assert_close(mine(x, word), theirs(x, x, x, key_padding_mask=~word)[0])
    short, long = (text.build((n,), 4, 50, 16, 4, 0, 0.0) for n in (5, 9))
    values = short.state_dict()
    values["places"] = F.pad(values["places"], (0, 0, 0, 4), value=9.0)
    long.load_state_dict(values)
    tokens = torch.randint(1, 50, (6, 5))
    torch.testing.assert_close(short(tokens), long(F.pad(tokens, (0, 4))))
    assert bool(torch.isfinite(short(torch.zeros(2, 5, dtype=torch.int64))).all())


SHORT = {"rounds": 1, "tau_train": 1, "lr": 0.1, "budget": 3}
SMALL = {"dataset": "digits", "model_options": {"widths": "8,16", "blocks": 1}, "clients": 5}
SMALL |= SHORT | RESNET | {"tau_init": 6, "batch_size": 32, "classes_per_client": 5}


def text_fields(path):
    options = {"dropout": 0.1}
    return SHORT | {"dataset": str(path), "model_options": options, "tau_init": 10, "batch_size": 8}


VIT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.patches = nn.Conv2d(channels, 16, 2, 2)
        self.place = nn.Parameter(torch.randn(16, 16) / 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.layer(x).mean(1))

def build(shape, classes):
    return Net(shape[2], classes)
"""


def test_both_learn_real_data_alike_on_any_number_of_ranks(help_texts, tmp_path):
    vit = SMALL | {"model": text_file(tmp_path / "vit.py", VIT), "model_options": {}}
    wanted = {"resnet": SMALL, "text": text_fields(help_texts)}
    jobs = {"vit": {"kernels": "native"}, "vit by PyTorch": {"kernels": "torch"}}
    wanted |= dict.fromkeys(jobs, vit)
    two = run_many(2, tmp_path, wanted, **jobs)
    for name, fields in wanted.items():
        with Result(run_here(tmp_path / f"{name}-1.h5", fields, **jobs.get(name, {}))) as one:
            counts = one["client/class_counts"]
            largest = (counts.max(1) / counts.sum(1)).mean()  # each client's largest class alone
            gain = {"resnet": 0.4, "text": 0.08}.get(name, 0.2)
            assert one["best/test_acc"].mean() > largest + gain
            assert starts.same(one.path, two[name])
