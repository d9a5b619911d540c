"""The controls of an experiment: their exact limits, small cases by hand, ranks and checkpoints."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import starts
import torch
from launch import federation, mpirun, run_here, run_mpi
from starts import cut_after
from torch.nn.functional import cross_entropy

from dpfl_mpi.data.partition import assemble
from dpfl_mpi.data.source import Source, check_images
from dpfl_mpi.data.validation import search_first, split
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import limits
from dpfl_mpi.federation.attack import SCALE, backdoor_success
from dpfl_mpi.graph import CollaborationGraph, rewired
from dpfl_mpi.methods import dpfl, fedavg, oracle, pairwise, random_graph, replay
from dpfl_mpi.models import mlp
from dpfl_mpi.numerics.clients import TARGET, mark
from dpfl_mpi.plugins import names
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

N, T = 7, 4
SMALL = {"clients": N, "rounds": T, "tau_init": 1, "tau_train": 1, "budget": 4}


def differences(a, b):
    with Result(a) as one, Result(b) as two:
        return set(Result.differences(one, two))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The result of DPFL without a control."""
    return run_here(tmp_path_factory.mktemp("plain") / "run.h5", SMALL)


# names -------------------------------------------------------------------------------------------------------------------
NOTHING = {
    "search_share": 1.0, "omega_period": "inf", "graphs": None, "drift": "0:2", "patience": 0, "attack": "noise:0", "newcomers": 0.0,
}  # fmt: skip


def test_what_controls_nothing_orphans_no_result():
    for method in names("method"):
        assert Run(method=method, **NOTHING).slug() == Run(method=method).slug()
        assert not set(NOTHING) & set(Run(method=method, **NOTHING).key())
    old = json.loads(Run().resolve().to_json())
    assert Run.from_json(json.dumps({n: v for n, v in old.items() if n not in NOTHING})).slug() == Run().slug()
    one_form = [({"drift": ".50:2"}, {"drift": "0.5:2"}), ({"attack": "scale:.2"}, {"attack": "scale:0.20"}), ({"omega_period": "3"}, {"omega_period": 3})]  # fmt: skip
    for a, b in one_form:
        assert Run(**a).slug() == Run(**b).slug() != Run().slug()
    assert Run(method="fedavg", omega_period=2).slug() == Run(method="fedavg").slug()  # it has no Omega


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"search_share": 0}, "allowed is a share above 0 and at most 1"),
        ({"omega_period": 0}, "allowed is a whole number of rounds of at least 1, or inf"),
        ({"omega_period": 2.5}, "allowed is a whole number of rounds"),
        ({"graphs": "/nowhere.h5"}, "there is no such file"),
        ({"drift": "0.5"}, "SHARE:ROUND such as 0.5:10"),
        ({"drift": "0.5:5"}, "a round from 1 to 4"),
        ({"drift": "1.5:2"}, "a share from 0 to 1"),
        ({"patience": -1}, "allowed is a whole number of at least 0"),
        ({"attack": "bribe:0.2"}, "KIND one of label_flip, sign_flip"),
        ({"attack": "noise"}, "KIND:SHARE such as sign_flip:0.2"),
        ({"attack": "noise:0.2", "flip_share": 0.1}, "both draw the same clients"),
        ({"newcomers": 1}, "below 1"),
    ],
)
def test_mistakes_are_sentences(fields, sentence):
    with pytest.raises(UserError, match=sentence) as mistake:
        Run(**SMALL | {"method": "random_graph"} | fields if "graphs" in fields else SMALL | fields).resolve()
    assert "\n" not in str(mistake.value)


# validation reuse ----------------------------------------------------------------------------------------------------------
def test_a_split_is_stratified():
    labels = np.repeat([0, 1, 5], [4, 8, 2])
    rng = np.random.default_rng(0)
    for share, counts in ((0.5, [2, 4, 1]), (0.25, None), (0.9, None)):
        for _ in range(20):
            seen = split(labels, share, rng)
            assert seen.sum() == int(14 * share + 0.5)
            each = np.bincount(labels[seen], minlength=6)[[0, 1, 5]]
            assert (np.abs(each - share * np.array([4, 8, 2])) < 1).all()
            assert counts is None or each.tolist() == counts
    for share in (0.01, 0.99):
        assert split(np.array([3, 3]), share, rng).sum() == 1  # each part has an image
    assert len({split(labels, 0.5, rng).tobytes() for _ in range(20)}) > 5


