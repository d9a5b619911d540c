"""The measures behind the figures, and `hours`, against numbers worked out by hand."""

import itertools

import numpy as np
import pandas as pd
import pytest
import tiny_result
from launch import run_here
from sklearn.metrics import adjusted_rand_score
from tiny_result import draw, module, tiny

from dpfl_mpi.figures import controls_table, frames, hours, omega, pareto, style
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.results import Result

SEEDS = ("dpfl", 42), ("dpfl", 52)
# two triangles
TWO = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]])


def test_a_client_without_a_score_has_no_sampling_variance():
    """1e4 * 0.9 * 0.1 / 100 = 9 for 0.9 of 101 images, and 1e4 / 4 for a single image."""
    variance = module("variance").sampling_variance
    assert variance(np.array([0.9, 0.9, np.nan]), np.array([101, 101, 1])) == pytest.approx(9)
    assert variance(np.array([0.9, 0.5]), np.array([101, 1])) == pytest.approx((9 + 2500) / 2)
    assert np.isnan(variance(np.array([np.nan]), np.array([1])))


def test_measures_of_a_graph_by_hand():
    common = omega.overlap(np.array([[2, 0], [1, 1], [0, 5]]))
    assert common.tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]
    chosen = CollaborationGraph.from_lists([[1, 2], [0], []])
    assert omega.homophily(chosen, common) == pytest.approx(1 / 3)
    assert np.isnan(omega.homophily(CollaborationGraph.empty(3), common))
    assert omega.gini(np.array([3, 3, 3])) == 0 and np.isnan(omega.gini(np.zeros(3)))
    assert omega.gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)  # (N - 1) / N
    assert omega.gini(np.array([1, 3])) == pytest.approx(0.25)
    full = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1]])
    assert omega.spectral_gap(full, np.array([0.2, 0.3, 0.5])) == pytest.approx(1)  # all mixed
    assert omega.spectral_gap(TWO, np.ones(6)) == pytest.approx(0)  # the triangles never meet
    pair = CollaborationGraph.from_lists([[1], []])
    # with p = 3, 1 the rows are (3/4, 1/4) and (0, 1): eigenvalues 3/4 and 1
    assert omega.spectral_gap(pair, np.array([3.0, 1.0])) == pytest.approx(0.25)
    other = CollaborationGraph.from_lists([[1], [2], []])
    assert omega.jaccard(chosen, other) == pytest.approx((0.5 + 0) / 2)  # client 2 chose nobody
    assert omega.rand_index(omega.communities(TWO), np.array([1, 1, 1, 0, 0, 0])) == 1
    assert omega.communities(CollaborationGraph.empty(3)).tolist() == [0, 1, 2]
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 4, 30), rng.integers(0, 3, 30)
        assert omega.rand_index(a, b) == pytest.approx(adjusted_rand_score(a, b))


def test_agreement_and_z(tmp_path, made, monkeypatch):
    """Omega of the tiny result has 4 of 5 edges both ways."""
    results = [tiny(tmp_path, "a"), tiny(tmp_path, "b", "dpfl", 52)]
    drawing = draw("omega", results, draws=5)
    rows = drawing.data.set_index(["measure", "round"])["value"]
    assert rows["reciprocity", 0] == pytest.approx(0.8) and rows["reciprocity", 1] == 1
    assert "jaccard" not in drawing.data["measure"].values and "Agreement" not in drawing.text
    drawing = draw("omega", [*results, results[0], tiny(tmp_path, "c", budget=2)], draws=5)
    (same,) = drawing.data[drawing.data["measure"] == "jaccard"]["value"]
    assert same == 1 and "Agreement" in drawing.text
    other_n = tiny(tmp_path, "d", graphs=[[[1, 2], [0], []]] * 3, clients=3, partition="motivation")
    assert "Agreement" not in draw("omega", [results[0], other_n], draws=2).text
    by_seed = {42: 1.0, 52: 3.0}
    monkeypatch.setattr(omega, "z_of_round", lambda result, t, draws: by_seed[result.run.seed])
    std = draw("omega", [made[n] for n in SEEDS], draws=2).data.set_index("measure")["std"]
    assert std["z"].tolist() == pytest.approx([2**0.5] * 2)
    assert std["reciprocity"].tolist() == [0] * 3
    single = draw("omega", [made["dpfl", 42]], draws=2).data
    assert "z" in single["measure"].values and single["std"].isna().all()
    # Four clients in two pairs, one sender each: all nine such graphs are counted.
    pairs = np.kron(np.eye(2), np.ones((2, 2)))
    matched = CollaborationGraph.from_lists([[1], [0], [3], [2]])
    derangements = [s for s in itertools.permutations(range(4)) if not np.equal(s, range(4)).any()]
    each = np.array([np.mean([pairs[k, j] for k, j in enumerate(s)]) for s in derangements])
    assert len(each) == 9
    z = omega.z_score(matched, pairs, 2000, np.random.default_rng(0))
    assert z == pytest.approx((1 - each.mean()) / each.std(), rel=0.1)
    assert np.isnan(omega.z_score(matched, np.ones((4, 4)), 20, np.random.default_rng(0)))


