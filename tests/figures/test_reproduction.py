"""reproduction/: groups.py and real_images.py on tiny data; the CSV files and the arena's tables against numbers chosen by hand and SciPy, and the pages against
the CSV files.
"""

import itertools
import re
import subprocess
from pathlib import Path

import arena
import findings
import numpy as np
import page
import pandas as pd
import pytest
import recomputed
import standings
import tiny_result
from csv_files import of_folder
from launch import ROOT, refused, script
from PIL import Image
from scipy import stats

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.datasets import cifar10
from dpfl_mpi.figures import label_flip, tables
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.settings import Run

FOLDER = ROOT / "reproduction"
DPFL = "DPFL (B_c = inf)"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Tiny results by method and seed: Local and DPFL, seeds 42 and 52."""
    folder = tmp_path_factory.mktemp("results")
    return {(m, s): tiny_result.tiny(folder, f"{m}{s}", m, s) for m, s in tiny_result.BEST}


@pytest.fixture(scope="module")
def folder(results, tmp_path_factory):
    """The CSV files of the tiny results, and beside it `controls`, those of the same Runs as controls."""
    collect, out = (
        script(FOLDER / "collect.py"),
        tmp_path_factory.mktemp("reproduction") / "digits-patho-3",
    )
    for (method, seed), result in results.items():
        for folder in (
            out,
            out,
            out.parent / "controls",
        ):  # one by one: lines are added; again: nothing is there twice
            lines = collect.lines_of(
                Run(method=method, seed=seed), result, folder.name == "controls"
            )
            collect.write(folder, {name: [each] for name, each in lines.items()})
    return out


def test_csv_by_hand(folder):
    frames = of_folder(folder)
    lines = frames["clients"]
    assert list(frames.runs["row"]) == ["Local"] * 2 + ["DPFL (B_c = 3)"] * 2
    assert (
        list(frames.runs["seed"]) == [42, 52, 42, 52]
        and len(lines) == 16
        and len(frames["curves"]) == 12
    )
    assert tables.mean_text(tables.means(lines, "Local")) == "65.00 ± 0.00 (2)"
    # partition means 5 and 10: deviation 3.5355, over sqrt(2) 2.5, t(1) = 12.7062
    assert (
        tables.difference_text(tables.paired(lines, "DPFL (B_c = 3)", "Local"))
        == "+7.50 ± 31.77 (2)"
    )
    assert list(pd.read_csv(folder / "graphs.csv").query("t == 0")["classes"].astype(str)) == [
        "0",
        "1",
        "0 1",
        "2",
    ]


@pytest.mark.parametrize(("name", "columns"), [
    ("clients", ["client", "test_acc", "val_acc", "round", "p", "train", "val", "test"]),
    ("curves", ["round", "models_epochs", "train_loss", "val_loss", "val_acc", "test_acc"]),
    ("graphs", ["t", "edges"]),
    ("costs", ["point", "accuracy", "models", "evaluations", "steps", "seconds"]),
])  # fmt: skip
def test_both_readers_give_the_same_frames(results, folder, name, columns):
    """Of the graphs CSV files hold seed 42 alone, of the controls alone the costs."""
    keys, sides = ["method", "seed", columns[0]], []
    held = of_folder(folder.parent / "controls" if name == "costs" else folder)
    for frames in (of_results(list(results.values())), held):
        lines = frames[name].merge(frames.runs[["run", "method"]], on="run")
        if name == "graphs":
            lines = lines[lines["seed"] == 42]
            lines["edges"] = [graph().senders.tolist() for graph in lines["graph"]]
        sides.append(lines[[*keys, *columns[1:]]].sort_values(keys, ignore_index=True))
    pd.testing.assert_frame_equal(*sides, check_dtype=False)


def test_a_row_names_the_options_that_are_not_the_usual():
    """Which the tables look for by these names."""
    row_of, usual = script(FOLDER / "collect.py").row_of, Run(method="perfedavg").resolve()
    assert row_of(usual, usual) == "PerFedAvg"
    trained = Run(method="perfedavg", options={"score_trained": True}).resolve()
    assert row_of(trained, usual) == "PerFedAvg, score_trained True"
    rows = [row_of(run.resolve(), Run(dataset="cifar10").resolve()) for run in label_flip.RUNS]
    assert rows == [f"{DPFL}, flip_share 0.4, flipped_run_ggc False", f"{DPFL}, flip_share 0.4"]


def test_what_was_tried_can_be_run(monkeypatch):
    """Its own method is FedProx but for the weight in +FT, so that the base of all weights is one Run."""
    monkeypatch.chdir(FOLDER.parent)
    runs = [
        run.resolve({"data": "of a file"} if run.data else {})
        for run in script(FOLDER / "tried.py").RUNS
    ]
    tuned = [run for run in runs if run.finetune_epochs]
    assert {run.untuned().slug() for run in tuned} <= {run.slug() for run in runs}  # computed once
    assert len({run.slug() for run in tuned}) == 9
    assert len({run.untuned().slug() for run in tuned}) == 3  # one per data set and partition
    assert {run.options["mu"] for run in tuned} == {0.1}
    row_of, usual = script(FOLDER / "collect.py").row_of, tuned[0].untuned()
    assert row_of(usual, usual) == "FedProx, fedprox_tuned"
    rows = [row_of(run, run.untuned()) for run in tuned]  # none is a second FedProx+FT of its seed
    weights = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 30.0, 30.0)
    assert rows == [f"FedProx+FT, fedprox_tuned, finetune_mu {mu}" for mu in weights]


def test_verdict_by_hand():
    """t(2) = 4.3027: three partitions of ours may differ by 4.3027 s sqrt(2/3), one by 4.3027 s sqrt(4/3)."""
    assert (
        recomputed.verdict(np.array([79.0, 80.0, 81.0]), 78.0, 1.0)
        == "within (+2.00, noise ± 3.51)"
    )
    assert (
        recomputed.verdict(np.array([82.0, 82.0, 82.0]), 78.0, 1.0)
        == "**off by +4.00** (noise ± 3.51)"
    )
    assert recomputed.verdict(np.array([82.0]), 78.0, 1.0) == "within (+4.00, noise ± 4.97)"


def cells(lines):
    return pd.DataFrame(lines).values.tolist()


def test_what_decides_by_hand(tmp_path):
    """One partition decides nothing; several do where 0 is outside both intervals, over partitions and over clients."""

    def claim(accuracies):  # by row and seed, of the clients of its Run
        runs, clients = [], []
        for i, ((row, seed), values) in enumerate(accuracies.items()):
            runs.append({"run": i, "row": row, "seed": seed, "partition_sha256": seed, "flags": ""})
            clients += [{"run": i, "client": k, "test_acc": a} for k, a in enumerate(values)]
        pd.DataFrame(runs).to_csv(tmp_path / "runs.csv", index=False)
        pd.DataFrame(clients).to_csv(tmp_path / "clients.csv", index=False)
        return next(
            line[1:]
            for line in cells(recomputed.order(of_folder(tmp_path)))
            if line[0].startswith("DPFL")
        )

    one = {(DPFL, 1): [0.5, 0.504], ("FedAvg+FT", 1): [0.3, 0.3], ("Local", 1): [0.1, 0.1]}
    # differences 20 and 20.4: deviation 0.28284, over sqrt(2) 0.2, t(1) = 12.7062
    assert claim(one) == ["+20.20 ± 2.54 (1)", "± 2.54", "-", "not decided"]
    # partition means 20.2 and 22.2: 2 / sqrt(2) / sqrt(2) * t(1); over clients sqrt(0.2**2 + 0) / 2 * t(2) = 0.1 * 4.30265
    two = one | {(DPFL, 2): [0.522, 0.522], ("FedAvg+FT", 2): [0.3, 0.3]}
    assert claim(two) == ["+21.20 ± 12.71 (2)", "± 0.43", "-", "holds"]
    # partitions of one mean, whose clients lie far apart: (-10, 50) and (20, 20): sqrt(30**2) / 2 * t(2)
    apart = {
        (DPFL, 1): [0.2, 0.8],
        (DPFL, 2): [0.5, 0.5],
        ("FedAvg+FT", 1): [0.3, 0.3],
        ("FedAvg+FT", 2): [0.3, 0.3],
    }
    assert claim(apart) == ["+20.00 ± 0.00 (2)", "± 64.54", "-", "not decided"]


def test_accuracies_at_equal_hours_by_hand():
    """DPFL takes 4 and 8 hours on two partitions: columns at 1.5, 3 and 6 hours. The other has ended after 2, on one partition."""
    each = {
        ("DPFL", 1): [(1, 50), (2, 60), (4, 70)],
        ("DPFL", 2): [(2, 40), (8, 90)],
        ("Local", 1): [(2, 65)],
    }
    cells_of = [(row, seed, h, a) for (row, seed), of in each.items() for h, a in of]
    lines = pd.DataFrame(cells_of, columns=["row", "seed", "hours", "accuracy"])
    # of 60 and 40, and of 70 and 40: deviation 14.1421 and 21.2132, over sqrt(2) 10 and 15, t(1) = 12.7062
    assert cells(page.at_equal_cost(lines, "hours")) == [
        ["DPFL", "50.00 (1)", "50.00 ± 127.06 (2)", "55.00 ± 190.59 (2)", "-"],
        ["Local", "-", "65.00 (1)", "65.00 (1)", "-"],
    ]


def test_runs_made_anew_replace_the_old_ones_and_other_data_is_refused(tmp_path):
    """The same row, seed and length under another name: of all its files the old lines go; those of others stay."""
    write = script(FOLDER / "collect.py").write

    def lines(run, row, seed, data="a"):
        runs = pd.DataFrame(
            [{"run": run, "row": row, "seed": seed, "epochs": 500, "data_sha256": data}]
        )
        return {
            "runs": [runs],
            "clients": [pd.DataFrame({"run": run, "client": [0, 1], "test_acc": seed / 100})],
        }

    for args in (("00000001", "DPFL", 42), ("00000002", "DPFL", 52), ("00000003", "DPFL", 42)):
        write(tmp_path, lines(*args))
    for name, each in (("runs", 1), ("clients", 2)):
        frame = pd.read_csv(tmp_path / f"{name}.csv", dtype={"run": str})
        assert sorted(frame["run"]) == ["00000002"] * each + ["00000003"] * each
    refused("holds Runs on other data", write, tmp_path, lines("00000004", "Local", 42, "b"))
    assert len(pd.read_csv(tmp_path / "runs.csv")) == 2


def test_the_pages_are_what_the_files_say():
    """Their tables hold the numbers of the CSV files, and every row's mean is that of its clients. A table without a place is a mistake."""
    for path, its in page.tables().items():
        assert page.filled(path.read_text(), its) == path.read_text()
    for frames in page.folders().values():
        means = frames["clients"].groupby("run")["test_acc"].mean()
        assert {*frames.runs["run"]} == {*means.index} == {*frames["curves"]["run"]}
        np.testing.assert_allclose(
            frames.runs.set_index("run")["test_acc"], means[frames.runs["run"]], rtol=1e-12
        )
    with pytest.raises(SystemExit, match="no place for the table 'x'"):
        page.filled("nothing", {"x": ""})


