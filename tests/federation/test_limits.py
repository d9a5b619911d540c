"""What limits clients: budgets, reach, participation, flipped labels; the motivating example."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from launch import differences, federation, refused, run_here, text_file, training_rows
from mpi4py import MPI

from dpfl_mpi import streams
from dpfl_mpi.federation import limits, search
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics import sketches
from dpfl_mpi.plugins import shipped
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import nearest

N = 9
SMALL = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 4}
NOTHING = {"finetune_epochs": 0, "reach": None, "participation": 1.0, "available": None}
NOTHING |= {"flip_share": 0.0, "flipped_run_ggc": True, "search_share": 1.0, "omega_period": "inf"}
NOTHING |= {"graphs": None, "drift": "0:2", "patience": 0, "attack": "noise:0", "newcomers": 0.0}


def run(**fields):
    return Run(**(SMALL | fields)).resolve()


def limits_of(resolved):
    return limits.limits_of(resolved, World(MPI.COMM_SELF))


def add_always(a, b, coin):
    return True


def test_what_limits_nothing_is_the_same_run(tmp_path):
    unread = {"optimizer", "lr_schedule", "adam_eps", *NOTHING}
    for method in shipped("method"):
        limited = Run(method=method, **NOTHING)
        ring = {"graphs"} if method == "dpsgd" else set()  # its default
        assert not (unread - ring) & set(limited.key())
        assert limited.slug() == Run(method=method).slug()
    ways = {"fours": ("budget", text_file(tmp_path / "fours", "4\n" * N))}
    ways["uniform"] = ("budget", "uniform:4:4")
    ways["reach"] = ("reach", "geometric:2")
    ways["always"] = ("available", text_file(tmp_path / "always", ("1 " * N + "\n") * 2))
    default = run_here(tmp_path / "default.h5", SMALL)
    for way, (name, value) in ways.items():
        more = ["graph/reach/indptr", "graph/reach/senders"] if name == "reach" else []
        assert differences(run_here(tmp_path / f"{way}.h5", SMALL | {name: value}), default) == more


@pytest.mark.parametrize(("name", "text", "sentence"), [
    ("budget", "3 4", "must hold 9 numbers"),
    ("budget", "0 " * N, "whole and at least 1"),
    ("reach", "0 1 2", "lines of two client numbers from 0 to 8"),
    ("reach", "0 1 2 3\n1 0 2 3\n", "lines of two client numbers from 0 to 8: receiver sender"),
    ("reach", "0 9", "it has client 9, allowed are 0 to 8"),
    ("reach", "\n", "it has no line, allowed is at least one"),
    ("churn", "", "it has no line, allowed is at least one"),
    ("available", "1 1 1", "at least 2 lines"),
    ("available", ("1 " * N + "\n") + ("0 " * N), "round 2 has no client"),
    ("available", "2 " * N + "\n" + "1 " * N, "zeros or ones"),
    ("churn", "1 0", "must hold lines of a time, a client, and join or leave"),
    ("churn", "1 0 joins", "must hold lines of a time, a client, and join or leave"),
    ("churn", "1 9 join", "it has client 9, allowed are 0 to 8"),
    ("churn", "2 0 join\n\n1 1 join", "its lines must be in the order of time"),
    ("churn", "1 0 leave\n2 0 leave", "client 0 must join and leave in turn"),
    ("network", "1 1 1 1 0\n" * 8, "must hold 9 lines (clients) of 5 numbers: step, image, up"),
    ("network", "1 1 1 1 0\n" * 8 + "1 1 1\n", "must hold 9 lines"),
    ("network", "1 1 1 one 0\n" * N, "must hold 9 lines"),
    ("network", "0,1,1,1,0\n" * N,
     "the value of 'step' for client 0 is 0, allowed is a number from 1e-09 to 1000"),
    ("network", "1,1,1,1,0\n" * 8 + "1,1,1,-1,0\n", "the value of 'down' for client 8 is -1"),
    ("network", "1,1,nan,1,0\n" * N, "the value of 'up' for client 0 is nan"),
    ("network", "1,1,1,1,-0.1\n" * N, "the value of 'latency' for client 0 is -0.1"),
])  # fmt: skip
def test_bad_files_are_sentences(name, text, sentence, tmp_path):
    refused(sentence, run, **{name: text_file(tmp_path / "file", text)})
    (tmp_path / "file").write_bytes(b"\xff\xfe\xff")
    refused("not a readable text file", run, **{name: str(tmp_path / "file")})


def test_budgets_and_reach_from_a_file_and_from_a_draw(tmp_path):
    path = text_file(tmp_path / "b", "1\n2\n3\ninf\n100\n4\n5\n6\n7\n")
    others = run(budget=path, budget_counts_self=False)
    assert limits_of(run(budget=path)).most_senders.tolist() == [0, 1, 2, 8, 8, 3, 4, 5, 6]
    assert limits_of(others).most_senders.tolist() == [1, 2, 3, 8, 8, 4, 5, 6, 7]
    assert limits_of(run()).most_senders.tolist() == [3] * N
    assert limits_of(run(budget="inf")).most_senders.tolist() == [N - 1] * N
    fields = {"clients": 300, "budget": "uniform:2:20"}
    drawn = limits_of(run(**fields)).most_senders + 1
    assert drawn.min() == 2 and drawn.max() == 20 and 10 < drawn.mean() < 12
    assert (limits_of(run(**fields, seed=1)).most_senders + 1 != drawn).any()

    def reached(reach, **fields):
        return limits_of(run(reach=reach, **fields)).reach

    assert limits_of(run()).reach is None
    place = streams.stream(run().seed, streams.REACH, 0, 0).random((40, 2))
    near = ((place[:, None] - place[None]) ** 2).sum(2) <= 0.4**2
    np.fill_diagonal(near, False)
    assert np.array_equal(reached("geometric:0.4", clients=40).matrix(), near) and near.any()
    assert reached("geometric:1.5", clients=40).matrix().sum() == 40 * 39
    assert sorted(reached("sites:2").degrees().tolist()) == [3] * 4 + [4] * 5
    assert reached("groups:0,1;4,2,3").degrees().tolist() == [1, 1, 2, 2, 2, 0, 0, 0, 0]
    directed = reached(text_file(tmp_path / "edges", "3 0\n3 5\n2 2\n0 3\n"))
    assert [directed.of(k).tolist() for k in range(4)] == [[3], [], [], [0, 5]]


@pytest.mark.parametrize("attack", [None, "scale:0.3"])
@pytest.mark.parametrize("reach", [None, "geometric:0.6", "sites:3", "groups:0,1,2,3;5,6"])
def test_first_phase_sums_over_the_reachable(reach, attack):
    """In Python's integers, of what others sent and the own true row: attackers too get X = Y."""
    with federation(SMALL | {"reach": reach, "attack": attack}) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        sent, attackers = fed.training.attack.sent(w), fed.members.limits.attackers
        sums, p = fed.sums.over_candidates(w, fed.candidates())
        graph = fed.reach
        for k in range(N):
            members = sorted({k, *graph.of(k).tolist()}) if reach else list(range(N))
            total = [0] * 5
            for j in members:
                row = (w if j == k else sent)[fed.row_of[j], :5].double().tolist()
                scale = float(fed.p[j]) * 2.0**50
                total = [t + round(v * scale) for t, v in zip(total, row, strict=True)]
            i = fed.row_of[k]
            assert sums[i, :5].tolist() == [t / 2.0**50 for t in total]
            assert p[i] == math.fsum(fed.p[members])
            assert fed.notes["models_received"][i] == len(members) - 1
        rows = fed.row_of[attackers]
        assert attack is None or not torch.equal(sent[rows], w[rows])


