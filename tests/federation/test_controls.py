"""Controls of an experiment: validation images, drift, patience, divergence, lies (--attack)."""

import numpy as np
import pytest
import torch
from launch import differences, federation, refused, run_here, text_file, training_rows, validation
from making import WILD, wild
from torch.nn.functional import cross_entropy

from dpfl_mpi.data.partition import assemble, search_first, split
from dpfl_mpi.federation.attack import SCALE, backdoor_success
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import dpfl, scaffold
from dpfl_mpi.models import mlp
from dpfl_mpi.numerics.clients import TARGET, mark
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

N, T = 7, 4
SMALL = {"clients": N, "rounds": T, "tau_init": 1, "tau_train": 1, "budget": 4}


def test_the_search_and_the_choice_of_the_round_see_different_images():
    with federation(SMALL) as whole, federation(SMALL | {"search_share": 0.4}) as fed:
        w = fed.common_row()
        fed.evaluate(w)
        losses = fed.scoring.losses(w[0], np.ones(N, bool))
        module = mlp.build((8, 8, 1), 10)
        torch.nn.utils.vector_to_parameters(w[0, : fed.ensemble.size].clone(), module.parameters())
        for i, k in enumerate(fed.ids):
            n = len(fed.partition.of("val", k))
            first, cut = int(fed.clients.score_start[i]), int(fed.clients.n_search[i])
            assert cut == int(0.4 * n + 0.5) < n
            x, y = validation(fed, k)
            logits = module(x).detach()
            assert abs(cross_entropy(logits[:cut], y[:cut]).item() - losses[i]) < 1e-5
            right = logits[cut:].argmax(1) == y[cut:]
            assert fed.notes["val_acc"][i] == right.double().mean().item()
            rows = slice(first, first + n)
            images = (c.score_x[rows].flatten(1).tolist() for c in (fed.clients, whole.clients))
            here, there = (sorted(map(tuple, each)) for each in images)
            assert here == there  # the same images in another order
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
    lists = {"train": [[0], [3]], "val": [[1, 2], [4]], "test": [[0], [0]]}
    parts = {name: [np.array(rows) for rows in each] for name, each in lists.items()}
    partition = assemble(parts, np.ones((2, 2), int), np.ones(2), False)
    labels = np.array([0, 1, 1, 0, 0])
    sentence = "client 1 has a single validation image, and both parts need one"
    refused(sentence, search_first, Run(search_share=0.5).resolve(), labels, partition)
    assert search_first(Run().resolve(), labels, partition)[0] is partition


def test_a_round_without_clients_changes_nothing(tmp_path):
    """Two clients stop after round 1, and the others come in round 3."""
    path = tmp_path / "available"
    available = text_file(path, "1 1 0 0\n" * 2 + "0 0 1 1\n" * 7)
    fields = {"clients": 4, "rounds": 9, "method": "fedavg", "patience": 1, "lr": 1e-12}
    with Result(run_here(tmp_path / "a.h5", fields | {"available": available})) as result:
        assert result.finished and result.last_round == 3
        assert result["client/stopped_round"].tolist() == [1, 1, 3, 3]
        scored = np.isfinite(result["round/test_acc"]).astype(int).tolist()
        assert scored == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
    # those that are available in round 1 join after all rounds
    fields |= {"patience": 0, "newcomers": 0.5}
    with federation(fields) as fed:
        new = fed.members.limits.newcomers
    text_file(path, " ".join(map(str, new.astype(int))) + "\n1 1 1 1\n")
    fields |= {"available": available, "rounds": 2}
    with Result(run_here(tmp_path / "b.h5", fields)) as result:
        assert result.finished and np.isfinite(result["newcomers/test_acc"][:, new]).all()
        assert np.isnan(result["round/test_acc"][1]).all()
        assert not result["traffic/models_received"][1].any()
        assert np.isfinite(result["round/test_acc"][2][~new]).all()
    available = text_file(tmp_path / "available", "1 " * N + "\n0" + " 1" * (N - 1))
    fields = {"rounds": 2, "omega_period": 2, "available": available, "budget": "inf"}
    with federation(SMALL | fields) as fed:
        state = dpfl.init(fed)
        for t in (1, 2):
            before = state["shared"]
            fed.begin_round(t)
            state = dpfl.round(fed, state, t)
        after = state["shared"]
        for name in ("omega", "chosen"):
            assert np.array_equal(after[name].of(0), before[name].of(0))
        assert len(before["omega"].of(0)) and 0 not in after["omega"].senders
        assert fed.notes["models_received"][fed.row_of[0]] == 0