def test_every_picture_is_drawn():
    """As many as lie beside the CSV files and in docs/pictures."""
    drawn = set()
    for path, figure in page.pictures():
        drawn.add(path)
        page.plt.close(figure)
    assert drawn == {*FOLDER.rglob("*.png"), *(ROOT / "docs" / "pictures").glob("findings-*.png")}


def test_what_a_seed_alone_changes_is_what_the_files_say():
    """DPFL under two seeds on the same 100 clients, t(99) = 1.98422; both pages and the distance of the oracle quote it."""
    runs, clients = (
        pd.read_csv(FOLDER / "controls" / f"{name}.csv") for name in ("runs", "clients")
    )
    lines = clients.merge(runs.query("rounds >= 20")[["run", "row", "seed"]], on="run")
    accuracy = lines.set_index(["row", "seed", "client"]).sort_index()["test_acc"]
    again = accuracy["DPFL, same clients", 32]
    for one, other in ((again, accuracy["DPFL", 42]), (accuracy["Oracle", 42], again)):
        points = 100 * (one - other)
        assert len(points) == 100
        text = f"{points.mean():.2f} ± {1.98422 * points.std() / 10:.2f}"
        assert text in page.FINDINGS.read_text()
        assert text in page.PAGE.read_text() or other is again


def test_the_findings_on_the_greedy_search_are_what_the_file_says():
    text, rows = page.FINDINGS.read_text(), pd.read_csv(FOLDER / "controls" / "optimality.csv")
    best, greedy = rows[rows["order"] == -1].set_index("client_id"), rows[rows["order"] >= 0]
    size = greedy["collaborators"].fillna("").str.split().str.len().mean()
    assert f"| the best subset of at most 3 | {-best['reward'].mean():.4f} | 0.0 |" in text
    assert (
        best["collaborators"].isna().all()
        and f"| nobody | {-best['reward'].mean():.4f} | 0 |" in text
    )
    assert (
        f"| Algorithm 2, mean over orders | {-greedy['reward'].mean():.4f} | {size:.1f} |" in text
    )
    assert f"found that out in {100 * (greedy['gap'] < 1e-12).mean():.1f} % of the orders" in text
    better = best["test_acc"] - greedy.groupby("client_id")["test_acc"].mean()
    half = 2.20099 * better.std() / len(better) ** 0.5  # t(11)
    assert f"by {100 * better.mean():.1f} ± {100 * half:.1f} points" in text


