"""The controls of an experiment: shared validation images, Omega anew, drift, patience, all on three ranks and after a cut; clients that lie."""

import numpy as np
import pytest
import torch
from launch import differences, federation, refused, run_here, text_file, training_rows, validation
from making import WILD, wild
from torch.nn.functional import cross_entropy

from dpfl_mpi.data.partition import assemble, search_first, split
from dpfl_mpi.federation import limits
from dpfl_mpi.federation.attack import SCALE, backdoor_success
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import dpfl, scaffold
from dpfl_mpi.models import mlp
from dpfl_mpi.numerics.clients import TARGET, mark
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

N, T = 7, 4
SMALL = {"clients": N, "rounds": T, "tau_init": 1, "tau_train": 1, "budget": 4}


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
    with federation(SMALL) as whole, federation(SMALL | {"search_share": 0.4}) as fed:
        w = fed.common_row()
        fed.evaluate(w)
        loss = fed.losses(w[0], np.ones(N, bool))
        module = mlp.build((8, 8, 1), 10)
        torch.nn.utils.vector_to_parameters(w[0, : fed.ensemble.size].clone(), module.parameters())
        for i, k in enumerate(fed.ids):
            val = fed.partition.of("val", k)
            first, cut = int(fed.clients.scored[i]), int(fed.clients.n_search[i])
            assert cut == int(0.4 * len(val) + 0.5) < len(val)
            x, y = validation(fed, k)
            logits = module(x).detach()
            assert abs(cross_entropy(logits[:cut], y[:cut]).item() - loss[i]) < 1e-5
            assert fed.notes["val_acc"][i] == (logits[cut:].argmax(1) == y[cut:]).double().mean().item()
            same = (a[first : first + len(val)].flatten(1) for a in (fed.clients.score_x, whole.clients.score_x))
            a, b = (sorted(map(tuple, images.tolist())) for images in same)
            assert a == b  # the same images in another order


def test_a_single_validation_image_cannot_be_shared():
    lists = {"train": [[0], [3]], "val": [[1, 2], [4]], "test": [[0], [0]]}
    parts = {name: [np.array(rows) for rows in each] for name, each in lists.items()}
    partition = assemble(parts, np.ones((2, 2), int), np.ones(2), False)
    labels = np.array([0, 1, 1, 0, 0])
    sentence = "client 1 has a single validation image, and both parts need one"
    refused(sentence, search_first, Run(search_share=0.5).resolve(), labels, partition)
    assert search_first(Run().resolve(), labels, partition)[0] is partition


def test_absent_clients_search_later(tmp_path):
    there = text_file(tmp_path / "there", "1 " * N + "\n0" + " 1" * (N - 1))
    with federation(SMALL | {"rounds": 2, "omega_period": 2, "available": there, "budget": "inf"}) as fed:
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
    with federation(SMALL | {"drift": "0.5:2", "method": "local"}) as fed:
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
def test_a_drift_counts_for_rewards_and_best_rounds(result_of, kernels):
    result = result_of(SMALL | {"drift": "1:3"}, kernels=kernels)
    assert (result["best/round"] >= 3).all() and result["client/drifted"].all()
    a, b = result["client/drift_classes"]
    held = result["client/class_counts"][:, [a, b]].sum(1) > 0
    assert (result["round/val_acc"][3] < result["round/val_acc"][2])[held].any()
    with federation(SMALL | {"drift": "1:1"}, kernels=kernels) as fed:
        w = fed.local_opt(fed.common_row(), 2)
        first = fed.losses(w[0], np.ones(N, bool))
        fed.begin_round(1)
        a, b = fed.drift.classes
        held = (fed.partition.class_counts[:, [a, b]].sum(1) > 0)[fed.ids]
        after = fed.losses(w[0], np.ones(N, bool))
        assert (first[held] != after[held]).all() and (first[~held] == after[~held]).all()


