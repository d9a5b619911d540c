"""What the methods are at their exact limits, with clients that are away, on several ranks; their options, optimisers and schedules."""

import math

import launch
import numpy as np
import pytest
import starts
import torch
from launch import differences, federation, run_here, run_many
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from twins import FIELDS, HEAD, TAU, play

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.training import learning_rate
from dpfl_mpi.numerics.backend import Adam
from dpfl_mpi.plugins import find, names
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run


@pytest.fixture(scope="module", params=["auto", "torch"])
def kernels(request):
    launch.DEFAULTS["kernels"] = request.param
    yield request.param
    del launch.DEFAULTS["kernels"]


@pytest.fixture(scope="module")
def base(kernels):
    return {method: play(method) for method in ("local", "fedavg")}


def part(played, where):
    scored, states, _ = played
    return scored if where == "scored" else [state[where[0]][where[1]] for state in states]


W = ("client", "w"), ("shared", "w")  # Local's rows, and FedAvg's


@pytest.mark.parametrize(
    ("method", "options", "fields", "which", "alike"),
    [
        ("fedprox", {"mu": 0}, {}, "fedavg", {W[1]: W[1]}),
        ("ditto", {"lam": 0}, {}, "local", {("client", "v"): W[0]}),
        ("ditto", {"lam": 0}, {}, "fedavg", {W[1]: W[1]}),
        ("apfl", {"alpha": 1.0}, {}, "local", {("client", "v"): W[0], "scored": "scored"}),
        ("apfl", {"alpha": 0.0}, {}, "fedavg", {W[1]: W[1]}),
        ("fedrep", {"head": "none", "base_epochs": TAU}, {}, "fedavg", {("shared", "phi"): W[1]}),
        ("fedrep", {"head": "all", "base_epochs": 0}, {}, "local", {("client", "h"): W[0], "scored": "scored"}),
        ("fedper", {"head": "none"}, {}, "fedavg", {("shared", "base"): W[1]}),
        ("fedper", {"head": "all"}, {}, "local", {"scored": "scored"}),
        ("fedala", {"layers": "none"}, {}, "fedavg", {W[1]: W[1]}),
        ("pens", None, {"budget": 1}, "local", {"scored": "scored"}),
        ("cobo", {"rho": 0.0}, {}, "local", {"scored": "scored"}),
        ("knnper", {"interpolation": 0}, {}, "fedavg", {W[1]: W[1]}),
    ],
)
def test_without_its_own_idea_a_method_is_fedavg_or_local(method, options, fields, which, alike, base):
    played = play(method, options=options, **fields)
    for mine, theirs in alike.items():
        a, b = part(played, mine), part(base[which], theirs)
        assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    if method == "knnper":  # and so are its scores
        for name, atol in (("val_acc", 0), ("test_acc", 0), ("val_loss", 1e-6), ("test_loss", 1e-6)):
            np.testing.assert_allclose(played[2].notes[name], base["fedavg"][2].notes[name], rtol=0, atol=atol)


def test_dpfl_of_budget_1_is_local(base):
    """tau_init = c tau_train epochs and R rounds are c + R rounds of Local."""
    _, states, dpfl = play("dpfl", rounds=1, budget=1, tau_init=2 * TAU)
    assert torch.equal(states[-1]["client"]["w"], base["local"][1][-1]["client"]["w"])
    mine, theirs = dpfl.training, base["local"][2].training
    assert np.array_equal(mine.epochs, theirs.epochs) and np.array_equal(mine.steps, theirs.steps)