def test_what_the_pages_say_of_two_rows_is_what_the_files_say():
    """Every "x ± y" outside the tables is in a table, or a difference of two rows: over partitions, or over the clients within them.

    Which, and its sign, the words around it say; these are the reader's to check. A sentence that the latest Runs made wrong fails here.
    """
    texts = {path.name: path.read_text() for path in (page.PAGE, page.FINDINGS)} | {
        "front": page.FRONT.read_text()
    }
    table = re.compile(r"<!-- (\S.*?) -->.*?<!-- /\1 -->", re.DOTALL)
    pair = re.compile(r"(\d+\.\d+)(?:, noise)?\s±\s(\d+\.\d+)")
    inside = {
        both
        for text in texts.values()
        for part in table.finditer(text)
        for both in pair.findall(part[0])
    }
    known = {(float(x), float(y)) for x, y in inside} | set(differences())
    rounded = {f"{x:.{digits}f} ± {y:.{digits}f}" for x, y in known for digits in (1, 2)}
    held_above = {
        "1.41 ± 0.98",
        "0.54 ± 1.08",
        "15.1 ± 4.5",
    }  # what a seed alone changes, and the greedy search
    for name, text in texts.items():
        assert {
            f"{x} ± {y}" for x, y in pair.findall(table.sub("", text))
        } - rounded <= held_above, name