def test_who_is_not_scored_after_a_drift_has_no_accuracy(tmp_path):
    with Result(run_here(tmp_path / "a.h5", SMALL | {"drift": f"0.5:{T}", "participation": 0.5})) as result:
        absent = np.isnan(result["round/test_acc"][T])
        assert 0 < absent.sum() < N and np.array_equal(np.isnan(result["best/test_acc"]), absent)
        assert (result["best/round"] == np.where(absent, -1, T)).all() and not result["best/confusion"][absent].any()
        assert result.test_acc == result["best/test_acc"][~absent].mean()


def test_patience_counts_rounds_that_are_no_better():
    with federation(SMALL | {"patience": 2, "method": "local"}) as fed:
        stale = []
        for t, accuracy in enumerate([0.5, 0.5, 0.6, 0.4, 0.6]):
            fed.begin_round(t)
            for score in (accuracy, 0.1):  # a method may score twice
                predicted = np.zeros(fed.clients.n_val[0] + fed.clients.n_test[0], int)
                predicted[: int(score * fed.clients.n_val[0])] = 1
                fed.scoring._note(0, fed.common_row()[0], predicted * 0.0, predicted, predicted * 0 + 1, "")
            stale.append(int(fed.scoring.stale[0]))
        assert stale == [0, 1, 0, 1, 2]
        fed.begin_round(5)
        stopped = fed.members.stopped_round[fed.ids]
        assert stopped[0] == 4 and (stopped[1:] == -1).all()  # after round 4; it leaves, and the others stay
        assert not fed.active[fed.ids[0]] and fed.active[fed.ids[1:]].all()


@pytest.mark.parametrize("method", ["dpfl", "fedavg", "pairwise"])
def test_who_stops_early(result_of, method):
    result = result_of(SMALL | {"method": method, "patience": 1, "rounds": 12, "omega_period": 3})
    stopped, val = result["client/stopped_round"], result["round/val_acc"]
    received = result["traffic/models_received"]
    assert (stopped > 0).sum() >= 2 and len(set(stopped.tolist())) > 2
    last = result.last_round
    served = 0
    for k in range(N):
        until = stopped[k] if stopped[k] >= 0 else last
        rises = [bool(val[t, k] > val[:t, k].max()) for t in range(1, until + 1)]
        assert all(rises[:-1]) and rises[-1] == (stopped[k] < 0)  # it rose until the round before the last
        assert np.isnan(val[until + 1 :, k]).all() and (received[until + 1 :, k] == 0).all()
        assert all(len(result.chosen(t).of(k)) == 0 for t in range(until + 1, last + 1))
        served += sum(k in result.chosen(t).senders for t in range(until + 1, last + 1))
    assert (served > 0) == (method != "fedavg")
    assert np.isfinite(result["best/test_acc"]).all() and result["client/epochs"][0] <= 12 + 1


@pytest.mark.parametrize("method", ["dpfl", "fedavg"])
def test_a_run_in_which_nothing_is_learned_ends(tmp_path, method):
    """When all have stopped, who are still tuned; but nobody stops before a drift, which nobody would see otherwise."""
    nothing = SMALL | {"method": method, "lr": 1e-12, "rounds": 9}
    with Result(run_here(tmp_path / "a.h5", nothing | {"patience": 1, "drift": "0.5:4"})) as result:
        assert result.finished and result.last_round < 9
        assert (result["client/stopped_round"] >= 5).all() and result["client/drifted"].sum() == 3
    with Result(run_here(tmp_path / "b.h5", nothing | {"patience": 2, "finetune_epochs": 1})) as result:
        assert result.finished and result.last_round == 2 == len(result["round/number"]) - 1
        assert (result["client/stopped_round"] == 2).all() and np.isfinite(result["finetune/val_acc"]).all()


