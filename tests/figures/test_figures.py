"""Figures and tables on their numbers, worked out by hand for `tiny_result`; every file of analysis/ runs without torch and MPI."""

import itertools
import resource
import sys
from types import SimpleNamespace

import h5py
import matplotlib.pyplot as pyplot
import numpy as np
import pandas as pd
import pytest
import tiny_result
from launch import ROOT, ended, refused, run_here, text_file
from sklearn.metrics import adjusted_rand_score
from tiny_result import draw, module, tiny

from dpfl_mpi.figures import (
    command,
    controls_table,
    frames,
    names,
    omega,
    paper,
    pareto,
    style,
    tables,
)
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Method
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import outcome, summary
from dpfl_mpi.settings import Run

ANALYSIS = ROOT / "analysis"
FILES = sorted(p.stem for p in ANALYSIS.glob("*.py"))
FOUR = tuple(tiny_result.BEST)
THREE = {"clients": 3, "partition": "motivation"}
ROWS = ["DPFL (B_c = 3)", "Local"]
TWO = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]])  # two triangles


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tiny results: dpfl and local for two seeds, and one each for the flip and the motivation."""
    folder = tmp_path_factory.mktemp("tiny")
    out = {(m, s): tiny(folder, f"{m}{s}", m, s) for m, s in FOUR}
    out["flip"] = tiny(folder, "flip", flipped=[False, True, False, True])
    out["clocked"] = tiny(folder, "clocked", network="phones")
    out["random"] = tiny(folder, "random", budget=2)
    out["unsearched"] = tiny(folder, "unsearched", "random_graph", best=(0.5,) * 4)
    both = [[[1, 2], [0, 2], [0, 1]]] * 3
    pair = {"graphs": [[[1], [0], []]] * 3, "reach": "groups:0,1;2"}
    out["alone"] = tiny(folder, "alone", "local", best=(0.5, 0.9, 0.9), **THREE)
    out["pair"] = tiny(folder, "pair", "random_graph", best=(0.4, 0.9, 0.9), **pair, **THREE)
    out["all"] = tiny(folder, "all", "random_graph", best=(0.7, 0.9, 0.9), graphs=both, **THREE)
    return out


WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))  # to import one of these fails
for sys.argv in eval(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def run_without(calls, cwd, *libraries):
    return ended(sys.executable, "-W", "error", "-c", WITHOUT, repr(calls), *libraries, cwd=cwd, timeout=240)


def test_every_file_runs_with_neither_torch_nor_mpi(made, tmp_path):
    special = {"label_flip": ["flip"], "motivation": ["alone"], "random_graph": [SEEDS[0], "unsearched"]}
    special |= {"hours": ["clocked"]}
    of = {name: [str(made[n].path) for n in special.get(name, FOUR)] for name in FILES}
    calls = [[str(ANALYSIS / f"{name}.py"), *of[name], "--out", str(tmp_path)] for name in FILES]
    read = [[f"{ROOT}/dpfl_mpi/{name}.py", of["sparsity"][0]] for name in ("show", "export")]
    done = run_without([*calls, read[0], [*read[1], f"--out={tmp_path}/o.csv"]], tmp_path, "torch", "mpi4py", "sklearn")
    assert done.returncode == 0, done.stderr
    for name in FILES:
        more = {"html"} if name == "report" else {"md", "tex"} if name.endswith("table") else {"pdf", "png"}
        assert {p.suffix[1:] for p in tmp_path.glob(f"{name}.*")} == {"csv"} | more
        assert all(str(p) in done.stdout for p in tmp_path.glob(f"{name}.*"))


def called(capsys, monkeypatch, *arguments, runs=(), figure="sparsity"):
    """Return code, output and errors of a figure's command in this process."""
    monkeypatch.setattr(sys, "argv", [figure, *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        command.main(figure, "", runs, module(figure).draw)
    return end.value.code, *capsys.readouterr()


def test_a_missing_run_is_named_with_its_command_and_the_rest_is_drawn(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results"
    small = {"clients": 4, "classes_per_client": 3, "rounds": 2, "budget": 3}
    runs = [Run(**small), Run(**small, seed=7), Run(dataset="nothing")]
    tiny_result.make(runs[0].path(results))
    found, missing = command.gather(runs, results)
    assert [r.path for r in found] == [runs[0].path(results)]
    flags = f"--classes_per_client=3 --clients=4 --rounds=2 --budget=3 --seed=7 --results={results}"
    assert missing[0] == f"missing: mpirun -n 8 python -m dpfl_mpi {flags}"
    assert missing[1].startswith("not available here: mpirun -n 8 python -m dpfl_mpi --dataset=nothing (--dataset is")
    assert command.gather(runs[1:2], "my results")[1][0].endswith(" '--results=my results'")
    runs[0].path(results).rename(runs[1].path(tmp_path))  # of another seed than its name says
    wrong = f"not available here: {command.command(runs[1])} ({runs[1].path(tmp_path)} holds another Run (different: "
    assert command.gather(runs[1:2], tmp_path) == ([], [f"{wrong}partition_seed, seed))"])
    runs[1].path(tmp_path).rename(runs[0].path(results))
    code, out, err = called(capsys, monkeypatch, "--results", results, "--out", tmp_path / "out", runs=runs)
    assert code == 0 and missing[0] in err and str(tmp_path / "out" / "sparsity.pdf") in out
    assert f" --results={results}\n" in err.partition("all of them at once: ")[2]


def test_runs_whose_data_are_not_there_are_counted_by_file(tmp_path, monkeypatch, capsys):
    """One of the usual place, one that is named: nobody can compute them here, so no command is offered. Few are still named each."""
    monkeypatch.chdir(tmp_path)
    named = {"dataset": "femnist", "data": "data/ten.h5", "partition": "fedrep"}
    runs = [Run(dataset="cifar10", seed=s) for s in range(6)] + [Run(**named, seed=s) for s in range(7)]
    made = "there is no such file: make it with `python -m dpfl_mpi.prepare"
    why = f"(--data is data/cifar10.h5; {made} cifar10 --out data/cifar10.h5`)"
    other = f"(--data is data/ten.h5; {made} femnist --source PATH --out data/ten.h5`)"
    counted = [f"not available here: {each}" for each in (f"6 of 13 Runs {why}", f"7 of 13 Runs {other}")]
    assert command.gather(runs, "results") == ([], counted)
    few = [f"not available here: {command.command(run)} {why}" for run in runs[1:6]]
    assert command.gather(runs[1:6], "results") == ([], few)
    nothing = "error: there is nothing to draw: no result of this figure has a recorded round yet"
    assert called(capsys, monkeypatch, runs=runs) == (2, "", "\n".join([*counted, nothing, ""]))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar10.h5").touch()  # there it is computed
    assert command.gather(runs[:2], "results")[1] == [f"missing: {command.command(run)}" for run in runs[:2]]


def test_a_mistake_is_one_sentence_and_a_code(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = made["dpfl", 42].path
    assert called(capsys, monkeypatch, "nothing.h5") == (2, "", "error: nothing.h5: there is no such result file\n")
    code, _, said = called(capsys, monkeypatch, file, "--out", file)
    assert code == 2 and said.startswith(f"error: --out is {file}, where nothing can be written: ")


def test_a_missing_library_is_one_sentence(tmp_path):
    done = run_without([[str(ANALYSIS / "omega.py")]], tmp_path, "networkx")
    said = "error: the figures need networkx: pip install networkx\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_rounds_and_budgets_of_the_graph_figure(made):
    evolution, result = module("graph_evolution"), made["dpfl", 42]
    assert evolution.rounds_to_show(0, 2, None, several=False) == [0, 1, 2]
    assert evolution.rounds_to_show(0, 2, evolution.round_list("0,last"), several=False) == [0, 2]
    refused("--rounds has 3, but ... has graphs of rounds 0 to 2", draw, "graph_evolution", [result], rounds=[3])
    refused("--budgets is 5; none of the results has one of these", draw, "graph_evolution", [result], budgets="5")
    drawing = draw("graph_evolution", [made["dpfl", 42], made["random"]], budgets="3,7,2")
    assert list(dict.fromkeys(drawing.data["budget"])) == ["3", "2"] and "no result has B_c = 7" in drawing.text


SEEDS = ("dpfl", 42), ("dpfl", 52)
BY_HAND = {  # figure: results, columns of its numbers in their order
    "graph_evolution": (SEEDS[:1], {"edges": [5, 2, 3], "sparsity": [1 - 9 / 16, 1 - 6 / 16, 1 - 7 / 16],
        "one_way_edges": [1 / 5, 0, 1 / 3], "one_way_pairs": [1 / 6, 0, 1 / 6],
        # clients 0 and 2, and 1 and 2, share one
        "edges_sharing_a_class": [2 / 5, 1, 2 / 3], "pairs_sharing_a_class": [4 / 12] * 3}),
    # two seeds, the same graphs: the band is empty
    "sparsity": (SEEDS, {"value": [0.4375, 0.625, 0.5625], "std": [0] * 3, "n": [2] * 3}),
    "asymmetry": (SEEDS[:1], {"value": [1 / 5, 0, 1 / 3, 1 / 6, 0, 1 / 6]}),
    "greedy_cases": (SEEDS[:1], {"candidates": [12, 5, 5], "a > 0, b > 0: coin": [1 / 12, 0, 0]}),
    "random_graph": ((*SEEDS, "unsearched"), {"accuracy": [30, 40, 50, 52.5, 62.5, 72.5], "std": [0] * 3 + [5 / 2**0.5] * 3}),
    "learning_curves": ([("local", 42)], {"epochs": [10, 15, 20] * 2, "mean": [45, 55, 65, 0.5, 0.4, 0.3]}),
    # a (1 - a) / 4 with 5 test samples: seed 42 (.16 + .24 + 0 + .24) / 16, seed 52 (.09 + .21 + .09 + .25) / 16
    "variance": (SEEDS, {"accuracy": [72.5], "variance": [387.5], "sampling_variance": [400], "sampling_share": [400 / 387.5]}),
    "traffic_and_time": (SEEDS[:1], {"received_mean": [2.5, 0.5, 0.75], "received_most": [4, 1, 2], "budget_others": [2] * 3,
        "mpi_rma_mib": [1, 2, 3], "mpi_collective_mib": [0.5] * 3, "seconds_graph": [4, 4, 4]}),  # the slowest rank
}  # fmt: skip
SAID = {
    "greedy_cases": "coin 4.55 % of 22 candidates",
    "learning_curves": "Local: 65.00 % after 20 epochs (round 2)",
    "traffic_and_time": "0.62 models received per client and round (budget 2 others), 2.5 before round 1; "
    "MPI 3.00 MiB per round, 1.50 before",
}


@pytest.mark.parametrize("figure", BY_HAND)
def test_figures_by_hand(made, figure):
    of, columns = BY_HAND[figure]
    drawing = draw(figure, [made[n] for n in of])
    for name, values in columns.items():
        assert drawing.data[name].tolist() == pytest.approx(values), name
    assert SAID.get(figure, "") in drawing.text


def test_the_accuracy_table_by_hand(made):
    drawing = draw("accuracy_table", [made[n] for n in FOUR])
    dpfl, local = (drawing.data.set_index("method").loc[m] for m in ("DPFL (B_c = 3)", "Local"))
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
    assert r"DPFL ($B_c = 3$) & \textbf{72.50 $\pm$ 3.54 (2)} \\" in drawing.latex


def test_a_method_the_best_beats_is_not_bold(made, tmp_path):
    better = tiny(tmp_path, "better", best=(0.7, 0.7, 0.9, 0.71))  # 10 10 10 11 above Local
    lines = of_results([better, made["local", 42]])["clients"]
    assert tables.unbeaten(lines, ROWS) == [True, False]
    [difference] = tables.paired(lines, *ROWS)
    assert difference.tolist() == pytest.approx([10, 10, 10, 11])
    lines = of_results([better, made["local", 52]])["clients"]  # another partition: nothing to compare client by client
    assert tables.paired(lines, *ROWS) == [] and not tables.comparable([])


def test_the_paper_stands_beside_runs_of_its_size_alone(made, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "COLUMNS", ("Digits Patho(3)",))
    results = [tiny(tmp_path, "inf", budget="inf"), made["local", 42]]

    def beside():
        frames = of_results(results)
        table = module("tau_init_table").table(frames, "tau_init", "tau_init", paper.TAU_INIT, "Digits Patho(3)")
        return {*module("accuracy_table").measure(frames)["paper"], *table.data["paper"]}

    assert beside() == {""}  # of 4 clients, where the paper's are of 100
    monkeypatch.setattr(paper, "CLIENTS", 4)
    assert beside() == {"80.38 ± 1.62", "84.39 ± 0.43", "83.04"}
    assert paper.by_budget(paper.PERIOD[5])["20"] == paper.by_budget(paper.PERIOD[5])["0.2N"] == "84.01"


def test_runs_whose_files_have_one_name_and_another_content_are_told_apart(tmp_path):
    """Two budgets of one file that was edited in between: two rows, two cells, in the tables that have a row or a column per budget."""
    results, file = [], tmp_path / "b.txt"
    for i, budgets in enumerate(("1 2 3 4", "2 2 2 2")):
        results.append(tiny(tmp_path, i, budget=text_file(file, budgets), best=(0.1 * i + 0.5,) * 4))
    marks = [r.run.contents["budget"][:6] for r in results]
    rows = of_results(results).rows["row"]
    assert [f"budget {file} [{mark}]" in row for mark, row in zip(marks, rows, strict=True)] == [True, True]
    for name in ("accuracy_table", "tau_init_table"):
        text = draw(name, results).text
        assert "50.00 (1)" in text and "60.00 (1)" in text
    runs = [SimpleNamespace(graphs=f"{folder}/out.h5", contents={"graphs": 6 * folder}) for folder in "ab"]
    assert [names.hash_mark(run, "graphs", runs) for run in runs] == [" [aaaaaa]", " [bbbbbb]"]


def test_what_nobody_was_scored_for_is_not_the_best(made, tmp_path):
    """All clients of one Run diverged: its cell is a dash, and the other Run is what nothing beats."""
    gone, local = tiny(tmp_path, "gone", best=[np.nan] * 4), made["local", 42]
    lines = of_results([gone, local])["clients"]
    assert tables.unbeaten(lines, ROWS) == [False, True] and tables.unbeaten(lines, ROWS[:1]) == [False]
    assert tables.mean_text(tables.means(lines, ROWS[0])) == "- (1)"
    text = draw("accuracy_table", [gone, local]).text
    assert "**65.00 (1)**" in text
    assert "Note: rows differ" not in text
    text = draw("accuracy_table", [tiny(tmp_path, "fast", "local", lr=0.5, clip_norm=1.0), gone]).text
    assert "\nNote: rows differ in clip_norm, lr, not in the method alone.\n" in text
    others = [draw(name, [gone, local]).text for name in ("variance", "pareto", "controls_table", "learning_curves")]
    assert not [each for each in (text, *others) if "nan" in each]


def test_repetitions_of_a_run_count_once_and_values_have_short_names(made):
    repeated = of_results([made[n] for n in (*SEEDS, SEEDS[0])])
    assert len(repeated.runs) == 2 and len(repeated.rows) == 1
    ditto, replay = Run(method="ditto", options={"lam": 0.5}), Run(method="replay", graphs="results/a.h5")
    assert names.value_of(SimpleNamespace(run=ditto), "options") == "lam 0.5"
    assert names.value_of(SimpleNamespace(run=replay), "graphs") == "of a"


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Runs of one method, budget and seed that are no repetitions, two of them on other data or with other settings."""
    folder = tmp_path_factory.mktemp("unlike")
    c = {"tau_train": 3, "tau_init": 1, "best": (0.5,) * 4}
    fields = {"a": {}, "b": {"tau_train": 3}, "c": c, "d": {"batch_size": 7}}
    return [tiny(folder, name, **more) for name, more in fields.items()]


def test_rows_curves_and_panels_say_in_what_runs_differ(unlike, made, tmp_path):
    """In settings, or in data of one name: no cell mixes them. Of repetitions panels say the seed alone."""
    size = unlike[0].run.batch_size
    numbers = ((10, 5, size), (10, 3, size), (1, 3, size), (10, 5, 7))
    said = [f"DPFL ($B_c=3$), tau_init {a}, tau_train {b}, batch_size {c}" for a, b, c in numbers]
    looks = {a.get_label(): (a.get_color(), a.get_linestyle()) for a in draw("sparsity", unlike).figure.axes[0].lines}
    assert list(looks) == said and len(set(looks.values())) == 4
    panels = [draw("greedy_cases", of).figure.axes for of in (unlike, [made[n] for n in SEEDS])]
    titles = [[" ".join(a.get_title().split("\n")[:-1]) for a in each] for each in panels]
    assert titles == [said, [f"DPFL ($B_c=3$), seed {s}" for s in (42, 52)]]
    table = draw("tau_init_table", unlike)
    rows = [f"{a}, tau_train {b}, batch_size {c}" for a, b, c in sorted(numbers)]
    assert table.data["mean"].tolist() == pytest.approx([50, 70, 70, 70]) and all(row in table.text for row in rows)
    other = [tiny(tmp_path, sha, best=(x,) * 4, sha=sha) for sha, x in (("aaaaaaaa", 0.5), ("bbbbbbbb", 0.7))]
    data = draw("accuracy_table", other).data
    means = {f"DPFL (B_c = 3), data_sha256 {mark}": mean for mark, mean in (("aaaaaa", 50), ("bbbbbb", 70))}
    assert dict(zip(data["method"], data["mean"], strict=True)) == pytest.approx(means)


def test_dpfl_is_compared_with_the_random_graph_of_the_same_settings(unlike, made):
    drawing = draw("random_graph", [*unlike[:3], made["unsearched"]])
    [with_random] = [line.split("|") for line in drawing.text.splitlines() if "Random graph" in line]
    assert [cell.strip() for cell in with_random[2:4]] == ["DPFL (B_c = 3), tau_init 10, tau_train 5", "70.00 (1)"]


def test_a_method_has_one_colour_in_every_figure(made):
    """That of its file; one of one's own, without a colour, has another: hashed from its name."""
    colours = {m: style.method_look(find("method", m)) for m in shipped("method")}
    assert colours["dpfl"] == ("#0072B2", "-", "X") and len({look[:2] for look in colours.values()}) == len(colours)
    mine = {style.method_look(Method(title=f"mine{i}"))[:2] for i in range(100)}
    assert len(mine) > 9 and not mine & {look[:2] for look in colours.values() if look[1] == "-"}
    assert style.method_look(Method(title="x", colour="red; drop")) == style.method_look(Method(title="x"))  # of a result's file
    results = [made[n] for n in FOUR]
    curves = draw("learning_curves", results).figure.axes[0].lines
    drawn = {line.get_label().split(" ")[0]: line.get_color().upper() for line in curves}
    assert drawn == {"DPFL": colours["dpfl"][0], "Local": colours["local"][0]}
    assert {point.get_color().upper() for point in draw("variance", results).figure.axes[0].lines} == {*drawn.values()}
    for name in ("pareto", "omega"):  # a DPFL curve and, where there is one without a graph, Local's
        lines = draw(name, results).figure.axes[0].lines
        assert {line.get_color().upper() for line in lines} - set(drawn.values()) == set()
        assert drawn["DPFL"] in {line.get_color().upper() for line in lines}


def test_a_legend_stays_in_the_picture(unlike, made, tmp_path):
    many = [tiny(tmp_path, t, tau_init=t) for t in range(1, 12)]
    for name in ("sparsity", "asymmetry", "random_graph", "learning_curves", "variance", "greedy_cases"):
        with pyplot.rc_context(style.STYLE):
            figure = draw(name, [*unlike, *many, made["unsearched"]]).figure
            figure.draw_without_rendering()
        (box,) = [drawn.get_window_extent() for drawn in figure.legends]
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, name


def test_a_figure_with_a_panel_for_each_draws_twelve_at_most(tmp_path):
    """Thirteen Runs of two seeds: a seed of the first twelve, in the figure and in its numbers, and a sentence about the rest."""
    results = [tiny(tmp_path, f"{t}-{s}", seed=s, tau_init=t) for t in range(1, 14) for s in (42, 52)]
    for name in ("graph_evolution", "greedy_cases"):
        drawing = draw(name, results)
        assert drawing.data["run"].nunique() == 12 and len({r.rpartition("-")[0] for r in drawing.data["run"]}) == 12
        assert drawing.text.startswith("12 of 26 results are drawn, one seed of each Run")
    assert draw("graph_evolution", results[:12]).data["seed"].nunique() == 2  # so many have room for all


def test_clients_with_flipped_labels_are_in_no_average(made):
    row = draw("accuracy_table", [made["flip"]]).data.iloc[0]  # .8 and 1.0 are benign, .6 and .4 flipped
    assert row[["mean", "worst_decile", "last_round"]].tolist() == pytest.approx([90, 80, 90])
    assert made["flip"].mean("round/test_acc").tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_repetitions_on_one_partition_are_paired_by_seed(tmp_path):
    def group(method, *clients):  # a result per seed, all on one partition
        for seed, best in zip((42, 52, 62), clients, strict=False):
            yield tiny(tmp_path, f"{method}{seed}", method, seed, best=best, partition_seed=1)

    a = [*group("dpfl", *((first, 0.5, 0.5, 0.5) for first in (0.8, 0.9, 1.0)))]
    b = [*group("local", (0.6, 0.5, 0.5, 0.4), (0.5, 0.5, 0.5, 0.2))]  # without the third seed
    [both], [rest] = (tables.paired(of_results([*some, *b])["clients"], *ROWS) for some in (a, a[2:]))
    assert both.tolist() == pytest.approx([30, 0, 0, 20])  # means of .2 and .4, of .1 and .3: four pairs
    assert rest.tolist() == pytest.approx([45, 0, 0, 20])  # no common seed: all of each


def test_a_budget_per_client_is_drawn_as_any_other(tmp_path):
    results = [tiny(tmp_path, i, budget=budget) for i, budget in enumerate(("uniform:2:4", 2, "inf"))]
    for name in set(FILES) - {"label_flip", "motivation", "random_graph", "report", "hours"}:
        draw(name, results)
    assert [names.budget_order(r.run) for r in results] == [3, 2, float("inf")]
    assert "B_c = uniform:2:4" in draw("accuracy_table", results).text


def test_what_there_is_nothing_to_draw_of(made):
    for figure, of, lacks in (
        ("greedy_cases", "unsearched", "has searched for its graph"),
        ("sparsity", ("local", 42), "has a collaboration graph"),
        ("label_flip", ("dpfl", 42), "has clients with flipped labels"),
        ("motivation", ("dpfl", 42), "has the three clients of the example"),
        ("random_graph", ("dpfl", 42), "is of a random graph"),
    ):
        refused(f"none of these results {lacks}", draw, figure, [made[of]])
    refused("--draws is 0; allowed is a whole number of at least 1", draw, "omega", [made["dpfl", 42]], draws=0)


def test_tuning_longer_than_the_rounds_is_drawn_whole(tmp_path):
    path = tiny_result.make(tmp_path / "tuned.h5", "local", finetune_epochs=4)
    with h5py.File(path, "a") as file:
        file["finetune/test_acc"] = np.linspace(0.5, 0.9, 5)[:, None] * np.ones(4)
        file["finetune/epochs"] = 20 + np.arange(5)
    lines = draw("learning_curves", [Result(path)]).figure.axes[0].lines
    assert lines[1].get_xdata().tolist() == [20, 21, 22, 23, 24]
    assert lines[1].get_ydata().tolist() == pytest.approx([50, 60, 70, 80, 90])


def test_label_flip(made, tmp_path):
    """Clients 1 and 3 are flipped; in round 2 client 0 takes {1, 2} and 2 takes {0}: half and none of theirs."""
    drawing = draw("label_flip", [made["flip"]], rounds="every")
    figure = drawing.figure
    assert drawing.data["edge_share_from_flipped"].tolist() == pytest.approx([2 / 4, 0, 1 / 3])
    for said in ("in round 2 benign clients have 25.0 % flipped collaborators", "66.7 % by chance"):
        assert said in drawing.text
    served = tiny(tmp_path, "served", "fedavg", flipped=[True, False, False, False], best=(0.5,) * 4)  # it has no graph
    assert draw("label_flip", [made["flip"], served]).text == drawing.text
    assert [a.get_title() for a in figure.axes] == [r"$\Omega$ (before round 1)", "round 1", "round 2"]
    # order: benign 0 and 2 by class, then flipped 1 and 3; 0 takes 1 and 2
    assert figure.axes[2].images[0].get_array().tolist() == [[3, 1, 2, 0], [1, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]
    for rounds in ("2", [2]):
        assert [a.get_title() for a in draw("label_flip", [made["flip"]], rounds=rounds).figure.axes] == ["round 2"]
    for wrong in ("abc", "0,every", "", "\u00b2"):
        said = f"--rounds is {wrong!r}; allowed are round numbers and last, as in 0,50,last, or every"
        assert refused(said, draw, "label_flip", [made["flip"]], rounds=wrong) == said


def test_motivation(made, tmp_path):
    assert draw("motivation", [made["alone"]]).data["accuracy"].tolist() == [50]
    assert draw("motivation", [made[n] for n in ("all", "alone", "pair", ("dpfl", 42))]).text.splitlines() == [
        "client 1 alone: 50.0 % (1 seeds)",
        "client 1 with 2: 40.0 % (1 seeds), -10.0 points against alone",
        "client 1 with 2 and 3: 70.0 % (1 seeds), +20.0 points against alone",
        "Left out: 1 of 4 results, which are not of the example (--partition motivation).",
    ]
    # two rates on one seed were two seeds, of any three clients: they are two bars, and other partitions are refused
    made_of = ((42, 0.01, 0.5), (42, 0.1, 0.3), (52, 0.1, 0.4))
    rates = [tiny(tmp_path, f"{s}{lr}", "local", s, best=(x, 0.9, 0.9), lr=lr, **THREE) for s, lr, x in made_of]
    assert draw("motivation", [*rates, made["all"]]).text.splitlines() == [
        "client 1 alone (Local, lr 0.01): 50.0 % (1 seeds)",
        "client 1 alone (Local, lr 0.1): 35.0 % (2 seeds)",
        "client 1 with 2 and 3: 70.0 % (1 seeds)",
    ]
    others = [tiny(tmp_path, f"o{lr}", "local", clients=3, lr=lr) for lr in (0.01, 0.1)]
    refused("--partition motivation", draw, "motivation", others)


def test_a_client_that_is_not_scored_has_no_sampling_variance():
    """0.9 of 101 images: 1e4 * 0.9 * 0.1 / 100 = 9. A third client of one image and no score made it 839."""
    variance = module("variance").sampling_variance
    assert variance(np.array([0.9, 0.9, np.nan]), np.array([101, 101, 1])) == pytest.approx(9)
    assert variance(np.array([0.9, 0.5]), np.array([101, 1])) == pytest.approx((9 + 2500) / 2)
    assert np.isnan(variance(np.array([np.nan]), np.array([1])))


def test_omega_is_drawn_until_it_is_searched_anew(tmp_path):
    """With --omega_period 2 the graph of round 2 is another Omega's: 1 stood for who was in the first one.

    The order is by most frequent class, then the second: client 0 (class 0 alone), 2 (class 0, then 1), 1, 3.
    """
    result = tiny(tmp_path, "anew", omega_period=2)
    drawing = draw("graph_evolution", [result])
    before, anew = (a.images[0].get_array().tolist() for a in drawing.figure.axes[1:3])
    assert drawing.figure.axes[1].get_title() == "round 1\nsparsity 62.5 %"
    # 0 took 2, 1 is in Omega; 2 took 0, 3 is in Omega; 1 took nobody, 0 is in Omega
    assert before == [[3, 2, 1, 0], [2, 3, 0, 1], [1, 0, 3, 0], [0, 0, 0, 3]]
    assert anew == [[3, 2, 2, 0], [2, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]  # round 2: 0 took 1 and 2, 2 took 0
    assert "from round 2 on Omega is another, which is not recorded" in drawing.text
    assert "not recorded" not in draw("graph_evolution", [result], rounds=[0, 1]).text
    mended = draw("graph_evolution", [tiny(tmp_path, "churn", churn="0.2:0.5")]).text
    assert "from round 1 on Omega is another, which is not recorded" in mended


def test_an_unfinished_run_is_drawn_and_said_to_be_one(made, tmp_path, capsys):
    result = tiny(tmp_path, "running", finished=False)
    assert command.has_rounds(result)
    assert "is stopped after round 2 of 2: drawn up to there" in capsys.readouterr().err
    text = draw("accuracy_table", [result, made["local", 42]]).text
    assert "**70.00 (1), not finished** |" in text and "\n\nNote: not finished: DPFL (B_c = 3).\n" in text
    assert "not finished" not in draw("accuracy_table", [made[n] for n in FOUR]).text
    fewer = tiny(tmp_path, "fewer", best=(0.5, 0.5, 0.5, np.nan))
    note = "\nNote: DPFL (B_c = 3) has means over 3 of 4 clients, 1 took no part."
    assert note in draw("accuracy_table", [fewer]).text
    tuned = draw("learning_curves", [tiny(tmp_path, "tuned", "local", finetune_epochs=1, finished=False)])
    assert set(tuned.data["measure"]) == {"round/test_acc", "round/val_loss"}


def test_of_several_local_the_nearest_is_the_one_to_compare_with(tmp_path):
    """DPFL of 70 % with lr 0.01 is 5 above the Local of its rate, whatever the order, and not 50 above another rate's."""
    files = {"a": ("local", 0.2, 0.05), "b": ("local", 0.65, 0.01), "c": ("dpfl", 0.7, 0.01)}
    for order in ("abc", "bac"):
        results = [tiny(tmp_path, f"{order}{n}", m, best=(x,) * 4, lr=lr) for n in order for m, x, lr in [files[n]]]  # fmt: skip
        gain = draw("accuracy_table", results).data.set_index("method")["vs_local"]
        assert gain.filter(like="DPFL").tolist() == [pytest.approx(5)] and gain.filter(like="Local").isna().all()


def test_epochs_are_those_of_both_models(tmp_path):
    """Round 2 of the tiny result is at 20 epochs: 40 of Ditto's two models."""
    ditto = tiny(tmp_path, "ditto", "ditto", best=(0.5,) * 4, graphs=[[[]] * 4] * 3)
    assert draw("accuracy_table", [ditto]).data["epochs"].tolist() == [40]
    assert draw("learning_curves", [ditto]).data["epochs"].max() == 40
    assert draw("report", [ditto]).data["local epochs"].tolist() == [40]
    assert outcome(ditto)["local epochs"] == 40
    assert Result(ditto.path).curves()["epochs"].tolist() == [20, 30, 40]


def test_a_method_without_omega_has_no_graph_before_round_1(tmp_path):
    """Its round 0 was drawn as an empty Omega, called 0 % one-way, and compared with DPFL's. The seeds of a method come in their order."""
    drawn = [[[]] * 4, [[2], [], [0], []], [[1, 2], [], [0], []]]
    pens = [tiny(tmp_path, f"p{s}", "pens", s, best=(0.5,) * 4, graphs=drawn) for s in (42, 52)]
    dpfl = tiny(tmp_path, "d")
    for name in ("sparsity", "asymmetry"):
        drawing = draw(name, pens)
        assert drawing.data["round"].min() == 1 and "in round 1, " in drawing.text
        assert "before round 1" in draw(name, [dpfl]).text
    evolution = draw("graph_evolution", [*pens[::-1], dpfl]).data
    drawn = [["dpfl", 42, t] for t in (0, 1, 2)] + [["pens", s, t] for s in (42, 52) for t in (1, 2)]
    assert evolution[["method", "seed", "round"]].values.tolist() == drawn
    omega = draw("omega", [pens[0], dpfl], 3)
    assert "Agreement" not in omega.text and omega.text.count("Omega") == 1
    assert omega.data[omega.data["method"].str.startswith("PENS")]["round"].min() == 1
    assert "to build Omega" not in summary(pens[0].path) and "to build Omega" in summary(dpfl.path)


def test_a_full_disk_leaves_no_half_of_a_figure(tmp_path, at_most):
    drawing = draw("learning_curves", [tiny(tmp_path)])
    kept = {path: path.read_bytes() for path in command.save(drawing, "c", tmp_path)}
    said = f"--out is {tmp_path}, where nothing can be written: File too large"
    at_most(resource.RLIMIT_FSIZE, 8000)
    refused(said, command.save, drawing, "c", tmp_path)
    assert kept == {path: path.read_bytes() for path in kept} and not list(tmp_path.glob(".*"))


def test_traffic_of_a_round_that_is_being_written_is_left_out(tmp_path):
    """A kill between two appends: round 2 has its traffic, and not its seconds."""
    path = tiny_result.make(tmp_path / "cut.h5", finished=False)
    with h5py.File(path, "a") as file:
        for array in file["seconds"].values():
            array.resize(2, 0)
    assert list(module("traffic_and_time").measure(Result(path), "", "")["round"]) == [0, 1]


def test_latex_escapes_what_it_must():
    texts = "DPFL (B_c = uniform:2:20)", "A & B_1 #2", "DPFL (B_c = inf), tau_init 1"
    expected = r"DPFL (B\_c = uniform:2:20)", r"A \& B\_1 \#2", r"DPFL ($B_c = \infty$), $\tau_{\mathrm{init}}$ 1"
    assert [text for text in expected if text not in tables.latex(pd.DataFrame({"method": texts}))] == []


def test_a_table_of_another_score(tmp_path):
    result = Result(run_here(tmp_path / "run.h5", {"method": "local", "clients": 3, "rounds": 1}))
    drawing, mean = draw("accuracy_table", [result], score="macro_f1"), 100 * result.score("macro_f1").mean()
    assert "Test macro F1, %" in drawing.text and drawing.data["mean"].tolist() == [pytest.approx(mean)]


@pytest.mark.parametrize("colour", ["#123456", ""])
def test_a_method_from_outside_has_the_looks_of_its_file(tmp_path, colour):
    """One file, no list of names: its title, and its colour, or one hashed from its title."""
    method = Method(title="Mine", colour=colour, line="--")
    code = f"from dpfl_mpi.methods import Method, local\nMETHOD = {method!r}\ninit, round = local.init, local.round\n"
    (tmp_path / "mine.py").write_text(code.replace("<class 'dpfl_mpi.settings.fields.NoOptions'>", "Method().options"))
    fields = {"method": str(tmp_path / "mine.py"), "clients": 3, "rounds": 1}
    [line] = draw("learning_curves", [Result(run_here(tmp_path / "mine.h5", fields))]).figure.axes[0].lines
    assert line.get_color() == style.method_look(method)[0].lower() and line.get_label() == r"Mine ($B_c=\infty$)"
    assert line.get_color() == colour or not colour


def test_measures_of_a_graph_by_hand():
    common = omega.overlap(np.array([[2, 0], [1, 1], [0, 5]]))
    assert common.tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]
    assert omega.homophily(CollaborationGraph.from_lists([[1, 2], [0], []]), common) == pytest.approx(1 / 3)
    assert np.isnan(omega.homophily(CollaborationGraph.empty(3), common))
    assert omega.gini(np.array([3, 3, 3])) == 0 and np.isnan(omega.gini(np.zeros(3)))
    assert omega.gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)  # (N - 1) / N
    assert omega.gini(np.array([1, 3])) == pytest.approx(0.25)
    full = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1]])
    assert omega.spectral_gap(full, np.array([0.2, 0.3, 0.5])) == pytest.approx(1)  # one step makes all models one
    assert omega.spectral_gap(TWO, np.ones(6)) == pytest.approx(0)  # the triangles never meet
    pair = CollaborationGraph.from_lists([[1], []])  # rows (3/4, 1/4) with p 3, 1, and (0, 1): eigenvalues 3/4 and 1
    assert omega.spectral_gap(pair, np.array([3.0, 1.0])) == pytest.approx(0.25)
    a, b = (CollaborationGraph.from_lists(x) for x in ([[1, 2], [0], []], [[1], [2], []]))
    assert omega.jaccard(a, b) == pytest.approx((0.5 + 0) / 2)  # client 2 chose nobody in either


def test_z_is_against_graphs_of_the_same_degrees():
    """One sender and one receiver each, four clients in two pairs: mean and deviation of the homophily by counting all nine such graphs."""
    pairs = np.kron(np.eye(2), np.ones((2, 2)))
    matched = CollaborationGraph.from_lists([[1], [0], [3], [2]])
    derangements = [s for s in itertools.permutations(range(4)) if not np.equal(s, range(4)).any()]
    each = np.array([np.mean([pairs[k, j] for k, j in enumerate(s)]) for s in derangements])
    assert len(each) == 9
    z = omega.z_score(matched, pairs, 2000, np.random.default_rng(0))
    assert z == pytest.approx((1 - each.mean()) / each.std(), rel=0.1)
    assert np.isnan(omega.z_score(matched, np.ones((4, 4)), 20, np.random.default_rng(0)))


def test_communities_and_rand_index():
    assert omega.rand_index(omega.communities(TWO), np.array([1, 1, 1, 0, 0, 0])) == 1
    assert omega.communities(CollaborationGraph.empty(3)).tolist() == [0, 1, 2]
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 4, 30), rng.integers(0, 3, 30)
        assert omega.rand_index(a, b) == pytest.approx(adjusted_rand_score(a, b))


