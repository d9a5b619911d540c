"""Figures and tables on their numbers, worked out by hand for `tiny_result`; every file of analysis/ runs without torch and MPI."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import tiny_result
from launch import ROOT, run_here
from tiny_result import draw, module

from dpfl_mpi import api
from dpfl_mpi.errors import NO_READER, UserError
from dpfl_mpi.methods import Method
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import outcome, summary
from dpfl_mpi.settings import Run

pytest.importorskip("matplotlib")
pd = pytest.importorskip("pandas")

from dpfl_mpi.figures import command, names, paper, style, tables  # noqa: E402
from dpfl_mpi.figures.frames import of_results  # noqa: E402

ANALYSIS = ROOT / "analysis"
FILES = sorted(p.stem for p in ANALYSIS.glob("*.py"))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The paths of tiny results: dpfl and local for two seeds, and one each for the flip and the motivation."""
    folder = tmp_path_factory.mktemp("tiny")
    out = {(m, s): tiny_result.make(folder / f"{m}{s}.h5", m, s) for m in ("dpfl", "local") for s in (42, 52)}
    out["flip"] = tiny_result.make(folder / "flip.h5", flipped=[False, True, False, True])
    out["random"] = tiny_result.make(folder / "random.h5", budget=2)
    out["unsearched"] = tiny_result.make(folder / "unsearched.h5", "random_graph", best=(0.5, 0.5, 0.5, 0.5))
    three = {"clients": 3, "partition": "motivation"}
    both = [[[1, 2], [0, 2], [0, 1]]] * 3
    out["alone"] = tiny_result.make(folder / "alone.h5", "local", best=(0.5, 0.9, 0.9), **three)
    pair = {"graphs": [[[1], [0], []]] * 3, "reach": "groups:0,1;2"}
    out["pair"] = tiny_result.make(folder / "pair.h5", "random_graph", best=(0.4, 0.9, 0.9), **pair, **three)
    out["all"] = tiny_result.make(folder / "all.h5", "random_graph", best=(0.7, 0.9, 0.9), graphs=both, **three)
    return out


def open_all(made, *names):
    return [Result(made[n]) for n in names]


def four(made):
    return open_all(made, ("dpfl", 42), ("dpfl", 52), ("local", 42), ("local", 52))


def test_every_figure_is_a_command():
    """Its RUNS are what `python -m dpfl_mpi.sweep analysis/NAME.py` computes."""
    for name in FILES:
        runs = runpy.run_path(str(ANALYSIS / f"{name}.py"))["RUNS"]
        assert runs == module(name).RUNS and all(isinstance(run, Run) for run in runs) and module(name).__doc__


