"""analysis/omega.py: every measure by hand, or by another program."""

import sys

import numpy as np
import pytest
import tiny_result
from launch import ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("networkx")
sys.path.insert(0, str(ROOT / "analysis"))

import omega

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
    drawing = omega.draw([Result(p) for p in paths], draws=5)
    rows = drawing.data.set_index(["measure", "round"])["value"]
    assert rows["reciprocity", 0] == pytest.approx(0.8) and rows["reciprocity", 1] == 1
    assert "jaccard" not in drawing.data["measure"].values and "Agreement" not in drawing.text
    paths.append(tiny_result.make(tmp_path / "c.h5", "dpfl", 42, budget=2))
    drawing = omega.draw([Result(p) for p in paths], draws=5)
    (same,) = drawing.data[drawing.data["measure"] == "jaccard"]["value"]
    assert same == 1 and "Agreement" in drawing.text


def test_the_deviation_of_z_is_over_repetitions(tmp_path, monkeypatch):
    """z of 1 and 3: 2 +- sqrt(2) (ddof 1). A single seed has no deviation, of any measure."""
    monkeypatch.setattr(omega, "z_scores", lambda group, t, draws: np.array([1.0, 3.0])[: len(group)])
    results = [Result(tiny_result.make(tmp_path / f"{s}.h5", "dpfl", s)) for s in (42, 52)]
    std = omega.draw(results, draws=2).data.set_index("measure")["std"]
    assert std["z"].tolist() == pytest.approx([2**0.5] * 2) and std["reciprocity"].tolist() == [0, 0, 0]
    single = omega.draw(results[:1], draws=2).data
    assert "z" in single["measure"].values and single["std"].isna().all()
