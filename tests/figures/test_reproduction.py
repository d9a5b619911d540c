"""reproduction/: the CSV files against numbers chosen by hand, and the page against the CSV files."""

import importlib.util
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_result

from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

FOLDER = Path(__file__).resolve().parents[2] / "reproduction"
pytest.importorskip("matplotlib")


def module(name):
    spec = importlib.util.spec_from_file_location(f"reproduction_{name}", FOLDER / f"{name}.py")
    out = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "analysis")]
    spec.loader.exec_module(out)
    sys.path[:] = before
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The CSV files of tiny results: Local and DPFL, seeds 42 and 52."""
    collect, root = module("collect"), tmp_path_factory.mktemp("reproduction")
    files = {name: [] for name in collect.FILES}
    for method, seed in tiny_result.BEST:
        path = tiny_result.make(root / f"{method}{seed}.h5", method, seed)
        with Result(path) as result:
            for name, lines_of in collect.FILES.items():
                frame = lines_of(Run(method=method, seed=seed), result)
                frame.insert(0, "run", result.run.slug()[-8:])
                files[name].append(frame)
    out = root / "digits-patho-3"
    out.mkdir()
    for name, frames in files.items():
        for frame in frames:  # one by one: lines are added
            collect.merge(out / f"{name}.csv", frame)
        collect.merge(out / f"{name}.csv", frames[0])  # again: nothing is there twice
    return out


def test_csv_by_hand(folder):
    draw = module("stored")
    runs, clients = draw.read(folder, "runs"), draw.read(folder, "clients")
    assert list(runs["row"]) == ["DPFL (B_c = 0.75N)"] * 2 + ["Local"] * 2 and list(runs["seed"]) == [42, 52, 42, 52]
    assert len(clients) == 16 and len(draw.read(folder, "curves")) == 12
    np.testing.assert_allclose(draw.percent(runs, "DPFL (B_c = 0.75N)"), [70, 75])
    assert draw.ours(draw.percent(runs, "Local")) == "65.00 ± 0.00 (2)"
    gains = draw.paired(clients, "DPFL (B_c = 0.75N)", "Local")
    np.testing.assert_allclose(gains, [[20, 0, 20, -20], [30, 10, 10, -10]], atol=1e-12)
    # partition means 5 and 10: deviation 3.5355, over sqrt(2) 2.5, t(1) = 12.7062
    assert draw.difference(clients, "DPFL (B_c = 0.75N)", "Local") == "+7.50 ± 31.77 (2)"


def test_a_row_names_the_options_that_are_not_the_usual():
    row_of, usual = module("collect").row_of, Run(method="perfedavg").resolve()
    assert row_of(usual, usual) == "PerFedAvg"
    trained = Run(method="perfedavg", options={"score_trained": True}).resolve()
    assert row_of(trained, usual) == "PerFedAvg, score_trained True"


def test_what_was_tried_can_be_run(monkeypatch):
    """Its own method is FedProx but for the weight in +FT, so that the base of all weights is one Run."""
    monkeypatch.chdir(FOLDER.parent)
    runs = [run.resolve({"data": "of a file"} if run.data else {}) for run in module("tried").RUNS]
    tuned = [run for run in runs if run.finetune_epochs]
    assert {run.untuned().slug() for run in tuned} <= {run.slug() for run in runs}  # computed once
    assert len({run.slug() for run in tuned}) == 9
    assert len({run.untuned().slug() for run in tuned}) == 3  # one per data set and partition
    assert {run.options["mu"] for run in tuned} == {0.1}
    row_of, usual = module("collect").row_of, tuned[0].untuned()
    assert row_of(usual, usual) == "FedProx, fedprox_tuned"
    rows = [row_of(run, run.untuned()) for run in tuned]  # none is a second FedProx+FT of its seed
    weights = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 30.0, 30.0)
    assert rows == [f"FedProx+FT, fedprox_tuned, finetune_mu {mu}" for mu in weights]


def test_verdict_by_hand():
    """t(2) = 4.3027: three partitions of ours may differ by 4.3027 s sqrt(2/3), one by 4.3027 s sqrt(4/3)."""
    verdict = module("stored").verdict
    assert verdict(np.array([79.0, 80.0, 81.0]), (78.0, 1.0)) == "within (+2.00, noise ± 3.51)"
    assert verdict(np.array([82.0, 82.0, 82.0]), (78.0, 1.0)) == "**off by +4.00** (noise ± 3.51)"
    assert verdict(np.array([82.0]), (78.0, 1.0)) == "within (+4.00, noise ± 4.97)"


def test_what_a_step_took_by_hand(tmp_path):
    """Means over a row's Runs; a line from before the seconds were kept is left out, and +FT, whose rounds are the base's."""
    lines = pd.DataFrame(
        {
            "run": list("abcd"),
            "row": ["DPFL", "DPFL", "Local", "FedAvg+FT"],
            "seed": [1, 2, 1, 1],
            "gradient_steps": 1_000_000,
            "evaluations": [100_000, 100_000, 0, 0],
            "core_hours": [0.25, 0.5, 1, 1],
            "train_seconds": [600, 1200, np.nan, 600],
            "graph_seconds": [100, 300, np.nan, 0],
            "megabytes": [0.5, 0.7, np.nan, 1],
        }
    )
    folder = tmp_path / "digits"
    folder.mkdir()
    lines.to_csv(folder / "runs.csv", index=False)
    *_, row = module("costs").measured([folder]).splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "digits",
        "DPFL",
        "2",
        "22.5",
        "15.0",
        "0.90",
        "3.3",
        "2.00",
        "0.6",
    ]


def test_graphs_by_hand(folder):
    """Omega of seed 42 has 5 edges of 16 cells, of which one has no reverse; the last round's 3, of which one has none."""
    experiments = module("experiments")
    found = experiments.graphs_of(folder, "DPFL (B_c = 0.75N)")
    assert [t for t, _ in found] == [0, 1, 2]
    for (_, chosen), senders in zip(found, tiny_result.GRAPHS, strict=True):
        assert [list(np.flatnonzero(row)) for row in chosen] == senders
    assert not experiments.graphs_of(folder, "Local")
    omega, last = [found[0][1]], [found[2][1]]
    assert experiments.shares(module("experiments").sparsity, omega, last) == "43.8 to 56.2"  # 9 and 7 of 16
    assert experiments.shares(lambda a: 1 - experiments.asymmetry(a)[0], omega, last) == "80.0 to 66.7"
    classes = pd.read_csv(folder / "graphs.csv").query("t == 0")["classes"].astype(str)
    assert list(classes) == ["0", "1", "0 1", "2"]