BLOCK = """
import importlib.abc, runpy, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "mpi4py", "sklearn"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
for file, *arguments in eval(sys.argv[1]):
    sys.argv = [file, *arguments]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def test_every_file_runs_with_neither_torch_nor_mpi(made, tmp_path):
    usual = [str(result.path) for result in four(made)]
    special = {"label_flip": [str(made["flip"])], "motivation": [str(made["alone"])]}
    drawn = [name for name in FILES if name != "report" or importlib.util.find_spec("plotly")]
    calls = [[str(ANALYSIS / f"{n}.py"), *special.get(n, usual), "--out", str(tmp_path)] for n in drawn]
    words = [sys.executable, "-W", "error", "-c", BLOCK, repr(calls)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    for call in calls:
        name = Path(call[0]).stem
        kind = "report" if name == "report" else "table" if name.endswith("table") else "figure"
        endings = {"report": {"csv", "html"}, "table": {"csv", "md", "tex"}, "figure": {"csv", "pdf", "png"}}[kind]
        assert {p.suffix[1:] for p in tmp_path.glob(f"{name}.*")} == endings
        assert all(str(p) in done.stdout for p in tmp_path.glob(f"{name}.*"))


def test_a_missing_run_is_named_with_its_command_and_the_rest_is_drawn(made, tmp_path, monkeypatch, capsys):
    results = tmp_path / "results"
    small = {"clients": 4, "classes_per_client": 3, "rounds": 2, "budget": 3}
    runs = [Run(**small), Run(**small, seed=7), Run(dataset="nothing")]
    tiny_result.make(runs[0].path(results))
    found, missing = command.gather(runs, results)
    assert [r.path for r in found] == [runs[0].path(results)]
    flags = f"--classes_per_client=3 --clients=4 --rounds=2 --budget=3 --seed=7 --results={results}"
    assert missing[0] == f"missing: mpirun -n 8 python -m dpfl_mpi {flags}"
    gone = "not available here: mpirun -n 8 python -m dpfl_mpi --dataset=nothing (--dataset is nothing"
    assert missing[1].startswith(gone)
    monkeypatch.setattr(sys, "argv", ["sparsity", "--results", str(results), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        command.main("sparsity", "", runs, module("sparsity").draw)
    assert end.value.code == 0
    said = capsys.readouterr()
    assert missing[0] in said.err and str(tmp_path / "out" / "sparsity.pdf") in said.out


def test_runs_whose_data_are_not_there_are_counted_by_file(tmp_path, monkeypatch, capsys):
    """One of the usual place, one that is named: nobody can compute them here, so no command is offered. Few are still named each."""
    monkeypatch.chdir(tmp_path)
    named = {"dataset": "femnist", "data": "data/ten.h5", "partition": "fedrep"}
    runs = [Run(dataset="cifar10", seed=s) for s in range(6)] + [Run(**named, seed=s) for s in range(7)]
    made = "there is no such file: make it with `python -m dpfl_mpi.prepare"
    why = f"(--data is data/cifar10.h5; {made} cifar10 --out data/cifar10.h5`)"
    counted = [
        f"not available here: 6 of 13 Runs {why}",
        f"not available here: 7 of 13 Runs (--data is data/ten.h5; {made} femnist --source PATH --out data/ten.h5`)",
    ]
    assert command.gather(runs, "results") == ([], counted)
    few = [f"not available here: {command.command(run)} {why}" for run in runs[1:6]]
    assert command.gather(runs[1:6], "results") == ([], few)
    monkeypatch.setattr(sys, "argv", ["sparsity"])
    with pytest.raises(SystemExit) as end:
        command.main("sparsity", "", runs, module("sparsity").draw)
    nothing = "error: there is nothing to draw: no result of this figure has a recorded round yet"
    assert end.value.code == 2 and capsys.readouterr().err.splitlines() == [*counted, nothing]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar10.h5").touch()  # there it is computed
    assert command.gather(runs[:2], "results")[1] == [f"missing: {command.command(run)}" for run in runs[:2]]


def test_a_reader_that_has_left_ends_a_figure_without_a_word(made, tmp_path):
    read, write = os.pipe()
    os.close(read)  # `| head -1`, once it has its line
    words = [sys.executable, str(ANALYSIS / "accuracy_table.py"), str(made["dpfl", 42])]
    done = subprocess.run(words, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (NO_READER, b"") and (tmp_path / "figures/accuracy_table.csv").is_file()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nothing.h5"], "error: nothing.h5: there is no such result file"),
        ([], "error: there is nothing to draw"),
        (["FILE", "--out", "FILE"], "where nothing can be written"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_code(made, tmp_path, arguments, sentence):
    file = str(made["dpfl", 42])
    done = subprocess.run(
        [sys.executable, str(ANALYSIS / "sparsity.py"), *(file if a == "FILE" else a for a in arguments)],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


WITHOUT = """
import runpy, sys
sys.modules[sys.argv[1]] = None
name, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_path(name, run_name="__main__")
"""


@pytest.mark.parametrize("library, file", [("matplotlib", "graph_evolution"), ("networkx", "report")])
def test_a_missing_library_is_one_sentence(tmp_path, library, file):
    words = [sys.executable, "-c", WITHOUT, library, str(ANALYSIS / f"{file}.py"), "x.h5"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: the figures need {library}: pip install {library}\n"


def test_rounds_and_budgets_of_the_graph_figure(made):
    evolution = module("graph_evolution")
    [result] = open_all(made, ("dpfl", 42))
    assert evolution.rounds_to_show(0, 2, None, several=False) == [0, 1, 2]
    assert evolution.rounds_to_show(0, 2, evolution.round_list("0,last"), several=False) == [0, 2]
    with pytest.raises(UserError, match=r"--rounds has 3, but .* has graphs of rounds 0 to 2"):
        draw("graph_evolution", [result], rounds=[3])
    with pytest.raises(UserError, match="--budgets is 5; none of the results has one of these"):
        draw("graph_evolution", [result], budgets="5")
    drawing = draw("graph_evolution", open_all(made, ("dpfl", 42), "random"), budgets="3,2")
    assert list(dict.fromkeys(drawing.data["budget"])) == ["3", "2"]


def test_the_graph_figure_shows_the_matrix_in_class_order(made):
    [result] = open_all(made, ("dpfl", 42))
    # by most frequent class, then the second: client 0 (class 0 alone), 2 (class 0, then 1), 1, 3
    expected = [
        [3, 2, 1, 0],  # client 0 took 2; 1 is in Omega
        [2, 3, 0, 1],  # client 2 took 0; 3 is in Omega
        [1, 0, 3, 0],  # client 1 took nobody; 0 is in Omega
        [0, 0, 0, 3],
    ]
    figure = draw("graph_evolution", [result]).figure
    shown = [a.images[0].get_array() for a in figure.axes if a.images]
    assert len(shown) == 3 and np.asarray(shown[1]).tolist() == expected
    assert [a.get_title() for a in figure.axes][1] == "round 1\nsparsity 62.5 %"


BY_HAND = {  # figure: results, columns of its numbers in their order, parts of its text
    "graph_evolution": (
        [("dpfl", 42)],
        {
            **{"edges": [5, 2, 3], "sparsity": [1 - 9 / 16, 1 - 6 / 16, 1 - 7 / 16]},
            **{"one_way_edges": [1 / 5, 0, 1 / 3], "one_way_pairs": [1 / 6, 0, 1 / 6]},
            # clients 0 and 2, and 1 and 2, share one
            **{"edges_sharing_a_class": [2 / 5, 1, 2 / 3], "pairs_sharing_a_class": [4 / 12] * 3},
        },
        [],
    ),
    # two seeds, the same graphs: the band is empty
    "sparsity": ([("dpfl", 42), ("dpfl", 52)], {"value": [0.4375, 0.625, 0.5625], "std": [0] * 3, "n": [2] * 3}, []),
    "asymmetry": ([("dpfl", 42)], {"value": [1 / 5, 0, 1 / 3, 1 / 6, 0, 1 / 6]}, []),
    "greedy_cases": (
        [("dpfl", 42)],
        {"candidates": [12, 5, 5], "a > 0, b > 0: coin": [1 / 12, 0, 0]},
        ["coin 4.55 % of 22 candidates"],
    ),
    "random_graph": ([("dpfl", 42), ("dpfl", 52)], {"accuracy": [52.5, 62.5, 72.5], "std": [5 / 2**0.5] * 3}, []),
    "learning_curves": (
        [("local", 42)],
        {"epochs": [10, 15, 20] * 2, "mean": [45, 55, 65, 0.5, 0.4, 0.3]},
        ["Local: 65.00 % after 20 epochs (round 2)"],
    ),
    # a (1 - a) / 4 with 5 test samples: seed 42 (.16 + .24 + 0 + .24) / 16, seed 52 (.09 + .21 + .09 + .25) / 16
    "variance": (
        [("dpfl", 42), ("dpfl", 52)],
        {"accuracy": [72.5], "variance": [387.5], "sampling_variance": [400], "sampling_share": [400 / 387.5]},
        [],
    ),
    "traffic_and_time": (
        [("dpfl", 42)],
        {
            **{"received_mean": [2.5, 0.5, 0.75], "received_most": [4, 1, 2], "budget_others": [2] * 3},
            **{"mpi_rma_mib": [1, 2, 3], "mpi_collective_mib": [0.5] * 3},
            "seconds_graph": [4, 4, 4],  # the slowest rank
        },
        [
            "0.62 models received per client and round (budget 2 others), 2.5 before round 1; ",
            "2.5 before round 1; MPI 3.00 MiB per round, 1.50 before",
        ],
    ),
}


@pytest.mark.parametrize("figure", BY_HAND)
def test_figures_by_hand(made, figure):
    of, columns, texts = BY_HAND[figure]
    drawing = draw(figure, open_all(made, *of))
    for name, values in columns.items():
        assert drawing.data[name].tolist() == pytest.approx(values), name
    assert [text for text in texts if text not in drawing.text] == []


def test_the_accuracy_table_by_hand(made):
    drawing = draw("accuracy_table", four(made))
    dpfl, local = (drawing.data.set_index("method").loc[m] for m in ("DPFL (B_c = 0.75N)", "Local"))
    assert dpfl["mean"] == pytest.approx(72.5) and dpfl["std"] == pytest.approx(5 / 2**0.5) and dpfl["n"] == 2
    assert local["mean"] == pytest.approx(65) and local["std"] == pytest.approx(0)
    # client by client: 20 0 20 -20 and 30 10 10 -10; partition means 5 and 10, of which t(1) = 12.706
    assert dpfl["vs_local"] == pytest.approx(7.5)
    assert dpfl["vs_local_half_interval"] == pytest.approx(12.7062 * 2.5)
    assert dpfl["below_local_percent"] == pytest.approx(25)
    assert dpfl["worst_decile"] == pytest.approx(45)  # of four clients the lowest: 40 and 50
    assert dpfl["client_std"] == pytest.approx((500**0.5 + 275**0.5) / 2)
    assert dpfl["bold"] and local["bold"]  # 7.5 +- 14: the best does not beat Local
    lines = drawing.text.splitlines()
    assert lines[0].split() == ["|", "method", "|", "Digits", "Patho(3)", "|"]
    assert lines[2].split() == ["|", "Local", "|", "**65.00", "±", "0.00", "(2)**", "|"]
    assert len({len(line) for line in lines[:4]}) == 1  # legible as it is
    assert r"DPFL ($B_c = 0.75N$) & \textbf{72.50 $\pm$ 3.54 (2)} \\" in drawing.latex


def test_a_method_the_best_beats_is_not_bold(made, tmp_path):
    better = Result(tiny_result.make(tmp_path / "better.h5", best=(0.7, 0.7, 0.9, 0.71)))  # 10 10 10 11 above Local
    [local, other] = open_all(made, ("local", 42), ("local", 52))
    lines, rows = of_results([better, local])["clients"], ["DPFL (B_c = 0.75N)", "Local"]
    assert tables.unbeaten(lines, rows) == [True, False]
    [difference] = tables.paired(lines, *rows)
    assert difference.tolist() == pytest.approx([10, 10, 10, 11])
    lines = of_results([better, other])["clients"]  # another partition: nothing to compare client by client
    assert tables.paired(lines, *rows) == [] and not tables.comparable([])


def test_the_paper_beside_ours():
    assert paper.table_1("CIFAR-10 Patho(3)", "DPFL (B_c = inf)") == ("83.04", "0.98")
    assert paper.table_1("FEMNIST fedrep", "Local") == ("87.27", "0.27")
    assert paper.table_1("Digits Patho(3)", "Local") is None
    assert all(len(row.split()) == 10 for row in paper.TABLE_1.values())
    assert paper.by_budget(paper.PERIOD[5]) == {
        **{"inf": "83.83", "0.2N": "84.01", "0.1N": "83.31", "0.05N": "83.73"},
        **{"20": "84.01", "10": "83.31", "5": "83.73"},
    }


def test_the_paper_stands_beside_runs_of_its_size_alone(made, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "COLUMNS", ("Digits Patho(3)",))
    results = [Result(tiny_result.make(tmp_path / "inf.h5", budget="inf")), *open_all(made, ("local", 42))]

    def beside():
        frames = of_results(results)
        table = module("tau_init_table").table(frames, "tau_init", "tau_init", paper.TAU_INIT, "Digits Patho(3)")
        return {*module("accuracy_table").measure(frames)["paper"], *table.data["paper"]}

    assert beside() == {""}  # of 4 clients, where the paper's are of 100
    monkeypatch.setattr(paper, "CLIENTS", 4)
    assert beside() == {"80.38 ± 1.62", "84.39 ± 0.43", "83.04"}


def test_runs_whose_files_have_one_name_and_another_content_are_told_apart(tmp_path):
    """Two budgets of one file that was edited in between: two rows, two cells, in the tables that have a row or a column per budget."""
    results, file = [], tmp_path / "b.txt"
    for i, budgets in enumerate(("1 2 3 4", "2 2 2 2")):
        file.write_text(budgets)
        results.append(Result(tiny_result.make(tmp_path / f"{i}.h5", budget=str(file), best=(0.1 * i + 0.5,) * 4)))
    marks = [r.run.contents["budget"][:6] for r in results]
    rows = of_results(results).rows["row"]
    assert [f"budget {file} [{mark}]" in row for mark, row in zip(marks, rows, strict=True)] == [True, True]
    for name in ("accuracy_table", "tau_init_table"):
        text = draw(name, results).text
        assert "50.00 (1)" in text and "60.00 (1)" in text


def test_what_nobody_was_scored_for_is_not_the_best(tmp_path):
    """All clients of one Run diverged: its cell is a dash, and the other Run is what nothing beats."""
    gone = Result(tiny_result.make(tmp_path / "gone.h5", best=[np.nan] * 4))
    local = Result(tiny_result.make(tmp_path / "local.h5", "local"))
    lines, rows = of_results([gone, local])["clients"], ["DPFL (B_c = 0.75N)", "Local"]
    assert tables.unbeaten(lines, rows) == [False, True] and tables.unbeaten(lines, rows[:1]) == [False]
    assert tables.cell(tables.means(lines, rows[0])) == "- (1)"
    text = draw("accuracy_table", [gone, local]).text
    assert "nan" not in text and "**65.00 (1)**" in text


def test_repetitions_of_a_run_count_once_and_variants_are_told_apart(made, tmp_path):
    results = open_all(made, ("dpfl", 42), ("dpfl", 42), ("dpfl", 52))
    assert len(of_results(results).runs) == 2 and len(of_results(results).rows) == 1
    other = Result(tiny_result.make(tmp_path / "other.h5", tau_init=1))
    rows = of_results([results[0], other]).rows["row"]
    assert list(rows) == ["DPFL (B_c = 0.75N), tau_init 10", "DPFL (B_c = 0.75N), tau_init 1"]
    for run, field, said in (
        (Run(method="ditto", options={"lam": 0.5}), "options", "lam 0.5"),
        (Run(method="replay", graphs="results/a.h5"), "graphs", "of a"),
    ):
        assert names.value_of(SimpleNamespace(run=run), field) == said


def test_tables_by_budget(made, tmp_path):
    one = Result(tiny_result.make(tmp_path / "one.h5", tau_init=1, best=(0.5, 0.5, 0.5, 0.5)))
    drawing = draw("tau_init_table", [*four(made), one])
    assert drawing.data.set_index("tau_init")["mean"].to_dict() == pytest.approx({1: 50.0, 10: 72.5})
    assert drawing.text.splitlines()[0].split() == ["|", "tau_init", "|", "B_c", "=", "3", "|"]
    drawing = draw("ggc_period_table", [Result(tiny_result.make(tmp_path / "p.h5", ggc_period=5))], paper=True)
    assert drawing.data.to_dict("records")[0]["ggc_period"] == 5


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Runs of one method, budget and seed that are no repetitions, two of them on other data or with other settings."""
    folder = tmp_path_factory.mktemp("unlike")
    paths = [
        tiny_result.make(folder / "a.h5"),
        tiny_result.make(folder / "b.h5", tau_train=3),
        tiny_result.make(folder / "c.h5", tau_train=3, tau_init=1, best=(0.5, 0.5, 0.5, 0.5)),
        tiny_result.make(folder / "d.h5", batch_size=7),
    ]
    return [Result(p) for p in paths]