def differences():
    """Yield (size, half width of the 95 % interval) of the difference of any two rows, and of the example's first client."""
    each = {name: frames["clients"] for name, frames in page.folders().items()}
    each["controls"] = findings.long(page.folders()["controls"])["clients"]
    first = each["cifar-10-motivation"].query("client == 0")
    # over seeds, as if each were a client
    each["example"] = first.assign(client=first["seed"], seed=0, partition="", run="")
    for lines in each.values():
        rows = dict(
            list(lines.groupby("row"))
        )  # a pair is looked for in its own lines alone: faster
        for a, b in itertools.combinations(rows, 2):
            parts = tables.paired(pd.concat([rows[a], rows[b]]), a, b)
            if tables.comparable(parts):
                mean, half = tables.interval(parts)
                yield abs(mean), half
                yield abs(mean), recomputed.over_clients(parts)


# the arena -----------------------------------------------------------------------------------------------------------------
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
            costs = {
                "models": 100.0 * seed,
                "megabytes": 3,
                "evaluations": 0,
                "steps": 7,
                "core_hours": 0.5,
            }
            name = {
                "setting": "Digits",
                "epochs": 10,
                "row": row,
                "seed": seed,
                "run": run,
                "partition": f"p{seed}",
            }
            runs.append(name | costs)
            clients.append(pd.DataFrame({"run": run, "client": range(50), "accuracy": test}))
    runs, clients = pd.DataFrame(runs), pd.concat(clients)
    found = standings.differences(runs, clients)
    pairs = {("DPFL", "Local"), ("DPFL", standings.RANDOM), (standings.RANDOM, "Local")}
    assert set(zip(found["row"], found["to"], strict=True)) == pairs
    assert found["significant"].all()
    table = pd.DataFrame(standings.table(runs, clients, found)).set_index("row")
    assert table.loc["DPFL", "vs random graph"].startswith("**+1.98 ± 0.08 (3)")
    assert table.loc["Local", "vs Local"] == "-"
    longer = runs[runs["seed"] == 1].assign(epochs=20)  # of one partition, and one row more
    other = found[found["to"] == standings.RANDOM].assign(
        row="Oracle", parts=[found["parts"][0][:1]]
    )
    (front,) = standings.answer(
        pd.concat([runs, longer]), pd.concat([found, other.assign(epochs=20, significant=False)])
    )
    assert (front["epochs"], front["DPFL"], front["Oracle"]) == ("10", "**+1.98 ± 0.08 (3)**", "-")
    assert front["random graph over Local"].startswith("**+8.0")
    assert (table["models"] == "200").all() and (table["core hours"] == "0.50").all()
    noise = clients.assign(accuracy=clients.groupby("client")["accuracy"].transform("mean"))
    noise["accuracy"] += np.random.default_rng(3).normal(0, 0.01, len(noise))
    assert not standings.differences(runs, noise)["significant"].any()
    one = standings.differences(runs[runs["seed"] == 1], clients)
    assert not one["significant"].any() and one["p"].min() < 1e-6  # one partition decides nothing
    _, right = standings.picture(runs, found).axes
    assert [text.get_text() for text in right.texts] == [
        "DPFL",
        standings.RANDOM,
    ]  # Local has no difference of its own