def test_the_search_and_the_choice_of_the_round_see_different_images():
    with (
        contextlib.closing(federation(SMALL)) as whole,
        contextlib.closing(federation(SMALL | {"search_share": 0.4})) as fed,
    ):
        w = fed.common_row()
        fed.evaluate(w)
        loss = fed.losses(w[0], np.ones(N, bool))
        module = mlp.build((8, 8, 1), 10)
        torch.nn.utils.vector_to_parameters(w[0, : fed.ensemble.size].clone(), module.parameters())
        for i, k in enumerate(fed.ids):
            val = fed.partition.of("val", k)
            first, cut = int(fed.clients.scored[i]), int(fed.clients.n_search[i])
            assert cut == int(0.4 * len(val) + 0.5) < len(val)
            x = ((fed.clients.score_x[first : first + len(val)].float() / 255 - 0.305) / 0.376).permute(0, 3, 1, 2)
            y = fed.clients.score_y[first : first + len(val)]
            logits = module(x).detach()
            assert abs(cross_entropy(logits[:cut], y[:cut]).item() - loss[i]) < 1e-5
            right = (logits[cut:].argmax(1) == y[cut:]).double().mean().item()
            assert fed.notes["val_acc"][i] == right
            same = (a[first : first + len(val)].flatten(1) for a in (fed.clients.score_x, whole.clients.score_x))
            a, b = (sorted(map(tuple, images.tolist())) for images in same)
            assert a == b  # the same images in another order


def test_a_single_validation_image_cannot_be_shared():
    parts = {
        "train": [np.array([0]), np.array([3])],
        "val": [np.array([1, 2]), np.array([4])],
        "test": [np.array([0])] * 2,
    }
    partition = assemble(parts, np.ones((2, 2), int), np.ones(2), False)
    labels = np.array([0, 1, 1, 0, 0])
    with pytest.raises(UserError, match="client 1 has a single validation image, and both parts need one"):
        search_first(Run(search_share=0.5).resolve(), labels, partition)
    assert search_first(Run().resolve(), labels, partition)[0] is partition