def test_a_cell_of_a_table_is_of_like_runs(unlike):
    drawing = draw("tau_init_table", unlike)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in drawing.text.splitlines() if line[:1] == "|"]
    assert rows[0] == ["tau_init", "B_c = 3"]
    size = unlike[0].run.batch_size
    assert [row[0] for row in rows[2:]] == [
        f"1, tau_train 3, batch_size {size}",
        f"10, tau_train 3, batch_size {size}",
        f"10, tau_train 5, batch_size {size}",
        "10, tau_train 5, batch_size 7",
    ]
    assert [row[1].strip("*") for row in rows[2:]] == ["50.00 (1)", "70.00 (1)", "70.00 (1)", "70.00 (1)"]
    drawing = draw("ggc_period_table", unlike)
    assert drawing.data["n"].tolist() == [1] * 4 and drawing.data["variant"].nunique() == 4


def test_curves_and_panels_say_in_what_they_differ(unlike, made):
    size = unlike[0].run.batch_size
    said = [
        f"tau_init 10, tau_train 5, batch_size {size}",
        f"tau_init 10, tau_train 3, batch_size {size}",
        f"tau_init 1, tau_train 3, batch_size {size}",
        "tau_init 10, tau_train 5, batch_size 7",
    ]
    said = [f"DPFL ($B_c = 0.75N$), {row}" for row in said]
    axes = draw("sparsity", unlike).figure.axes[0]
    assert [line.get_label() for line in axes.lines] == said
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 4
    figure = draw("greedy_cases", unlike).figure
    assert [" ".join(a.get_title().split("\n")[:-1]) for a in figure.axes] == said
    figure = draw("graph_evolution", unlike).figure
    assert sorted(t for a in figure.axes if (t := a.get_ylabel().replace("\n", " "))) == sorted(said)
    axes = draw("random_graph", unlike).figure.axes[0]
    assert [line.get_label() for line in axes.lines] == said
    # one seed more: its panel is told apart by the seed alone
    two = draw("greedy_cases", open_all(made, ("dpfl", 42), ("dpfl", 52))).figure
    assert [a.get_title().split("\n")[0] for a in two.axes] == [f"DPFL ($B_c = 0.75N$), seed {s}" for s in (42, 52)]


