"""What the methods are at their exact limits, with clients that are away, on several ranks, and which options they take."""

import launch
import numpy as np
import pytest
import torch
from launch import differences, federation, run_here, run_many
from twins import FIELDS, HEAD, TAU, play

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find, names
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run


@pytest.fixture(scope="module", params=["auto", "torch"])
def kernels(request):
    """What computes the methods: the native kernels where they can (one client at a time), and PyTorch."""
    launch.DEFAULTS["kernels"] = request.param
    yield request.param
    del launch.DEFAULTS["kernels"]


@pytest.fixture(scope="module")
def base(kernels):
    return {method: play(method) for method in ("local", "fedavg")}


def part(played, where):
    """Return what was scored, or what stands at `where` in the states."""
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
    """To the bit."""
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
    assert np.array_equal(dpfl.training.epochs, base["local"][2].training.epochs)


def test_two_epochs_twice_are_four_and_a_second_model_counts_no_epoch():
    for method in ("ditto", "apfl", "perfedavg", "fedrep", "pfedgraph"):
        _, _, fed = play(method, rounds=2)
        assert (fed.training.epochs == 2 * TAU).all()
        per_epoch = -(-fed.clients.n_train // 32)
        steps = {"ditto": 2 * per_epoch, "apfl": 2 * per_epoch}.get(method, per_epoch) * 2 * TAU
        assert np.array_equal(fed.training.steps, 2 * ((per_epoch * TAU) // 2) if method == "perfedavg" else steps)
        assert (fed.notes["models_received"] == 2).all()


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


def test_a_frozen_head_keeps_weights_and_momentum():
    """Freezing masks weights, momentum, decay and clip norm: the base's steps are as if the head did not exist."""
    with federation(FIELDS | {"method": "fedrep", "weight_decay": 0.1}) as fed:
        head = fed.columns("head")
        assert int(head.sum()) == 64 * 10 + 10
        w = fed.local_opt(fed.common_row(), 1)
        before, momentum = w.clone(), fed.training.momentum["w"].clone()
        w = fed.local_opt(w, 2, trained=~head)
        assert torch.equal(w[:, head], before[:, head]) and not torch.equal(w, before)
        assert torch.equal(fed.training.momentum["w"][:, head], momentum[:, head])
        with pytest.raises(UserError, match="allowed are head, none, all, or of the layers fc1, head"):
            fed.columns("fc7")


# ranks ------------------------------------------------------------------------------------------------------------------
# replay needs a result, fedbn a normalisation
BASELINES = [m for m in names("method") if m not in ("dpfl", "fedbn", "replay")]
SEVEN = {"clients": 7, "rounds": 2, "tau_train": 2, "tau_init": 1, "budget": 3}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The results of all baselines on three ranks, which are started once."""
    return run_many(3, tmp_path_factory.mktemp("three"), {m: SEVEN | {"method": m} for m in BASELINES})


@pytest.mark.parametrize("method", BASELINES)
def test_a_method_does_not_know_the_ranks(method, tmp_path, three):
    """The same bits on one and on three ranks."""
    # kernels: as on three, whatever the fixture was
    one = run_here(tmp_path / "one.h5", SEVEN | {"method": method}, kernels="auto")
    with Result(one) as a, Result(three[method]) as b:
        assert Result.differences(a, b) == []
        assert a["round/gradient_steps"][-1] > 0
        assert a["round/epochs"].tolist() == ([1, 3, 5] if find("method", method).preprocesses else [0, 2, 4])
        expected = {"local": 0, "scaffold": 4}.get(method, 2)  # x and c
        received = a["traffic/models_received"][1:]
        assert (received >= 2).all() if method == "cobo" else (received == expected).all()  # cobo: and pairs' midpoints


def test_more_ranks_than_clients(tmp_path):
    """And a window of five rows: several passes."""
    fields = {"method": "pfedgraph", "clients": 3, "rounds": 2, "tau_train": 1}
    four = run_many(4, tmp_path, {"four": fields}, four={"window_gb": 2e-5})["four"]
    assert differences(run_here(tmp_path / "one.h5", fields, kernels="auto"), four) == []


# options ----------------------------------------------------------------------------------------------------------------
def test_random_graph_draws():
    """B_c - 1 distinct others each, once or anew each round."""
    for redraw in (False, True):
        _, states, _ = play("random_graph", budget=3, options={"redraw": redraw})
        graphs = [s["shared"]["chosen"] for s in states]
        assert all((g.degrees() == 2).all() and not g.matrix().diagonal().any() for g in graphs)
        assert (len({g.matrix().tobytes() for g in graphs}) > 1) is redraw


def test_options_name_the_run():
    assert Run(method="fedprox", options={"mu": 0.1}).slug() == Run(method="fedprox").slug()
    assert Run(method="fedprox", options={"mu": 1}).slug() == Run(method="fedprox", options={"mu": 1.0}).slug()
    assert Run(method="fedprox", options={"mu": 1}).slug() != Run(method="fedprox").slug()


@pytest.mark.parametrize(
    ("method", "fields", "sentence"),
    [
        ("fedrep", {"tau_train": 1}, "--options.base_epochs is 1 of 1 epochs of a round, so no head is ever trained; use fewer, "),
        ("fedbn", {}, "--method fedbn keeps normalisation layers personal, and --model mlp has none"),
    ],
)  # fmt: skip
def test_what_a_method_needs_of_its_run_is_one_sentence(method, fields, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        play(method, **fields)
