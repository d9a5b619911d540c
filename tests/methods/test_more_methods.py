"""SCAFFOLD, FedPer, pFedMe, FedALA, PENS, CoBo and FedBN against slow twins in plain PyTorch, and their exact limits (`test_methods.Twin`)."""

import contextlib

import launch
import numpy as np
import pytest
import torch
from launch import federation
from test_methods import FIELDS, ROUNDS, TAU, N, Twin, play, same, shared

import dpfl_mpi.models
from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import fedbn
from dpfl_mpi.plugins import find

HEAD = 64 * 64 + 64  # the first column of the perceptron's head


def keyed(*key):
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def twin_scaffold(tw, o):
    """Without momentum, decay and clipping a step is the paper's line 10, and c_i its option II; else c_i is the mean of the gradients."""
    x, c, c_i = tw.start, torch.zeros_like(tw.start), [torch.zeros_like(tw.start)] * N
    yield [x] * N
    for t in range(ROUNDS):
        trained, controls = [], []
        for k in range(N):
            y, seen = x, []
            for batch in tw.batches(k, t * TAU, TAU):
                seen.append(tw.gradient(y, batch))
                g = seen[-1] - c_i[k] + c
                y = tw.step(k, "w", y, g) if tw.run.momentum else y - tw.run.lr * g
            paper = c_i[k] - c + (x - y) / (len(seen) * tw.run.lr)
            controls.append(sum(seen) / len(seen) if tw.run.momentum else paper)
            trained.append(y)
        x = x + o["global_lr"] * (tw.mean(trained) - x)
        c = c + tw.mean([new - old for new, old in zip(controls, c_i, strict=True)])
        c_i = controls
        yield [x] * N


def twin_fedper(tw, o):
    body, heads = tw.start[:HEAD], [tw.start[HEAD:]] * N
    yield [tw.start] * N
    for t in range(ROUNDS):
        w = [tw.local(k, torch.cat([body, heads[k]]), t * TAU) for k in range(N)]
        yield w
        body, heads = tw.mean(w)[:HEAD], [row[HEAD:] for row in w]


def twin_pfedme(tw, o):
    w = tw.start
    yield [w] * N
    for t in range(ROUNDS):
        thetas, trained = [], []
        for k in range(N):
            w_k = theta = w
            for batch in tw.batches(k, t * TAU, TAU):
                for _ in range(o["steps"]):
                    pull = lambda v, w_k=w_k: o["lam"] / 2 * (v - w_k).square().sum()  # noqa: E731
                    theta = theta - o["personal_lr"] * tw.gradient(theta, batch, pull)
                w_k = w_k - tw.run.lr * o["lam"] * (w_k - theta)
            thetas.append(theta)
            trained.append(w_k)
        yield thetas
        w = (1 - o["beta"]) * w + o["beta"] * tw.mean(trained)


def twin_fedala(tw, o):
    w, w_i, weight = tw.start, [tw.start] * N, [torch.ones(len(tw.start) - HEAD)] * N
    yield list(w_i)
    for t in range(ROUNDS):
        for k in range(N):
            if t:
                batches = list(tw.batches(k, t * TAU, 1))
                batches, losses = batches[: int(np.ceil(o["share"] * len(batches)))], []
                own, step = w_i[k][HEAD:], (w - w_i[k])[HEAD:]
                while len(losses) < (o["passes"] if t == 1 else 1):
                    for batch in batches:
                        mixed = torch.cat([w[:HEAD], own + step * weight[k]])
                        g = tw.gradient(mixed, batch)
                        loss = torch.nn.functional.cross_entropy(tw.model(mixed)(batch[0]), batch[1]).detach()
                        weight[k] = (weight[k] - o["eta"] * g[HEAD:] * step).clamp(0, 1)
                    losses.append(float(loss))
                    if len(losses) > 10 and np.std(losses[-10:]) < o["threshold"]:
                        break
                w_i[k] = torch.cat([w[:HEAD], own + step * weight[k]])
            w_i[k] = tw.local(k, w_i[k], t * TAU)
        yield list(w_i)
        w = tw.mean(w_i)