def test_rows_of_a_setting_train_as_long_with_the_same_budget():
    before = (
        "dpfl",
        "dpfl_choice",
        "random_graph",
        "oracle",
        "pairwise",
        "nearest",
    )  # train 10 epochs before round 1
    for setting, row, epochs, run in arena.CELLS:
        asked = 5 * run.rounds + run.finetune_epochs + (10 if run.method in before else 0)
        assert asked == epochs, (setting, row)
        assert str(run.budget) == ("6" if setting.startswith("HAR") else "0.1N")
    names = [(setting, row, epochs, run.seed) for setting, row, epochs, run in arena.CELLS]
    assert len(set(names)) == len(names) > 400
    assert "groups.py --source OUT.zip --by labels --seed 42 --out" in arena.prepared(
        "data/labels-42.h5"
    )
    refused("--cell is no such; no cell's name has these words", arena.print_commands, "no such")


def test_a_cells_line(tmp_path):
    result = tiny_result.tiny(tmp_path, "one", "dpfl", 42)
    line = arena.line_of(Run(method="dpfl"), result)
    assert line["models"] == pytest.approx(result["traffic/models_received"].sum(0).mean())
    assert line["megabytes"] == pytest.approx(
        4e-6 * line["models"] * int(result.fact("parameters"))
    )


def test_a_client_that_is_like_no_other_is_scored_on_its_own_images(result_of):
    result = result_of({"clients": 4, "rounds": 1, "method": "local", "tau_train": 1})
    alone, alike = (
        arena.clients_of(setting, result) for setting in ("HAR, 30 people", "CIFAR-10 Patho(3)")
    )
    assert (
        alone["accuracy"].tolist()
        == alone["own"].tolist()
        == result["best/test_acc"].round(6).tolist()
    )
    assert alike["own"].tolist() == alone["own"].tolist() != alike["accuracy"].tolist()