def test_dpfl_is_compared_with_the_random_graph_of_the_same_settings(unlike, made):
    drawing = draw("random_graph", [*unlike[:3], Result(made["unsearched"])])
    [with_random] = [line.split("|") for line in drawing.text.splitlines() if "Random graph" in line]
    assert [cell.strip() for cell in with_random[2:4]] == ["DPFL (B_c = 0.75N), tau_init 10, tau_train 5", "70.00 (1)"]


def test_a_method_has_one_colour_in_every_figure(made):
    """That of its file; one of one's own, without a colour, has another: hashed from its name."""
    colours = {m: style.look(find("method", m)) for m in shipped("method")}
    assert colours["dpfl"] == ("#0072B2", "-", "X") and len({look[:2] for look in colours.values()}) == len(colours)
    mine = {style.look(Method(title=f"mine{i}"))[:2] for i in range(100)}
    assert len(mine) > 9 and not mine & {look[:2] for look in colours.values() if look[1] == "-"}
    assert style.look(Method(title="x", colour="red; drop")) == style.look(Method(title="x"))  # of a result's file
    results = four(made)
    curves = draw("learning_curves", results).figure.axes[0].lines
    drawn = {line.get_label().split(" ")[0]: line.get_color().upper() for line in curves}
    assert drawn == {"DPFL": colours["dpfl"][0], "Local": colours["local"][0]}
    points = draw("variance", results).figure.axes[0].lines
    assert {line.get_color().upper() for line in points} == set(drawn.values())
    for name in ("pareto", "omega"):  # a DPFL curve and, where there is one without a graph, Local's
        lines = draw(name, results).figure.axes[0].lines
        assert {line.get_color().upper() for line in lines} - set(drawn.values()) == set()
        assert drawn["DPFL"] in {line.get_color().upper() for line in lines}