def test_no_edge_outside_budget_or_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "decide", add_always)
    fields = SMALL | {"reach": "geometric:0.6", "budget": "uniform:1:4"}
    resolved = Run(**fields).resolve()
    reach = limits_of(resolved).reach.matrix()
    with Result(run_here(tmp_path / "run.h5", fields, kernels="torch")) as result:
        graph = CollaborationGraph(result["graph/reach/indptr"], result["graph/reach/senders"])
        most = result["client/budget"] - 1
        assert np.array_equal(graph.matrix(), reach)
        assert np.array_equal(most, limits_of(resolved).most_senders)
        for t in range(3):
            chosen = result.graph(t)
            assert chosen.any() and not (chosen & ~reach).any()
            assert np.array_equal(chosen.sum(1), np.minimum(reach.sum(1), most))
    with federation(fields) as fed:
        k = int(np.flatnonzero(~reach.all(1))[0])
        stranger = np.flatnonzero(~reach[k] & (np.arange(N) != k))[:1]
        outside = CollaborationGraph.from_lists(stranger if i == k else [] for i in range(N))
        refused("outside the --reach", fed.exchange, fed.common_row(), outside)


@pytest.mark.parametrize("seed", range(3))
def test_theorem_1_with_reach_and_budgets(seed):
    fields = {"reach": "geometric:0.7", "budget": "uniform:1:5", "seed": seed}
    with federation(SMALL | fields) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        together = fed.ggc(w, fed.exchange(w, fed.reach))
        batched = fed.bggc(w)
        assert np.array_equal(together.matrix(), batched.matrix()) and batched.degrees().any()