def test_a_round_without_clients_changes_nothing(tmp_path):
    """Two stop after round 1, and the others come in round 3: of nobody in round 2 the server has no mean."""
    there = text_file(tmp_path / "there", "1 1 0 0\n" * 2 + "0 0 1 1\n" * 7)
    fields = {"clients": 4, "rounds": 9, "method": "fedavg", "patience": 1, "available": there, "lr": 1e-12}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        assert result.finished and result["client/stopped_round"].tolist() == [1, 1, 3, 3] and result.last_round == 3
        there_by_round = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
        assert np.isfinite(result["round/test_acc"]).astype(int).tolist() == there_by_round
    # who is there in round 1 comes after all rounds
    fields |= {"patience": 0, "newcomers": 0.5}
    with federation({k: v for k, v in fields.items() if k != "available"}) as fed:
        new = fed.members.limits.newcomers
    text_file(tmp_path / "there", " ".join(map(str, new.astype(int))) + "\n1 1 1 1\n")
    with Result(run_here(tmp_path / "b.h5", fields | {"rounds": 2})) as result:
        assert result.finished and np.isfinite(result["newcomers/test_acc"][:, new]).all()
        assert np.isnan(result["round/test_acc"][1]).all() and not result["traffic/models_received"][1].any()
        assert np.isfinite(result["round/test_acc"][2][~new]).all()


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_repeated_search_receives_its_phases_again_and_the_sum_once(repeats):
    with federation(SMALL | {"budget": "inf", "ggc_repeats": repeats}) as fed:
        fed.bggc(fed.local_opt(fed.common_row(), 1))
        assert (fed.notes["models_received"] == (N - 1) + repeats * (N - 1)).all()


def test_the_servers_control_is_the_mean_of_those_who_can_take_part():
    """SCAFFOLD, lines 16 and 17 where all take part: c is the mean of all c_i, newcomers apart."""
    with federation(SMALL | {"method": "scaffold", "newcomers": 0.3}) as fed:
        state = scaffold.init(fed)
        for t in (1, 2):
            fed.begin_round(t)
            state = scaffold.round(fed, state, t)
            there = ~fed.members.limits.newcomers[fed.ids]
            p, c_i = torch.from_numpy(fed.p[fed.ids])[:, None], state["client"]["c"].double()
            mean = (p * c_i)[there].sum(0) / p[there].sum()
            assert torch.allclose(state["shared"]["c"].double(), mean, atol=1e-7) and mean.abs().max() > 1e-4


def test_who_has_diverged_sends_and_receives_no_more():
    """Of a ring in which client 2 has diverged: it and client 1, who received from it, keep their rows; on ranks as test_checked.py says."""
    with federation({"clients": 4, "budget": 2}) as fed:
        omega = CollaborationGraph.from_lists([[(k + 1) % 4] for k in range(4)])
        fed.members.diverged_round[2] = 0
        fed.narrow(omega)
        mixed = fed.average(fed.common_row() + torch.from_numpy(fed.ids)[:, None], omega)
        for i, k in enumerate(fed.ids):
            j = (k + 1) % 4
            expected = k if k in (1, 2) else (fed.p[k] * k + fed.p[j] * j) / (fed.p[k] + fed.p[j])
            assert abs(float((mixed[i] - fed.common_row()[i])[0]) - expected) < 1e-5, k


@pytest.mark.parametrize("method", ["fedavg", "fedsim"])
def test_a_run_goes_on_without_who_has_diverged(method, tmp_path):
    """In round 2 he is the only one of a server's round; a client whose model is no number scores none."""
    wild(tmp_path / "wild.h5", 5)
    there = np.ones((4, 5), int)
    there[1] = np.arange(5) == WILD if method == "fedavg" else 1
    np.savetxt(tmp_path / "there", there, "%d")
    fields = {"dataset": "image_folder", "data": str(tmp_path / "wild.h5"), "partition": "natural", "model": "mlp"}
    fields |= {"method": method, "clients": 5, "rounds": 4, "tau_train": 1, "budget": 3, "clip_norm": 0.0}
    fields |= {"on_divergence": "exclude", "available": str(tmp_path / "there")}
    with Result(run_here(tmp_path / "r.h5", fields)) as result:
        assert result.finished and np.flatnonzero(result["client/diverged_round"] >= 0).tolist() == [WILD]