def test_the_servers_control_is_the_mean_of_those_who_can_take_part():
    """SCAFFOLD, lines 16 and 17 where all take part: c is the mean of all c_i, no newcomers'."""
    with federation(SMALL | {"method": "scaffold", "newcomers": 0.3}) as fed:
        state = scaffold.init(fed)
        for t in (1, 2):
            fed.begin_round(t)
            state = scaffold.round(fed, state, t)
            joined = ~fed.members.limits.newcomers[fed.ids]
            p, c_i = torch.from_numpy(fed.p[fed.ids])[:, None], state["client"]["c"].double()
            mean = (p * c_i)[joined].sum(0) / p[joined].sum()
            assert torch.allclose(state["shared"]["c"].double(), mean, atol=1e-7)
            assert mean.abs().max() > 1e-4


def test_drift_exchanges_two_classes(tmp_path):
    with federation(SMALL | {"drift": "0.5:2", "method": "local"}) as fed:
        drifted, clients = fed.members.limits.drifted, fed.clients
        assert drifted.sum() == 3 and len(set(fed.drift_classes.tolist())) == 2
        before = clients.y.clone(), clients.score_y.clone()
        fed.begin_round(1)
        fed.evaluate(fed.common_row())
        assert torch.equal(clients.y, before[0]) and np.isfinite(fed.scoring.best_val).all()
        fed.begin_round(2)
        assert np.isnan(fed.scoring.best_val).all()
        fed.begin_round(3)  # once only
        a, b = fed.drift_classes.tolist()
        changed = 0
        for i, k in enumerate(fed.ids):
            other = {a: b, b: a} if drifted[k] else {}
            now, starts = (clients.y, clients.score_y), (clients.start, clients.score_start)
            for y, y_before, start in zip(now, before, starts, strict=True):
                rows = slice(int(start[i]), int(start[i + 1]))
                expected = [other.get(c, c) for c in y_before[rows].tolist()]
                assert y[rows].tolist() == expected
                changed += expected != y_before[rows].tolist()
        assert changed
    fields = SMALL | {"drift": f"0.5:{T}", "participation": 0.5}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        absent = np.isnan(result["round/test_acc"][T])
        assert 0 < absent.sum() < N and np.array_equal(np.isnan(result["best/test_acc"]), absent)
        assert (result["best/round"] == np.where(absent, -1, T)).all()
        assert not result["best/confusion"][absent].any()
        assert result.test_acc == result["best/test_acc"][~absent].mean()


@pytest.mark.parametrize("more", [{"flip_share": 0.5}, {"attack": "backdoor:0.5"}])
def test_a_drift_leaves_wrong_labels_wrong(more):
    """Twin: labels drift first, then are made wrong."""
    fields = SMALL | {"method": "local", "partition": "dirichlet", "drift": "1:1"}
    with federation(fields) as honest, federation(fields | more) as fed:
        exchanged = 0
        for each in (honest, fed):
            each.drift_classes = np.array([TARGET, 4])
            each.begin_round(1)
        for i, k in enumerate(fed.ids):
            rows, y = training_rows(fed, k), honest.clients.y[training_rows(honest, k)].clone()
            first, end = map(int, fed.clients.score_start[i : i + 2])
            scored = honest.clients.score_y[first:end].clone()
            if fed.members.limits.flipped[k]:
                val = len(fed.partition.of("val", k))
                y, scored[:val] = 9 - y, 9 - scored[:val]
            if fed.members.limits.attackers[k]:
                y[::2] = TARGET
            assert torch.equal(fed.clients.y[rows], y)
            assert torch.equal(fed.clients.score_y[first:end], scored)
            exchanged += int((scored == TARGET).sum())
        assert exchanged


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_drift_counts_for_rewards_and_best_rounds(result_of, kernels):
    result = result_of(SMALL | {"drift": "1:3"}, kernels=kernels)
    assert (result["best/round"] >= 3).all() and result["client/drifted"].all()
    a, b = result["client/drift_classes"]
    affected = result["client/class_counts"][:, [a, b]].sum(1) > 0
    assert (result["round/val_acc"][3] < result["round/val_acc"][2])[affected].any()
    with federation(SMALL | {"drift": "1:1"}, kernels=kernels) as fed:
        w = fed.local_opt(fed.common_row(), 2)
        before = fed.scoring.losses(w[0], np.ones(N, bool))
        fed.begin_round(1)
        a, b = fed.drift_classes
        affected = (fed.partition.class_counts[:, [a, b]].sum(1) > 0)[fed.ids]
        assert ((before != fed.scoring.losses(w[0], np.ones(N, bool))) == affected).all()