def test_agreement_is_told_of_runs_on_one_partition_alone(tmp_path):
    """Two runs on one partition are compared, one on another is not; Omega of the tiny result has 4 of 5 edges both ways."""
    results = [tiny(tmp_path, "a"), tiny(tmp_path, "b", "dpfl", 52)]
    drawing = draw("omega", results, draws=5)
    rows = drawing.data.set_index(["measure", "round"])["value"]
    assert rows["reciprocity", 0] == pytest.approx(0.8) and rows["reciprocity", 1] == 1
    assert "jaccard" not in drawing.data["measure"].values and "Agreement" not in drawing.text
    drawing = draw("omega", [*results, results[0], tiny(tmp_path, "c", budget=2)], draws=5)
    (same,) = drawing.data[drawing.data["measure"] == "jaccard"]["value"]
    assert same == 1 and "Agreement" in drawing.text
    # of another number of clients: nothing to compare
    fewer = tiny(tmp_path, "d", graphs=[[[1, 2], [0], []]] * 3, **THREE)
    assert "Agreement" not in draw("omega", [results[0], fewer], draws=2).text


def test_the_deviation_of_z_is_over_repetitions(made, monkeypatch):
    """z of 1 and 3: 2 +- sqrt(2) (ddof 1). A single seed has no deviation, of any measure."""
    monkeypatch.setattr(omega, "z_of_round", lambda result, t, draws: {42: 1.0, 52: 3.0}[result.run.seed])
    std = draw("omega", [made[n] for n in SEEDS], draws=2).data.set_index("measure")["std"]
    assert std["z"].tolist() == pytest.approx([2**0.5] * 2) and std["reciprocity"].tolist() == [0, 0, 0]
    single = draw("omega", [made["dpfl", 42]], draws=2).data
    assert "z" in single["measure"].values and single["std"].isna().all()