@pytest.mark.parametrize("method", ["dpfl", "pairwise"])
def test_a_search_among_the_most_similar(method, tmp_path):
    """Where all in reach are candidates, only the bytes of the sketches are added."""
    fields = SMALL | {"method": method, "reach": "sites:2"}
    with federation(fields | {"candidates": 3}) as fed:
        w, site = fed.local_opt(fed.common_row(), 2), fed.reach
        of_all = sketches.sketches(w, fed.initial_row(), np.ones(N, bool), fed.run.seed)[fed.row_of]
        lists = sketches.nearest(np.arange(N), of_all, site.of, 3)
        similar = CollaborationGraph.from_lists(lists).matrix()
        assert similar.sum() < len(site.senders)
        assert not (fed.bggc(w).matrix() & ~similar).any()
        assert (fed.notes["models_received"] == 6).all()
        assert np.array_equal(np.isfinite(fed.losses_of_all(w)), similar[fed.ids])
    fields["network"] = "phones"
    runs = [run_here(tmp_path / f"{m}.h5", fields | {"candidates": m}) for m in (4, "inf")]
    sent = [Result(path)["traffic/bytes_sent"].sum(1) for path in runs]
    assert (sent[0] - sent[1]).tolist() == [len(site.senders) * sketches.ENTRIES, 0, 0]
    assert {name.split("/")[0] for name in differences(*runs)} <= {"network", "traffic"}


def test_who_takes_part_by_share_and_by_file(tmp_path):
    everyone = np.ones(N, bool)
    half = limits_of(run(participation=0.5, rounds=50))
    rounds = [half.present(t, everyone) for t in range(51)]
    assert rounds[0].all() and all(present.sum() == 5 for present in rounds[1:])
    assert len({present.tobytes() for present in rounds}) > 40
    assert limits_of(run(participation=0.01)).present(1, everyone).sum() == 1
    path = text_file(tmp_path / "a", "1 0 " * 4 + "0\n" + "0 " * 8 + "1\n")
    both = limits_of(run(available=path, participation=0.5))
    available = np.array([[1, 0] * 4 + [0], [0] * 8 + [1]])
    assert np.array_equal(both.available, available)
    for t, count in ((1, 2), (2, 1)):
        present = both.present(t, everyone)
        assert present.sum() == count and not (present & (available[t - 1] == 0)).any()
    # In floats 0.29 * 50 is 14.499999999999998, and 0.29 * 100 is 28.999999999999996.
    for share, clients, count in ((0.29, 50, 15), (0.3, 45, 14), (0.5, 5, 3), (0.24, 10, 2)):
        assert nearest(share, clients) == count
        of_nine = limits_of(run(participation=share))
        some = dataclasses.replace(of_nine, most_senders=np.zeros(clients))
        assert some.present(1, np.ones(clients, bool)).sum() == count
    cases = (0.29, 100, 29), (0.58, 50, 29), (0.82, 150, 123), (0.1, 5, 0), (1, 7, 7)
    for share, clients, count in cases:
        fields = Run(clients=clients, rounds=5, flip_share=share, drift=f"{share}:2").resolve()
        roles = limits_of(fields)
        assert roles.flipped.sum() == roles.drifted.sum() == count


def test_means_of_groups_are_over_those_present():
    """Nobody of group 2 is there, so it keeps its row; each client sends 1 model and gets 3."""
    with federation(SMALL | {"method": "fedavg", "participation": 0.4}) as fed:
        fed.begin_round(1)
        w, old = fed.local_opt(fed.common_row(), 1), fed.copies(fed.initial_row(1))[:3]
        present = fed.members.present
        group = np.where(present, fed.p > np.median(fed.p[present]), 2)
        means = fed.means(w, group, old, down=3)
        for c in (0, 1):
            members = np.flatnonzero(group == c)
            total = sum(fed.p[k] * w[fed.row_of[k]].double() for k in members)
            assert torch.allclose(means[c].double(), total / fed.p[members].sum(), atol=1e-7)
        assert torch.equal(means[2], old[2])
        assert (fed.notes["models_received"] == 4 * present[fed.ids]).all()
        assert torch.equal(fed.means(w, group * 0, old)[0], fed.mean(w))


