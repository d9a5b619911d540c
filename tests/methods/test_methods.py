"""The methods by hand, with clients that are away; optimisers and schedules; graphs that are not searched; and the contract of a method's file."""

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from launch import differences, federation, refused, run_here, text_file
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from twins import FIELDS, HEAD, TAU, play

from dpfl_mpi import methods, models
from dpfl_mpi.engine.checks import check_state
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.training import learning_rate
from dpfl_mpi.graph import CollaborationGraph, rewired
from dpfl_mpi.methods import Method, dac, dfedpgp, oracle, pairwise, pfedsv, random_graph, replay
from dpfl_mpi.plugins import find, names
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run, option


def test_the_columns_of_layers():
    with federation(FIELDS | {"method": "fedrep"}) as fed:
        size = fed.ensemble.size
        first = torch.arange(size) < HEAD
        held = {"none": first & ~first, "all": first | ~first, "fc1": first, "head": ~first, "fc1,head": first | ~first}
        assert all(torch.equal(fed.columns(layers)[:size], columns) for layers, columns in held.items())
        refused("--options.head is x; allowed are head,", fed.columns, "x")
        refused("what fed.columns is given is x; allowed are head,", fed.columns, "x", "layer")


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
    fields = {"available": str(tmp_path / "there"), "budget": "inf", "classes_per_client": 8, "lr": 0.1, "seed": 0}
    for method in ("dpfl", "scaffold", "fedper", "pfedme", "fedala", "pens", "cobo"):
        (_, _, fed_before), (_, states, fed) = (play(method, rounds=rounds, **fields) for rounds in (1, 2))
        away, here = fed.row_of[[0, 2]], fed.row_of[[1, 3]]
        for name, rows in states[1]["client"].items():
            before, after = torch.as_tensor(rows), torch.as_tensor(states[2]["client"][name])
            columns = slice(HEAD, None) if method == "fedper" else slice(None)  # the base comes from the server
            assert torch.equal(before[away][..., columns], after[away][..., columns]), (method, name)
        assert np.array_equal(fed_before.training.epochs[away], fed.training.epochs[away])
        if method != "pfedme":
            before, after = fed_before.training.momentum["w"], fed.training.momentum["w"]
            assert torch.equal(before[away], after[away]) and not torch.equal(before[here], after[here])
        if method == "dpfl":  # who is away keeps its choice, and is nobody's
            before, after = (state["shared"]["chosen"].matrix() for state in states[1:])
            assert np.array_equal(before[::2], after[::2]) and before[::2].any()
            assert before[1::2, ::2].any() and not after[1::2, ::2].any()
        assert (fed.notes["models_received"][away] == 0).all() and (fed.notes["models_received"][here] > 0).all()


@pytest.mark.parametrize(("method", "fields", "sentence"), [
    ("fedrep", {"options": {"head": "fc7"}}, "allowed are head, none, all, or of the layers fc1, head"),
    ("fedala", {"options": {"layers": "foo"}}, "--options.layers is foo; allowed are head, none, all, or of the layers"),
    ("fedrep", {"tau_train": 1}, "--options.base_epochs is 1; allowed is 0 to 0: the rest of tau_train is the head's"),
    ("dpfl_choice", {"options": {"tolerance": 0.1}}, "--options.tolerance is 0.1; only a forward search has one: allowed is 0"),
    ("dpfl_choice", {"options": {"search": "forward", "neither": "keep_out"}}, "--options.neither is keep_out; a forward"),
    ("dfedpgp", {"options": {"head_epochs": 3}}, "--options.head_epochs is 3; allowed is 0 to 2, all of tau_train"),
    ("dfedpgp", {"send": "layers=head"}, "--send is layers=head; dfedpgp says itself what it sends: allowed is all"),
    ("dpfl_choice", {"send": "layers=body"}, "--send is layers=body; dpfl_choice scores models as they come"),
    ("sketch", {"attack": "noise:0.5"}, "--attack is noise:0.5; sketch sends more than models; allowed are"),
    ("fedbn", {}, "--method fedbn needs GroupNorm, LayerNorm or the like; --model mlp has none"),
])  # fmt: skip
def test_what_a_method_needs_of_its_run_is_one_sentence(method, fields, sentence):
    assert refused(sentence, play, method, **fields).startswith("--")