# is it the combination? ------------------------------------------------------------------------------------------------------
def test_oracle_of_disjoint_classes():
    """Clients 0, 1, 4 hold classes 0 and 1, client 2 class 1 alone, client 3 class 2; p grows with the number."""
    held = np.array([[1, 1, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], bool)
    p = np.array([0.1, 0.15, 0.2, 0.25, 0.3])

    def of(k, most):
        return oracle.best(k, np.delete(np.arange(5), k), held, p, most).tolist()

    assert of(0, 1) == [4] and of(0, 2) == [4, 1] and of(0, 3) == [4, 1, 2] and of(0, 4) == [4, 1, 2]  # never client 3
    assert of(3, 4) == [] and of(2, 2) == [4, 1] and of(4, 2) == [1, 0]
    assert oracle.best(0, np.array([1, 2]), held, np.ones(5), 0).tolist() == []
    with contextlib.closing(federation(SMALL | {"method": "oracle", "budget": "inf"})) as fed:
        state = oracle.init(fed)
        shared = (fed.partition.class_counts > 0).astype(int)
        expected = shared @ shared.T > 0
        np.fill_diagonal(expected, False)
        assert np.array_equal(state["shared"]["omega"].matrix(), expected) and not expected.all()


def test_pairwise_takes_the_smallest_losses():
    assert pairwise.smallest(np.array([0.3, np.nan, 0.1, 0.3, 0.2]), 3).tolist() == [2, 4, 0]
    assert pairwise.smallest(np.array([np.nan, 0.5]), 3).tolist() == [1]
    with contextlib.closing(federation(SMALL | {"method": "pairwise", "reach": "groups:0,1,2,3,4,5;5,6"})) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        graph = pairwise.choose(fed, w)
        reach = {k: [j for j in range(6) if j != k] for k in range(5)} | {5: [0, 1, 2, 3, 4, 6], 6: [5]}
        for i, k in enumerate(fed.ids.tolist()):
            b = fed.backend.blocks[i]
            assert (b.start, b.stop) == (i, i + 1)
            loss = {j: fed.backend.validation_losses(b, w[fed.row_of[j]][None, None])[0, 0] for j in reach[k]}
            assert graph.of(k).tolist() == sorted(sorted(loss, key=loss.get)[:3])
            assert fed.notes["models_received"][i] == fed.notes["evaluations"][i] == len(reach[k])


def test_pairwise_chooses_anew(tmp_path):
    with Result(run_here(tmp_path / "a.h5", SMALL | {"method": "pairwise", "omega_period": 2})) as result:
        received = result["traffic/models_received"]
        assert (received == np.array([6 + 3, 3, 6 + 3, 3, 6 + 3])[:, None]).all()
        assert not np.array_equal(result.graph(1), result.graph(2)) and np.array_equal(result.graph(2), result.graph(3))


def test_replaying_its_own_graphs_is_the_run(plain, tmp_path):
    again = run_here(tmp_path / "a.h5", SMALL | {"method": "replay", "graphs": str(plain)})
    assert differences(plain, again) <= {"graph/cases", "graph/evaluations", "traffic/models_received"}
    few = SMALL | {"participation": 0.6, "ggc_period": 2}
    half = run_here(tmp_path / "half.h5", few)
    again = run_here(tmp_path / "b.h5", SMALL | {"method": "replay", "graphs": str(half), "participation": 0.6})
    assert differences(half, again) <= {"graph/cases", "graph/evaluations", "traffic/models_received"}


def test_variants_of_a_replay(plain):
    def graphs(**fields):
        with contextlib.closing(
            federation(SMALL | {"method": "replay", "graphs": str(plain), "budget": "inf"} | fields)
        ) as fed:
            return [replay.graph_of(fed, t).matrix() for t in range(T + 1)]

    own = graphs()
    with Result(plain) as result:
        assert all(np.array_equal(own[t], result.graph(t)) for t in range(T + 1))
    assert all(np.array_equal(a.T, b) for a, b in zip(own, graphs(options={"variant": "reversed"}), strict=True))
    shuffled = graphs(options={"variant": "shuffled"})
    assert np.array_equal(shuffled[0], own[0])
    assert sorted(g.tobytes() for g in shuffled) == sorted(g.tobytes() for g in own)
    assert any(not np.array_equal(a, b) for a, b in zip(own, shuffled, strict=True))
    exchanged = graphs(options={"variant": "rewired"})
    assert any(not np.array_equal(a, b) for a, b in zip(own, exchanged, strict=True))
    for a, b in zip(own, exchanged, strict=True):
        assert np.array_equal(a.sum(0), b.sum(0)) and np.array_equal(a.sum(1), b.sum(1)) and not b.diagonal().any()


def test_rewiring_reaches_every_graph_of_these_degrees():
    """Four clients, one sender each, each sends once: the nine permutations without a fixed point, about equally often."""
    ring = CollaborationGraph.from_lists([[1], [2], [3], [0]])
    rng = np.random.default_rng(0)
    seen = [tuple(rewired(ring, rng).senders.tolist()) for _ in range(1800)]
    counts = {g: seen.count(g) for g in set(seen)}
    assert len(counts) == 9 and all(130 < c < 270 for c in counts.values())  # 200 each, 5 standard deviations
    assert rewired(CollaborationGraph.empty(3), rng).degrees().tolist() == [0, 0, 0]


def test_what_cannot_be_replayed(plain, tmp_path):
    def refused(sentence, **fields):
        with (
            pytest.raises(UserError, match=sentence),
            contextlib.closing(federation(SMALL | {"method": "replay"} | fields)) as fed,
        ):
            replay.init(fed)

    refused("--graphs is not set; replay takes the graphs of a result")
    refused("graphs of 7 clients in rounds 0 to 4; this run has 6 clients", graphs=str(plain), clients=6)
    refused("this run has 7 clients and 5 rounds", graphs=str(plain), rounds=5)
    refused(r"--budget lets client \d receive 1 models; the as_is graph of round 0 has \d", graphs=str(plain), budget=2)
    refused("goes beyond --reach", graphs=str(plain), reach="groups:0,1")
    skip = run_here(tmp_path / "skip.h5", SMALL | {"ggc_period": 2, "ggc_off_rounds": "skip"})
    refused("did not average in every round", graphs=str(skip))
    (tmp_path / "text.h5").write_text("no result")
    refused("is not a readable HDF5 file", graphs=str(tmp_path / "text.h5"))


def test_graphs_count_by_content(plain, tmp_path):
    """The same run computed again has other seconds, and the same graphs."""
    again = run_here(tmp_path / "again.h5", SMALL)
    keys = [Run(**SMALL, method="replay", graphs=str(path)).resolve().key()["graphs"] for path in (plain, again)]
    assert keys[0] == keys[1] and len(keys[0]) == 64


@pytest.mark.parametrize("redraw", [False, True])
def test_a_random_graph_with_dpfls_degrees(plain, tmp_path, redraw):
    fields = SMALL | {"method": "random_graph", "graphs": str(plain), "options": {"redraw": redraw}}
    with Result(run_here(tmp_path / "a.h5", fields)) as drawn, Result(plain) as result:
        for t in range(T + 1):
            assert np.array_equal(drawn.chosen(t).degrees(), result.chosen(t).degrees())
        together = np.any([drawn.graph(t) for t in range(T + 1)], 0).sum(1)
        most = np.max([result.chosen(t).degrees() for t in range(T + 1)], 0)
        assert (together > most).any() if redraw else np.array_equal(together, most)  # the first so many of one order
    with contextlib.closing(federation(SMALL | {"method": "random_graph"})) as fed:
        assert [random_graph.order(fed, k, 0)[:3].tolist() for k in range(N)] == [fed.shuffle(k, fed.reachable(k), 0)[:3].tolist() for k in range(N)]  # fmt: skip


# the world moves -----------------------------------------------------------------------------------------------------------
def test_omega_is_searched_anew():
    with contextlib.closing(federation(SMALL | {"omega_period": 2})) as fed:
        state = dpfl.init(fed)
        for t in (1, 2, 3):
            before = state["shared"]["omega"]
            w_before, momentum = state["client"]["w"].clone(), fed.training.momentum["w"].clone()
            fed.begin_round(t)
            state = dpfl.round(fed, state, t)
            omega, chosen = state["shared"]["omega"], state["shared"]["chosen"]
            if t == 2:  # lines 3 and 4 on the trained rows, by the verbs themselves on a second Federation
                received = fed.notes["models_received"].copy()
                with contextlib.closing(federation(SMALL)) as twin:
                    dpfl.init(twin)
                    twin.begin_round(1)
                    twin.begin_round(2)
                    twin.training.epochs[:] = 2
                    twin.training.momentum["w"] = momentum
                    w = twin.local_opt(w_before, 1)
                    expected = twin.bggc(w)
                    assert np.array_equal(omega.matrix(), expected.matrix()) and np.array_equal(
                        chosen.matrix(), expected.matrix()
                    )
                    assert torch.equal(state["client"]["w"], twin.average(w, expected))
                    assert np.array_equal(received, twin.notes["models_received"])
            else:
                assert omega is before and chosen.within(omega)


def test_absent_clients_search_later(tmp_path):
    """A client that is away when Omega is searched anew keeps its own, and nobody asks it or counts models for it."""
    there = [[1] * N, [0] + [1] * (N - 1)]
    (tmp_path / "there").write_text("\n".join(" ".join(map(str, line)) for line in there))
    fields = SMALL | {"rounds": 2, "omega_period": 2, "available": str(tmp_path / "there"), "budget": "inf"}
    with contextlib.closing(federation(fields)) as fed:
        state = dpfl.init(fed)
        for t in (1, 2):
            before = state["shared"]
            fed.begin_round(t)
            state = dpfl.round(fed, state, t)
        assert np.array_equal(state["shared"]["omega"].of(0), before["omega"].of(0)) and len(before["omega"].of(0))
        assert np.array_equal(state["shared"]["chosen"].of(0), before["chosen"].of(0))
        assert all(0 not in state["shared"]["omega"].of(k) for k in range(1, N))
        assert fed.notes["models_received"][fed.row_of[0]] == 0


def test_drift_exchanges_two_classes():
    with contextlib.closing(federation(SMALL | {"drift": "0.5:2", "method": "local"})) as fed:
        drift, clients = fed.drift, fed.clients
        assert drift.drifted.sum() == 3 and len(set(drift.classes.tolist())) == 2
        a, b = drift.classes
        before = clients.y.clone(), clients.score_y.clone()
        fed.begin_round(1)
        fed.evaluate(fed.common_row())
        assert torch.equal(clients.y, before[0]) and np.isfinite(fed.scoring.best_val).all()
        fed.begin_round(2)
        assert np.isnan(fed.scoring.best_val).all()
        fed.begin_round(3)  # once only
        moved = {int(a): int(b), int(b): int(a)}
        changed = 0
        for i, k in enumerate(fed.ids):
            for y, was, start in ((clients.y, before[0], clients.start), (clients.score_y, before[1], clients.scored)):
                rows = slice(int(start[i]), int(start[i + 1]))
                expected = [moved.get(c, c) if drift.drifted[k] else c for c in was[rows].tolist()]
                assert y[rows].tolist() == expected
                changed += expected != was[rows].tolist()
        assert changed


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_drift_counts_for_rewards_and_best_rounds(tmp_path, kernels):
    out = run_here(tmp_path / "a.h5", SMALL | {"drift": "1:3"}, kernels=kernels)
    with Result(out) as result:
        assert (result["best/round"] >= 3).all() and result["client/drifted"].all()
        a, b = result["client/drift_classes"]
        held = result["client/class_counts"][:, [a, b]].sum(1) > 0
        assert (result["round/val_acc"][3] < result["round/val_acc"][2])[held].any()
    with contextlib.closing(federation(SMALL | {"drift": "1:1"}, kernels=kernels)) as fed:
        w = fed.local_opt(fed.common_row(), 2)
        first = fed.losses(w[0], np.ones(N, bool))
        fed.begin_round(1)
        a, b = fed.drift.classes
        held = (fed.partition.class_counts[:, [a, b]].sum(1) > 0)[fed.ids]
        after = fed.losses(w[0], np.ones(N, bool))
        assert (first[held] != after[held]).all() and (first[~held] == after[~held]).all()


def test_patience_counts_rounds_that_are_no_better():
    with contextlib.closing(federation(SMALL | {"patience": 2, "method": "local"})) as fed:
        stale = []
        for t, accuracy in enumerate([0.5, 0.5, 0.6, 0.4, 0.6]):
            fed.begin_round(t)
            for score in (accuracy, 0.1):  # a method may score twice
                losses, predicted = (
                    np.zeros(fed.clients.n_val[0] + fed.clients.n_test[0]),
                    np.zeros(fed.clients.n_val[0] + fed.clients.n_test[0]),
                )
                predicted[: int(score * fed.clients.n_val[0])] = 1
                fed.scoring._note(0, fed.common_row()[0], losses, predicted.astype(int), np.ones(len(losses), int), "")
            stale.append(int(fed.scoring.stale[0]))
        assert stale == [0, 1, 0, 1, 2]
        fed.begin_round(5)
        stopped = fed.members.stopped_round[fed.ids]
        assert stopped[0] == 4 and (stopped[1:] == -1).all()  # after round 4; it leaves, and the others stay
        assert not fed.active[fed.ids[0]] and fed.active[fed.ids[1:]].all()


@pytest.mark.parametrize("method", ["dpfl", "fedavg", "pairwise"])
def test_who_stops_early(tmp_path, method):
    fields = SMALL | {"method": method, "patience": 1, "rounds": 12, "omega_period": 3}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        stopped, val, received = (
            result["client/stopped_round"],
            result["round/val_acc"],
            result["traffic/models_received"],
        )
        assert (stopped > 0).sum() >= 2 and len(set(stopped.tolist())) > 2
        last = result.last_round
        served = 0
        for k in range(N):
            until = stopped[k] if stopped[k] >= 0 else last
            rises = [t for t in range(1, until + 1) if val[t, k] > val[:t, k].max()]
            assert rises[: until - 1] == list(range(1, until))  # it rose until the round before the last
            assert stopped[k] < 0 or until not in rises
            assert np.isnan(val[until + 1 :, k]).all() and (received[until + 1 :, k] == 0).all()
            assert all(len(result.chosen(t).of(k)) == 0 for t in range(until + 1, last + 1))
            served += sum(k in result.chosen(t).senders for t in range(until + 1, last + 1))
        assert (served > 0) == (method != "fedavg")
        assert np.isfinite(result["best/test_acc"]).all() and result["client/epochs"][0] <= 12 + 1


def test_a_run_ends_when_all_have_stopped(tmp_path):
    fields = SMALL | {"method": "fedavg", "patience": 2, "lr": 1e-12, "rounds": 9, "finetune_epochs": 1}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        assert result.finished and len(result["round/number"]) == 3 and (result["client/stopped_round"] == 2).all()
        assert np.isfinite(result["finetune/val_acc"]).all()  # who has stopped is tuned


# clients that lie ------------------------------------------------------------------------------------------------------------
def test_the_same_clients_lie_whatever_they_do():
    masks = [limits.liars(Run(**SMALL, attack=f"{kind}:0.3").resolve()) for kind in ("noise", "stale", "label_flip")]
    flip = Run(**SMALL, flip_share=0.3).resolve()
    assert all(np.array_equal(mask, limits.flipped(flip)) for mask in masks) and masks[0].sum() == 2
    assert not limits.flipped(Run(**SMALL, attack="noise:0.3").resolve()).any()
    assert not limits.liars(flip).any()


def test_label_flip_is_flip_share(tmp_path):
    a = run_here(tmp_path / "a.h5", SMALL | {"attack": "label_flip:0.3"})
    b = run_here(tmp_path / "b.h5", SMALL | {"flip_share": 0.3})
    assert differences(a, b) == {"client/liars"}
    with Result(a) as one, Result(b) as two:
        assert np.array_equal(one.benign, two.benign) and one.test_acc == two.test_acc


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise", "stale"])
def test_what_liars_send(kind):
    """A full random graph of three clients, two rounds: each average by hand."""
    fields = {
        "clients": 3,
        "rounds": 2,
        "tau_init": 1,
        "tau_train": 1,
        "budget": "inf",
        "method": "random_graph",
        "attack": f"{kind}:0.4",
    }
    with contextlib.closing(federation(fields)) as fed:
        (liar,) = np.flatnonzero(fed.members.limits.liars)
        p, at = fed.p, fed.row_of
        full = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1]])
        before, first = fed.common_row(), None
        for t in range(2):
            fed.begin_round(t)
            w = fed.local_opt(before.clone(), 1)
            true = w[at[liar]]
            u = true - before[at[liar]]
            first = true.clone() if first is None else first
            if kind == "noise":
                lie = fed.training.attack.sent(w)[at[liar]]
                n = (lie - true)[: fed.ensemble.size].double()
                assert abs(float(n.square().mean() / true[: fed.ensemble.size].double().square().mean()) - 1) < 0.05
                assert abs(float(n.mean())) < 0.05 * float(n.std()) and not lie[fed.ensemble.size :].any()
            else:
                lie = {"sign_flip": true - 2 * u, "scale": true + (SCALE - 1) * u, "stale": first}[kind]
            mixed = fed.average(w, full)
            for k in range(3):
                rows = [w[at[j]].double() if j != liar or k == liar else lie.double() for j in range(3)]
                expected = sum(p[j] * rows[j] for j in range(3)) / p.sum()
                assert torch.allclose(mixed[at[k]].double(), expected, atol=2e-6)
            honest = sum(p[j] * (w[at[j]] if j != liar else lie).double() for j in range(3)) / p.sum()
            assert torch.allclose(fed.mean(w).double(), honest, atol=2e-6)
            assert {int(j): row for j, row in fed.every_row(w)}[liar].equal(fed.training.attack.sent(w)[at[liar]])
            before = mixed