def test_costs_and_best_so_far_by_hand(made, tmp_path):
    """Omega has 5 edges, asked twice, then 2 and 3; 12, 5 and 5 decisions, 15.75 s a round."""
    curve = frames.costs(made["dpfl", 42])
    costs = curve[["models", "evaluations", "steps", "seconds"]]
    assert costs.values.tolist() == [[2.5, 6, 0, 15.75], [3, 8.5, 25, 31.5], [3.75, 11, 50, 47.25]]
    assert curve["accuracy"].tolist() == pytest.approx([50, 60, 70])
    reached = {"models": 3, "evaluations": 8.5, "steps": 25, "seconds": 31.5}
    assert pareto.first_at(curve, 59.9) == reached
    assert np.isnan(pareto.first_at(curve, 71)["models"])
    one_lacks = pd.DataFrame({"round": [0, 0, 1, 1], "x": [1, 3, 1, np.nan]})
    means = style.over_repetitions(one_lacks, "x")["mean"].tolist()
    assert means == pytest.approx([2, np.nan], nan_ok=True)
    text = draw("pareto", [made["dpfl", 42]], target=45).text
    assert "70.00 (1)" in text and "3.8" in text and "2.5" in text
    # one repetition ends with round 1, at 65 % and 25 steps
    both = frames.of_results([made[n] for n in SEEDS])
    lines = both["costs"]
    both.read = lambda _: lines[(lines["seed"] == 42) | (lines["point"] < 2)]
    table = pareto.table(both, 45, ["steps"])
    assert "67.50 (2)" in table and " 38 " in table
    val = np.array([[0.5, np.nan], [0.5, 0.2], [0.4, 0.1], [np.nan, 0.9]])
    test = np.arange(8.0).reshape(4, 2)
    latest = frames.best_so_far(val, test, True)
    assert np.array_equal(latest, [[0, np.nan], [2, 3], [2, 3], [2, 7]], equal_nan=True)
    assert frames.best_so_far(val, test, False)[:, 0].tolist() == [0, 0, 0, 0]
    small = {"clients": 7, "rounds": 4, "tau_train": 1, "tau_init": 1, "budget": 3}
    fields = small | {"newcomers": 0.2, "drift": "0.5:3"}
    variants = (
        {},
        {"method": "fedavg", "finetune_epochs": 2},
        {"attack": "noise:0.3", "tie": "earliest"},
        {"method": "pfedgraph", "rounds": 6, "clients": 8, "drift": None, "newcomers": 0},
    )
    for i, more in enumerate(variants):
        with Result(run_here(tmp_path / f"{i}.h5", fields | more)) as result:
            last, benign = frames.costs(result).iloc[-1], result.benign
            assert last["accuracy"] == pytest.approx(100 * result["best/test_acc"][benign].mean())
            assert last["models"] == result["traffic/models_received"][:, benign].sum(0).mean()