def test_best_so_far():
    val = np.array([[0.5, np.nan], [0.5, 0.2], [0.4, 0.1], [np.nan, 0.9]])
    test = np.arange(8.0).reshape(4, 2)
    assert np.array_equal(frames.best_so_far(val, test, True), [[0, np.nan], [2, 3], [2, 3], [2, 7]], equal_nan=True)
    assert frames.best_so_far(val, test, False)[:, 0].tolist() == [0, 0, 0, 0]


def test_costs_by_hand(made):
    """Omega has 5 edges, asked twice; then 2 and 3 edges; 12, 5 and 5 decisions; 100 steps per round of four clients; 15.75 seconds of a rank."""
    curve = frames.costs(made["dpfl", 42])
    costs = curve[["models", "evaluations", "steps", "seconds"]]
    assert costs.values.tolist() == [[2.5, 6, 0, 15.75], [3, 8.5, 25, 31.5], [3.75, 11, 50, 47.25]]
    assert curve["accuracy"].tolist() == pytest.approx([50, 60, 70])
    assert pareto.first_at(curve, 59.9) == {"models": 3, "evaluations": 8.5, "steps": 25, "seconds": 31.5}
    assert np.isnan(pareto.first_at(curve, 71)["models"])
    one_lacks = pd.DataFrame({"round": [0, 0, 1, 1], "x": [1, 3, 1, np.nan]})  # a mean of the other is another curve
    assert style.over_repetitions(one_lacks, "x")["mean"].tolist() == pytest.approx([2, np.nan], nan_ok=True)
    text = draw("pareto", [made["dpfl", 42]], reach=45).text
    assert "70.00 (1)" in text and "3.8" in text and "2.5" in text
    # a repetition that ends with round 1, at 65 % and 25 steps
    both = of_results([made[n] for n in SEEDS])
    lines = both["costs"]
    both.read = lambda _: lines[(lines["seed"] == 42) | (lines["point"] < 2)]
    assert "67.50 (2)" in pareto.table(both, 45, ["steps"]) and " 38 " in pareto.table(both, 45, ["steps"])