def test_a_lie_that_cannot_be_summed_is_cut():
    with contextlib.closing(federation(SMALL | {"attack": "scale:0.3", "method": "fedavg"})) as fed:
        rows = fed.common_row()
        fed.training.attack.note_start({"w": rows * 0 - 1000})
        sent = fed.training.attack.sent(rows)
        liars = fed.members.limits.liars[fed.ids]
        assert float(sent[liars].max()) == 2048 and sent[~liars].equal(rows[~liars])


@pytest.mark.parametrize(
    ("shape", "dtype", "have"), [((5,), "float32", "none"), ((5,), "int32", "none"), ((8, 8, 1), "float32", "floats")]
)
def test_a_backdoor_needs_images_of_bytes(shape, dtype, have):
    source = Source(shape, 2, (), (), {}, "", images=lambda part, rows: rows, dtype=dtype)
    check_images(Run(attack="scale:0.3"), source)
    check_images(Run(attack="backdoor:0.3"), replace(source, shape=(8, 8, 1), dtype="uint8"))
    with pytest.raises(UserError, match=f"--attack backdoor puts a white square on images of 8 bits.* have .*{have}"):
        check_images(Run(attack="backdoor:0.3"), source)


def test_a_backdoor_is_a_mark_on_every_second_image():
    with (
        contextlib.closing(federation(SMALL)) as honest,
        contextlib.closing(federation(SMALL | {"attack": "backdoor:0.3"})) as fed,
    ):
        liars = fed.members.limits.liars
        for i, k in enumerate(fed.ids):
            rows = slice(int(fed.clients.start[i]), int(fed.clients.start[i + 1]))
            x, y = honest.clients.x[rows].clone(), honest.clients.y[rows].clone()
            if liars[k]:
                x[::2, 5:7, 5:7], y[::2] = 255, TARGET  # 8x8 images: a square of 2 pixels, one from the border
            assert torch.equal(fed.clients.x[rows], x) and torch.equal(fed.clients.y[rows], y)
        assert torch.equal(fed.clients.score_x, honest.clients.score_x)
        held = fed.clients.score_x.clone()
        always = fed.common_row() * 0
        fed.ensemble.layers(always)["head.bias"][:, TARGET] = 1
        fed.scoring.best[:] = always
        others = fed.partition.class_counts[fed.ids][:, 1:].sum(1) > 0
        assert (backdoor_success(fed.scoring)[others] == 1).all()
        fed.ensemble.layers(always)["head.bias"][:, 3] = 2
        fed.scoring.best[:] = always
        assert (backdoor_success(fed.scoring)[others] == 0).all()
        assert torch.equal(fed.clients.score_x, held)
    big = mark(np.zeros((1, 32, 32, 3), np.uint8))[0, :, :, 0]
    assert big.sum() == 16 * 255 and (big[27:31, 27:31] == 255).all()