def test_patience_counts_rounds_that_are_no_better():
    with federation(SMALL | {"patience": 2, "method": "local"}) as fed:
        stale, n_val = [], fed.clients.n_val[0]
        for t, accuracy in enumerate([0.5, 0.5, 0.6, 0.4, 0.6]):
            fed.begin_round(t)
            for score in (accuracy, 0.1):  # a method may score twice
                predicted = np.zeros(n_val + fed.clients.n_test[0], int)
                predicted[: int(score * n_val)] = 1
                scores = predicted * 0.0, predicted, predicted * 0 + 1
                fed.scoring._note(0, fed.common_row()[0], scores, "")
            stale.append(int(fed.scoring.stale[0]))
        assert stale == [0, 1, 0, 1, 2]
        fed.begin_round(5)
        stopped = fed.members.stopped_round[fed.ids]
        assert stopped[0] == 4 and (stopped[1:] == -1).all()
        assert not fed.active[fed.ids[0]] and fed.active[fed.ids[1:]].all()


@pytest.mark.parametrize("method", ["dpfl", "fedavg", "pairwise"])
def test_who_stops_early(result_of, method):
    result = result_of(SMALL | {"method": method, "patience": 1, "rounds": 12, "omega_period": 3})
    stopped, val = result["client/stopped_round"], result["round/val_acc"]
    assert (stopped > 0).sum() >= 2 and len(set(stopped.tolist())) > 2
    last, served = result.last_round, 0
    for k in range(N):
        end = stopped[k] if stopped[k] >= 0 else last
        rises = [bool(val[t, k] > val[:t, k].max()) for t in range(1, end + 1)]
        assert all(rises[:-1]) and rises[-1] == (stopped[k] < 0)  # stops when it rises no more
        assert np.isnan(val[end + 1 :, k]).all()
        assert (result["traffic/models_received"][end + 1 :, k] == 0).all()
        graphs = [result.chosen(t) for t in range(end + 1, last + 1)]
        assert all(len(graph.of(k)) == 0 for graph in graphs)
        served += sum(k in graph.senders for graph in graphs)
    assert (served > 0) == (method != "fedavg")
    assert np.isfinite(result["best/test_acc"]).all() and result["client/epochs"][0] <= 12 + 1


@pytest.mark.parametrize("method", ["dpfl", "fedavg"])
def test_a_run_in_which_nothing_is_learned_ends(tmp_path, method):
    nothing = SMALL | {"method": method, "lr": 1e-12, "rounds": 9}
    with Result(run_here(tmp_path / "a.h5", nothing | {"patience": 1, "drift": "0.5:4"})) as result:
        assert result.finished and result.last_round < 9
        assert (result["client/stopped_round"] >= 5).all() and result["client/drifted"].sum() == 3
    tuned = nothing | {"patience": 2, "finetune_epochs": 1}
    with Result(run_here(tmp_path / "b.h5", tuned)) as result:
        assert result.finished and result.last_round == 2 == len(result["round/number"]) - 1
        assert (result["client/stopped_round"] == 2).all()
        assert np.isfinite(result["finetune/val_acc"]).all()


def test_who_has_diverged_sends_and_receives_no_more():
    """Client 2 of a ring has diverged: it and client 1, its receiver, keep their rows."""
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
    """In a server's round 2 it is the only client. It scores no other client's model."""
    wild(tmp_path / "wild.h5", 5)
    available = np.ones((4, 5), int)
    available[1] = np.arange(5) == WILD if method == "fedavg" else 1
    np.savetxt(tmp_path / "available", available, "%d")
    fields = {"dataset": "image_folder", "data": str(tmp_path / "wild.h5"), "model": "mlp"}
    fields |= {"partition": "natural", "method": method, "clients": 5, "rounds": 4, "tau_train": 1}
    fields |= {"budget": 3, "clip_norm": 0.0, "on_divergence": "exclude"}
    fields["available"] = str(tmp_path / "available")
    with Result(run_here(tmp_path / "r.h5", fields)) as result:
        assert result.finished
        assert np.flatnonzero(result["client/diverged_round"] >= 0).tolist() == [WILD]