def twin_pens(tw, o):
    w, taken = [tw.start] * N, np.zeros((N, N))
    others = tw.run.most_senders
    first = round(o["first_step"] * ROUNDS)
    yield w
    for t in range(1, ROUNDS + 1):
        w = [tw.local(k, w[k], (t - 1) * TAU) for k in range(N)]
        yield w
        new = []
        for k in range(N):
            draw = keyed(tw.run.seed, 4, k, t * 1000).permutation
            everyone = np.array([j for j in range(N) if j != k])
            if t <= first:
                x, y = tw.data[k]
                of = {
                    j: torch.nn.functional.cross_entropy(tw.model(w[j])(x), y).item()
                    for j in draw(everyone)[:others].tolist()
                }
                chosen = sorted(of, key=of.get)[: o["m"]]
                taken[k, chosen] += 1
            else:
                liked = [j for j in everyone if taken[k, j] > first * o["m"] / (N - 1)]
                chosen = draw(np.array(liked or everyone))[:others]
            members = [k, *chosen]
            new.append((sum(tw.p[j] * w[j].double() for j in members) / sum(tw.p[j] for j in members)).float())
        w = new


def twin_cobo(tw, o):
    x, w = [tw.start] * N, np.ones((N, N))
    yield x
    for t in range(1, ROUNDS + 1):
        drawn = np.array([keyed(tw.run.seed, streams.PAIRS, k, t).random(N) < 1 / N for k in range(N)])
        for i in range(N):
            for j in range(i):
                if drawn[i, j] or drawn[j, i]:
                    z = (x[i] + x[j]) / 2
                    g_i, g_j = (tw.gradient(z, next(tw.batches(k, (t - 1) * TAU, 1))) for k in (i, j))
                    w[i, j] = w[j, i] = min(max(w[i, j] + o["gamma"] * float(g_i @ g_j), 0), 1)
        old = x

        def pull(v, i, old=old):
            return o["rho"] / 2 * sum(w[i, j] * (v - old[j]).square().sum() for j in range(N) if j != i)

        x = [tw.local(i, x[i], (t - 1) * TAU, extra=lambda v, i=i: pull(v, i)) for i in range(N)]
        yield x


PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
CASES = [
    ("scaffold", {"global_lr": 0.7}, {}),
    ("scaffold", None, PLAIN),
    ("fedper", None, {}),
    ("pfedme", {"beta": 0.8}, {}),
    ("fedala", {"threshold": 0.02, "share": 0.5, "passes": 14}, {}),
    ("pens", {"m": 1, "first_step": 0.6}, {"budget": 3}),
    ("cobo", {"gamma": 5.0, "rho": 0.3}, {}),
]


@pytest.fixture(params=[("native", 1), ("torch", N)], ids=["native", "torch"])
def block(request, monkeypatch):
    """One client at a time by the native kernels, all at once by PyTorch."""
    kernels, block = request.param
    monkeypatch.setitem(launch.DEFAULTS, "kernels", kernels)
    return block


@pytest.mark.parametrize(("method", "options", "fields"), CASES)
def test_twin(method, options, fields, block):
    scored, states, fed = play(method, block=block, options=options, **({"budget": "inf"} | fields))
    twin = list(globals()[f"twin_{method}"](Twin(fed), fed.options))
    assert fed.backend.name == ("native" if block == 1 else "torch")
    assert len(scored) == len(twin) == ROUNDS + 1
    for rows, expected in zip(scored, twin, strict=True):
        assert torch.allclose(rows, torch.stack(list(expected)), rtol=0, atol=1e-5)
    assert (scored[-1] - scored[0]).abs().max() > 0.01, "a test of rows that do not move would pass with anything"
    state = states[-1]["client"]
    if method == "cobo":
        assert (state["w"] < 1).any() and (state["w"] > 0).any()
    if method == "fedala":
        learnt = state["W"][:, HEAD : fed.ensemble.size]
        assert (learnt < 1).any() and (learnt > 0).any() and (state["W"][:, :HEAD] == 1).all()


