"""Models of any kind: where they start, dropout by key, what is refused in which words, the shipped ones against twins and on real data."""

import math
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import own
import pytest
import starts
import torch
from launch import federation, refused, run_here, run_many, text_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfl_mpi import streams
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import in_memory
from dpfl_mpi.models import make, mlp, resnet, text
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.dropout import Draws, KeyedDropout, keyed
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.model_check import check_module
from dpfl_mpi.numerics.recorded import RecordedBackend, check_several
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.testing import checks

CPU = torch.device("cpu")
IMAGE, VECTOR, TEXT = ((8, 8, 1), "uint8"), ((12,), "float32"), ((10,), "int32")


@pytest.fixture(scope="module")
def help_texts(tmp_path_factory):
    """Real text that every Python has: passages of its help, of four topics, held by six clients; a data set's file."""
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
    """A norm's scale is 1, not 0: with 0 nothing behind it is ever trained."""
    torch.manual_seed(0)
    module = Mixed()
    ensemble = Ensemble(module, (0.5,), (0.25,), CPU)
    row = ensemble.initial_row(init, np.random.default_rng(0))
    w = {name: v[0] for name, v in ensemble.layers(row[None]).items()}
    assert w["norm.weight"].tolist() == [1] * 4 and w["norm.bias"].tolist() == [0] * 4
    assert w["gain"].unique().tolist() == [1.5]
    assert torch.equal(w["conv.weight"], dict(module.named_parameters())["conv.weight"]) is (init == "own")


def source(kind):
    (shape, dtype), rng = kind, np.random.default_rng(0)
    x = rng.integers(0, 9, (40, *shape)).astype(dtype)
    return in_memory(arrays_of(x + 0.5 if dtype == "float32" else x, np.arange(40) % 10))


def test_a_model_is_the_same_on_every_rank_and_depends_on_the_seed():
    run, data = Run(model="text", dataset="digits").resolve(), source(TEXT)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = make(run, data)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(6)
    two = make(run, data)
    other = make(Run(model="text", dataset="digits", seed=1).resolve(), data)
    assert torch.equal(one.words.weight, two.words.weight) and not torch.equal(one.words.weight, other.words.weight)