def written(tmp_path, accuracies, **columns):
    """Write the CSV files of one Run per row and seed, each with these clients' accuracies."""
    runs, clients = [], []
    for i, ((row, seed), values) in enumerate(accuracies.items()):
        runs.append({"run": str(i), "row": row, "seed": seed, "flags": "", "test_acc": np.nanmean(values)})
        clients += [{"run": str(i), "client": k, "test_acc": a} for k, a in enumerate(values)]
    pd.DataFrame(runs).to_csv(tmp_path / "runs.csv", index=False)
    pd.DataFrame(clients).to_csv(tmp_path / "clients.csv", index=False)
    return tmp_path


def cells(table):
    """Return the texts of a markdown table, line by line, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_ablation_by_hand(tmp_path):
    folder = written(
        tmp_path, {("DPFL (B_c = inf)", 42): [0.5, 0.7], ("DPFL (B_c = 0.1N), tau_init 1", 42): [0.4, 0.4]}
    )
    table = module("experiments").by_budget(folder, "tau_init", "tau_init", {1: tuple("abcd"), 10: tuple("efgh")})
    assert cells(table) == [
        ["1", "- [a]", "- [b]", "40.00 (1) [c]", "- [d]"],
        ["10", "60.00 (1) [e]", "- [f]", "- [g]", "- [h]"],
    ]


def test_random_graph_by_hand(tmp_path):
    rows = {("DPFL (B_c = inf)", 1): [0.5, 0.7], ("DPFL (B_c = inf)", 2): [0.6, 0.8], ("DPFL (B_c = 0.1N)", 1): [0, 0]}
    rows |= {("Random graph (B_c = inf)", 1): [0.4, 0.6], ("Random graph (B_c = inf)", 2): [0.4, 0.4]}
    rows |= {("Random graph (B_c = inf), redraw True", 1): [0.5, 0.6]}
    # differences of the partitions 10 and 30: mean 20, deviation 14.142, over sqrt(2) 10, t(1) = 12.7062
    # of the clients 0 and 10: mean 5, over sqrt(2) 5
    assert cells(module("experiments").random_graph(written(tmp_path, rows), "+4")) == [
        ["inf", "Random graph", "45.00 ± 7.07 (2)", "+20.00 ± 127.06 (2)", "+4"],
        ["inf", "Random graph, drawn anew each round", "55.00 (1)", "+5.00 ± 63.53 (1)", "+4"],
    ]


def test_first_and_last_graph_by_hand(tmp_path):
    """Two clients: both edges in Omega, none half way, one at the end; with themselves 4, 2 and 3 of 4 cells."""
    folder = written(tmp_path, {("DPFL (B_c = inf)", 42): [0.5, 0.7]})
    lines = [(0, 0, "1"), (0, 1, "0"), (4, 0, ""), (4, 1, ""), (9, 0, "1"), (9, 1, "")]
    graphs = pd.DataFrame(lines, columns=["t", "client", "collaborators"]).assign(run="0")
    graphs.to_csv(folder / "graphs.csv", index=False)
    expected = ["inf", "0.0 to 25.0", "-", "100.0 to 0.0", "100.0 to 0.0"]
    assert cells(module("experiments").graphs(folder)) == [expected]


def test_flips_are_found_by_the_names_of_their_runs():
    """The row that `collect` writes for each of the figure's Runs is one that the table looks for."""
    row_of, usual = module("collect").row_of, Run(dataset="cifar10").resolve()
    rows = [row_of(run.resolve(), usual) for run in label_flip_runs()]
    searching = "DPFL (B_c = inf), flip_share 0.4"
    assert rows == [f"{searching}, flipped_run_ggc False", searching]