def test_wrong_rows_and_graphs_are_refused():
    with federation(SMALL) as fed:
        w, graph = fed.common_row(), CollaborationGraph.from_lists([[1]] + [[]] * (N - 1))
        means = fed.mean, lambda w: fed.mean(w_KW=w), lambda w: [*fed.batches(1, {"w": w})]
        sends = fed.average, lambda w: fed.exchange(w, graph), lambda w: [*fed.every_row(w)]
        for call in (*means, *sends, fed.bggc):
            refused("was given Tensor float64", call, w.double())
        for other, kind in (([[1]], "list"), (CollaborationGraph.empty(2), "graph of 2 clients")):
            calls = {"average": (w, other), "exchange": (w, other), "narrow": (other,)}
            for name, given in (calls | {"tell": (fed.p[fed.ids], other)}).items():
                sentence = f"the graph of fed.{name} is a {kind}; fed.collect makes"
                refused(sentence, getattr(fed, name), *given)
        received = fed.exchange(w, graph)
        other = CollaborationGraph.from_lists([[2]] + [[]] * (N - 1))
        did_not_come = "an edge along which the models received did not come"
        refused(did_not_come, fed.average, w, other, received)


def test_label_flip_is_flip_share_and_means_are_over_the_benign(tmp_path):
    fields = {"label": {"attack": "label_flip:0.3"}, "flip": {"flip_share": 0.3}}
    fields["door"] = {"attack": "backdoor:0.3"}
    paths = {name: run_here(tmp_path / f"{name}.h5", SMALL | more) for name, more in fields.items()}
    assert differences(paths["label"], paths["flip"]) == ["client/attackers"]
    with federation(SMALL | {"attack": "noise:0.3"}) as fed:
        assert not fed.members.limits.flipped.any()
    label, flip, door = (Result(path) for path in paths.values())
    assert np.array_equal(label.benign, flip.benign) and label.test_acc == flip.test_acc
    assert np.array_equal(label.benign, door.benign)
    assert np.array_equal(~flip.benign, flip["client/flipped"])
    assert np.array_equal(~door.benign, door["client/attackers"]) and (~door.benign).sum() == 2
    assert door.test_acc == door["best/test_acc"][door.benign].mean()
    success = door["attack/success"]
    assert ((success >= 0) & (success <= 1))[np.isfinite(success)].all()


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise", "stale"])
def test_what_attackers_send(kind):
    fields = {"clients": 3, "budget": "inf", "method": "random_graph", "attack": f"{kind}:0.4"}
    with federation(SMALL | fields) as fed:
        (attacker,) = np.flatnonzero(fed.members.limits.attackers)
        p, row_of, size = fed.p, fed.row_of, fed.ensemble.size
        everyone = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1]])
        before, first = fed.common_row(), None
        for t in range(2):
            fed.begin_round(t)
            w = fed.local_opt(before.clone(), 1)
            true = w[row_of[attacker]]
            u = true - before[row_of[attacker]]
            first = true.clone() if first is None else first
            sent = fed.training.attack.sent(w)[row_of[attacker]]
            if kind == "noise":
                lie, noise = sent, (sent - true)[:size].double()
                variance = float(noise.square().mean() / true[:size].double().square().mean())
                assert abs(variance - 1) < 0.05 and not lie[size:].any()
                assert abs(float(noise.mean())) < 0.05 * float(noise.std())
            else:
                lies = {"sign_flip": true - 2 * u, "scale": true + (SCALE - 1) * u, "stale": first}
                lie = lies[kind]
            rows = [(lie if j == attacker else w[row_of[j]]).double() for j in range(3)]
            as_sent = sum(p[j] * rows[j] for j in range(3)) / p.sum()
            own = as_sent + p[attacker] * (true.double() - rows[attacker]) / p.sum()
            mixed = fed.average(w, everyone)
            for k in range(3):
                expected = own if k == attacker else as_sent
                assert torch.allclose(mixed[row_of[k]].double(), expected, atol=2e-6)
            assert torch.allclose(fed.mean(w).double(), as_sent, atol=2e-6)
            assert dict(fed.every_row(w))[attacker].equal(sent)
            before = mixed