def test_cells_are_collected_folder_by_folder(tmp_path):
    """DPFL's cell comes from one folder and local's from another; then only cells that need DPFL's result to be there are still to be computed."""
    arena, setting = script(ROOT / "reproduction" / "arena.py"), "CIFAR-10 Patho(3)"
    arena.FILE, arena.CLIENTS = (tmp_path / f"{name}.csv" for name in ("arena", "arena-clients"))
    arena.CELLS, arena.DONE = [], set()
    for row, method, more in ("DPFL", "dpfl", {"budget": 3}), ("Local", "local", {}):
        run = Run(method=method, clients=4, rounds=2, seed=42, classes_per_client=3, **more)
        tiny_result.make(run.path(tmp_path / row), method, 42)
        arena.CELLS.append((setting, row, 160, run))
    scored = []  # these results hold no models

    def clients_of(_, result):
        scored.append(result.path.stem[-8:])
        return pd.DataFrame(
            {"run": scored[-1], "client": range(4), "accuracy": result["best/test_acc"]}
        )

    arena.clients_of = clients_of
    for row in ("Local", "DPFL", "DPFL"):
        arena.collect(str(tmp_path / row))
        arena.DONE = {
            arena.place(*line)
            for line in pd.read_csv(arena.FILE)[arena.KEYS].itertuples(index=False)
        }
    lines, clients = pd.read_csv(arena.FILE), pd.read_csv(arena.CLIENTS, dtype={"run": str})
    assert (
        lines["row"].tolist() == ["DPFL", "Local"] and len(scored) == 2
    )  # what is known is not scored again
    assert clients["run"].unique().tolist() == lines["run"].tolist() and len(clients) == 8
    assert clients["client"].tolist() == [0, 1, 2, 3] * 2 and clients["client"].dtype == int
    assert clients["accuracy"].tolist() == [0.8, 0.6, 1.0, 0.4, 0.6, 0.6, 0.8, 0.6]
    lacks = {row: arena.is_wanted(setting, row, 160, 42) for row in ("DPFL", "Local", "Ditto")}
    assert lacks == {
        "DPFL": True,
        "Local": False,
        "Ditto": True,
    }  # the random graph's degrees are DPFL's
    arena.DONE.add(arena.place(setting, standings.DEGREES, 160, 42))
    assert not arena.is_wanted(setting, "DPFL", 160, 42)


# data ---------------------------------------------------------------------------------------------------------------------
groups, real_images = (script(FOLDER / f"{name}.py") for name in ("groups", "real_images"))


# groups.py --------------------------------------------------------------------------------------------------------------
def whole(classes):
    """Return 200 training and 100 test images; the upper left pixel of image i is i, and its class i mod `classes`."""
    x, i = np.zeros((300, 32, 32, 3), np.uint8), np.r_[:200, :100]
    x[:, 0, 0, 0] = i
    return arrays_of(x, i % classes, test=np.arange(300) >= 200)


def read(monkeypatch, by, **options):
    """Return the data set of these images."""
    classes = 100 if by == "superclass" else 10
    monkeypatch.setattr(
        groups.cifar100 if by == "superclass" else groups.cifar10, "read", lambda _: whole(classes)
    )
    return groups.read(Path("a"), by, **options)


def test_labels_are_moved_on_by_group(monkeypatch):
    out = read(monkeypatch, "labels", clients=8)
    assert np.bincount(out.train_clients).tolist() == [25] * 8 and out.client_names == tuple(
        "01234567"
    )
    number, shift = out.train_images[:, 0, 0, 0], np.array([0, 2, 5, 7])
    assert number.tolist() == list(range(200))
    np.testing.assert_array_equal(out.train_labels, (number + shift[out.train_clients % 4]) % 10)
    np.testing.assert_array_equal(
        out.test_labels, (np.arange(100) + shift[out.test_clients % 4]) % 10
    )
    owners = [read(monkeypatch, "labels", clients=8, seed=s).train_clients for s in (1, 1, 2)]
    assert (owners[0] == owners[1]).all() and (owners[0] != owners[2]).any()


def test_images_are_rotated_by_group(monkeypatch):
    out = read(monkeypatch, "rotation", clients=8)
    corner = np.array([(0, 0), (31, 0), (31, 31), (0, 31)])[
        out.train_clients % 4
    ]  # against the clock
    np.testing.assert_array_equal(
        out.train_images[np.arange(200), corner[:, 0], corner[:, 1], 0], np.arange(200)
    )
    np.testing.assert_array_equal(out.train_labels, np.arange(200) % 10)


