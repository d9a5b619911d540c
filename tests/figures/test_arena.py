"""The arena's tables against numbers by hand and SciPy, and its cells against one another."""

import arena as cells
import numpy as np
import pandas as pd
import pytest
import standings
import tiny_result
from launch import ROOT, script
from scipy import stats

from dpfl_mpi.settings import Run


def test_holm_by_hand():
    assert standings.holm([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert standings.holm([0.9, 0.8]).tolist() == [1, 1]


def test_a_chance_is_the_larger_of_two_t_tests():
    rng = np.random.default_rng(1)
    parts = [rng.normal(0.3, 1, 50), rng.normal(0.5, 1, 50), rng.normal(0.1, 1, 50)]
    assert standings.chance(parts[:1]) == pytest.approx(stats.ttest_1samp(parts[0], 0).pvalue)
    over_partitions = stats.ttest_1samp([part.mean() for part in parts], 0).pvalue
    mean, error = np.mean(parts), np.sqrt(sum(part.var(ddof=1) / 50 for part in parts)) / 3
    over_clients = 2 * stats.t(147).sf(mean / error)
    assert standings.chance(parts) == pytest.approx(max(over_partitions, over_clients))
    assert standings.chance([part - mean for part in parts]) > 0.9


def test_a_table_says_what_is_decided():
    """Three partitions of 50 clients: DPFL is two points above the random graph and ten above Local, each by client with a little noise."""
    rng = np.random.default_rng(2)
    above = {"DPFL": 0.10, standings.RANDOM: 0.08, "Local": 0.0}
    runs, clients = [], []
    for seed in (1, 2, 3):
        of_client = rng.uniform(0.4, 0.6, 50)
        for row, gain in above.items():
            run = f"{row}{seed}"
            test = of_client + gain + rng.normal(0, 0.002, 50)
            costs = {"models": 100.0 * seed, "megabytes": 3, "evaluations": 0, "steps": 7, "core_hours": 0.5}
            name = {"setting": "Digits", "epochs": 10, "row": row, "seed": seed, "run": run, "partition": f"p{seed}"}
            runs.append(name | costs)
            clients.append(pd.DataFrame({"run": run, "client": range(50), "accuracy": test}))
    runs, clients = pd.DataFrame(runs), pd.concat(clients)
    found = standings.differences(runs, clients)
    assert set(zip(found["row"], found["to"], strict=True)) == {
        ("DPFL", "Local"), ("DPFL", standings.RANDOM), (standings.RANDOM, "Local"),
    }  # fmt: skip
    assert found["decided"].all()
    table = pd.DataFrame(standings.table(runs, clients, found)).set_index("row")
    assert table.loc["DPFL", "to a random graph"].startswith("**+1.98 ± 0.08 (3)")
    assert table.loc["Local", "to Local"] == "-"
    longer = runs[runs["seed"] == 1].assign(epochs=20)  # of one partition, and one row more
    other = found[found["to"] == standings.RANDOM].assign(row="Oracle", parts=[found["parts"][0][:1]])
    (front,) = standings.answer(pd.concat([runs, longer]), pd.concat([found, other.assign(epochs=20, decided=False)]))
    assert (front["epochs"], front["DPFL"], front["Oracle"]) == ("10", "**+1.98 ± 0.08 (3)**", "-")
    assert front["random graph over Local"].startswith("**+8.0")
    assert (table["models"] == "200").all() and (table["core hours"] == "0.50").all()
    noise = clients.assign(accuracy=clients.groupby("client")["accuracy"].transform("mean"))
    noise["accuracy"] += np.random.default_rng(3).normal(0, 0.01, len(noise))
    assert not standings.differences(runs, noise)["decided"].any()
    one = standings.differences(runs[runs["seed"] == 1], clients)
    assert not one["decided"].any() and one["p"].min() < 1e-6  # one partition decides nothing
    _, right = standings.picture(runs, found).axes
    assert [text.get_text() for text in right.texts] == ["DPFL", standings.RANDOM]  # Local has no difference of its own


def test_rows_of_a_setting_train_as_long_with_the_same_budget():
    before = ("dpfl", "dpfl_choice", "random_graph", "oracle", "pairwise", "nearest")  # train 10 epochs before round 1
    for setting, row, epochs, run in cells.CELLS:
        asked = 5 * run.rounds + run.finetune_epochs + (10 if run.method in before else 0)
        assert asked == epochs, (setting, row)
        assert str(run.budget) == ("6" if setting.startswith("HAR") else "0.1N")
    names = [(setting, row, epochs, run.seed) for setting, row, epochs, run in cells.CELLS]
    assert len(set(names)) == len(names) > 400


def test_a_cells_line(tmp_path):
    result = tiny_result.tiny(tmp_path, "one", "dpfl", 42)
    line = cells.line_of(Run(method="dpfl"), result)
    assert line["models"] == pytest.approx(result["traffic/models_received"].sum(0).mean())
    assert line["megabytes"] == pytest.approx(4e-6 * line["models"] * int(result.fact("parameters")))


def test_a_client_that_is_like_no_other_is_scored_on_its_own_images(result_of):
    result = result_of({"clients": 4, "rounds": 1, "method": "local", "tau_train": 1})
    alone, alike = (cells.clients_of(setting, result) for setting in ("HAR, 30 people", "CIFAR-10 Patho(3)"))
    assert alone["accuracy"].tolist() == alone["own"].tolist() == result["best/test_acc"].round(6).tolist()
    assert alike["own"].tolist() == alone["own"].tolist() != alike["accuracy"].tolist()


def test_cells_are_collected_folder_by_folder(tmp_path):
    """DPFL's cell comes from one folder and local's from another; then only cells that need DPFL's result to be there are still to be computed."""
    cells, setting = script(ROOT / "reproduction" / "arena.py"), "CIFAR-10 Patho(3)"
    cells.FILE, cells.CLIENTS = (tmp_path / f"{name}.csv" for name in ("arena", "arena-clients"))
    cells.CELLS, cells.DONE = [], set()
    for row, method, more in ("DPFL", "dpfl", {"budget": 3}), ("Local", "local", {}):
        run = Run(method=method, clients=4, rounds=2, seed=42, **more)
        tiny_result.make(run.path(tmp_path / row), method, 42)
        cells.CELLS.append((setting, row, 160, run))
    scored = []  # these results hold no models

    def clients_of(_, result):
        scored.append(result.path.stem[-8:])
        return pd.DataFrame({"run": scored[-1], "client": range(4), "accuracy": result["best/test_acc"]})

    cells.clients_of = clients_of
    for row in ("Local", "DPFL", "DPFL"):
        cells.collect(str(tmp_path / row))
        known = pd.read_csv(cells.FILE)[cells.KEYS].itertuples(index=False)
        cells.DONE = {cells.place(*line) for line in known}
    lines, clients = pd.read_csv(cells.FILE), pd.read_csv(cells.CLIENTS, dtype={"run": str})
    assert lines["row"].tolist() == ["DPFL", "Local"] and len(scored) == 2  # what is known is not scored again
    assert clients["run"].unique().tolist() == lines["run"].tolist() and len(clients) == 8
    assert clients["client"].tolist() == [0, 1, 2, 3] * 2 and clients["client"].dtype == int
    assert clients["accuracy"].tolist() == [0.8, 0.6, 1.0, 0.4, 0.6, 0.6, 0.8, 0.6]
    lacks = {row: cells.lacks(setting, row, 160, 42) for row in ("DPFL", "Local", "Ditto")}
    assert lacks == {"DPFL": True, "Local": False, "Ditto": True}  # the random graph's degrees are DPFL's
    cells.DONE.add(cells.place(setting, standings.DEGREES, 160, 42))
    assert not cells.lacks(setting, "DPFL", 160, 42)
