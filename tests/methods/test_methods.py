"""The methods by hand: columns, absent clients, schedules, fixed graphs, a method's contract."""

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from launch import differences, federation, refused, run_here, text_file
from torch.optim.lr_scheduler import CosineAnnealingLR
from twins import FIELDS, HEAD, TAU, keyed, play

from dpfl_mpi import methods, models, streams
from dpfl_mpi.engine.checks import check_state
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.training import learning_rate
from dpfl_mpi.figures import names as names_of_rows
from dpfl_mpi.graph import CollaborationGraph, rewired
from dpfl_mpi.methods import (
    Method,
    dac,
    dfedpgp,
    dpsgd,
    fedala,
    oracle,
    pairwise,
    pfedsv,
    random_graph,
    replay,
)
from dpfl_mpi.methods._senders import least
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import title
from dpfl_mpi.settings import Run, option

same = np.array_equal


def test_the_columns_of_layers():
    with federation(FIELDS | {"method": "fedrep"}) as fed:
        size = fed.ensemble.size
        first, every = torch.arange(size) < HEAD, torch.ones(size, dtype=torch.bool)
        expected = {"none": ~every, "all": every, "fc1": first, "head": ~first, "fc1,head": every}
        for layers, columns in expected.items():
            assert torch.equal(fed.columns(layers)[:size], columns)
        refused("--options.head is x; allowed are head,", fed.columns, "x")
        refused("what fed.columns is given is x; allowed are head,", fed.columns, "x", "layer")


AVERAGING = "dac dfedpgp dpsgd facade fedfomo fedsim l2c morph pens pfedsv random_graph sketch"


@pytest.mark.parametrize("method", AVERAGING.split())
def test_the_scores_of_averages(tmp_path, method):
    """From round 10 on, nothing is learned: its trained model is the average of round 9."""
    fields = FIELDS | {"method": method, "rounds": 10, "lr": 0.002, "lr_decay": 1e-30}
    fields |= {"options": {"heads": 1} if method == "facade" else {}}
    paths = [run_here(tmp_path / f"{mixed}.h5", fields, mixed=mixed) for mixed in (True, False)]
    with Result(paths[0]) as result:
        for scores in ("val_acc", "test_acc"):
            trained, averaged = result[f"round/{scores}"], result[f"mixed/{scores}"]
            assert same(averaged[9], trained[10])
            assert not same(averaged[1:10], trained[1:10])
    assert differences(*paths) == []  # but for what --mixed adds