def label_flip_runs():
    sys.path.insert(0, str(FOLDER.parent / "analysis"))
    try:
        return importlib.import_module("label_flip").RUNS
    finally:
        sys.path.pop(0)


def test_flips_by_hand(tmp_path):
    """Clients 2 and 3 are flipped: of the others' three edges one comes from them in Omega, and none at the end."""
    folder = written(
        tmp_path, {("DPFL (B_c = inf), flip_share 0.4, flipped_run_ggc False", 42): [0.5, 0.7, np.nan, np.nan]}
    )
    lines = [(0, 0, "1 2"), (0, 1, "0"), (0, 2, "3"), (0, 3, ""), (9, 0, "1"), (9, 1, ""), (9, 2, "0"), (9, 3, "")]
    graphs = pd.DataFrame(lines, columns=["t", "client", "collaborators"]).assign(run="0")
    graphs.to_csv(folder / "graphs.csv", index=False)
    expected = ["only train", "60.00 (1)", "33.3 %", "0.0 %", "66.7 %", "none in the end"]
    assert cells(module("experiments").flips(folder)) == [expected]


def test_the_example_by_hand(tmp_path):
    """Only client 1 counts, over the seeds."""
    both = "Random graph (B_c = inf)"
    rows = {("Local", 1): [0.5, 0.9], ("Local", 2): [0.6, 0.9], (both, 1): [0.6, 0.1], (both, 2): [0.66, 0.1]}
    assert cells(module("experiments").example(written(tmp_path, rows))) == [
        ["alone", "55.00 ± 7.07 (2)", "-", "-"],
        ["with 2 and 3", "63.00 ± 4.24 (2)", "+8.0 ± 25.4", "about +6"],
    ]