def test_pareto_shows_the_ten_points_below_the_best_with_bands_and_names_the_rest(made, tmp_path):
    """DPFL ends at 70 and 75 %, which are 72.5 and a band; the random graph at 50 %, of one seed."""
    drawing = draw("pareto", [made[n] for n in (*SEEDS, "unsearched")])
    axes = drawing.figure.axes[0]
    assert axes.get_ylim()[0] == pytest.approx(62.5) and len(axes.collections) == 1
    assert drawing.data["std"].tolist() == pytest.approx([0] * 3 + [5 / 2**0.5] * 3)
    assert "Too low for the picture: Random graph (B_c = 3) (50.0 %)." in drawing.text
    other = [tiny(tmp_path, str(network), network=network, partition="dirichlet") for network in (None, "phones")]
    both = draw("pareto", [made["dpfl", 42], other[0]]), draw("hours", [made["clocked"], other[1]])
    assert [len(set(drawn.figure.axes[0].get_legend_handles_labels()[1])) for drawn in both] == [2, 2]


def test_seeds_share_a_bar_of_traffic(made, tmp_path):
    """Four clients receive 2 and 3 models in rounds 1 and 2, and in the second seed none: means of 0.625 and 0, the most 2."""
    none = tiny(tmp_path, "none", "dpfl", 52, graphs=[[[], [], [], []]] * 3)
    drawing = draw("traffic_and_time", [made["dpfl", 42], none, made["local", 42]])
    left, middle, _ = drawing.figure.axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["DPFL ($B_c=3$)", "Local"]
    assert [bar.get_width() for bar in left.patches] == pytest.approx([0.3125, 0]) and middle.get_xlim()[0] == 0
    assert list(left.lines[0].get_xdata()) == [2, 2] and "DPFL (B_c = 3), seed 42, 52: 0.31 models" in drawing.text