def test_the_table_of_controls_by_hand(made, tmp_path):
    """Client 2 attacks. The others chose 2 in round 1, and 1 and 2 in round 2: 2 of 3 attack."""
    path = tiny_result.make(tmp_path / "a.h5")
    with tiny_result.changing(path) as file:
        file.attrs["test_acc"] = 0.6  # of those who do not lie
        file["client/attackers"] = np.array([False, False, True, False])
        file["best/val_acc"][...] = np.array([0.9, 0.6, 0.1, 0.5])  # test 0.8, 0.6, 1.0, 0.4
        file["attack/success"] = np.array([0.5, 0.25, 1, np.nan])
        confusion = np.zeros((4, 3, 3), int)
        confusion[0, 1] = [1, 3, 0]  # one of 4 images of class 1 is taken for class 0
        confusion[1, 2] = [0, 0, 5]
        file["best/confusion"] = confusion
        scores = [[np.nan, 0.5, np.nan, 0.7], [np.nan, 0.6, np.nan, 1.0]]
        file["newcomers/test_acc"] = np.array(scores)
        file["newcomers/epochs"] = np.array([0, 5])
    result = Result(path)
    [gaps] = controls_table.gaps(frames.of_results([result])["clients"])
    assert sorted(gaps.tolist()) == pytest.approx([0, 10, 10])
    assert controls_table.attacker_shares(result) == (0.25, pytest.approx(2 / 3))
    assert controls_table.backdoor(result) == (0.375, 0.125)
    assert controls_table.newcomers(result).tolist() == pytest.approx([0.6, 0.8])
    drawing = draw("controls_table", [result])
    assert "+6.67" in drawing.text and "66.7 of 25.0" in drawing.text
    assert drawing.data["models"].tolist() == [3]  # those who do not lie received 7, 2 and 0
    begun = tiny(tmp_path, "begun", seed=52, finished=False)  # lacks what is written at the end
    for text in (drawing.text, draw("controls_table", [result, begun]).text):
        assert "37.5 (12.5)" in text and "60.0 / 80.0" in text
    plain = draw("controls_table", [made["dpfl", 42]])
    assert "attackers" not in plain.text and "stopped" not in plain.text
    assert plain.data["accuracy"].tolist() == [70]


class Made(dict):
    """Two rounds of three clients: client 2 ends last, and client 0 waits for it."""

    path, last_round, benign = "made.h5", 1, np.array([True, True, False])

    def __init__(self):
        values = {
            "round/best_test_acc": [[0.5, 0.7, 0], [0.8, 0.9, 0]],
            "network/end": [[36, 72, 36], [108, 72, 360]],
            "network/wait": [[0, 0, 0], [36, 0, 72]],
            "network/waited_for": [[-1, -1, -1], [2, -1, 1]],
            "network/train": [[36.0] * 3] * 2,
            "network/choose": [[6.0] * 3] * 2,
            "traffic/bytes_sent": [[1e9, 0, 0], [1e9, 5e8, 5e8]],
        }
        super().__init__({name: np.array(value) for name, value in values.items()})


def test_who_came_by_age_by_hand():
    """Client 1 comes in round 1 and is absent in 2; 2 leaves in 2 and is back in 3; 3 lies."""
    there = [[1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]]
    nan = np.nan
    scored = [
        [0.5, nan, 0.5, nan],
        [0.6, 0.3, 0.6, 0.1],
        [0.7, nan, nan, 0.1],
        [0.8, 0.7, 0.5, 0.1],
    ]
    made = Made()
    made.last_round, made.benign = 3, np.array([True, True, True, False])
    made |= {"round/there": np.array(there, bool), "round/test_acc": np.array(scored)}
    # at age 0 client 1 in round 1, of a mean of 50, and client 2 in round 3, of 66.7
    # at age 2 client 1 in round 3
    found = controls_table.arrivals(made)
    assert found.index.tolist() == [0, 2]
    assert found.to_numpy() == pytest.approx(np.array([[40, (50 + 200 / 3) / 2], [70, 200 / 3]]))
    assert len(controls_table.arrivals(Made())) == 0


def test_hours_and_gigabytes_by_hand():
    lines = hours.measure(Made())  # after 72 s client 1 has ended both rounds
    assert lines["accuracy"].tolist() == pytest.approx([70, 85])
    assert lines["hours"].tolist() == pytest.approx([0.02, 0.1])
    assert lines["gigabytes"].tolist() == pytest.approx([1.5, 3])
    assert hours.waits(Made()).tolist() == pytest.approx([0, 0.02, 0.01])
    row = hours.row_of(Made(), lines, 80)
    # 252 s of work, 108 of waiting, 72 of them for client 1; client 2 waited for it and ends last
    expected = {"accuracy": 85, "hours": 0.1, "gigabytes": 3}
    expected |= {"hours to 80 %": 0.1, "gigabytes to 80 %": 3}
    assert row == pytest.approx(expected | {"waiting, %": 30, "longest": 200 / 3, "critical": 100})
    assert np.isnan(hours.row_of(Made(), lines, 90)["hours to 90 %"])
    end = np.array([[1, 2, 3], [4, 5, 4], [9, 6, 6]])
    assert hours.critical_path(end, np.array([[-1, -1, -1], [1, 2, -1], [1, -1, -1]])) == [2, 2, 1]