def test_the_page_is_what_the_files_say():
    """Its tables hold the numbers of the CSV files, and every row's mean is that of its clients."""
    draw, read = module("draw"), module("stored").read
    page = (FOLDER / "README.md").read_text()
    assert draw.filled(page, draw.blocks()) == page
    front = (FOLDER.parent / "README.md").read_text()
    assert draw.filled(front, draw.front()) == front
    for path in FOLDER.glob("*/runs.csv"):
        runs, clients = read(path.parent, "runs"), read(path.parent, "clients")
        assert sorted(runs["run"]) == sorted(set(clients["run"])) == sorted(set(read(path.parent, "curves")["run"]))
        means = clients.groupby("run")["test_acc"].mean()
        np.testing.assert_allclose(runs.set_index("run")["test_acc"], means[runs["run"]], rtol=1e-12)


def test_the_findings_are_what_the_files_say():
    """Tables of docs/findings.md hold the numbers of the CSV files; its differences are recomputed from each client's accuracy."""
    draw = module("draw_controls")
    page = draw.PAGE.read_text()
    assert draw.filled(page, draw.blocks()) == page
    clients = pd.read_csv(draw.FOLDER / "clients.csv").merge(pd.read_csv(draw.FOLDER / "runs.csv"), on="run")
    accuracy = clients[clients["rounds"] >= 20].groupby(["row", "seed", "client"])["test_acc_x"].mean()
    means = 100 * (accuracy["DPFL"] - accuracy["Local"]).groupby("seed").mean()
    half = {2: 12.7062, 3: 4.30265}[len(means)] * means.std() / len(means) ** 0.5
    [line] = [line for line in page.splitlines() if line.startswith("| Local ")][:1]
    assert f"{means.mean():+.2f} ± {half:.2f} ({len(means)})" in line


def test_what_a_seed_alone_changes_is_what_the_files_say():
    """DPFL under two seeds on the same 100 clients, t(99) = 1.98422; both pages and the distance of the oracle quote it."""
    draw = module("draw_controls")
    clients = pd.read_csv(draw.FOLDER / "clients.csv").merge(pd.read_csv(draw.FOLDER / "runs.csv"), on="run")
    accuracy = clients[clients["rounds"] >= 20].set_index(["row", "seed", "client"]).sort_index()["test_acc_x"]
    again, page = accuracy["DPFL, same clients", 32], draw.PAGE.read_text()
    for one, other in ((again, accuracy["DPFL", 42]), (accuracy["Oracle", 42], again)):
        points = 100 * (one - other)
        assert len(points) == 100
        text = f"{points.mean():.2f} ± {1.98422 * points.std() / 10:.2f}"
        assert text in page
        assert text in (FOLDER / "README.md").read_text() or other is again


def test_the_findings_on_the_greedy_search_are_what_the_file_says():
    draw = module("draw_controls")
    page, rows = draw.PAGE.read_text(), pd.read_csv(draw.FOLDER / "optimality.csv")
    best, greedy = rows[rows["order"] == -1].set_index("client_id"), rows[rows["order"] >= 0]
    size = greedy["collaborators"].fillna("").str.split().str.len().mean()
    assert f"| the best subset of at most 3 | {-best['reward'].mean():.4f} | 0.0 |" in page
    assert best["collaborators"].isna().all() and f"| nobody | {-best['reward'].mean():.4f} | 0 |" in page
    assert f"| Algorithm 2, mean over orders | {-greedy['reward'].mean():.4f} | {size:.1f} |" in page
    assert f"found that out in {100 * (greedy['gap'] < 1e-12).mean():.1f} % of the orders" in page
    better = best["test_acc"] - greedy.groupby("client_id")["test_acc"].mean()
    half = 2.20099 * better.std() / len(better) ** 0.5  # t(11)
    assert f"by {100 * better.mean():.1f} ± {100 * half:.1f} points" in page