def test_an_update_counts_from_the_start_of_the_rounds_training():
    with federation(SMALL | {"method": "fedavg", "attack": "sign_flip:0.3"}) as fed:
        fed.begin_round(1)
        for _, probe in fed.batches(1, {"w": fed.common_row() * 3}, advance=False, most=1):
            probe.w.mul_(2)
        start = fed.common_row()
        w = fed.local_opt(start.clone(), 1)
        attackers = fed.members.limits.attackers[fed.ids]
        assert torch.equal(fed.training.attack.sent(w)[attackers], (2 * start - w)[attackers])
    with federation(SMALL | {"newcomers": 0.3, "attack": "scale:0.3"}) as fed:
        frozen = fed.local_opt(fed.common_row(), 1)
        fed.members.begin_after(fed.members.limits.newcomers)
        fed.training.attack.before.clear()
        fed.local_opt(fed.common_row(), 0, momentum="newcomer")
        assert torch.equal(fed.training.attack.sent(frozen), frozen)  # u is 0
    with federation(SMALL | {"attack": "scale:0.3", "method": "fedavg"}) as fed:
        rows = fed.common_row()
        fed.training.attack.note_start({"w": rows * 0 - 1000})
        sent = fed.training.attack.sent(rows)
        attackers = fed.members.limits.attackers[fed.ids]
        assert float(sent[attackers].max()) == 2048 and sent[~attackers].equal(rows[~attackers])


def test_a_backdoor_is_a_mark_on_every_second_image():
    with federation(SMALL) as honest, federation(SMALL | {"attack": "backdoor:0.3"}) as fed:
        for k in fed.ids:
            rows = training_rows(fed, k)
            x, y = honest.clients.x[rows].clone(), honest.clients.y[rows].clone()
            if fed.members.limits.attackers[k]:  # 8x8 images: 2x2 pixels, one from the border
                x[::2, 5:7, 5:7], y[::2] = 255, TARGET
            assert torch.equal(fed.clients.x[rows], x) and torch.equal(fed.clients.y[rows], y)
        images = fed.clients.score_x.clone()
        assert torch.equal(images, honest.clients.score_x)
        others = fed.partition.class_counts[fed.ids][:, 1:].sum(1) > 0
        constant = fed.common_row() * 0  # a model that always answers one class
        for answer, success in ((TARGET, 1), (3, 0)):
            fed.ensemble.layers(constant)["head.bias"][:, answer] += 1 + (answer == 3)
            fed.scoring.best[:], fed.scoring.best_round[:] = constant, 0
            fed.scoring.best_round[0] = -1  # was never scored
            found = backdoor_success(fed.scoring)
            assert np.isnan(found[0]) and (found[1:][others[1:]] == success).all()
        assert torch.equal(fed.clients.score_x, images)
    big = mark(np.zeros((1, 32, 32, 3), np.uint8))[0, :, :, 0]
    assert big.sum() == 16 * 255 and (big[27:31, 27:31] == 255).all()


@pytest.mark.parametrize(("tie", "kept"), [("latest", 3), ("earliest", 1)])
def test_which_of_equally_good_rounds_counts(tie, kept):
    """Validation accuracies of about 0.5, 0.6, 0.4 and 0.6: rounds 1 and 3 are equal."""
    with federation(SMALL | {"tie": tie, "method": "local"}) as fed:
        n_val, start = int(fed.clients.n_val[0]), fed.common_row()[0]
        for t, accuracy in enumerate([0.5, 0.6, 0.4, 0.6]):
            fed.begin_round(t)
            predicted = np.zeros(n_val + fed.clients.n_test[0], int)
            predicted[: int(accuracy * n_val)] = 1
            fed.scoring._note(0, start + t, (predicted * 0.0, predicted, predicted * 0 + 1), "")
        assert fed.scoring.best_round[0] == kept
        assert float((fed.scoring.best[0] - start)[0]) == pytest.approx(kept, abs=1e-5)


def test_who_has_stopped_leaves_the_servers_average():
    with federation(SMALL | {"method": "fedavg", "patience": 1}) as fed:
        fed.begin_round(1)
        fed.members.stopped_round[2] = 1
        fed.begin_round(2)
        p = np.where(np.arange(N) == 2, 0, fed.p)
        mean = fed.mean(fed.common_row() + torch.from_numpy(fed.ids)[:, None])
        expected = (p * np.arange(N)).sum() / p.sum()
        assert float((mean - fed.initial_row())[0]) == pytest.approx(expected, abs=1e-5)
