"""reproduction/: its pages and tables against the CSV files, SciPy, and numbers chosen by hand."""

import re

import numpy as np
import page
import pandas as pd
import pytest
import recomputed
import tiny_result
from csv_files import of_folder
from launch import ROOT, federation, refused, script

from dpfl_mpi.figures import label_flip, tables
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.settings import Run

FOLDER = ROOT / "reproduction"
DPFL = "DPFL (B_c = inf)"
collect = script(FOLDER / "collect.py")


@pytest.fixture(scope="module")
def results(made):
    """Return tiny results by method and seed: Local and DPFL, seeds 42 and 52."""
    return {key: made[key] for key in tiny_result.BEST}


@pytest.fixture(scope="module")
def folder(results, tmp_path_factory):
    """Return a folder with CSV files of the tiny results, added twice; beside it is `controls`."""
    out = tmp_path_factory.mktemp("reproduction") / "digits-patho-3"
    for (method, seed), result in results.items():
        for folder in (out, out, out.parent / "controls"):
            controls = folder.name == "controls"
            lines = collect.lines_of(Run(method=method, seed=seed), result, controls)
            collect.write(folder, {name: [each] for name, each in lines.items()})
    return out


def test_csv_by_hand(folder):
    frames = of_folder(folder)
    lines = frames["clients"]
    assert list(frames.runs["row"]) == ["Local"] * 2 + ["DPFL (B_c = 3)"] * 2
    assert list(frames.runs["seed"]) == [42, 52, 42, 52]
    assert len(lines) == 16 and len(frames["curves"]) == 12
    assert tables.mean_text(tables.means(lines, "Local")) == "65.00 ± 0.00 (2)"
    # partition means 5 and 10: deviation 3.5355, over sqrt(2) 2.5, t(1) = 12.7062
    parts = tables.paired(lines, "DPFL (B_c = 3)", "Local")
    assert tables.difference_text(parts) == "+7.50 ± 31.77 (2)"
    classes = pd.read_csv(folder / "graphs.csv").query("t == 0")["classes"]
    assert list(classes.astype(str)) == ["0", "1", "0 1", "2"]


FRAMES = {
    "clients": "client test_acc val_acc round p train val test",
    "curves": "round models_epochs train_loss val_loss val_acc test_acc",
    "graphs": "t edges",
    "costs": "point accuracy models evaluations steps seconds",
}


@pytest.mark.parametrize("name", FRAMES)
def test_both_readers_give_the_same_frames(results, folder, name):
    columns, sides = FRAMES[name].split(), []
    keys = ["method", "seed", columns[0]]
    stored = of_folder(folder.parent / "controls" if name == "costs" else folder)
    for frames in (of_results(list(results.values())), stored):
        lines = frames[name].merge(frames.runs[["run", "method"]], on="run")
        if name == "graphs":
            lines = lines[lines["seed"] == 42]
            lines["edges"] = [graph().senders.tolist() for graph in lines["graph"]]
        sides.append(lines[[*keys, *columns[1:]]].sort_values(keys, ignore_index=True))
    pd.testing.assert_frame_equal(*sides, check_dtype=False)


def test_what_was_tried_can_be_run(monkeypatch):
    """What FedProx's +FT does is an option of tuning, so all ways share one Run's rounds."""
    monkeypatch.chdir(FOLDER.parent)
    asked = script(FOLDER / "tried.py").RUNS
    runs = [run.resolve({"data": "of a file"} if run.data else {}) for run in asked]
    tuned = [run for run in runs if run.finetune_epochs]
    bases = {run.untuned().slug() for run in tuned}
    assert bases <= {run.slug() for run in runs}
    assert len({run.slug() for run in tuned}) == 11
    assert len(bases) == 4  # one per data set and partition, and one of fedprox_part
    assert {run.options["mu"] for run in tuned} == {0.1}
    usual = tuned[0].untuned()
    assert collect.row_of(usual, usual) == "FedProx, fedprox_tuned"
    weights = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 30.0, 30.0)
    expected = [f"FedProx+FT, fedprox_tuned, finetune_mu {mu}" for mu in weights]
    expected += [f"FedProx+FT, fedprox_part, part {part}" for part in ("head", "body")]
    assert [collect.row_of(run, run.untuned()) for run in tuned] == expected
    usual = Run(method="perfedavg").resolve()
    assert collect.row_of(usual, usual) == "PerFedAvg"
    trained = Run(method="perfedavg", options={"score_trained": True}).resolve()
    assert collect.row_of(trained, usual) == "PerFedAvg, score_trained True"
    standard = Run(dataset="cifar10").resolve()
    rows = [collect.row_of(run.resolve(), standard) for run in label_flip.RUNS]
    assert rows == [f"{DPFL}, flip_share 0.4, flipped_run_ggc False", f"{DPFL}, flip_share 0.4"]