def test_rows_and_graphs_of_another_kind_and_edges_that_nothing_came_along_are_refused():
    with federation(SMALL) as fed:
        w, graph = fed.common_row(), CollaborationGraph.from_lists([[1]] + [[]] * (N - 1))
        means = fed.mean, lambda w: fed.mean(w_KW=w), lambda w: [*fed.batches(1, {"w": w})]
        sends = fed.average, lambda w: fed.exchange(w, graph), lambda w: [*fed.every_row(w)], fed.bggc
        for call in (*means, *sends):
            refused("was given Tensor float64", call, w.double())
        for other, said in (([[1]], "a list"), (CollaborationGraph.empty(2), "a graph of 2 clients")):
            calls = {"average": (w, other), "exchange": (w, other), "narrow": (other,), "tell": (fed.p[fed.ids], other)}
            for name, given in calls.items():
                refused(f"the graph of fed.{name} is {said}; fed.collect makes", getattr(fed, name), *given)
        received = fed.exchange(w, graph)
        other = CollaborationGraph.from_lists([[2]] + [[]] * (N - 1))
        refused("an edge along which the models received did not come", fed.average, w, other, received)


def test_label_flip_is_flip_share_and_averages_are_over_the_benign(tmp_path):
    fields = {"label": {"attack": "label_flip:0.3"}, "flip": {"flip_share": 0.3}, "door": {"attack": "backdoor:0.3"}}
    paths = {name: run_here(tmp_path / f"{name}.h5", SMALL | more) for name, more in fields.items()}
    assert differences(paths["label"], paths["flip"]) == ["client/liars"]
    assert not limits.flipped(Run(**SMALL, attack="noise:0.3").resolve()).any()
    with Result(paths["label"]) as one, Result(paths["flip"]) as two, Result(paths["door"]) as door:
        assert np.array_equal(one.benign, two.benign) and one.test_acc == two.test_acc
        assert np.array_equal(door.benign, ~door["client/liars"]) and door["client/liars"].sum() == 2
        assert np.array_equal(one.benign, door.benign) and np.array_equal(~two.benign, two["client/flipped"])
        assert door.test_acc == door["best/test_acc"][door.benign].mean()
        success = door["attack/success"]
        assert ((success >= 0) & (success <= 1))[np.isfinite(success)].all()


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise", "stale"])
def test_what_liars_send(kind):
    fields = {"clients": 3, "budget": "inf", "method": "random_graph", "attack": f"{kind}:0.4"}
    with federation(SMALL | fields) as fed:
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
    with federation(SMALL | {"attack": "scale:0.3", "method": "fedavg"}) as fed:
        rows = fed.common_row()
        fed.training.attack.note_start({"w": rows * 0 - 1000})
        sent = fed.training.attack.sent(rows)
        liars = fed.members.limits.liars[fed.ids]
        assert float(sent[liars].max()) == 2048 and sent[~liars].equal(rows[~liars])


def test_a_probe_is_not_a_liars_way():
    """u counts from the start of the round's training: neither from what a method only tries, nor from a second model."""
    with federation(SMALL | {"method": "fedavg", "attack": "sign_flip:0.3"}) as fed:
        fed.begin_round(1)
        for _batch, probe in fed.batches(1, {"w": fed.common_row() * 3}, advance=False, most=1):
            probe.w.mul_(2)
        start = fed.common_row()
        w = fed.local_opt(start.clone(), 1)
        liars = fed.members.limits.liars[fed.ids]
        assert torch.equal(fed.training.attack.sent(w)[liars], (2 * start - w)[liars])


def test_a_frozen_liar_has_not_moved():
    with federation(SMALL | {"newcomers": 0.3, "attack": "scale:0.3"}) as fed:
        frozen = fed.local_opt(fed.common_row(), 1)
        fed.members.begin_after(fed.members.limits.newcomers)
        fed.training.attack.begin()
        fed.local_opt(fed.common_row(), 0, momentum="newcomer")
        assert torch.equal(fed.training.attack.sent(frozen), frozen)


def test_a_backdoor_is_a_mark_on_every_second_image():
    with federation(SMALL) as honest, federation(SMALL | {"attack": "backdoor:0.3"}) as fed:
        liars = fed.members.limits.liars
        for k in fed.ids:
            rows = training_rows(fed, k)
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