def test_a_client_holds_one_superclass(monkeypatch):
    out = read(monkeypatch, "superclass", clients=40)
    for labels, owners in (
        (out.train_labels, out.train_clients),
        (out.test_labels, out.test_clients),
    ):
        np.testing.assert_array_equal(groups.SUPERCLASS[labels], owners % 20)
    assert np.bincount(groups.SUPERCLASS).tolist() == [5] * 20
    # aquatic mammals, people and trees, by the alphabetical numbers of beaver, dolphin, otter, seal, whale; baby, boy, girl, man, woman; ...
    members = {0: [4, 30, 55, 72, 95], 14: [2, 11, 35, 46, 98], 17: [47, 52, 56, 59, 96]}
    assert {s: np.flatnonzero(s == groups.SUPERCLASS).tolist() for s in members} == members


def test_prepare_takes_it(monkeypatch, tmp_path, said):
    monkeypatch.setattr(groups.cifar10, "read", lambda _: whole(10))
    words = f"{ROOT}/reproduction/groups.py --source {tmp_path} --by rotation --clients 8 --out {tmp_path}/a.h5"
    assert "200 training and 100 test images of 32x32x3, 10 classes, 8 clients" in said(
        prepare.main, *words.split()
    )


# real_images.py ---------------------------------------------------------------------------------------------------------
A_CLASS = 4  # images: three to train, one to test


def committed(clone, clients):
    """Write clients' files as PFLlib does, images and labels by the name of the file, and commit them; return the commit."""
    for name, (images, labels) in clients.items():
        path = clone / "dataset" / "Cifar10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        x = (
            (images.transpose(0, 3, 1, 2) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        ).astype(np.float32)
        np.savez_compressed(path, data={"x": x, "y": labels})
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "data"]):
        subprocess.run([*git, *words], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def test_exact_images_take_the_place_of_the_jpegs(tmp_path, monkeypatch, said):
    """Of blurred noise, so that a JPEG is near it. Two repositories share images, in no order; of image 0 there is the JPEG alone."""
    coarse = np.random.default_rng(0).integers(0, 256, (10 * A_CLASS, 4, 4, 3), np.uint8)
    truth = np.stack(
        [np.asarray(Image.fromarray(x).resize((32, 32), Image.Resampling.BICUBIC)) for x in coarse]
    )
    labels, order = np.arange(40) // A_CLASS, np.random.default_rng(1).permutation(np.arange(1, 40))
    rows = {
        "a/x": {"train/0.npz": order[:20], "test/0.npz": order[20:25]},
        "b/x": {"train/0.npz": order[15:]},
    }
    files = {
        name: {file: (truth[r], labels[r]) for file, r in each.items()}
        for name, each in rows.items()
    }
    sources = tuple((name, committed(tmp_path / name, each), "") for name, each in files.items())
    monkeypatch.setitem(real_images.SOURCES, "cifar10", sources)
    for i, image in enumerate(truth):
        place = (
            tmp_path
            / "jpeg"
            / ("test" if i % A_CLASS == 3 else "train")
            / cifar10.CLASSES[i // A_CLASS]
        )
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i % A_CLASS}.jpg", quality=80)
    told = said(
        real_images.main, "cifar10", tmp_path, tmp_path / "out.zip", "--jpeg", tmp_path / "jpeg"
    )
    assert all(s in told for s in ("a/x", "25 new images", "14 new images", "3 of 4 matched"))
    out, copy = cifar10.read(tmp_path / "out.zip"), cifar10.read(tmp_path / "jpeg")
    test = np.arange(40) % A_CLASS == 3
    np.testing.assert_array_equal(out.train_images[1:], truth[~test][1:])
    np.testing.assert_array_equal(out.test_images, truth[test])
    np.testing.assert_array_equal(out.train_images[0], copy.train_images[0])
    np.testing.assert_array_equal(out.train_labels, copy.train_labels)
    assert (
        (copy.test_images != truth[test]).any(axis=(1, 2, 3)).all()
    )  # there was something to mend