def cells(lines):
    return pd.DataFrame(lines).values.tolist()


def test_verdicts_and_accuracies_at_equal_hours_by_hand(tmp_path):
    def claim(accuracies):  # of clients, by row and seed
        runs, clients = [], []
        for i, ((row, seed), values) in enumerate(accuracies.items()):
            names = {"run": i, "row": row, "seed": seed}
            runs.append(names | {"partition_sha256": seed, "flags": ""})
            clients += [{"run": i, "client": k, "test_acc": a} for k, a in enumerate(values)]
        pd.DataFrame(runs).to_csv(tmp_path / "runs.csv", index=False)
        pd.DataFrame(clients).to_csv(tmp_path / "clients.csv", index=False)
        lines = cells(recomputed.order(of_folder(tmp_path)))
        return next(line[1:] for line in lines if line[0].startswith("DPFL"))

    tuned = "FedAvg+FT"
    one = {(DPFL, 1): [0.5, 0.504], (tuned, 1): [0.3, 0.3], ("Local", 1): [0.1, 0.1]}
    # differences 20 and 20.4: deviation 0.28284, over sqrt(2) 0.2, t(1) = 12.7062
    assert claim(one) == ["+20.20 ± 2.54 (1)", "± 2.54", "-", "not decided"]
    # means 20.2 and 22.2: 2 / sqrt(2) / sqrt(2) * t(1); over clients 0.2 / 2 * t(2) = 4.30265
    two = one | {(DPFL, 2): [0.522, 0.522], (tuned, 2): [0.3, 0.3]}
    assert claim(two) == ["+21.20 ± 12.71 (2)", "± 0.43", "-", "holds"]
    # its p is 2 arctan(1 / 21.2) / pi = 0.030; with two more claims Holm doubles it
    more = {("Local", 2): [0.1, 0.1], ("FedAvg", 1): [0.0, 0.0], ("FedAvg", 2): [0.4, 0.4]}
    assert claim(two | more) == ["+21.20 ± 12.71 (2)", "± 0.43", "-", "not decided"]
    # equal means of clients far apart: (-10, 50) and (20, 20): sqrt(30**2) / 2 * t(2)
    apart = {(DPFL, 1): [0.2, 0.8], (DPFL, 2): [0.5, 0.5]}
    apart |= {(tuned, 1): [0.3, 0.3], (tuned, 2): [0.3, 0.3]}
    assert claim(apart) == ["+20.00 ± 0.00 (2)", "± 64.54", "-", "not decided"]
    # t(2) = 4.3027: three partitions may be off by 4.3027 s sqrt(2/3), one by t s sqrt(4/3).
    verdict = recomputed.verdict
    assert verdict(np.array([79.0, 80, 81]), 78.0, 1.0) == "within (+2.00, noise ± 3.51)"
    assert verdict(np.array([82.0, 82, 82]), 78.0, 1.0) == "**off by +4.00** (noise ± 3.51)"
    assert verdict(np.array([82.0]), 78.0, 1.0) == "within (+4.00, noise ± 4.97)"
    # DPFL takes 4 and 8 hours on two partitions: columns at 1.5, 3 and 6 hours.
    curves = {
        ("DPFL", 1): [(1, 50), (2, 60), (4, 70)],
        ("DPFL", 2): [(2, 40), (8, 90)],
        ("Local", 1): [(2, 65)],
    }
    lines = [(*key, *point) for key, points in curves.items() for point in points]
    frame = pd.DataFrame(lines, columns=["row", "seed", "hours", "accuracy"])
    # of 60 and 40, and 70 and 40: deviations 14.1421 and 21.2132, over sqrt(2) 10 and 15
    assert cells(page.at_equal_cost(frame, "hours")) == [
        ["DPFL", "50.00 (1)", "50.00 ± 127.06 (2)", "55.00 ± 190.59 (2)", "-"],
        ["Local", "-", "65.00 (1)", "65.00 (1)", "-"],
    ]


def test_recomputed_runs_replace_old_ones_and_other_data_are_refused(tmp_path):
    def lines(run, row, seed, data="a"):
        names = {"run": run, "row": row, "seed": seed, "epochs": 500, "data_sha256": data}
        clients = {"run": run, "client": [0, 1], "test_acc": seed / 100}
        return {"runs": [pd.DataFrame([names])], "clients": [pd.DataFrame(clients)]}

    for args in (("00000001", "DPFL", 42), ("00000002", "DPFL", 52), ("00000003", "DPFL", 42)):
        collect.write(tmp_path, lines(*args))
    for name, each in (("runs", 1), ("clients", 2)):
        frame = pd.read_csv(tmp_path / f"{name}.csv", dtype={"run": str})
        assert sorted(frame["run"]) == ["00000002"] * each + ["00000003"] * each
    other = lines("00000004", "Local", 42, "b")
    refused("holds Runs on other data", collect.write, tmp_path, other)
    assert len(pd.read_csv(tmp_path / "runs.csv")) == 2