def test_what_the_pages_say_of_two_rows_is_what_the_files_say():
    """Every "x ± y" outside the tables is in a table, or a difference of two rows: over partitions, or over the clients within them.

    Which, and its sign, the words around it say; these are the reader's to check. A sentence that the latest Runs made wrong fails here.
    """
    pages = [FOLDER / "README.md", FOLDER.parent / "README.md", FOLDER.parent / "docs" / "findings.md"]
    table = re.compile(r"<!-- (\S.*?) -->.*?<!-- /\1 -->", re.DOTALL)
    pair = re.compile(r"(\d+\.\d+)(?:, noise)?\s±\s(\d+\.\d+)")
    known = {
        (float(x), float(y))
        for page in pages
        for part in table.finditer(page.read_text())
        for x, y in pair.findall(part[0])
    }
    known |= set(differences())
    rounded = {f"{x:.{digits}f} ± {y:.{digits}f}" for x, y in known for digits in (1, 2)}
    held_above = {"1.41 ± 0.98", "0.54 ± 1.08", "15.1 ± 4.5"}  # what a seed alone changes, and the greedy search
    for page in pages:
        said = {f"{x} ± {y}" for x, y in pair.findall(table.sub("", page.read_text()))}
        assert said - rounded <= held_above, page.name


def differences():
    """Yield (size, half width of the 95 % interval) of the difference of any two rows, and of the example's first client."""
    stored, lines = module("stored"), module("control_lines")
    folders = [path.parent for path in FOLDER.glob("*/runs.csv") if path.parent != lines.FOLDER]
    each = [stored.read(folder, "clients") for folder in folders] + [lines.only_long(lines.read("clients"))]
    first = each[folders.index(FOLDER / "cifar-10-motivation")].query("client == 0")
    for clients in [*each, first.assign(client=first["seed"], seed=0)]:  # over seeds, as if each were a client
        for a, b in itertools.combinations(sorted(set(clients["row"])), 2):
            parts = stored.paired(clients, a, b)
            if stored.comparable(parts):
                mean, half = stored.interval(parts)
                yield abs(mean), half
                yield abs(mean), stored.over_clients(parts)


def test_newcomers_and_lies_by_hand(monkeypatch):
    draw = module("draw_controls")
    runs = pd.DataFrame({"run": ["a", "b"], "row": ["DPFL, newcomers 0.1", "DPFL, attack noise:0.2"], "seed": 42, "rounds": 6, "test_acc": [0.8, 0.75]})  # fmt: skip
    runs = runs.assign(newcomers_0=[0.1, np.nan], newcomers_1=[0.5, np.nan], newcomers_5=[0.625, np.nan])
    runs = runs.assign(newcomers_0_half=0.01, newcomers_1_half=0.02, newcomers_5_half=0.03)
    runs = runs.assign(liars_chosen=[np.nan, 0.125], backdoor=np.nan, backdoor_unmarked=np.nan)
    clients = pd.DataFrame({"run": ["b", "b"], "client": [0, 1], "test_acc": [0.7, 0.8], "val_acc": [0.75, 0.8]})
    frames = {"runs": runs, "clients": clients.merge(runs[["run", "row", "seed", "rounds"]], on="run")}
    monkeypatch.setattr(draw, "read", frames.__getitem__)
    later = [("a", 0, 0.6), ("a", 1, 0.65), ("c", 0, 0.7), ("c", 1, 0.85)]
    frames["newcomers"] = pd.DataFrame(later, columns=["run", "client", "test_acc"]).assign(epochs=5)
    frames["newcomers"]["row"] = frames["newcomers"]["run"].map(
        {"a": "DPFL, newcomers 0.1", "c": "Local, newcomers 0.1"}
    )
    frames["runs"].loc[2] = runs.loc[0].replace({"a": "c", "DPFL, newcomers 0.1": "Local, newcomers 0.1"})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in draw.came_later().splitlines()[-2:]]
    # differences of the two newcomers -10 and -20: mean -15, deviation 7.0711, over sqrt(2) 5, t(1) = 12.7062
    assert cells[0] == ["DPFL", "80.00", "10.0 ± 1.0", "50.0 ± 2.0", "62.5 ± 3.0", "-"]
    assert cells[1] == ["Local", "80.00", "10.0 ± 1.0", "50.0 ± 2.0", "62.5 ± 3.0", "-15.00 ± 63.53 (1)"]
    cells = [cell.strip() for cell in draw.attacks().splitlines()[-1].strip("|").split("|")]
    assert cells == ["DPFL", "noise", "75.00", "-", "12.5", "-"]
    [gap] = draw.gaps(frames["clients"], "DPFL, attack noise:0.2")
    np.testing.assert_allclose(gap, [5, 0], atol=1e-12)