def test_a_legend_stays_in_the_picture(unlike, made, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    many = [Result(tiny_result.make(tmp_path / f"{t}.h5", tau_init=t)) for t in range(1, 12)]
    for name in ("sparsity", "asymmetry", "random_graph", "learning_curves", "variance", "greedy_cases"):
        with matplotlib.rc_context(style.STYLE):
            figure = draw(name, [*unlike, *many]).figure
            figure.draw_without_rendering()
        (box,) = [drawn.get_window_extent() for drawn in figure.legends]
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, name


def test_a_figure_with_a_panel_for_each_draws_twelve_at_most(tmp_path):
    """Thirteen Runs of two seeds: a seed of the first twelve, in the figure and in its numbers, and a sentence about the rest."""
    results = [Result(tiny_result.make(tmp_path / f"{t}-{s}.h5", seed=s, tau_init=t)) for t in range(1, 14) for s in (42, 52)]  # fmt: skip
    for name in ("graph_evolution", "greedy_cases"):
        drawing = draw(name, results)
        assert drawing.data["run"].nunique() == 12 and len({r.rpartition("-")[0] for r in drawing.data["run"]}) == 12
        assert drawing.text.startswith("12 of 26 results are drawn, a seed of each Run")
    assert draw("graph_evolution", results[:12]).data["seed"].nunique() == 2  # so many have room for all


def test_label_flip(made):
    flip = module("label_flip")
    [result] = open_all(made, "flip")  # clients 1 and 3 are flipped; 0 takes {1, 2} and 2 takes {0} in round 2
    assert flip.shares(result.graph(2), flip.flipped(result)).tolist() == [0.5, 0]
    drawing = draw("label_flip", [result])
    assert drawing.data["edge_share_from_flipped"].tolist() == pytest.approx([2 / 4, 0, 1 / 3])
    for said in ("25.0 % of their collaborators from flipped ones in round 2", "by chance 66.7 %"):
        assert said in drawing.text


def test_clients_with_flipped_labels_are_in_no_average(made):
    [result] = open_all(made, "flip")  # .8 and 1.0 are benign, .6 and .4 flipped
    row = draw("accuracy_table", [result]).data.iloc[0]
    assert row[["mean", "worst_decile", "last_round"]].tolist() == pytest.approx([90, 80, 90])
    assert result.mean("round/test_acc").tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_fine_tuned_runs_end_with_their_last_round(made, tmp_path):
    path = tiny_result.make(tmp_path / "tuned.h5")
    with tiny_result.changing(path) as file:
        file.attrs["rounds_done"] = 12  # tuning counts on after round 2
    assert Result(path).last_round == 2
    assert draw("graph_evolution", [Result(path)]).data["round"].tolist() == [0, 1, 2]


def test_repetitions_on_one_partition_are_paired_by_seed(tmp_path):
    def group(method, *clients):
        """One result per seed, all on the partition of seed 42."""
        paths = []
        for seed, best in zip((42, 52, 62), clients, strict=False):
            path = tiny_result.make(tmp_path / f"{method}{seed}.h5", method, seed, best=best, partition_seed=1)
            with tiny_result.changing(path) as file:
                file["meta"].attrs["partition_sha256"] = "p"
            paths.append(path)
        return [Result(p) for p in paths]

    a = group("dpfl", (0.8, 0.5, 0.5, 0.5), (0.9, 0.5, 0.5, 0.5), (1.0, 0.5, 0.5, 0.5))
    b = group("local", (0.6, 0.5, 0.5, 0.4), (0.5, 0.5, 0.5, 0.2))  # without the third seed
    rows = ["DPFL (B_c = 0.75N)", "Local"]
    [both], [rest] = (tables.paired(of_results([*some, *b])["clients"], *rows) for some in (a, a[2:]))
    assert both.tolist() == pytest.approx([30, 0, 0, 20])  # means of .2 and .4, of .1 and .3: four pairs
    assert rest.tolist() == pytest.approx([45, 0, 0, 20])  # no common seed: all of each


def test_a_budget_per_client_is_drawn_as_any_other(tmp_path):
    paths = [tiny_result.make(tmp_path / f"{i}.h5", budget=b) for i, b in enumerate(("uniform:2:4", 2, "inf"))]
    results = [Result(p) for p in paths]
    for name in ("accuracy_table", "variance", "learning_curves", "sparsity", "asymmetry", "graph_evolution"):
        draw(name, results)
    for name in ("greedy_cases", "random_graph", "traffic_and_time", "tau_init_table"):
        draw(name, results)
    assert [names.budget_order(r.run) for r in results] == [3, 2, float("inf")]
    assert "B_c = uniform:2:4" in draw("accuracy_table", results).text


@pytest.mark.parametrize(
    "figure, of, sentence",
    [
        ("greedy_cases", "unsearched", "none of these results has searched for its graph"),
        ("sparsity", ("local", 42), "none of these results has a collaboration graph"),
        ("label_flip", ("dpfl", 42), "none of these results has clients with flipped labels"),
        ("motivation", ("dpfl", 42), "three clients"),
    ],
)
def test_what_there_is_nothing_to_draw_of(made, figure, of, sentence):
    with pytest.raises(UserError, match=sentence):
        draw(figure, open_all(made, of))


def test_tuning_longer_than_the_rounds_is_drawn_whole(tmp_path):
    path = tiny_result.make(tmp_path / "tuned.h5", "local", finetune_epochs=4)
    with h5py.File(path, "a") as file:
        file["finetune/test_acc"] = np.linspace(0.5, 0.9, 5)[:, None] * np.ones(4)
        file["finetune/epochs"] = 20 + np.arange(5)
    figure = draw("learning_curves", [Result(path)]).figure
    lines = figure.axes[0].lines
    assert lines[1].get_xdata().tolist() == [20, 21, 22, 23, 24]
    assert lines[1].get_ydata().tolist() == pytest.approx([50, 60, 70, 80, 90])


def test_the_flipped_graph_over_rounds(made):
    figure = draw("label_flip", [Result(made["flip"])], rounds="every").figure
    assert [a.get_title() for a in figure.axes] == [r"$\Omega$ (before round 1)", "round 1", "round 2"]
    cells = figure.axes[2].images[0].get_array()
    # order: benign 0 and 2 by class, then flipped 1 and 3; 0 takes 1 and 2
    assert cells.tolist() == [[3, 1, 2, 0], [1, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]
    figure = draw("label_flip", [Result(made["flip"])], rounds="2").figure
    assert [a.get_title() for a in figure.axes] == ["round 2"]
    with pytest.raises(UserError, match="--rounds has 7"):
        draw("label_flip", [Result(made["flip"])], rounds="7")
    for wrong in ("abc", "0,every", "", "\u00b2"):
        with pytest.raises(UserError) as refused:
            draw("label_flip", [Result(made["flip"])], rounds=wrong)
        allowed = "allowed are round numbers and last, as in 0,50,last, or every"
        assert str(refused.value) == f"--rounds is {wrong!r}; {allowed}"


def test_motivation(made):
    alone, pair, everyone = open_all(made, "alone", "pair", "all")
    assert draw("motivation", [alone]).data["accuracy"].tolist() == [50]
    drawing = draw("motivation", [everyone, alone, pair, *open_all(made, ("dpfl", 42))])
    assert drawing.text.splitlines() == [
        "client 1 alone: 50.0 % (1 seeds)",
        "client 1 with 2: 40.0 % (1 seeds), -10.0 points against alone",
        "client 1 with 2 and 3: 70.0 % (1 seeds), +20.0 points against alone",
        "Left out: 1 of 4 results, which are not of the example (--partition motivation).",
    ]


def test_motivation_averages_repetitions_of_its_partition_alone(made, tmp_path):
    """Two rates on one seed were two seeds, of any three clients: they are two bars, and other partitions are refused."""
    three = {"clients": 3, "partition": "motivation"}
    made_of = ((42, 0.01, 0.5), (42, 0.1, 0.3), (52, 0.1, 0.4))
    rates = [Result(tiny_result.make(tmp_path / f"{s}{lr}.h5", "local", s, best=(x, 0.9, 0.9), lr=lr, **three)) for s, lr, x in made_of]  # fmt: skip
    drawing = draw("motivation", [*rates, *open_all(made, "all")])
    assert drawing.text.splitlines() == [
        "client 1 alone (Local, lr 0.01): 50.0 % (1 seeds)",
        "client 1 alone (Local, lr 0.1): 35.0 % (2 seeds)",
        "client 1 with 2 and 3: 70.0 % (1 seeds)",
    ]
    others = [Result(tiny_result.make(tmp_path / f"o{lr}.h5", "local", clients=3, lr=lr)) for lr in (0.01, 0.1)]
    with pytest.raises(UserError, match="--partition motivation"):
        draw("motivation", others)


def test_a_client_that_is_not_scored_has_no_sampling_variance():
    """0.9 of 101 images: 1e4 * 0.9 * 0.1 / 100 = 9. A third client of one image and no score made it 839."""
    variance = module("variance").sampling_variance
    assert variance(np.array([0.9, 0.9, np.nan]), np.array([101, 101, 1])) == pytest.approx(9)
    assert variance(np.array([0.9, 0.5]), np.array([101, 1])) == pytest.approx((9 + 2500) / 2)
    assert np.isnan(variance(np.array([np.nan]), np.array([1])))


def test_omega_is_drawn_until_it_is_searched_anew(tmp_path):
    """With --omega_period 2 the graph of round 2 is another Omega's: 1 stood for who was in the first one."""
    result = Result(tiny_result.make(tmp_path / "anew.h5", omega_period=2))
    drawing = draw("graph_evolution", [result])
    before, anew = (a.images[0].get_array().tolist() for a in drawing.figure.axes[1:3])
    assert before == [[3, 2, 1, 0], [2, 3, 0, 1], [1, 0, 3, 0], [0, 0, 0, 3]]  # as without a period
    assert anew == [[3, 2, 2, 0], [2, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]  # round 2: 0 took 1 and 2, 2 took 0
    assert "from round 2 on Omega is another, which is not recorded" in drawing.text
    assert "not recorded" not in draw("graph_evolution", [result], rounds=[0, 1]).text


def test_an_unfinished_run_is_drawn_and_said_to_be_one(made, tmp_path, capsys):
    result = Result(tiny_result.make(tmp_path / "running.h5", finished=False))
    assert command.has_rounds(result)
    assert "is running, round 2 of 2: drawn as far as it is" in capsys.readouterr().err
    text = draw("accuracy_table", [result, *open_all(made, ("local", 42))]).text
    assert "**70.00 (1), not finished** |" in text and "\n\nNote: not finished: DPFL (B_c = 0.75N).\n" in text
    assert "not finished" not in draw("accuracy_table", four(made)).text


def test_data_of_one_name_are_told_apart_by_their_hash(tmp_path):
    """The same Run on other pixels, as of a JPEG copy: a row of its own in every table, none lost."""
    each = {"aaaaaaaa": 0.5, "bbbbbbbb": 0.7}
    results = [Result(tiny_result.make(tmp_path / f"{sha}.h5", best=(x,) * 4, sha=sha)) for sha, x in each.items()]
    data = draw("accuracy_table", results).data
    assert dict(zip(data["method"], data["mean"], strict=True)) == {
        "DPFL (B_c = 0.75N), data_sha256 aaaaaa": 50,
        "DPFL (B_c = 0.75N), data_sha256 bbbbbb": pytest.approx(70),
    }
    assert len(draw("tau_init_table", results).data) == 2


def test_of_several_local_the_nearest_is_the_one_to_compare_with(tmp_path):
    """DPFL of 70 % with lr 0.01 is 5 above the Local of its rate, whatever the order, and not 50 above another rate's."""
    files = {"a": ("local", 0.2, 0.05), "b": ("local", 0.65, 0.01), "c": ("dpfl", 0.7, 0.01)}
    for order in ("abc", "bac"):
        results = [Result(tiny_result.make(tmp_path / f"{order}{n}.h5", m, best=(x,) * 4, lr=lr)) for n in order for m, x, lr in [files[n]]]  # fmt: skip
        gain = draw("accuracy_table", results).data.set_index("method")["vs_local"]
        assert gain.filter(like="DPFL").tolist() == [pytest.approx(5)] and gain.filter(like="Local").isna().all()


def test_epochs_are_those_of_both_models(tmp_path):
    """Round 2 of the tiny result is at 20 epochs: 40 of Ditto's two models."""
    path = tiny_result.make(tmp_path / "ditto.h5", "ditto", best=(0.5,) * 4, graphs=[[[]] * 4] * 3)
    data = draw("accuracy_table", [Result(path)]).data
    assert data["epochs"].tolist() == [40]
    assert draw("learning_curves", [Result(path)]).data["epochs"].max() == 40
    assert draw("report", [Result(path)]).data["local epochs"].tolist() == [40]
    assert outcome(Result(path))["local epochs"] == 40
    assert api.Result(path).curves()["epochs"].tolist() == [20, 30, 40]


def test_a_method_without_omega_has_no_graph_before_round_1(tmp_path):
    """Its round 0 was drawn as an empty Omega, called 0 % one-way, and compared with DPFL's. The seeds of a method come in their order."""
    drawn = [[[]] * 4, [[2], [], [0], []], [[1, 2], [], [0], []]]
    made = {s: tiny_result.make(tmp_path / f"p{s}.h5", "pens", s, best=(0.5,) * 4, graphs=drawn) for s in (42, 52)}
    pens, dpfl = [Result(path) for path in made.values()], Result(tiny_result.make(tmp_path / "d.h5"))
    for name in ("sparsity", "asymmetry"):
        drawing = draw(name, pens)
        assert drawing.data["round"].min() == 1 and "in round 1, " in drawing.text
        assert "before round 1" in draw(name, [dpfl]).text
    evolution = draw("graph_evolution", [*pens[::-1], dpfl]).data
    assert evolution[["method", "seed", "round"]].values.tolist() == [
        *(["dpfl", 42, t] for t in (0, 1, 2)),
        *(["pens", s, t] for s in (42, 52) for t in (1, 2)),
    ]
    assert draw("graph_evolution", pens[:1]).data["round"].tolist() == [1, 2]
    omega = draw("omega", [pens[0], dpfl], 3)
    assert "Agreement" not in omega.text and omega.text.count("Omega") == 1
    assert omega.data[omega.data["method"].str.startswith("PENS")]["round"].min() == 1
    assert "to build Omega" not in summary(made[42]) and "to build Omega" in summary(dpfl.path)


def test_a_full_disk_leaves_no_half_of_a_figure(tmp_path, monkeypatch):
    """A second drawing that cannot be written leaves the first."""
    drawing = draw("accuracy_table", [Result(tiny_result.make(tmp_path / "d.h5"))])
    (csv, *_) = command.save(drawing, "table", tmp_path)
    before = csv.read_bytes()

    def full(self, path, **_):
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(UserError, match="No space left on device"):
        command.save(drawing, "table", tmp_path)
    assert csv.read_bytes() == before and not list(tmp_path.glob(".*"))


def test_traffic_of_a_round_that_is_being_written_is_left_out(tmp_path):
    """A kill between two appends: round 2 has its traffic, and not its seconds."""
    path = tiny_result.make(tmp_path / "cut.h5", finished=False)
    with h5py.File(path, "a") as file:
        for array in file["seconds"].values():
            array.resize(2, 0)
    assert list(module("traffic_and_time").measure(Result(path))["round"]) == [0, 1]


def test_latex_escapes_what_it_must():
    table = pd.DataFrame({"method": ["DPFL (B_c = uniform:2:20)", "A & B_1 #2", "DPFL (B_c = inf), tau_init 1"]})
    text = tables.latex(table)
    assert r"DPFL (B\_c = uniform:2:20)" in text and r"A \& B\_1 \#2" in text
    assert r"DPFL ($B_c = \infty$), $\tau_{\mathrm{init}}$ 1" in text


def test_a_table_of_another_score(tmp_path):
    with Result(run_here(tmp_path / "run.h5", {"method": "local", "clients": 3, "rounds": 1})) as result:
        drawing = draw("accuracy_table", [result], score="macro_f1")
        mean = 100 * result.score("macro_f1").mean()
    assert "Test macro F1, %" in drawing.text and drawing.data["mean"].tolist() == [pytest.approx(mean)]


@pytest.mark.parametrize("colour", ["#123456", ""])
def test_a_method_from_outside_has_the_looks_of_its_file(tmp_path, colour):
    """One file, no list of names: its title, and its colour, or one hashed from its title."""
    method = Method(title="Mine", colour=colour, line="--")
    declared = f"from dpfl_mpi.methods import Method, local\nMETHOD = {method!r}\n"
    declared += "init, round = local.init, local.round\n"
    (tmp_path / "mine.py").write_text(declared.replace("<class 'dpfl_mpi.methods.NoOptions'>", "Method().options"))
    fields = {"method": str(tmp_path / "mine.py"), "clients": 3, "rounds": 1}
    [line] = draw("random_graph", [Result(run_here(tmp_path / "mine.h5", fields))]).figure.axes[0].lines
    assert line.get_color() == style.look(method)[0].lower() and line.get_label() == r"Mine ($B_c = \infty$)"
    assert line.get_color() == colour or not colour