def test_the_pages_are_what_the_files_say():
    for path, texts in page.tables().items():
        assert page.filled(path.read_text(), texts) == path.read_text()
    for frames in page.folders().values():
        means = frames["clients"].groupby("run")["test_acc"].mean()
        assert {*frames.runs["run"]} == {*means.index} == {*frames["curves"]["run"]}
        stored = frames.runs.set_index("run")["test_acc"]
        np.testing.assert_allclose(stored, means[stored.index], rtol=1e-12)
    with pytest.raises(SystemExit, match="no place for the table 'x'"):
        page.filled("nothing", {"x": ""})
    drawn = set()
    for path, figure in page.pictures():
        drawn.add(path)
        page.plt.close(figure)
    assert drawn == {*FOLDER.rglob("*.png")}


def test_the_findings_are_what_the_files_say():
    """DPFL with two seeds on the same 100 clients, and the oracle; t(99) = 1.98422."""
    runs, clients = (pd.read_csv(FOLDER / "controls" / f"{n}.csv") for n in ("runs", "clients"))
    lines = clients.merge(runs.query("rounds >= 20")[["run", "row", "seed"]], on="run")
    accuracy = lines.set_index(["row", "seed", "client"]).sort_index()["test_acc"]
    again = accuracy["DPFL, same clients", 32]
    for one, other in ((again, accuracy["DPFL", 42]), (accuracy["Oracle", 42], again)):
        points = 100 * (one - other)
        assert len(points) == 100
        text = f"{points.mean():.2f} ± {1.98422 * points.std() / 10:.2f}"
        assert text in page.TABLES.read_text()
    text, rows = page.TABLES.read_text(), pd.read_csv(FOLDER / "controls" / "optimality.csv")
    best = rows[rows["order"] == -1].set_index("client_id")
    greedy = rows[rows["order"] >= 0]
    reward, size = -best["reward"].mean(), greedy["collaborators"].fillna("").str.split().str.len()
    assert best["collaborators"].isna().all()
    better = best["test_acc"] - greedy.groupby("client_id")["test_acc"].mean()
    half = 2.20099 * better.std() / len(better) ** 0.5  # t(11)
    found = 100 * (greedy["gap"] < 1e-12).mean()
    mean = -greedy["reward"].mean()
    for part in (
        f"| the best subset of at most 3 | {reward:.4f} | 0.0 |",
        f"| nobody | {reward:.4f} | 0 |",
        f"| Algorithm 2, mean over orders | {mean:.4f} | {size.mean():.1f} |",
        f"chose nobody in {found:.1f} % of the orders",
        f"by {100 * better.mean():.1f} ± {100 * half:.1f} points",
    ):
        assert part in text


def test_numbers_in_the_pages_prose_are_what_the_files_say():
    """Every "x ± y" outside the tables is in a table."""
    pages = [page.FRONT, page.ANSWER, page.TABLE_1, page.TABLES, FOLDER / "log.md"]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in pages}
    table = re.compile(r"<!-- (\S.*?) -->.*?<!-- /\1 -->", re.DOTALL)
    pair = re.compile(r"(\d+\.\d+)(?:, noise)?\s±\s(\d+\.\d+)")
    parts = [part[0] for text in texts.values() for part in table.finditer(text)]
    known = {(float(x), float(y)) for part in parts for x, y in pair.findall(part)}
    rounded = {f"{x:.{digits}f} ± {y:.{digits}f}" for x, y in known for digits in (1, 2)}
    tested_above = {"1.41 ± 0.98", "0.54 ± 1.08", "15.1 ± 4.5"}
    for name, text in texts.items():
        prose = {f"{x} ± {y}" for x, y in pair.findall(table.sub("", text))}
        assert prose - rounded <= tested_above, name


def test_tuning_one_part_freezes_the_other():
    method = FOLDER / "fedprox_part.py"
    for part in ("head", "body"):
        fields = {"method": str(method), "finetune_epochs": 2, "options": {"part": part, "mu": 0.5}}
        fields |= {"clients": 4, "lr": 0.1, "weight_decay": 0.1, "clip_norm": 0.0}
        with federation(fields) as fed:
            start = fed.common_row()
            gradient = script(method).finetune_gradient(fed, start)
            tuned = fed.local_opt(start.clone(), 2, gradient)
            head = fed.columns("head")
            trained = head if part == "head" else ~head
            proximal = fed.proximal(start, 0.5)
            fed.training.epochs[:] = 0  # the same batches again
            twin = fed.local_opt(start.clone(), 2, proximal, momentum="twin", trained=trained)
        assert (tuned[:, ~trained] == start[:, ~trained]).all()
        assert (tuned[:, trained] != start[:, trained]).any()
        np.testing.assert_allclose(tuned, twin, atol=1e-6)
