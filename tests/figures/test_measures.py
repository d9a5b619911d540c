"""What `omega`, `pareto` and `controls_table` measure: every number by hand, or by another program."""

import h5py
import numpy as np
import pytest
import tiny_result
from launch import run_here
from tiny_result import draw

pytest.importorskip("matplotlib")

from dpfl_mpi.figures import controls_table, frames, omega, pareto
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.results import Result

TWO = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]])  # two triangles


def test_overlap_and_homophily():
    common = omega.overlap(np.array([[2, 0], [1, 1], [0, 5]]))
    assert common.tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]
    assert omega.homophily(CollaborationGraph.from_lists([[1, 2], [0], []]), common) == pytest.approx(1 / 3)
    assert np.isnan(omega.homophily(CollaborationGraph.empty(3), common))


def test_z_is_against_graphs_of_the_same_degrees():
    """One sender and one receiver each, four clients in two pairs: mean and deviation of the homophily by counting all nine such graphs."""
    pairs = np.kron(np.eye(2), np.ones((2, 2)))
    matched = CollaborationGraph.from_lists([[1], [0], [3], [2]])
    derangements = [
        s for s in np.array(np.meshgrid(*[range(4)] * 4)).reshape(4, -1).T if len(set(s)) == 4 and (s != range(4)).all()
    ]
    each = np.array([np.mean([pairs[k, j] for k, j in enumerate(s)]) for s in derangements])
    assert len(each) == 9
    z = omega.z_score(matched, pairs, 2000, np.random.default_rng(0))
    assert z == pytest.approx((1 - each.mean()) / each.std(), rel=0.1)
    assert np.isnan(omega.z_score(matched, np.ones((4, 4)), 20, np.random.default_rng(0)))


def test_gini():
    assert omega.gini(np.array([3, 3, 3])) == 0
    assert omega.gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)  # (N - 1) / N
    assert omega.gini(np.array([1, 3])) == pytest.approx(0.25)
    assert np.isnan(omega.gini(np.zeros(3)))


def test_spectral_gap():
    full = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1]])
    assert omega.spectral_gap(full, np.array([0.2, 0.3, 0.5])) == pytest.approx(1)  # one step makes all models one
    assert omega.spectral_gap(TWO, np.ones(6)) == pytest.approx(0)  # the triangles never meet
    pair = CollaborationGraph.from_lists([[1], []])  # rows (3/4, 1/4) with p 3, 1, and (0, 1): eigenvalues 3/4 and 1
    assert omega.spectral_gap(pair, np.array([3.0, 1.0])) == pytest.approx(0.25)


def test_communities_and_rand_index():
    found = omega.communities(TWO)
    assert omega.rand_index(found, np.array([1, 1, 1, 0, 0, 0])) == 1
    assert omega.communities(CollaborationGraph.empty(3)).tolist() == [0, 1, 2]
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 4, 30), rng.integers(0, 3, 30)
        assert omega.rand_index(a, b) == pytest.approx(metrics.adjusted_rand_score(a, b))


def test_jaccard():
    a, b = (CollaborationGraph.from_lists(x) for x in ([[1, 2], [0], []], [[1], [2], []]))
    assert omega.jaccard(a, b) == pytest.approx((0.5 + 0) / 2)  # client 2 chose nobody in either
    assert omega.jaccard(TWO, TWO) == 1


def test_agreement_is_told_of_runs_on_one_partition_alone(tmp_path):
    """Two runs on one partition are compared, one on another is not; Omega of the tiny result has 4 of 5 edges both ways."""
    paths = [tiny_result.make(tmp_path / "a.h5", "dpfl", 42), tiny_result.make(tmp_path / "b.h5", "dpfl", 52)]
    drawing = draw("omega", [Result(p) for p in paths], draws=5)
    rows = drawing.data.set_index(["measure", "round"])["value"]
    assert rows["reciprocity", 0] == pytest.approx(0.8) and rows["reciprocity", 1] == 1
    assert "jaccard" not in drawing.data["measure"].values and "Agreement" not in drawing.text
    paths.append(tiny_result.make(tmp_path / "c.h5", "dpfl", 42, budget=2))
    drawing = draw("omega", [Result(p) for p in paths], draws=5)
    (same,) = drawing.data[drawing.data["measure"] == "jaccard"]["value"]
    assert same == 1 and "Agreement" in drawing.text