@pytest.mark.parametrize("method", ["ditto", "apfl", "perfedavg", "fedrep", "pfedgraph"])
def test_two_epochs_twice_are_four_and_a_second_model_counts_no_epoch(method):
    _, _, fed = play(method, rounds=2)
    per_epoch = -(-fed.clients.n_train // 32)
    steps = per_epoch * 2 * TAU * (2 if method in ("ditto", "apfl") else 1)
    if method == "perfedavg":  # a step takes two mini-batches
        steps = 2 * ((per_epoch * TAU) // 2)
    assert (fed.training.epochs == 2 * TAU).all() and same(fed.training.steps, steps)
    assert (fed.notes["models_received"] == 2).all()


ABSENT = ["dpfl", "scaffold", "fedper", "pfedme", "fedala", "pens", "cobo", "fedamp"]
ABSENT += ["ifca", "cfl"]


@pytest.mark.parametrize("method", ABSENT)
def test_absent_clients_keep_what_is_theirs(method, tmp_path):
    present = text_file(tmp_path / "present", "1 1 1 1\n0 1 0 1\n1 1 1 1\n")
    fields = {"budget": "inf", "classes_per_client": 8, "lr": 0.1, "seed": 0, "available": present}
    _, _, fed_before = play(method, rounds=1, **fields)
    _, states, fed = play(method, rounds=2, **fields)
    away, present_rows = fed.row_of[[0, 2]], fed.row_of[[1, 3]]
    for name, rows in states[1]["client"].items():
        before, after = torch.as_tensor(rows), torch.as_tensor(states[2]["client"][name])
        # FedPer's base comes from the server
        columns = slice(HEAD if method == "fedper" else 0, None)
        assert torch.equal(before[away][..., columns], after[away][..., columns]), name
    assert same(fed_before.training.epochs[away], fed.training.epochs[away])
    if method != "pfedme":
        before, after = fed_before.training.momentum["w"], fed.training.momentum["w"]
        assert torch.equal(before[away], after[away])
        assert not torch.equal(before[present_rows], after[present_rows])
    if method == "dpfl":  # an absent client keeps its choice, and nobody chooses it
        before, after = (state["shared"]["chosen"].matrix() for state in states[1:])
        assert same(before[::2], after[::2]) and before[::2].any()
        assert before[1::2, ::2].any() and not after[1::2, ::2].any()
    received = fed.notes["models_received"]
    assert (received[away] == 0).all() and (received[present_rows] > 0).all()


TOLERANCE = {"options": {"tolerance": 0.1}}
KEEP_OUT = {"options": {"search": "forward", "neither": "keep_out"}}


@pytest.mark.parametrize(("method", "fields", "sentence"), [
    ("fedrep", {"options": {"head": "fc7"}},
     "allowed are head, none, all, or of the layers fc1, head"),
    ("fedala", {"options": {"layers": "foo"}},
     "--options.layers is foo; allowed are head, none, all, or of the layers"),
    ("fedrep", {"tau_train": 1},
     "--options.base_epochs is 1; allowed is 0 to 0: the rest of tau_train is the head's"),
    ("dpfl_choice", TOLERANCE,
     "--options.tolerance is 0.1; only a forward search has one: allowed is 0"),
    ("dpfl_choice", KEEP_OUT, "--options.neither is keep_out; a forward"),
    ("dfedpgp", {"options": {"head_epochs": 3}},
     "--options.head_epochs is 3; allowed is 0 to 2, all of tau_train"),
    ("dfedpgp", {"send": "layers=head"},
     "--send is layers=head; dfedpgp says itself what it sends: allowed is all"),
    ("dpfl_choice", {"send": "layers=body"},
     "--send is layers=body; dpfl_choice scores models as they come"),
    ("facade", {"options": {"final": True}, "reach": "sites:2"},
     "--options.final is true; it averages whole models of all clients after the last round: "
     "leave out --reach"),
    ("facade", {"options": {"final": True}, "send": "layers=body"}, "leave out --send"),
    ("facade", {"options": {"final": True}, "patience": 2}, "leave out --patience"),
    ("sketch", {"attack": "noise:0.5"},
     "--attack is noise:0.5; sketch sends more than models; allowed are"),
    ("pfedsv", {"options": {"orders": 0}, "clients": 9, "budget": 9},
     "--options.orders is 0, all 9! orders of 9 models; allowed are at most 8 models"),
    ("fedamp", {"attack": "scale:0.4"},
     "--attack is scale:0.4; fedamp sends models before it trains them, so there is no change to"),
    ("l2c", {"codec": "topk:0.1"},
     "--codec is topk:0.1; l2c sends changes of models, which no receiver keeps: allowed is none"),
    ("spectral_search", {"candidates": 3, "clients": 9},
     "--candidates is 3; spectral_search receives models of its own kind alone: allowed is inf"),
    ("fedbn", {}, "--method fedbn needs GroupNorm, LayerNorm or the like; --model mlp has none"),
])  # fmt: skip
def test_what_a_method_needs_of_its_run_is_one_sentence(method, fields, sentence):
    assert refused(sentence, play, method, **fields).startswith("--")


@pytest.mark.parametrize(("state", "rounds"), [("keep", 2), ("reset", 1)])
def test_the_momentum_is_kept_or_reset(state, rounds):
    fields = {"optimizer": "adam", "momentum_state": state, "method": "local"}
    with federation(FIELDS | fields) as fed:
        w, per_epoch = fed.common_row(), -(-fed.clients.n_train // 32)
        for t in (1, 2):
            fed.begin_round(t)
            fed.local_opt(w, 1)
        assert fed.training.momentum["w"][:, -1].tolist() == (rounds * per_epoch).tolist()


def rates(**fields):
    run = Run(method="fedavg", rounds=10, lr=0.1, **fields).resolve()
    return [learning_rate(run, t) for t in range(13)]


def test_the_schedule_is_pytorchs():
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    schedule, cosine = CosineAnnealingLR(optimiser, T_max=10), []
    for _ in range(10):
        cosine += schedule.get_last_lr()
        optimiser.step()
        schedule.step()
    assert rates(lr_schedule="cosine")[1:11] == pytest.approx(cosine)
    assert rates()[1:11] == [0.1] * 10
    decayed = rates(lr_schedule="cosine", lr_decay=0.5)
    assert decayed[:2] == [0.1, 0.1]  # preprocessing, the first round
    assert decayed[10] == pytest.approx(0.5 * 0.1 * (1 + math.cos(0.9 * math.pi)) / 2, rel=1e-12)
    assert decayed[12] == 0.05  # fine-tuning starts at the schedule's start anew
    assert rates(lr_decay=0.5) == [0.1] * 10 + [0.05] * 3


N, T = 7, 4
SMALL = {"clients": N, "rounds": T, "tau_init": 1, "tau_train": 1, "budget": 4}
UNLIKE = {"graph/cases", "graph/evaluations", "traffic/models_received"}  # of a replay and its run


def small(method, **fields):
    return SMALL | {"method": method} | fields


def replaying(path, **fields):
    return small("replay", graphs=path and str(path), **fields)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("plain") / "run.h5", SMALL)


def test_oracle_of_disjoint_classes():
    """Clients 0, 1, 4 have classes 0 and 1, client 2 class 1 alone, client 3 class 2.

    p grows with the number.
    """
    counts = np.array([[1, 1, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    p = np.array([0.1, 0.15, 0.2, 0.25, 0.3])

    def best(k, most):
        common = oracle.shared_classes(k, counts)
        return oracle.best(np.delete(np.arange(5), k), common, p, most).tolist()

    assert [best(0, most) for most in (1, 2, 3, 4)] == [[4], [4, 1], [4, 1, 2], [4, 1, 2]]
    assert [best(3, 4), best(2, 2), best(4, 2)] == [[], [4, 1], [1, 0]]
    assert oracle.best(np.array([1, 2]), np.array([2, 2, 1]), np.ones(5), 0).tolist() == []
    with federation(small("oracle", budget="inf")) as fed:
        state = oracle.init(fed)
        shared = (fed.partition.class_counts > 0).astype(int)
        expected = shared @ shared.T > 0
        np.fill_diagonal(expected, False)
        assert same(state["shared"]["omega"].matrix(), expected) and not expected.all()
        fed.groups = np.arange(fed.n) % 2
        alike = fed.groups[:, None] == fed.groups
        assert same(oracle.init(fed)["shared"]["omega"].matrix(), expected & alike)


def test_oracle_by_overlap_of_class_distributions():
    """Client 0 has 60, 30 and 10 % of three classes.

    Of 1 it shares 30 + 10 %, of 2 and 3 60 + 30 %, of 4, which lacks a class, 60 + 10 %, of 5
    nothing. By classes 1, 2 and 3 are equal, and the heavier 1 comes first.
    """
    counts = np.array(
        [[6, 3, 1, 0], [0, 3, 7, 0], [14, 6, 0, 0], [7, 3, 0, 0], [3, 0, 1, 0], [0, 0, 0, 4]]
    )
    common = oracle.overlaps(0, counts)
    assert common.tolist() == [1, 0.4, 0.9, 0.9, 0.7, 0]
    others, p = np.arange(1, 6), np.array([0.2, 0.3, 0.1, 0.2, 0.1, 0.1])
    assert [oracle.best(others, common, p, n).tolist() for n in (1, 5)] == [[3], [3, 2, 4, 1]]
    by_classes = oracle.shared_classes(0, counts)
    assert by_classes.tolist() == [3, 2, 2, 2, 2, 0]
    assert oracle.best(others, by_classes, p, 5).tolist() == [1, 3, 2, 4]
    with federation(small("oracle", options={"by": "overlap"})) as fed:
        graph = oracle.init(fed)["shared"]["omega"]
        share = fed.class_counts / fed.class_counts.sum(1, keepdims=True)
        for k in range(N):
            common = [sum(map(min, share[k].tolist(), share[j].tolist())) for j in range(N)]
            rest = sorted({*range(N)} - {k, *graph.of(k)})
            assert len(graph.of(k)) == 3
            assert min(common[j] for j in graph.of(k)) >= max(common[j] for j in rest) - 1e-12


def test_pairwise(tmp_path):
    assert pairwise.smallest(np.array([0.3, np.nan, 0.1, 0.3, 0.2]), 3).tolist() == [2, 4, 0]
    assert pairwise.smallest(np.array([np.nan, 0.5]), 3).tolist() == [1]
    with federation(small("pairwise", reach="groups:0,1,2,3,4,5;5,6")) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        graph = pairwise.choose(fed, w, fed.candidates())
        reach = {k: [j for j in range(6) if j != k] for k in range(5)}
        reach |= {5: [0, 1, 2, 3, 4, 6], 6: [5]}
        for i, k in enumerate(fed.ids.tolist()):
            b = slice(i, i + 1)
            rows = {j: w[fed.row_of[j]][None, None] for j in reach[k]}
            loss = {j: fed.backend.validation_losses(b, row)[0, 0] for j, row in rows.items()}
            assert graph.of(k).tolist() == sorted(sorted(loss, key=loss.get)[:3])
            assert fed.notes["models_received"][i] == len(reach[k])
            assert fed.notes["evaluations"][i] == len(reach[k])
    with Result(run_here(tmp_path / "a.h5", small("pairwise", omega_period=2))) as result:
        by_round = np.array([6 + 3, 3, 6 + 3, 3, 6 + 3])
        assert (result["traffic/models_received"] == by_round[:, None]).all()
        first, second, third = (result.graph(t) for t in (1, 2, 3))
        assert not same(first, second) and same(second, third)


def test_a_replay_and_dpfl_choice_are_dpfl(plain, tmp_path):
    half = run_here(tmp_path / "half.h5", SMALL | {"participation": 0.6, "ggc_period": 2})
    for path, more in ((plain, {}), (half, {"participation": 0.6})):
        again = run_here(tmp_path / f"{path.stem}-again.h5", replaying(path, **more))
        assert set(differences(path, again)) <= UNLIKE

    def key(path):
        return Run(**replaying(path)).resolve().key()["graphs"]

    assert key(plain) == key(run_here(tmp_path / "again.h5", SMALL)) and len(key(plain)) == 64
    with h5py.File(half, "r+") as file:
        file.attrs["sha256"] = key(plain)  # a file may claim the hash of other graphs
    assert key(half) != key(plain)
    assert differences(plain, run_here(tmp_path / "a.h5", small("dpfl_choice"))) == []

    def graphs(variant="as_is"):
        with federation(replaying(plain, budget="inf", options={"variant": variant})) as fed:
            return [replay.graph_of(fed, t).matrix() for t in range(T + 1)]

    own, turned, shuffled, exchanged = map(graphs, ("as_is", "reversed", "shuffled", "rewired"))
    with Result(plain) as result:
        assert all(same(own[t], result.graph(t)) for t in range(T + 1))
    assert same(np.transpose(own, (0, 2, 1)), turned)
    assert same(shuffled[0], own[0]) and not same(own, shuffled)
    assert sorted(g.tobytes() for g in shuffled) == sorted(g.tobytes() for g in own)
    assert not same(own, exchanged)
    for a, b in zip(own, exchanged, strict=True):
        assert same(a.sum(0), b.sum(0)) and same(a.sum(1), b.sum(1)) and not b.diagonal().any()

    def init(graphs=plain, **fields):
        with federation(replaying(graphs, **fields)) as fed:
            replay.init(fed)

    refused("--graphs is not set; replay takes the graphs of a result", init, None)
    refused("graphs of 7 clients in rounds 0 to 4; this run has 6 clients", init, clients=6)
    refused("this run has 7 clients and 5 rounds", init, rounds=5)
    too_many = "receive 1 models; the as_is graph of round 0 has ... for it"
    refused(f"--budget lets client ... {too_many}", init, budget=2)
    refused("goes beyond --reach", init, reach="groups:0,1")
    skip = run_here(tmp_path / "skip.h5", SMALL | {"ggc_period": 2, "ggc_off_rounds": "skip"})
    refused("did not average in every round", init, skip)
    refused("is not a readable HDF5 file", init, text_file(tmp_path / "text.h5", "no result"))


def test_a_graph_of_ones_own(tmp_path):
    """Senders 1 and 2 of client 0, 0 of client 1, then from round 3 on 3 of client 2."""
    text = "1 1 0\n1,2,0\n1 1 0\n\n1 0 1\n3 3 2\n"
    fields = small("dpsgd", graphs=text_file(tmp_path / "a.txt", text), budget=1)
    first, second = [[1, 2], [0], [], [], [], [], []], [[], [], [3], [], [], [], []]
    with federation(fields) as fed:
        lists = [[graph.of(k).tolist() for k in range(N)] for graph in fed.graphs]
        assert lists == [first, first, first, second, second]
        assert fed.most_senders.tolist() == [2, 1, 1, 0, 0, 0, 0]
        a = dpsgd.weights(np.arange(2), fed.graphs[0])
    expected = np.zeros((2, 7))
    expected[0, :3], expected[1, :2] = 1 / 3, (1 / 3, 2 / 3)
    assert a == pytest.approx(expected)
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        assert [same(result.graph(t), fed.graphs[t].matrix()) for t in range(1, 5)] == [True] * 4
        assert title(result).endswith("7 clients, a, 4 rounds, seed 42")
        assert names_of_rows.row_name(result.run) == "D-PSGD (a)"
    for text in ("", "0 7\n", "0 0\n", "0 1\n0 1 2\n", "0 1 2 3\n", "a b\n", "-1 2\n"):
        fields = small("dpsgd", graphs=text_file(tmp_path / "b.txt", text))
        with pytest.raises(UserError, match="which must hold lines 'from to'"), federation(fields):
            pass
    late = small("dpsgd", graphs=text_file(tmp_path / "c.txt", "2 0 1\n"))
    with pytest.raises(UserError, match="first graph is of round 2; allowed"), federation(late):
        pass
    again = Run(**small("dpsgd", budget=3)), Run(**small("dpsgd", graphs="ring"))
    assert again[0].key() == again[1].key() != Run(**small("dpsgd", graphs="grid")).key()
    refused(
        "--graphs is rong; there is no such file, allowed are ring, grid",
        Run(**small("dpsgd", graphs="rong")).resolve,
    )


def test_rewiring_reaches_every_graph_of_these_degrees():
    ring = CollaborationGraph.from_lists([[1], [2], [3], [0]])
    rng = np.random.default_rng(0)
    drawn = [tuple(rewired(ring, rng).senders.tolist()) for _ in range(1800)]
    counts = [drawn.count(g) for g in set(drawn)]
    # 200 each, 5 standard deviations
    assert len(counts) == 9 and all(130 < c < 270 for c in counts)
    assert rewired(CollaborationGraph.empty(3), rng).degrees().tolist() == [0, 0, 0]
    rng, clients = np.random.default_rng(5), np.arange(30)
    lists = [rng.choice(np.delete(clients, k), k % 6, replace=False) for k in clients]
    graph = CollaborationGraph.from_lists(lists)
    receivers, senders = graph.receivers().tolist(), graph.senders.tolist()
    draws, edges = np.random.default_rng(1), set(zip(receivers, senders, strict=True))
    for a, b in draws.integers(0, len(senders), (20 * len(senders), 2)).tolist():
        new = {(receivers[a], senders[b]), (receivers[b], senders[a])}
        if all(k != j for k, j in new) and not new & edges:
            edges = edges - {(receivers[a], senders[a]), (receivers[b], senders[b])} | new
            senders[a], senders[b] = senders[b], senders[a]
    found = rewired(graph, np.random.default_rng(1))
    assert set(zip(found.receivers().tolist(), found.senders.tolist(), strict=True)) == edges


@pytest.mark.parametrize("redraw", [False, True])
def test_a_random_graph_with_dpfls_degrees(plain, tmp_path, redraw):
    fields = small("random_graph", graphs=str(plain), options={"redraw": redraw})
    with Result(run_here(tmp_path / "a.h5", fields)) as drawn, Result(plain) as result:
        degrees = [result.chosen(t).degrees() for t in range(T + 1)]
        assert same([drawn.chosen(t).degrees() for t in range(T + 1)], degrees)
        together = np.any([drawn.graph(t) for t in range(T + 1)], 0).sum(1)
        most = np.max(degrees, 0)  # else the first so many of one order
        assert (together > most).any() if redraw else same(together, most)
    with federation(small("random_graph")) as fed:
        for k in range(N):
            order = random_graph.stable_order(fed, k, 0, fed.candidates())
            assert same(order[:3], fed.shuffle(k, fed.reachable(k), 0)[:3])


def four(method, **fields):
    few = {"clients": 4, "rounds": 1, "tau_train": 1, "budget": 3}
    return federation(few | {"method": method} | fields)


def test_dac_draws_as_softmax_says_and_hears_of_others():
    """Two of clients 1 to 3 are drawn in turn, by weights 1, 2, 3; within 4 standard errors."""
    with four("dac") as fed:
        pairs = dict.fromkeys(itertools.permutations((1, 2, 3), 2), 0)
        for t in range(2000):
            fed.members.round = t
            pairs[tuple(dac.draw_senders(fed, 0, np.log([9, 1, 2, 3])).tolist())] += 1
    for (a, b), count in pairs.items():
        p = a / 6 * b / (6 - a)
        assert abs(count / 2000 - p) < 4 * np.sqrt(p * (1 - p) / 2000)
    s = np.array([0, 3.0, 2.0, 0, 0, 7.0])
    of_others = np.array([[1.0, 0, 0, 0, 0, 4.0], [5.0, 0, 0, 6.0, 0, 8.0]])  # of clients 1 and 2
    unknown = np.array([False, False, False, True, True, True])
    dac.second_hop(s, unknown, of_others, np.array([3.0, 2.0]))
    # only client 2 knows client 3, nobody knows 4; client 1 is the more similar, so 5 is as it says
    assert s.tolist() == [0, 3, 2, 6, 0, 4]


def test_shapley_values_by_hand():
    """Player 2 is worth something only with player 1; each order shares what they add together."""
    worth = {(0,): 1, (1,): 0, (2,): 0, (0, 1): 1, (0, 2): 1, (1, 2): 6, (0, 1, 2): 7}
    calls = []

    def value(coalitions):
        calls.append(len(coalitions))
        return np.array([worth[tuple(sorted(s))] for s in coalitions], float)

    every_order = list(itertools.permutations(range(3)))
    assert pfedsv.shapley(every_order, value, 0.0) == pytest.approx([1, 3, 3]) and calls == [7]
    assert pfedsv.shapley([[1, 0, 2]], value, -4.0) == pytest.approx([1, 4, 6])


def test_an_exploded_model_is_nobodys_choice():
    assert least(np.array([np.nan, 2, 1])) == 2 and least(np.array([np.nan, np.inf])) == 0
    few, settled = [1.0] * fedala.LOSSES, [9.0] + [1.0] * fedala.LOSSES
    assert fedala.deviation(few) == math.inf and fedala.deviation(settled) == 0
    assert fedala.deviation([*settled, math.nan]) == math.inf


def test_push_sum_keeps_the_mass_and_its_bytes_are_the_body():
    """Of 4 clients 0 sends to all: it keeps a quarter. Of clients 0 to 3 out_j is 3, 2, 0, 0."""
    graph = CollaborationGraph.from_lists([[1], [0], [0, 1], [0]])
    with four("dfedpgp") as fed:
        order, head = fed.row_of, fed.columns("head")
        u = fed.common_row()
        u[:] = torch.arange(1.0, 5)[fed.ids, None]
        new, mu = dfedpgp.push(fed, u, np.ones(4), graph, head)
        from_0, from_1 = 1 / 4, 1 / 3
        both = from_0 + from_1
        assert mu[order].tolist() == pytest.approx([both, both, both + 1, from_0 + 1])
        both = from_0 + 2 * from_1
        rows = new[order]
        assert rows[:, 0].tolist() == pytest.approx([both, both, both + 3, from_0 + 4])
        assert rows[:, head][:, 0].tolist() == [1, 2, 3, 4]
        size = 4 * int((~head[: fed.ensemble.size]).sum()) + 8  # and mu
        assert fed._parts.mail.ledger.bytes.tolist() == [3 * size, 2 * size, 0, 0]
        fed._parts.members.trains[0] = False  # --patience
        pairs = ([[1], [0, 2], [1], [2]], [[1], [2], [1], [2]]), ([[3], [0], [1], [2]], 4 * [[]])
        for edges, kept in pairs:  # 0 sends nothing, nor does who receives from it alone
            found = dfedpgp.sharing(fed, CollaborationGraph.from_lists(edges))
            assert [found.of(k).tolist() for k in range(4)] == kept
        new, mu = dfedpgp.push(fed, u, np.full(4, 0.5), graph, head)
        assert torch.equal(new[order[0]], u[order[0]]) and mu[order[0]] == 0.5


def test_values_of_fed_tell_come_from_everyone_and_cost_their_bytes():
    graph = CollaborationGraph.from_lists([[1, 2], [0], [], [1]])
    with four("dac", send="layers=body") as fed:
        ledger, values = fed._parts.mail.ledger, np.arange(8.0).reshape(4, 2)[fed.ids]
        assert fed.tell(values, graph).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert ledger.bytes.tolist() == [16, 32, 16, 0]
        fed.tell(values[:, 0].astype(np.float32))
        assert ledger.bytes.tolist() == [28, 44, 28, 12]
        given = "fed.tell was given list of shape (); it takes a NumPy array of 4 rows"
        refused(given, fed.tell, [1, 2, 3, 4])


def test_what_the_methods_declare(tmp_path, monkeypatch):
    found = {name: find("method", name) for name in shipped("method")}
    graphs = {"dpfl", "dpfl_choice", "random_graph", "oracle", "pairwise", "replay", "nearest"}
    graphs |= {"dpsgd", "spectral", "spectral_search"}
    rivals = {"pens", "dac", "fedfomo", "fedsim", "pfedsv", "dfedpgp", "facade", "sketch"}
    rivals |= {"l2c", "morph"}
    assert {n for n, m in found.items() if m.topology == "graph"} == rivals | graphs
    assert {n for n, m in found.items() if m.preprocesses} == graphs - {"dpsgd"}
    assert found["dpfl"].unread == {"graphs"} and "budget" not in found["random_graph"].unread
    assert all(m.citation.startswith("@") for n, m in found.items() if n != "local")
    # Without a declaration it reads every field of a Run but tau_init.
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    (tmp_path / "mine.py").write_text("from dpfl_mpi.methods.local import init, round\n")
    mine = find("method", "mine")
    assert (mine.title, mine.topology, mine.unread) == ("mine", "graph", {"tau_init"})
    assert mine.searches and not mine.preprocesses
    assert Run(method="mine", budget=3, ggc_period=2).resolve().most_senders == 2
    fields = {"clients": 4, "rounds": 3, "tau_train": 2, "finetune_epochs": 1}
    own, local = (run_here(tmp_path / f"{m}.h5", fields | {"method": m}) for m in ("mine", "local"))
    assert differences(own, local) == ["client/budget"]


GOOD = {"init": lambda fed: None, "round": lambda fed, state, t: None}


@dataclass(frozen=True)
class BadOptions:
    sizes: tuple = option((1, 2), "sizes")


DECLARED = [
    ({"server": True}, "METHOD of the method mine is {'server': True}; it must be a Method(...)"),
    (Method(models=0), "has models=0; allowed is a whole number from 1 to 1000"),
    (Method(every_row=True), "has every_row=True; allowed is a whole number from 0 to 1000"),
    (Method(sends=3), "METHOD of the method mine has sends=3; allowed is a text"),
    (Method(searches="no"), "has searches='no'; allowed is true or false"),
    (Method(ignores="graphs"), "has ignores='graphs'; allowed are tuples of omega_period, graphs"),
    (Method(optimizers=("sgd", "lion")),
     "has optimizers=('sgd', 'lion'); allowed are tuples of sgd, adam, adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "sentence"), [
    *(({"METHOD": declared}, sentence) for declared, sentence in DECLARED),
    ({"init": 3}, "the method mine has no function init"),
    ({"finetune_gradient": lambda fed: None}, "which is called as finetune_gradient(fed, start)"),
    ({"Options": dict}, "Options of the method mine must be a dataclass"),
    ({"Options": BadOptions}, "with true or false, a number or a text as the default"),
    ({"build": print, "HEAD": 3}, "HEAD of the model mine is 3"),
    ({"build": print, "Options": dict}, "Options of the model mine must be a dataclass"),
])  # fmt: skip
def test_a_file_that_breaks_the_contract_is_refused(content, sentence):
    load = models.load if "build" in content else methods.load
    refused(sentence, load, "mine", SimpleNamespace(**(GOOD | content)))


def fed(number=1, **notes):
    """Return what `check_state` looks at: two local clients of four, in round `number`."""
    members = Members.__new__(Members)  # all present and alive
    members.n, members.names, members.present = 4, (), np.ones(4, bool)
    members.diverged_round = np.full(4, -1)
    members.limits = SimpleNamespace(most_senders=np.array([3, 1, 1, 1]))
    log = SimpleNamespace(notes={"val_acc": np.ones(2)} | notes)
    return SimpleNamespace(n=4, round=number, ids=np.array([1, 3]), members=members, log=log)


W = torch.zeros(2, 5)
GRAPH = CollaborationGraph.empty(4)
TWO = CollaborationGraph.from_lists([[1, 2, 3], [], [0, 1], []])


SHARED = [
    ("omega", [[1], [0], [], []], 'state["shared"]["omega"] after round of the method mine is a '
     "list; it must be a CollaborationGraph"),
    ("chosen", CollaborationGraph.empty(2),
     "is a graph of 2 clients; it must be a CollaborationGraph of 4 clients"),
    ("chosen", TWO, 'state["shared"]["chosen"] after round of the method mine gives client 2 2 '
     "senders; its budget allows 1"),
    ("w", W.bfloat16(), "is a Tensor of torch.bfloat16, which a checkpoint cannot hold"),
    ("w", np.array([None]), "is a ndarray of object, which a checkpoint cannot hold"),
    ("w", np.complex64(1), "is a complex64 of complex64, which a checkpoint cannot hold"),
    ("w", W.to_sparse(), "is a Tensor of torch.float32, which a checkpoint cannot hold"),
    ("a/b", 1, "returned state[\"shared\"]['a/b']; a key is a text without / or NUL"),
    ("a\0b", 1, "a key is a text without / or NUL"),
    (".", 1, "returned state[\"shared\"]['.']; a key is a text without / or NUL, and not"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "sentence"), [
    ({"shared": {}}, "returned a dict of shared; a state must be"),
    ({"client": {}, "shared": {}, "a": 1}, "returned a dict of client, shared, a; a state must be"),
    ({"client": W, "shared": {}}, "both dicts"),
    ({}, "returned an empty dict; a state must be"),
    ({"client": {"w": W, "last": W}, "shared": {}},
     'returned state["client"]["w"] and state["client"]["last"]; they share their memory, which'),
    ({"client": {"w": W}, "shared": {"phi": W[0]}}, "they share their memory"),
    ({"client": {"w": [1, 2]}, "shared": {}},
     "is a list; it must be a tensor or array of 2 rows, one per client of this rank"),
    *(({"client": {}, "shared": {name: value}}, sentence) for name, value, sentence in SHARED),
])  # fmt: skip
def test_a_state_that_breaks_the_contract_is_refused(state, sentence):
    refused(sentence, check_state, "mine", state, fed())


def test_good_states_pass():
    shared = {"omega": GRAPH, "chosen": GRAPH, "phi": W[0].clone(), "mask": np.ones(3, bool)}
    shared |= {"step": 3, "name": "a", "x": None}
    check_state("mine", {"client": {"w": W, "a": np.zeros((2, 1))}, "shared": shared}, fed())
    empty = {"client": {}, "shared": {}}
    check_state("mine", empty, fed(0))
    check_state("mine", empty, fed(2, val_acc=np.array([np.nan, 1])))  # it need not score


def test_cobo_counts_a_midpoint_down_and_its_gradient_up():
    _, _, fed = play("cobo", rounds=1, budget="inf")
    n, key = fed.n, (fed.run.seed, streams.PAIRS)
    drawn = np.array([keyed(*key, k, 1).random(n) for k in range(n)]) < 1 / n
    drawn &= ~np.eye(n, dtype=bool)
    pairs = (drawn | drawn.T).sum(1)
    received = fed.notes["models_received"][fed.row_of]
    assert pairs.any() and received.tolist() == (2 + 2 * pairs).tolist()