def test_rounds_and_epochs_are_whole_numbers(made):
    for name in ("omega", "sparsity", "asymmetry", "random_graph", "learning_curves", "greedy_cases"):
        drawn = draw(name, [made[SEEDS[0]], made["unsearched"]]).figure
        ticks = np.concatenate([axes.get_xticks() for axes in drawn.axes])
        assert (ticks == ticks.round()).all(), name


def test_it_ends_where_the_result_does(tmp_path):
    """The end of a curve is what the result says of its best models, tuned, after a drift, with liars and newcomers."""
    fields = {"clients": 7, "rounds": 4, "tau_train": 1, "tau_init": 1, "budget": 3, "newcomers": 0.2, "drift": "0.5:3"}
    variants = (
        {},
        {"method": "fedavg", "finetune_epochs": 2},
        {"attack": "noise:0.3", "tie": "earliest"},
        {"method": "pfedgraph", "rounds": 6, "clients": 8, "drift": None, "newcomers": 0},  # scores twice per round
    )
    for i, more in enumerate(variants):
        with Result(run_here(tmp_path / f"{i}.h5", fields | more)) as result:
            curve = frames.costs(result)
            assert curve["accuracy"].iloc[-1] == pytest.approx(100 * result["best/test_acc"][result.benign].mean())
            assert curve["models"].iloc[-1] == result["traffic/models_received"][:, result.benign].sum(0).mean()


def test_the_table_of_controls_by_hand(made, tmp_path):
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
    begun = tiny(tmp_path, "begun", seed=52, finished=False)  # which has nothing yet of what comes at the end
    for results in ([result], [result, begun]):
        drawing = draw("controls_table", results)
        assert "37.5 (12.5)" in drawing.text and "60.0 / 80.0" in drawing.text
        if len(results) == 1:  # those who do not lie received 7, 2 and 0 models
            assert "+6.67" in drawing.text and "66.7 of 25.0" in drawing.text and drawing.data["models"].tolist() == [3]
    plain = draw("controls_table", [made["dpfl", 42]])
    assert "liars" not in plain.text and "stopped" not in plain.text and plain.data["accuracy"].tolist() == [70]