def splitmix64(state):
    """The generator of Steele, Lea and Flood in Python's integers: the state after one step, and its output."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return state, z ^ (z >> 31)


def test_draws_are_those_of_splitmix64():
    """The known first outputs of seed 1234567; then a layer's draws, whose seed is the next output of its step's key."""
    state, out = 1234567, []
    for _ in range(3):
        state, z = splitmix64(state)
        out.append(z)
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    draws = Draws()
    draws.begin(torch.tensor(1234567))
    for start in out[:2]:  # the first two layers
        expected = []
        for _ in range(12):
            start, z = splitmix64(start)
            expected.append(z >> 40)
        assert draws.take((3, 4)).flatten().tolist() == expected


@pytest.mark.parametrize(
    ("layer", "trailing"), [(nn.Dropout, 0), (nn.Dropout1d, 1), (nn.Dropout2d, 2), (nn.Dropout3d, 3)]
)
def test_dropout_drops_a_share_and_keeps_the_mean(layer, trailing):
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
    assert KeyedDropout(0.3, 2, draws).shared_axes(torch.ones(4, 6, 5)) == 1  # nn.Dropout2d of [S, C, L] drops channels
    assert torch.equal(dropout.eval()(x), x) and float(KeyedDropout(1.0, 0, draws)(x).abs().max()) == 0


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.head = nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.drop(self.fc(x.flatten(1)).relu()))


def test_dropout_is_keyed_by_client_epoch_and_step_and_off_while_scoring(monkeypatch):
    """Blocks of one, two and four clients train alike; each key is the stream's; scores do not draw."""
    monkeypatch.setattr(mlp, "build", lambda shape, classes: Dropping())
    fields = {"clients": 4, "method": "local", "batch_size": 16, "seed": 3, "lr": 0.05, "classes_per_client": 3}
    rows = []
    for block in (1, 2, 4):
        with federation(fields, kernels="torch", block=block) as fed:
            w = fed.local_opt(fed.common_row(), 2)
            rows.append(w)
            fed.evaluate(w)
            scores = fed.notes["test_acc"].copy()
            fed.evaluate(w)
            assert np.array_equal(scores, fed.notes["test_acc"])
    assert float((rows[0] - rows[1]).abs().max()) < 1e-5 and float((rows[0] - rows[2]).abs().max()) < 1e-5
    n, client = int(fed.clients.n_train[0]), int(fed.ids[0])
    expected = [streams.stream(3, streams.DROPOUT, client, e).integers(0, 2**63, -(-n // 16)) for e in (4, 5)]
    keys = [int(batch.key[0]) for batch in fed.clients.batches(slice(0, 1), 2, np.full(4, 4), 16)]
    assert keys == np.concatenate(expected).tolist()
    block = Block(fed.ensemble, rows[0][:1].clone())
    batch = next(iter(fed.clients.batches(slice(0, 1), 1, np.zeros(4, int), 16)))
    with torch.no_grad():
        loss = fed.ensemble.gradient(block, batch.x, batch.y, batch.weight, batch.key)
        other = fed.ensemble.gradient(block, batch.x, batch.y, batch.weight, batch.key + 1)
    draws = Draws()
    draws.begin(batch.key[0])
    layers = {name: v[0] for name, v in fed.ensemble.layers(rows[0][:1]).items()}
    h = nn.functional.linear(batch.x[0].flatten(1), layers["fc.weight"], layers["fc.bias"]).relu()
    h = torch.where(draws.take((len(h), 32)) >= 2**23, h * 2, 0.0)  # p = 1/2
    plain = nn.functional.cross_entropy(nn.functional.linear(h, layers["head.weight"], layers["head.bias"]), batch.y[0])
    assert float(loss) == pytest.approx(float(plain), rel=1e-5) and float(other) != float(loss)


@pytest.mark.parametrize("model", ["dropping", "text"])
def test_recorded_steps_draw_the_same(model, monkeypatch, help_texts):
    monkeypatch.setattr(mlp, "build", lambda shape, classes: Dropping())
    fields = {"clients": 4, "method": "local", "lr": 0.05, "classes_per_client": 3}
    if model == "text":
        fields = text_fields(help_texts) | {"method": "local"}
    rows = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traced, without a compiler
    for kind in (Backend, RecordedBackend, partial(RecordedBackend, compiled=True)):
        with federation(fields, kernels="torch", block=3) as fed:
            fed.training.backend = kind(fed.ensemble, fed.clients, fed.backend.optimiser, 3)
            rows.append(fed.local_opt(fed.common_row(), 1))
        assert float((rows[0] - rows[-1]).abs().max()) < 1e-5 < float((rows[0] - fed.common_row()).abs().max())


INSIDE = {  # what comes before the one layer
    "rrelu": nn.Sequential(nn.ReLU(), nn.RReLU()),
    "noise": lambda x: x + torch.randn_like(x),
}


class Odd(nn.Module):
    """A model of 8x8 grey images in ten classes, with a constant buffer, that does one thing wrong."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.fc, self.inside = wrong, nn.Linear(64, 10), INSIDE.get(wrong, nn.Identity())
        self.register_buffer("scale", torch.full((64,), 0.5))
        self.kept = [self.fc.weight]
        if wrong == "nan":
            nn.init.constant_(self.fc.bias, math.nan)
        self.odd = nn.Parameter(torch.zeros(3, dtype=torch.float64)) if wrong == "double" else None

    def forward(self, x):
        x = self.inside(x.flatten(1) * self.scale)
        if self.wrong == "functional":
            x = nn.functional.dropout(x, 0.5, self.training)
        if self.wrong == "buffer":
            self.scale.add_(1)
        if self.wrong == "checkpoint":
            return checkpoint(self.fc, x, use_reentrant=False)
        if self.wrong == "kept beside":
            return x @ self.kept[0].T + self.fc(x)
        out = self.fc(x)
        return {"none": None, "one axis": out[:, 0], "squeezed": out.squeeze()}.get(self.wrong, out)


DRAWS = "forward draws random numbers from PyTorch's generator"
TRACKED = nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize(("module", "sentence"), [
    (Odd("double"), "odd is float64; parameters must be float32"),
    (Odd("nan"), "fc.bias starts with a value that is not finite"),
    (Odd("functional"), DRAWS),
    (Odd("noise"), DRAWS),
    (Odd("rrelu"), DRAWS),
    (Odd("buffer"), "forward changes the buffer scale"),
    (Odd("none"), "forward returned a NoneType for 2 samples of 10 classes; it must return logits, float [2, 10]"),
    (Odd("one axis"), "forward returned a tensor [2] for 2 samples of 10 classes"),
    (Odd("squeezed"), "forward gives a sample other logits when it is alone than beside another"),
    (Odd("checkpoint"), "the gradient of forward fails: RuntimeError: it hooks what is saved for the gradient (torch.utils.checkpoint)"),
    (Odd("kept beside"), "forward reads a parameter that it keeps beside its layers"),
    (TRACKED, "layer 0 (InstanceNorm2d) keeps batch statistics"),
    (nn.Flatten(), "has no parameters; there is nothing to train"),
    (nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), "1.weight has no size yet (a Lazy layer)"),
], ids=lambda v: getattr(v, "wrong", None))  # fmt: skip
def test_modules_that_would_be_wrong_are_refused(module, sentence):
    assert refused(sentence, check_module, "mine", module, *IMAGE, 10, "").startswith("--model")


TWO = SimpleNamespace(shape=IMAGE[0])  # clients with images


ONE_AT_A_TIME = """from torch import nn

HEAD = "head"


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.rnn = nn.GRU(shape[1], 4, batch_first=True)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.rnn(x[:, 0])[0][:, -1])


def build(shape, classes):
    return Net(shape, classes)
"""


class Last(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0][:, -1]


def test_what_cannot_run_for_several_clients_at_once_is_refused_before_it_does(monkeypatch, tmp_path):
    module = nn.Sequential(nn.Flatten(1, 2), Last(8, 4, batch_first=True), nn.Linear(4, 10))
    check_module("mine", module, *IMAGE, 10, "")
    ensemble = Ensemble(module, (0.5,), (0.25,), CPU)
    said = refused("--model: forward does not run for several clients at once (", check_several, ensemble, TWO)
    assert "no nn.GRU; --block 1 does" in said
    (check,) = checks(text_file(tmp_path / "gru.py", ONE_AT_A_TIME), block=1)  # as it advises
    assert check.complaint() == ""
    # as PyTorch 2.11 on an H200
    fails = RuntimeError("adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set")
    monkeypatch.setattr(ensemble, "gradient", Mock(side_effect=fails))
    refused("--model: adaptive_avg_pool2d_backward_cuda, which...allowed are pools of", check_several, ensemble, TWO)


TWICE = nn.PReLU()


@pytest.mark.parametrize("module", [
    Odd(""), Dropping(), Mixed(),
    nn.Sequential(nn.InstanceNorm2d(1), nn.Flatten(), nn.Linear(64, 10)),
    nn.Sequential(nn.Flatten(), TWICE, nn.Linear(64, 10), TWICE),
    nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 32, 0.0, batch_first=True), nn.Flatten(), nn.Linear(64, 10)),
], ids=["plain", "dropout", "group norm", "instance norm", "a layer that is used twice", "transformer"])  # fmt: skip
def test_modules_that_are_right_pass_and_train_in_blocks(module):
    check_module("mine", module, *IMAGE, 10, "")
    ensemble = Ensemble(module, (0.5,), (0.25,), CPU)
    check_several(ensemble, TWO)
    rng = np.random.default_rng(0)
    x = ensemble.normalise(torch.from_numpy(rng.integers(0, 256, (2, 5, 8, 8, 1)).astype(np.uint8)))
    y, weight, key = torch.from_numpy(rng.integers(0, 10, (2, 5))), torch.full((2, 5), 0.2), torch.tensor([7, 8])
    w = torch.stack([ensemble.initial_row("torch", np.random.default_rng(i)) for i in range(2)])
    both, own = Block(ensemble, w), [p.clone() for p in ensemble.module.parameters()]
    with torch.no_grad():
        losses = ensemble.gradient(both, x, y, weight, key if ensemble.draws.layers else None)
        for i in range(2):
            one = Block(ensemble, w[i : i + 1])
            now = slice(i, i + 1)
            loss = ensemble.gradient(one, x[now], y[now], weight[now], key[now] if ensemble.draws.layers else None)
            torch.testing.assert_close(losses[now], loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(both.g[now], one.g, rtol=1e-4, atol=1e-6)
        ensemble.logits(ensemble.ready(w[:1]), ensemble.prepare(x[:1]))
    assert all(map(torch.equal, own, ensemble.module.parameters()))  # no row stays in a layer


def test_a_build_that_fails(monkeypatch):
    monkeypatch.setattr(mlp, "build", lambda shape, classes: nn.Linear(shape[3], classes))
    said = refused("--model mlp: build failed for samples of 8x8x1: IndexError: ", make, Run().resolve(), source(IMAGE))
    assert re.search(r" \(test_models.py, line \d+\)$", said)


@pytest.mark.parametrize(("fields", "kind", "sentence"), [
    ({"model": "text"}, VECTOR, "--model text takes tokens, and these data are numbers: use --model mlp"),
    ({"model": "cnn"}, VECTOR, "--model cnn needs images, these are vectors of 12 numbers"),
    ({"model": "cnn"}, ((15, 20, 1), "uint8"), "at least 16x16, these are 15x20"),
    ({"model": "resnet"}, VECTOR, "--model resnet needs images; use --model mlp for vectors"),
    ({"model": "resnet", "model_options": {"blocks": 0}}, IMAGE, "--model_options.blocks is 0; allowed is a whole number from 1"),
    ({"model": "resnet", "model_options": {"widths": "16,x"}}, IMAGE, "--model_options.widths is 16,x; allowed are whole numbers"),
    ({"model": "text", "model_options": {"heads": 5}}, TEXT, "--model_options.heads is 5; it must divide --model_options.width, 32"),
])  # fmt: skip
def test_models_and_data_that_do_not_go_together(fields, kind, sentence):
    refused(sentence, lambda: make(Run(**fields).resolve(), source(kind)))


def test_many_tokens_need_few_rows():
    data = in_memory(arrays_of(np.array([[2**31 - 1, 5]] * 10), np.arange(10) % 2))
    sentence = "tokens go to 2147483647, an embedding has at most 131072 rows: set --model_options.rows"
    refused(sentence, make, Run(model="text").resolve(), data)
    module = make(Run(model="text", model_options={"rows": 100}).resolve(), data)
    a, b = torch.tensor([[2**31 - 1, 5]]), torch.tensor([[(2**31 - 1) % 100, 105]])
    assert module.words.weight.shape == (100, 32) and torch.equal(module(a), module(b))


def test_model_options_are_part_of_the_run_where_they_differ():
    plain = Run(model="resnet")
    assert plain.slug() == Run(model="resnet", model_options={"blocks": 2}).slug()
    deep = Run(model="resnet", model_options={"blocks": 3, "widths": 8})
    assert deep.slug() != plain.slug() and deep.resolve().model_options == {"blocks": 3, "widths": "8"}


def test_a_budget_of_one_is_said_to_be_local(tmp_path, capsys):
    run_here(tmp_path / "r.h5", {"clients": 6, "rounds": 0, "tau_init": 0, "budget": "0.1N"}, quiet=False)
    assert "warning: --budget is 1 of 6 clients: B_c counts the client's own model" in capsys.readouterr().err


def test_resnet_by_hand():
    module = resnet.build((32, 32, 3), 10, "16,32,64", 2, 8)
    first, second = 2 * (32 + 2304 + 32 + 2304), 32 + 4608 + 64 + 9216 + 512 + 64 + 9216 + 64 + 9216
    third = 64 + 18432 + 128 + 36864 + 2048 + 128 + 36864 + 128 + 36864
    assert sum(p.numel() for p in module.parameters()) == 432 + first + second + third + 128 + 650 == 175_066
    block = module.stages[2]
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    normed = nn.functional.group_norm(x, 8).relu()
    inner = nn.functional.group_norm(nn.functional.conv2d(normed, block.conv1.weight, None, 2, 1), 8).relu()
    left = nn.functional.conv2d(normed, block.shortcut.weight, None, 2)
    torch.testing.assert_close(block(x), left + nn.functional.conv2d(inner, block.conv2.weight, None, 1, 1))
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_attention_is_pytorchs():
    """With the same weights as nn.MultiheadAttention; token 0 is not attended to, and does not change what is said of a text."""
    torch.manual_seed(0)
    mine, theirs = text.Attention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    for ours, name in ((mine.inward, "in_proj_"), (mine.outward, "out_proj.")):
        theirs.load_state_dict({f"{name}{kind}": getattr(ours, kind) for kind in ("weight", "bias")}, strict=False)
    x, word = torch.randn(3, 7, 16), torch.arange(7) < torch.tensor([7, 3, 1])[:, None]
    torch.testing.assert_close(mine(x, word), theirs(x, x, x, key_padding_mask=~word)[0])
    short, long = (text.build((n,), 4, 50, 16, 4, 0, 0.0) for n in (5, 9))
    held = short.state_dict()
    long.load_state_dict(held | {"places": nn.functional.pad(held["places"], (0, 0, 0, 4), value=9.0)})
    tokens = torch.randint(1, 50, (6, 5))
    torch.testing.assert_close(short(tokens), long(nn.functional.pad(tokens, (0, 4))))
    assert bool(torch.isfinite(short(torch.zeros(2, 5, dtype=torch.int64))).all())  # an empty text


SHORT = {"rounds": 1, "tau_train": 1, "lr": 0.1, "budget": 3}
RESNET = SHORT | {"dataset": "digits", "model": "resnet", "model_options": {"widths": "8,16", "blocks": 1}}
RESNET |= {"clients": 5, "tau_init": 6, "batch_size": 32, "classes_per_client": 5}


def text_fields(path):
    return SHORT | {"dataset": str(path), "model_options": {"dropout": 0.1}, "tau_init": 10, "batch_size": 8}


def test_both_learn_real_data_alike_on_any_number_of_ranks(help_texts, tmp_path):
    wanted = {"resnet": RESNET, "text": text_fields(help_texts)}
    two = run_many(2, tmp_path, wanted)
    for name, fields in wanted.items():
        with Result(run_here(tmp_path / f"{name}-1.h5", fields)) as one:
            counts = one["client/class_counts"]
            largest = (counts.max(1) / counts.sum(1)).mean()  # what naming each client's largest class would reach
            assert one.run.model == name
            assert one["best/test_acc"].mean() > largest + {"resnet": 0.4, "text": 0.08}[name]
            assert starts.same(one.path, two[name])