def test_two_epochs_twice_are_four_and_a_second_model_counts_no_epoch():
    for method in ("ditto", "apfl", "perfedavg", "fedrep", "pfedgraph"):
        _, _, fed = play(method, rounds=2)
        assert (fed.training.epochs == 2 * TAU).all()
        per_epoch = -(-fed.clients.n_train // 32)
        steps = {"ditto": 2 * per_epoch, "apfl": 2 * per_epoch}.get(method, per_epoch) * 2 * TAU
        assert np.array_equal(fed.training.steps, 2 * ((per_epoch * TAU) // 2) if method == "perfedavg" else steps)
        assert (fed.notes["models_received"] == 2).all()


def test_absent_clients_keep_what_is_theirs(tmp_path):
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


# replay needs a result, fedbn a normalisation
BASELINES = [m for m in names("method") if m not in ("dpfl", "fedbn", "replay")]
SEVEN = {"clients": 7, "rounds": 2, "tau_train": 2, "tau_init": 1, "budget": 3}


FEW = {"method": "pfedgraph", "clients": 3, "rounds": 2, "tau_train": 1}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The results of all baselines on three ranks, and of `FEW` clients on four, with a window of five rows; one start."""
    runs = {m: SEVEN | {"method": m} for m in BASELINES} | {"few": FEW}
    jobs = {m: {"ranks": 3} for m in BASELINES} | {"few": {"window_gb": 2e-5}}
    return run_many(4, tmp_path_factory.mktemp("several"), runs, **jobs)


@pytest.mark.parametrize("method", BASELINES)
def test_a_method_does_not_know_the_ranks(method, tmp_path, several):
    # kernels: as on three, whatever the fixture was
    one = run_here(tmp_path / "one.h5", SEVEN | {"method": method}, kernels="auto")
    with Result(one) as a, Result(several[method]) as b:
        assert Result.differences(a, b) == []
        assert a["round/gradient_steps"][-1] > 0
        assert a["round/epochs"].tolist() == ([1, 3, 5] if find("method", method).preprocesses else [0, 2, 4])
        expected = {"local": 0, "scaffold": 4}.get(method, 2)  # x and c
        received = a["traffic/models_received"][1:]
        assert (received >= 2).all() if method == "cobo" else (received == expected).all()  # cobo: and pairs' midpoints


def test_more_ranks_than_clients_and_several_passes(tmp_path, several):
    assert differences(run_here(tmp_path / "one.h5", FEW, kernels="auto"), several["few"]) == []


@pytest.mark.parametrize(
    ("method", "fields", "sentence"),
    [
        ("fedrep", {"options": {"head": "fc7"}}, ".*allowed are head, none, all, or of the layers fc1, head"),
        ("fedala", {"options": {"layers": "foo"}}, "--options.layers is foo; allowed are head, none, all, or of the layers"),
        ("fedrep", {"tau_train": 1}, "--options.base_epochs is 1; allowed is 0 to 0: the rest of tau_train is the head's"),
        ("fedbn", {}, "--method fedbn needs GroupNorm, LayerNorm or the like; --model mlp has none"),
    ],
)  # fmt: skip
def test_what_a_method_needs_of_its_run_is_one_sentence(method, fields, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        play(method, **fields)


BETAS, EPS, DECAY = (0.8, 0.95), 1e-6, 0.1


@pytest.mark.parametrize("decoupled", [False, True])
def test_steps_are_pytorchs(decoupled):
    """Two rows, each clipped by itself; in the third a mask freezes columns, which are as if they did not exist."""
    w = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    trained = torch.arange(16) % 3 > 0
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    for mask in (None, trained):
        columns = slice(None) if mask is None else trained
        rows, memory = w.clone(), torch.zeros(2, 33)
        leaves = [torch.nn.Parameter(row[columns].clone()) for row in w]
        theirs = [kind([leaf], 0.05, betas=BETAS, eps=EPS, weight_decay=DECAY) for leaf in leaves]
        for step in range(6):
            g = torch.randn(2, 16, generator=torch.Generator().manual_seed(step + 1)) * (1 + step)
            for leaf, row, optimiser in zip(leaves, g, theirs, strict=True):
                leaf.grad = row[columns].clone()
                torch.nn.utils.clip_grad_norm_([leaf], 5.0)
                optimiser.step()
            Adam(2, 0.0, DECAY, 5.0, BETAS, EPS, decoupled).step(rows, g, memory, 0.05, mask)
        expected = torch.stack([leaf.detach() for leaf in leaves])
        assert torch.allclose(rows[:, columns], expected, rtol=0, atol=2e-6)
        if mask is not None:
            assert torch.equal(rows[:, ~trained], w[:, ~trained]) and not memory[:, :16][:, ~trained].any()


def test_its_memory_is_kept_reset_and_checkpointed(tmp_path, monkeypatch):
    for state, steps in (("keep", 2), ("reset", 1)):
        with federation(FIELDS | {"optimizer": "adam", "momentum_state": state, "method": "local"}) as fed:
            w, per_epoch = fed.common_row(), -(-fed.clients.n_train // 32)
            for t in (1, 2):
                fed.begin_round(t)
                fed.local_opt(w, 1)
            assert fed.training.momentum["w"][:, -1].tolist() == (steps * per_epoch).tolist()
    fields = starts.small(method="fedrep", tau_train=2, optimizer="adam", lr_schedule="cosine")
    starts.cut_after(monkeypatch, 2, tmp_path / "run.h5", fields)
    assert starts.same(starts.here(tmp_path / "run.h5", fields), starts.here(tmp_path / "whole.h5", fields))


def rates(**fields):
    run = Run(method="fedavg", rounds=10, lr=0.1, **fields).resolve()
    return run, [learning_rate(run, t) for t in range(1, 11)]


def scheduled(kind, **how):
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    schedule, out = kind(optimiser, **how), []
    for _ in range(10):
        out += schedule.get_last_lr()
        optimiser.step()
        schedule.step()
    return out


def test_schedules_are_pytorchs():
    step, cosine = scheduled(StepLR, step_size=3, gamma=0.5), scheduled(CosineAnnealingLR, T_max=10, eta_min=0.01)
    assert rates(lr_schedule="step", lr_step=3, lr_gamma=0.5)[1] == pytest.approx(step)
    assert rates(lr_schedule="cosine", lr_final=0.1)[1] == pytest.approx(cosine)
    assert rates()[1] == [0.1] * 10
    run, _ = rates(lr_schedule="cosine", lr_decay=0.5)
    assert [learning_rate(run, t) for t in (0, 1)] == [0.1, 0.1]  # preprocessing, the first round
    assert learning_rate(run, 10) == pytest.approx(0.5 * 0.1 * (1 + math.cos(0.9 * math.pi)) / 2, rel=1e-12)
    assert learning_rate(run, 12) == 0.05  # fine-tuning starts at the schedule's start anew