def test_its_memory_is_kept_and_reset():
    for state, steps in (("keep", 2), ("reset", 1)):
        with federation(FIELDS | {"optimizer": "adam", "momentum_state": state, "method": "local"}) as fed:
            w, per_epoch = fed.common_row(), -(-fed.clients.n_train // 32)
            for t in (1, 2):
                fed.begin_round(t)
                fed.local_opt(w, 1)
            assert fed.training.momentum["w"][:, -1].tolist() == (steps * per_epoch).tolist()


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


N, T = 7, 4
SMALL = {"clients": N, "rounds": T, "tau_init": 1, "tau_train": 1, "budget": 4}
UNLIKE = {"graph/cases", "graph/evaluations", "traffic/models_received"}  # of a replay and its run


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("plain") / "run.h5", SMALL)


def test_oracle_of_disjoint_classes():
    """Clients 0, 1, 4 hold classes 0 and 1, client 2 class 1 alone, client 3 class 2; p grows with the number."""
    held = np.array([[1, 1, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], bool)
    p = np.array([0.1, 0.15, 0.2, 0.25, 0.3])

    def of(k, most):
        return oracle.best(k, np.delete(np.arange(5), k), held, p, most).tolist()

    assert of(0, 1) == [4] and of(0, 2) == [4, 1] and of(0, 3) == [4, 1, 2] and of(0, 4) == [4, 1, 2]  # never client 3
    assert of(3, 4) == [] and of(2, 2) == [4, 1] and of(4, 2) == [1, 0]
    assert oracle.best(0, np.array([1, 2]), held, np.ones(5), 0).tolist() == []
    with federation(SMALL | {"method": "oracle", "budget": "inf"}) as fed:
        state = oracle.init(fed)
        shared = (fed.partition.class_counts > 0).astype(int)
        expected = shared @ shared.T > 0
        np.fill_diagonal(expected, False)
        assert np.array_equal(state["shared"]["omega"].matrix(), expected) and not expected.all()


def test_pairwise_takes_the_smallest_losses():
    assert pairwise.smallest(np.array([0.3, np.nan, 0.1, 0.3, 0.2]), 3).tolist() == [2, 4, 0]
    assert pairwise.smallest(np.array([np.nan, 0.5]), 3).tolist() == [1]
    with federation(SMALL | {"method": "pairwise", "reach": "groups:0,1,2,3,4,5;5,6"}) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        graph = pairwise.choose(fed, w, fed.candidates())
        reach = {k: [j for j in range(6) if j != k] for k in range(5)} | {5: [0, 1, 2, 3, 4, 6], 6: [5]}
        for i, k in enumerate(fed.ids.tolist()):
            b = fed.backend.blocks[i]
            assert (b.start, b.stop) == (i, i + 1)
            loss = {j: fed.backend.validation_losses(b, w[fed.row_of[j]][None, None])[0, 0] for j in reach[k]}
            assert graph.of(k).tolist() == sorted(sorted(loss, key=loss.get)[:3])
            assert fed.notes["models_received"][i] == fed.notes["evaluations"][i] == len(reach[k])


def test_pairwise_chooses_anew(tmp_path):
    with Result(run_here(tmp_path / "a.h5", SMALL | {"method": "pairwise", "omega_period": 2})) as result:
        assert (result["traffic/models_received"] == np.array([6 + 3, 3, 6 + 3, 3, 6 + 3])[:, None]).all()
        assert not np.array_equal(result.graph(1), result.graph(2)) and np.array_equal(result.graph(2), result.graph(3))


def test_replaying_its_own_graphs_is_the_run(plain, tmp_path):
    """That run computed again has other seconds, and the same graphs: a file counts by them."""
    half = run_here(tmp_path / "half.h5", SMALL | {"participation": 0.6, "ggc_period": 2})
    for path, more in ((plain, {}), (half, {"participation": 0.6})):
        again = run_here(tmp_path / f"{path.stem}-again.h5", SMALL | more | {"method": "replay", "graphs": str(path)})
        assert set(differences(path, again)) <= UNLIKE
    again = run_here(tmp_path / "again.h5", SMALL)
    keys = [Run(**SMALL, method="replay", graphs=str(path)).resolve().key()["graphs"] for path in (plain, again)]
    assert keys[0] == keys[1] and len(keys[0]) == 64
    with h5py.File(half, "r+") as file:
        file.attrs["sha256"] = keys[0]  # which it may say, and no graphs of it
    assert Run(**SMALL, method="replay", graphs=str(half)).resolve().key()["graphs"] != keys[0]


def test_dpfl_choice_without_options_is_dpfl(plain, tmp_path):
    assert differences(plain, run_here(tmp_path / "a.h5", SMALL | {"method": "dpfl_choice"})) == []


def test_variants_of_a_replay(plain):
    def graphs(**fields):
        with federation(SMALL | {"method": "replay", "graphs": str(plain), "budget": "inf"} | fields) as fed:
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
    ring = CollaborationGraph.from_lists([[1], [2], [3], [0]])
    rng = np.random.default_rng(0)
    seen = [tuple(rewired(ring, rng).senders.tolist()) for _ in range(1800)]
    counts = {g: seen.count(g) for g in set(seen)}
    assert len(counts) == 9 and all(130 < c < 270 for c in counts.values())  # 200 each, 5 standard deviations
    assert rewired(CollaborationGraph.empty(3), rng).degrees().tolist() == [0, 0, 0]


def test_what_cannot_be_replayed(plain, tmp_path):
    def init(graphs=plain, **fields):
        with federation(SMALL | {"method": "replay", "graphs": graphs and str(graphs)} | fields) as fed:
            replay.init(fed)

    refused("--graphs is not set; replay takes the graphs of a result", init, None)
    refused("graphs of 7 clients in rounds 0 to 4; this run has 6 clients", init, clients=6)
    refused("this run has 7 clients and 5 rounds", init, rounds=5)
    refused("--budget lets client ... receive 1 models; the as_is graph of round 0 has ... for it", init, budget=2)
    refused("goes beyond --reach", init, reach="groups:0,1")
    skip = run_here(tmp_path / "skip.h5", SMALL | {"ggc_period": 2, "ggc_off_rounds": "skip"})
    refused("did not average in every round", init, skip)
    refused("is not a readable HDF5 file", init, text_file(tmp_path / "text.h5", "no result"))


@pytest.mark.parametrize("redraw", [False, True])
def test_a_random_graph_with_dpfls_degrees(plain, tmp_path, redraw):
    fields = SMALL | {"method": "random_graph", "graphs": str(plain), "options": {"redraw": redraw}}
    with Result(run_here(tmp_path / "a.h5", fields)) as drawn, Result(plain) as result:
        for t in range(T + 1):
            assert np.array_equal(drawn.chosen(t).degrees(), result.chosen(t).degrees())
        together = np.any([drawn.graph(t) for t in range(T + 1)], 0).sum(1)
        most = np.max([result.chosen(t).degrees() for t in range(T + 1)], 0)
        assert (together > most).any() if redraw else np.array_equal(together, most)  # the first so many of one order
    with federation(SMALL | {"method": "random_graph"}) as fed:
        assert [random_graph.stable_order(fed, k, 0, fed.candidates())[:3].tolist() for k in range(N)] == [fed.shuffle(k, fed.reachable(k), 0)[:3].tolist() for k in range(N)]  # fmt: skip


def test_rewiring_in_parts_draws_what_it_drew_at_once():
    rng = np.random.default_rng(5)
    others = [np.delete(np.arange(30), k) for k in range(30)]
    graph = CollaborationGraph.from_lists(rng.choice(others[k], k % 6, replace=False) for k in range(30))
    receivers, senders = graph.receivers().tolist(), graph.senders.tolist()
    draws, edges = np.random.default_rng(1), set(zip(receivers, senders, strict=True))
    for a, b in draws.integers(0, len(senders), (20 * len(senders), 2)).tolist():
        one, two = (receivers[a], senders[b]), (receivers[b], senders[a])
        if one[0] != one[1] and two[0] != two[1] and one not in edges and two not in edges:
            edges = edges - {(receivers[a], senders[a]), (receivers[b], senders[b])} | {one, two}
            senders[a], senders[b] = senders[b], senders[a]
    found = rewired(graph, np.random.default_rng(1))
    assert set(zip(found.receivers().tolist(), found.senders.tolist(), strict=True)) == edges


FOUR = {"clients": 4, "rounds": 1, "tau_train": 1, "budget": 3}


def test_dac_hears_of_clients_from_the_most_similar_that_knows_them():
    s = np.array([0, 3.0, 2.0, 0, 0, 7.0])
    told = np.array([[1.0, 0, 0, 0, 0, 4.0], [5.0, 0, 0, 6.0, 0, 8.0]])  # by clients 1 and 2
    dac.second_hop(s, np.array([False, False, False, True, True, True]), told, np.array([3.0, 2.0]))
    # of 3 only client 2 knows, of 4 none; client 1 is the more similar, so 5 is as it says
    assert s.tolist() == [0, 3, 2, 6, 0, 4]


def test_dac_draws_as_softmax_says():
    """Of 4 clients, drawn one after the other by weights 1, 2, 3: the frequencies of the first and of pairs, within 4 standard errors."""
    with federation(FOUR | {"method": "dac"}) as fed:
        pairs = {}
        for t in range(2000):
            fed.members.round = t
            pair = tuple(dac.draw_senders(fed, 0, np.log([9, 1, 2, 3])).tolist())
            pairs[pair] = pairs.get(pair, 0) + 1
    for a, b in ((1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)):
        p = a / 6 * b / (6 - a)
        assert abs(pairs[a, b] / 2000 - p) < 4 * np.sqrt(p * (1 - p) / 2000)


def test_shapley_values_by_hand():
    """Player 2 is worth something only with player 1; through all 6 orders they share what they add together."""
    worth = {(0,): 1, (1,): 0, (2,): 0, (0, 1): 1, (0, 2): 1, (1, 2): 6, (0, 1, 2): 7}
    asked = []

    def of(coalitions):
        asked.append(len(coalitions))
        return np.array([worth[tuple(sorted(s))] for s in coalitions], float)

    assert pfedsv.shapley(list(itertools.permutations(range(3))), of, 0.0) == pytest.approx([1, 3, 3]) and asked == [7]
    assert pfedsv.shapley([[1, 0, 2]], of, -4.0) == pytest.approx([1, 4, 6])


def test_push_sum_keeps_the_mass_and_its_bytes_are_the_body():
    """Of 4 clients 0 sends to all: it keeps a quarter. Of clients 0 to 3 out_j is 3, 2, 0, 0."""
    graph = CollaborationGraph.from_lists([[1], [0], [0, 1], [0]])
    with federation(FOUR | {"method": "dfedpgp"}) as fed:
        order, head = fed.row_of, fed.columns("head")
        u = fed.common_row()
        u[:] = torch.arange(1.0, 5)[fed.ids, None]
        new, mu = dfedpgp.push(fed, u, np.ones(4), graph, head)
        assert mu[order].tolist() == pytest.approx([1 / 4 + 1 / 3, 1 / 4 + 1 / 3, 1 / 4 + 1 / 3 + 1, 1 / 4 + 1])
        at = [1 / 4 + 2 / 3, 1 / 4 + 2 / 3, 1 / 4 + 2 / 3 + 3, 1 / 4 + 4]
        assert new[order][:, 0].tolist() == pytest.approx(at)
        assert new[order][:, head][:, 0].tolist() == [1, 2, 3, 4]
        size = 4 * int((~head[: fed.ensemble.size]).sum()) + 8  # and mu
        assert fed._parts.mail.ledger.bytes.tolist() == [3 * size, 2 * size, 0, 0]
        fed._parts.members.trains[0] = False  # --patience
        new, mu = dfedpgp.push(fed, u, np.full(4, 0.5), graph, head)
        assert torch.equal(new[order[0]], u[order[0]]) and mu[order[0]] == 0.5


def test_what_is_told_comes_from_everyone_and_costs_its_bytes():
    graph = CollaborationGraph.from_lists([[1, 2], [0], [], [1]])
    with federation(FOUR | {"method": "dac", "send": "layers=body"}) as fed:
        ledger, values = fed._parts.mail.ledger, np.arange(8.0).reshape(4, 2)[fed.ids]
        assert fed.tell(values, graph).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert ledger.bytes.tolist() == [16, 32, 16, 0]
        fed.tell(values[:, 0].astype(np.float32))
        assert ledger.bytes.tolist() == [28, 44, 28, 12]
        refused("fed.tell was given list of shape (); it takes a NumPy array of 4 rows", fed.tell, [1, 2, 3, 4])


# the contract of a method's file ------------------------------------------------------------------------------------------------
def test_init_and_round_are_a_method(tmp_path, monkeypatch):
    """A file in the folder, found by its name. Without a declaration it reads every field of a Run but tau_init; here it does what Local does."""
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    (tmp_path / "mine.py").write_text("from dpfl_mpi.methods.local import init, round\n")
    mine = find("method", "mine")
    assert (mine.title, mine.topology, mine.searches, mine.preprocesses) == ("mine", "graph", True, False)
    assert mine.unread == {"tau_init"}
    assert Run(method="mine", budget=3, ggc_period=2).resolve().most_senders == 2
    fields = {"clients": 4, "rounds": 3, "tau_train": 2, "finetune_epochs": 1}
    paths = [run_here(tmp_path / f"{name}.h5", fields | {"method": name}) for name in ("mine", "local")]
    assert differences(*paths) == ["client/budget"]


def test_what_the_methods_declare():
    found = {name: find("method", name) for name in names("method")}
    graphs = {"dpfl", "dpfl_choice", "random_graph", "oracle", "pairwise", "replay", "nearest"}
    rivals = {"pens", "dac", "fedsim", "pfedsv", "dfedpgp", "facade", "sketch"}
    assert {n for n, m in found.items() if m.topology == "graph"} == rivals | graphs
    assert {n for n, m in found.items() if m.preprocesses} == graphs
    assert found["dpfl"].unread == {"graphs"} and "budget" not in found["random_graph"].unread
    assert all(m.citation.startswith("@") for n, m in found.items() if n != "local")


GOOD = {"init": lambda fed: None, "round": lambda fed, state, t: None}


@dataclass(frozen=True)
class BadOptions:
    sizes: tuple = option((1, 2), "sizes")


@pytest.mark.parametrize(("content", "sentence"), [
    ({"init": 3}, "the method mine has no function init"),
    ({"finetune_gradient": lambda fed: None}, "which is called as finetune_gradient(fed, start)"),
    ({"METHOD": {"server": True}}, "METHOD of the method mine is {'server': True}; it must be a Method(...)"),
    ({"METHOD": Method(models=0)}, "has models=0; allowed are whole numbers from 1 to 1000"),
    ({"METHOD": Method(every_row=True)}, "has every_row=True; allowed are whole numbers from 0 to 1000"),
    ({"METHOD": Method(sends=3)}, "METHOD of the method mine has sends=3; allowed are texts"),
    ({"METHOD": Method(searches="no")}, "has searches='no'; allowed are True and False"),
    ({"METHOD": Method(ignores="graphs")}, "has ignores='graphs'; allowed are tuples of omega_period, graphs"),
    ({"METHOD": Method(optimizers=("sgd", "lion"))}, "has optimizers=('sgd', 'lion'); allowed are tuples of sgd, adam, adamw"),
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
    members = Members.__new__(Members)  # the present and the living of a run of four
    members.n, members.diverged_round, members.present = 4, np.full(4, -1), np.ones(4, bool)
    members.limits = SimpleNamespace(most_senders=np.array([3, 1, 1, 1]))
    log = SimpleNamespace(notes={"val_acc": np.ones(2)} | notes)
    return SimpleNamespace(n=4, round=number, ids=np.array([1, 3]), members=members, log=log)


W = torch.zeros(2, 5)
GRAPH = CollaborationGraph.empty(4)
TWO = CollaborationGraph.from_lists([[1, 2, 3], [], [0, 1], []])


@pytest.mark.parametrize(("state", "sentence"), [
    ({"shared": {}}, "returned a dict of shared; a state is"),
    ({"client": {}, "shared": {}, "more": 1}, "returned a dict of client, shared, more; a state is"),
    ({"client": W, "shared": {}}, "of two dicts"),
    ({"client": {"w": [1, 2]}, "shared": {}}, "is a list; it must be a tensor or array of 2 rows, one per client of this rank"),
    ({"client": {}, "shared": {"omega": [[1], [0], [], []]}}, 'state["shared"]["omega"] after round of the method mine is a list; it must be a CollaborationGraph'),
    ({"client": {}, "shared": {"chosen": CollaborationGraph.empty(2)}}, "is a graph of 2 clients; it must be a CollaborationGraph of 4 clients"),
    ({"client": {}, "shared": {"w": W.bfloat16()}}, "is a Tensor of torch.bfloat16, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"w": np.array([None])}}, "is a ndarray of object, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"w": np.complex64(1)}}, "is a complex64 of complex64, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"w": W.to_sparse()}}, "is a Tensor of torch.float32, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"a/b": 1}}, "returned state[\"shared\"]['a/b']; a key is a text without /"),
    ({"client": {}, "shared": {"chosen": TWO}}, 'state["shared"]["chosen"] after round of the method mine gives client 2 2 senders; its budget allows 1')
])  # fmt: skip
def test_a_state_that_breaks_the_contract_is_refused(state, sentence):
    refused(sentence, check_state, "mine", state, fed())


def test_good_states_pass():
    shared = {"omega": GRAPH, "chosen": GRAPH, "phi": W[0], "mask": np.ones(3, bool), "step": 3, "name": "a", "x": None}
    check_state("mine", {"client": {"w": W, "a": np.zeros((2, 1))}, "shared": shared}, fed())
    check_state("mine", {"client": {}, "shared": {}}, fed(0))
    unscored = fed(2, val_acc=np.array([np.nan, 1]))  # a later round need not score
    check_state("mine", {"client": {}, "shared": {}}, unscored)


def test_all_orders_of_many_models_are_refused(tmp_path):
    fields = {"method": "pfedsv", "clients": 9, "rounds": 1, "budget": 9, "options": {"orders": 0}}
    sentence = "--options.orders is 0, all 9! orders of 9 models; allowed are at most 8 models"
    refused(sentence, run_here, tmp_path / "run.h5", fields)