def test_a_method_without_its_own_idea_is_fedavg_or_local():
    """Where its own idea is switched off a method is FedAvg, or Local, to the bit."""
    base = {method: play(method) for method in ("local", "fedavg")}
    for method, options in (("fedper", {"head": "none"}), ("fedala", {"layers": "none"})):
        states = play(method, options=options)[1]
        assert same(shared(states, "base" if method == "fedper" else "w"), shared(base["fedavg"][1]))
    for method, options, fields in (
        ("fedper", {"head": "all"}, {}),
        ("pens", None, {"budget": 1}),
        ("cobo", {"rho": 0.0}, {}),
    ):
        assert same(play(method, options=options, **fields)[0], base["local"][0]), method


def test_absent_clients_keep_what_is_theirs(tmp_path):
    """In a round without them: controls, weights, models and counts, to the bit."""
    (tmp_path / "there").write_text("1 1 1 1\n0 1 0 1\n1 1 1 1\n")
    fields = {"available": str(tmp_path / "there"), "budget": 3}
    for method in ("scaffold", "fedper", "pfedme", "fedala", "pens", "cobo"):
        _, states, fed = play(method, rounds=2, **fields)
        away, here = fed.row_of[[0, 2]], fed.row_of[[1, 3]]
        for name, rows in states[1]["client"].items():
            before, after = torch.as_tensor(rows), torch.as_tensor(states[2]["client"][name])
            columns = slice(HEAD, None) if method == "fedper" else slice(None)  # the base comes from the server
            assert torch.equal(before[away][..., columns], after[away][..., columns]), (method, name)
        assert not torch.equal(fed.training.momentum["w"][here], fed.training.momentum["w"][away]) or method == "pfedme"
        assert (fed.notes["models_received"][away] == 0).all() and (fed.notes["models_received"][here] > 0).all()


# FedBN: a model with GroupNorm -------------------------------------------------------------------------------------------
NORMED = """
from torch import nn

HEAD = "head"


class Net(nn.Module):
    def __init__(self, c, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 36, classes)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def build(shape, classes):
    return Net(shape[2], classes)
"""


@pytest.fixture
def normed(tmp_path, monkeypatch):
    """A model `normed` beside those of the package."""
    (tmp_path / "normed.py").write_text(NORMED)
    monkeypatch.setattr(dpfl_mpi.models, "__path__", [*dpfl_mpi.models.__path__, str(tmp_path)])
    return "normed"


def test_fedbn_twin(normed):
    scored, _, fed = play("fedbn", model=normed, init="torch")
    tw = Twin(fed)
    tw.module = find("model", normed).build((8, 8, 1), 10)
    own = torch.cat([torch.full((p.numel(),), n.startswith("norm.")) for n, p in tw.module.named_parameters()])
    assert int(own.sum()) == 8 and torch.equal(fed.columns("normalisation")[: len(own)], own)
    mean, w = tw.start, [tw.start] * N
    for t, rows in enumerate(scored[1:]):
        w = [tw.local(k, torch.where(own, w[k], mean), t * TAU) for k in range(N)]
        assert torch.allclose(rows, torch.stack(w), rtol=0, atol=1e-5)
        mean = tw.mean(w)
    norms = scored[-1][:, own]
    assert (norms[0] - norms[1]).abs().max() > 1e-3


def test_fedbn_without_normalisation_is_one_sentence():
    with (
        contextlib.closing(federation(FIELDS | {"method": "fedbn"})) as fed,
        pytest.raises(UserError, match="--method fedbn keeps normalisation layers personal, and --model mlp has none"),
    ):
        fedbn.init(fed)