def test_runs_made_anew_replace_the_old_ones_and_other_data_is_refused(tmp_path):
    """The same row, seed and length under another name: of all its files the old lines go; those of others stay."""
    write = module("collect").write

    def lines(run, row, seed, data="a"):
        runs = pd.DataFrame([{"run": run, "row": row, "seed": seed, "epochs": 500, "data_sha256": data}])
        return {"runs": [runs], "clients": [pd.DataFrame({"run": run, "client": [0, 1], "test_acc": seed / 100})]}

    for args in (("00000001", "DPFL", 42), ("00000002", "DPFL", 52), ("00000003", "DPFL", 42)):
        write(tmp_path, lines(*args))
    for name, each in (("runs", 1), ("clients", 2)):
        frame = pd.read_csv(tmp_path / f"{name}.csv", dtype={"run": str})
        assert sorted(frame["run"]) == ["00000002"] * each + ["00000003"] * each
    with pytest.raises(SystemExit, match="holds Runs on other data"):
        write(tmp_path, lines("00000004", "Local", 42, "b"))
    assert len(pd.read_csv(tmp_path / "runs.csv")) == 2


def test_what_decides_by_hand(tmp_path):
    """One partition decides nothing; several do where 0 is outside both intervals, over partitions and over clients."""
    one = {("DPFL (B_c = inf)", 1): [0.5, 0.504], ("FedAvg+FT", 1): [0.3, 0.3], ("Local", 1): [0.1, 0.1]}
    # differences 20 and 20.4: deviation 0.28284, over sqrt(2) 0.2, t(1) = 12.7062
    assert claim(tmp_path, one) == ["+20.20 ± 2.54 (1)", "± 2.54", "-", "not decided"]
    # partition means 20.2 and 22.2: 2 / sqrt(2) / sqrt(2) * t(1); over clients sqrt(0.2**2 + 0) / 2 * t(2) = 0.1 * 4.30265
    two = one | {("DPFL (B_c = inf)", 2): [0.522, 0.522], ("FedAvg+FT", 2): [0.3, 0.3]}
    assert claim(tmp_path, two) == ["+21.20 ± 12.71 (2)", "± 0.43", "-", "holds"]
    # partitions of one mean, whose clients lie far apart: (-10, 50) and (20, 20): sqrt(30**2) / 2 * t(2)
    apart = {
        ("DPFL (B_c = inf)", 1): [0.2, 0.8],
        ("FedAvg+FT", 1): [0.3, 0.3],
        ("DPFL (B_c = inf)", 2): [0.5, 0.5],
        ("FedAvg+FT", 2): [0.3, 0.3],
    }
    assert claim(tmp_path, apart) == ["+20.00 ± 0.00 (2)", "± 64.54", "-", "not decided"]


def claim(tmp_path, rows):
    """Return what the table of the paper's order says of DPFL and FedAvg+FT."""
    lines = cells(module("table_1").order("nowhere", written(tmp_path, rows)))
    return next(line[1:] for line in lines if line[0].startswith("DPFL"))


def test_a_table_without_a_place_is_a_mistake():
    with pytest.raises(SystemExit, match="no place for the table 'x'"):
        module("draw").filled("nothing", {"x": ""})