def test_flipped_labels():
    with federation(SMALL) as honest, federation(SMALL | {"flip_share": 0.4}) as fed:
        assert fed.members.limits.flipped.sum() == 3  # floor(0.4 * 9)
        for k in range(N):
            i, rows = int(fed.row_of[k]), training_rows(fed, k)
            first, n_val = int(fed.clients.score_start[i]), int(fed.clients.n_val[i])
            val = slice(first, first + n_val)
            test = slice(first + n_val, first + n_val + int(fed.clients.n_test[i]))
            pairs = [(honest.clients.y[rows], fed.clients.y[rows])]
            pairs += [(honest.clients.score_y[p], fed.clients.score_y[p]) for p in (val, test)]
            for (true, labels), changes in zip(pairs, (True, True, False), strict=True):
                flips = changes and fed.members.limits.flipped[k]
                assert torch.equal(labels, 9 - true if flips else true)


def test_flipped_clients_that_do_not_choose_still_serve(result_of, monkeypatch):
    monkeypatch.setattr(search, "decide", add_always)
    fields = SMALL | {"flip_share": 0.4, "budget": "inf"}
    some = result_of(fields | {"flipped_run_ggc": False}, kernels="torch")
    everyone = result_of(fields | {"flipped_run_ggc": True}, kernels="torch")
    flipped = ~some.benign
    assert flipped.sum() == 3
    assert np.array_equal(some["client/flipped"], flipped)
    for t in range(3):
        assert not some.graph(t)[flipped].any()  # they choose none
        assert some.graph(t)[np.ix_(~flipped, flipped)].all()  # and are chosen
    assert (some["traffic/models_received"][:, flipped] == 0).all()
    assert everyone.graph(1)[flipped].any()
    assert some.test_acc == some["best/test_acc"][~flipped].mean()


def test_motivation_sets_are_runs(tmp_path):
    """{1}, {1,2}, {1,3}, {1,2,3} differ in reach alone; client 1 alone is Local to the bit."""
    base = {"clients": 3, "tau_init": 1, "tau_train": 1, "rounds": 2, "budget": "inf"}
    sets = {"1": "groups:0", "12": "groups:0,1", "13": "groups:0,2", "123": "groups:0,1,2"}
    method = base | {"method": "random_graph"}
    runs = {name: method | {"reach": groups} for name, groups in sets.items()}
    assert len({Run(**fields).slug() for fields in runs.values()}) == 4
    runs["local"] = base | {"method": "local", "rounds": 3}
    results = {name: Result(run_here(tmp_path / name, fields)) for name, fields in runs.items()}
    local = results.pop("local")
    for name, senders in (("1", []), ("12", [1]), ("13", [2]), ("123", [1, 2])):
        assert results[name].chosen(1).of(0).tolist() == senders
    assert np.array_equal(results["1"]["round/test_loss"], local["round/test_loss"][1:])
    assert len({r["round/test_loss"][-1, 0] for r in results.values()}) == 4


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_search_has_the_same_mean(kernels):
    with federation(SMALL | {"metric": "batch", "batch_size": 7}, kernels=kernels) as fed:
        fed.begin_round(1)
        w = fed.local_opt(fed.common_row(), 1)
        for i, n in enumerate(fed.clients.n_val):
            pair = torch.stack([w[i], 0.5 * w[i]])
            fed.scoring.metric_batch = 7
            batched = -fed.scoring.validation_losses(i, pair)
            losses = fed.backend.score(slice(i, i + 1), pair[1:])[0][0]
            batches = [losses[at : min(at + 7, n)].mean() for at in range(0, n, 7)]
            assert batched[1] == pytest.approx(-np.mean(batches), rel=1e-12)
            fed.scoring.metric_batch = 10**6
            whole = -fed.scoring.validation_losses(i, pair)
            fed.scoring.metric_batch = 0
            np.testing.assert_allclose(-whole, fed.scoring.validation_losses(i, pair), rtol=1e-6)
    with federation(SMALL) as fed:
        right = np.array([True, True, True, False, False])
        means = {0: 3 / 5, 2: (1.0 + 0.5 + 0.0) / 3, 4: (0.75 + 0.0) / 2, 5: 3 / 5}
        for size, expected in means.items():
            fed.scoring.metric_batch = size
            assert fed.scoring.mean(right) == pytest.approx(expected, rel=1e-15)


def test_the_share_of_a_round_is_of_those_who_joined_and_are_available(tmp_path):
    """Clients 0 to 7 have joined, 2 to 8 are available: half of these six is three."""
    path = text_file(tmp_path / "a", ("0 0 " + "1 " * 7 + "\n") * 2)
    both, joined = limits_of(run(available=path, participation=0.5)), np.arange(N) < 8
    for t in (1, 2):
        present = both.present(t, joined)
        assert present.sum() == 3 and not present[[0, 1, 8]].any()
    assert np.array_equal(both.present(0, joined), joined)