def test_the_deviation_of_z_is_over_repetitions(tmp_path, monkeypatch):
    """z of 1 and 3: 2 +- sqrt(2) (ddof 1). A single seed has no deviation, of any measure."""
    monkeypatch.setattr(omega, "z_of_round", lambda result, t, draws: {42: 1.0, 52: 3.0}[result.run.seed])
    results = [Result(tiny_result.make(tmp_path / f"{s}.h5", "dpfl", s)) for s in (42, 52)]
    std = draw("omega", results, draws=2).data.set_index("measure")["std"]
    assert std["z"].tolist() == pytest.approx([2**0.5] * 2) and std["reciprocity"].tolist() == [0, 0, 0]
    single = draw("omega", results[:1], draws=2).data
    assert "z" in single["measure"].values and single["std"].isna().all()


def test_best_so_far():
    val = np.array([[0.5, np.nan], [0.5, 0.2], [0.4, 0.1], [np.nan, 0.9]])
    test = np.arange(8.0).reshape(4, 2)
    assert np.array_equal(frames.best_so_far(val, test, True), [[0, np.nan], [2, 3], [2, 3], [2, 7]], equal_nan=True)
    assert frames.best_so_far(val, test, False)[:, 0].tolist() == [0, 0, 0, 0]


def test_costs_by_hand(tmp_path):
    """Omega has 5 edges, asked twice; then 2 and 3 edges; 12, 5 and 5 decisions; 100 steps per round of four clients; 21 seconds."""
    with Result(tiny_result.make(tmp_path / "a.h5")) as result:
        curve = frames.costs(result)
        assert {n: v.tolist() for n, v in curve.items() if n not in ("accuracy", "point")} == {
            "models": [2.5, 3, 3.75], "evaluations": [6, 8.5, 11], "steps": [0, 25, 50], "seconds": [21, 42, 63],
        }  # fmt: skip
        assert curve["accuracy"].tolist() == pytest.approx([50, 60, 70])
        curve["accuracy"] = np.array([50.0, 60, 70])
        assert pareto.first_at(curve, 60) == {"models": 3, "evaluations": 8.5, "steps": 25, "seconds": 42}
        assert np.isnan(pareto.first_at(curve, 71)["models"])
        text = draw("pareto", [result], reach=45).text
        assert "70.00 (1)" in text and "3.8" in text and "2.5" in text


def test_it_ends_where_the_result_does(tmp_path):
    """The end of a curve is what the result says of its best models, tuned, after a drift, with liars and newcomers."""
    fields = {"clients": 7, "rounds": 4, "tau_train": 1, "tau_init": 1, "budget": 3, "newcomers": 0.2, "drift": "0.5:3"}
    variants = (
        {},
        {"method": "fedavg", "finetune_epochs": 2},
        {"attack": "noise:0.3", "tie": "earliest"},
        # scores twice per round
        {"method": "pfedgraph", "rounds": 6, "clients": 8, "drift": None, "newcomers": 0},
    )
    for i, more in enumerate(variants):
        with Result(run_here(tmp_path / f"{i}.h5", fields | more)) as result:
            curve = frames.costs(result)
            assert curve["accuracy"].iloc[-1] == pytest.approx(100 * result["best/test_acc"][result.benign].mean())
            assert curve["models"].iloc[-1] == result["traffic/models_received"][:, result.benign].sum(0).mean()


def test_the_table_by_hand(tmp_path):
    """Client 2 lies. The others chose 2 in round 1, and 1 and 2 in round 2: two liars of three."""
    path = tiny_result.make(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file["client/liars"] = np.array([False, False, True, False])
        file["best/val_acc"][...] = np.array([0.9, 0.6, 0.1, 0.5])  # test 0.8, 0.6, 1.0, 0.4
        file["attack/success"] = np.array([0.5, 0.25, 1, np.nan])
        confusion = np.zeros((4, 3, 3), int)
        confusion[0, 1] = [1, 3, 0]  # of 4 images of class 1 one is taken for class 0
        confusion[1, 2] = [0, 0, 5]
        file["best/confusion"] = confusion
        file["newcomers/test_acc"] = np.array([[np.nan, 0.5, np.nan, 0.7], [np.nan, 0.6, np.nan, 1.0]])
    result = Result(path)
    assert sorted(controls_table.gaps(frames.of_results([result])["clients"])[0].tolist()) == pytest.approx([0, 10, 10])
    assert controls_table.liar_shares(result) == (0.25, pytest.approx(2 / 3))
    assert controls_table.backdoor(result) == (0.375, 0.125)
    assert controls_table.newcomers(result).tolist() == pytest.approx([0.6, 0.8])
    text = draw("controls_table", [result]).text
    assert "+6.67" in text and "66.7 of 25.0" in text and "37.5 (12.5)" in text and "60.0 / 80.0" in text
    plain = draw("controls_table", [Result(tiny_result.make(tmp_path / "b.h5"))])
    assert "liars" not in plain.text and "stopped" not in plain.text and plain.data["accuracy"].tolist() == [70]