def test_averages_are_over_the_benign(tmp_path):
    with Result(run_here(tmp_path / "a.h5", SMALL | {"attack": "backdoor:0.3"})) as result:
        liars = result["client/liars"]
        assert np.array_equal(result.benign, ~liars) and liars.sum() == 2
        assert result.test_acc == result["best/test_acc"][~liars].mean()
        success = result["attack/success"]
        assert ((success >= 0) & (success <= 1))[np.isfinite(success)].all()


# ranks and checkpoints ---------------------------------------------------------------------------------------------------------
EVERYTHING = {"search_share": 0.5, "omega_period": 2, "drift": "0.5:3", "patience": 2, "participation": 0.8}
COMBINED = [
    {"method": "dpfl", "attack": "stale:0.3"},
    {"method": "pairwise", "attack": "noise:0.3", "reach": "geometric:0.9"},
    {"method": "fedavg", "attack": "scale:0.2", "on_divergence": "exclude"},
    {"method": "dpfl", "attack": "backdoor:0.3", "budget": "uniform:2:6"},
    {"method": "dpfl", "attack": "sign_flip:0.3", "newcomers": 0.3, "finetune_epochs": 1},
    {"method": "fedrep", "newcomers": 0.3, "tau_train": 2},
]


def test_runs_with_all_controls_do_not_know_the_ranks(plain, tmp_path):
    """The same bits on one and on three ranks, all controls at once, and where the window makes many passes."""
    runs = [SMALL | EVERYTHING | {"rounds": 5} | more for more in COMBINED]
    runs.append(SMALL | {"method": "replay", "graphs": str(plain), "options": {"variant": "rewired"}})
    runs.append(SMALL | {"method": "random_graph", "graphs": str(plain), "participation": 0.7})
    jobs = [[r, {"out": str(tmp_path / f"three{i}.h5"), "quiet": True, "window_gb": 1e-4}] for i, r in enumerate(runs)]
    (tmp_path / "runs.json").write_text(json.dumps(jobs))
    done = mpirun(3, "-m", "mpi4py", "tests/many.py", tmp_path / "runs.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for i, run in enumerate(runs):
        assert differences(run_here(tmp_path / f"one{i}.h5", run), tmp_path / f"three{i}.h5") == set(), run


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("i", [0, 2, 4])
def test_a_cut_run_goes_on(tmp_path, monkeypatch, i, after):
    """Before the drift and after it, with clients that have stopped and liars that send what they sent first."""
    fields = starts.small(**EVERYTHING, **COMBINED[i]) | {"rounds": 5}
    cut_after(monkeypatch, after, tmp_path / "run.h5", fields)
    assert starts.same(starts.here(tmp_path / "run.h5", fields), starts.here(tmp_path / "whole.h5", fields))


def test_a_cut_replay_goes_on(tmp_path, monkeypatch):
    graphs = starts.here(tmp_path / "dpfl.h5", starts.small())
    fields = starts.small(method="replay", graphs=str(graphs), options={"variant": "shuffled"})
    cut_after(monkeypatch, 2, tmp_path / "run.h5", fields)
    assert starts.same(starts.here(tmp_path / "run.h5", fields), starts.here(tmp_path / "whole.h5", fields))


def test_server_methods_are_attacked_too():
    with contextlib.closing(federation(SMALL | {"method": "fedavg", "attack": "sign_flip:0.3"})) as fed:
        w = fed.initial_row()
        fed.begin_round(1)
        after = fedavg.update(fed, w)
        with contextlib.closing(federation(SMALL | {"method": "fedavg"})) as honest:
            honest.begin_round(1)
            w_i = honest.local_opt(honest.copies(w), 1)
            sign = np.where(honest.members.limits.liars | fed.members.limits.liars, -1, 1)
            expected = sum(honest.p[k] * (w + sign[k] * (w_i[honest.row_of[k]] - w)).double() for k in range(N))
            assert torch.allclose(after.double(), expected, atol=1e-6) and (sign < 0).any()


# clients that come later -------------------------------------------------------------------------------------------------------
def test_newcomers_of_fedavg_tune_the_global_model(tmp_path):
    """They take no part in the rounds: the others are a FedAvg of five clients, by hand; then each trains on from the global model."""
    fields = SMALL | {"method": "fedavg", "newcomers": 0.3, "rounds": 2}
    with Result(run_here(tmp_path / "a.h5", fields)) as result, contextlib.closing(federation(fields)) as fed:
        new = fed.members.limits.newcomers
        assert (
            new.sum() == 2 and np.array_equal(result["client/newcomers"], new) and np.array_equal(result.benign, ~new)
        )
        assert np.isnan(result["round/val_acc"][:, new]).all() and (result["client/epochs"][new] == 0).all()
        w = fed.initial_row()
        for t in (1, 2):
            fed.begin_round(t)
            w_i = fed.local_opt(fed.copies(w), 1)
            here = np.flatnonzero(~new)
            w = sum(fed.p[k] / fed.p[here].sum() * w_i[fed.row_of[k]].double() for k in here).float()
        fed.members.begin(0)
        fed.members.present[:] = True
        fed.training.momentum.clear()
        rows = fed.copies(w)
        accuracy = []
        for epochs in (0, 1, 4):
            fed.local_opt(rows, epochs)
            fed.log.begin()
            fed.evaluate(rows)
            accuracy.append(fed.notes["test_acc"][fed.row_of[new]])
        stored = result["newcomers/test_acc"]
        assert result["newcomers/epochs"].tolist() == [0, 1, 5] and np.isnan(stored[:, ~new]).all()
        assert (
            np.abs(stored[:, new] - np.array(accuracy)).max() <= 0.05
        )  # an image or two: the twin's mean is in other order
        assert result["newcomers/models_received"].sum() == 0


def test_newcomers_of_dpfl_choose_among_the_frozen():
    """What they receive, and their average, by the verbs of a second Federation in which they are ordinary clients."""
    from dpfl_mpi.engine import newcomers
    from dpfl_mpi.plugins import find

    caught = {}
    with contextlib.closing(federation(SMALL | {"newcomers": 0.3, "budget": 3})) as fed:
        state = dpfl.init(fed)
        new = fed.members.limits.newcomers
        assert not new[state["shared"]["omega"].senders].any() and (state["shared"]["omega"].degrees()[new] == 0).all()
        best = fed.scoring.best.clone()
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:
            patch.setattr(newcomers, "write_newcomers", lambda recorder, fed, epochs, stacked: caught.update(stacked))
            bggc, graphs = fed.bggc, []
            fed.bggc = lambda w: graphs.append((w.clone(), bggc(w))) or graphs[-1][1]
            newcomers.arrive(None, fed._parts, state, find("method", "dpfl"))
        assert len(graphs) == 3
        for rows, omega in graphs:
            assert torch.equal(rows[fed.row_of[~new]], best[fed.row_of[~new]])
            assert (omega.degrees()[~new] == 0).all() and not new[omega.senders].any() and (omega.degrees() <= 2).all()
        assert graphs[0][1].degrees()[new].all()  # an untrained model is worth nothing
        assert torch.equal(graphs[0][0][fed.row_of[new]], fed.common_row()[fed.row_of[new]])
        in_phases = caught["models_received"][fed.row_of[new]]
        assert (in_phases >= 5 + 2).all() and (in_phases <= 5 + 5 + 2).all()  # the sum of five, candidates, the chosen
        assert (caught["models_received"][fed.row_of[~new]] == 0).all()


def test_newcomers_remember_what_the_model_is_that_is_scored(tmp_path):
    """kNN-Per: alone on a rank, or in one block with all, a newcomer kept the representations of the model before its training."""
    fields = {"method": "knnper", "clients": 8, "rounds": 1, "newcomers": 0.25}
    one = run_here(tmp_path / "one.h5", fields)
    assert differences(one, run_mpi(4, tmp_path / "four.h5", fields)) == set()
    by_block = [run_here(tmp_path / f"{b}.h5", fields, kernels="torch", block=b) for b in (2, 8)]
    scores = [Result(path)["newcomers/test_acc"] for path in by_block]
    np.testing.assert_allclose(*scores)


@pytest.mark.parametrize("method", [m for m in names("method") if m != "replay"])
def test_every_method_takes_newcomers(tmp_path, method):
    fields = SMALL | {"method": method, "newcomers": 0.3, "rounds": 2, "participation": 0.8}
    if method == "fedrep":  # an epoch for the head and one for the base
        fields |= {"tau_train": 2}
    if method == "fedbn":  # needs normalisation layers
        fields |= {"model": "resnet", "model_options": {"widths": "4,8", "groups": 2}, "augment": False}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        new = result["client/newcomers"]
        assert (
            np.isfinite(result["newcomers/test_acc"][:, new]).all()
            and np.isnan(result["newcomers/test_acc"][:, ~new]).all()
        )
        assert np.isfinite(result["best/test_acc"][~new]).all() and np.isnan(result["best/test_acc"][new]).all()
        assert all(len(result.chosen(t).of(k)) == 0 for t in range(3) for k in np.flatnonzero(new))
        assert np.isfinite(result.test_acc)
