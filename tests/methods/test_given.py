"""The methods whose graphs are not searched: oracle, pairwise, replay, and random graphs with another run's degrees."""

import numpy as np
import pytest
from launch import differences, federation, run_here

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph, rewired
from dpfl_mpi.methods import oracle, pairwise, random_graph, replay
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

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
    """That run computed again has other seconds, and the same graphs: a file counts by them."""
    half = run_here(tmp_path / "half.h5", SMALL | {"participation": 0.6, "ggc_period": 2})
    for path, more in ((plain, {}), (half, {"participation": 0.6})):
        again = run_here(tmp_path / f"{path.stem}-again.h5", SMALL | more | {"method": "replay", "graphs": str(path)})
        assert set(differences(path, again)) <= UNLIKE
    again = run_here(tmp_path / "again.h5", SMALL)
    keys = [Run(**SMALL, method="replay", graphs=str(path)).resolve().key()["graphs"] for path in (plain, again)]
    assert keys[0] == keys[1] and len(keys[0]) == 64


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
    def refused(sentence, **fields):
        with pytest.raises(UserError, match=sentence), federation(SMALL | {"method": "replay"} | fields) as fed:
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
        assert [random_graph.order(fed, k, 0)[:3].tolist() for k in range(N)] == [fed.shuffle(k, fed.reachable(k), 0)[:3].tolist() for k in range(N)]  # fmt: skip


def test_rewiring_in_parts_draws_what_it_drew_at_once():
    rng = np.random.default_rng(5)
    graph = CollaborationGraph.from_lists(
        rng.choice(np.delete(np.arange(30), k), k % 6, replace=False) for k in range(30)
    )
    receivers, senders = graph.receivers().tolist(), graph.senders.tolist()
    draws, edges = np.random.default_rng(1), set(zip(receivers, senders, strict=True))
    for a, b in draws.integers(0, len(senders), (20 * len(senders), 2)).tolist():
        one, two = (receivers[a], senders[b]), (receivers[b], senders[a])
        if one[0] != one[1] and two[0] != two[1] and one not in edges and two not in edges:
            edges = edges - {(receivers[a], senders[a]), (receivers[b], senders[b])} | {one, two}
            senders[a], senders[b] = senders[b], senders[a]
    found = rewired(graph, np.random.default_rng(1))
    assert set(zip(found.receivers().tolist(), found.senders.tolist(), strict=True)) == edges
