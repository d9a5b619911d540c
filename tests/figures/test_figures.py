"""Figures and tables on numbers worked out by hand for `tiny_result`."""

import argparse
import io
import re
import resource
import sys
from types import SimpleNamespace

import h5py
import matplotlib.pyplot as pyplot
import numpy as np
import pandas as pd
import pytest
import tiny_result
from launch import ROOT, ended, refused, text_file
from tiny_result import NAMED, draw, module, tiny

from dpfl_mpi.figures import command, names, paper, style, tables
from dpfl_mpi.figures.command import fitted_page
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.methods import Method
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import summary
from dpfl_mpi.settings import Run

ANALYSIS = ROOT / "analysis"
FILES = sorted(p.stem for p in ANALYSIS.glob("*.py"))
FOUR = tuple(tiny_result.BEST)
SEEDS = ("dpfl", 42), ("dpfl", 52)
THREE = {"clients": 3, "partition": "motivation"}
ROWS = ["DPFL (B_c = 3)", "Local"]
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))  # importing one of these fails
for sys.argv in eval(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def run_without(calls, cwd, *libraries):
    """Run programs in a new process in which some libraries cannot be imported."""
    code = ("-W", "error", "-c", WITHOUT, repr(calls), *libraries)
    return ended(sys.executable, *code, cwd=cwd, timeout=240)


def test_every_file_runs_with_neither_torch_nor_mpi(made, tmp_path):
    special = {"label_flip": ["flip"], "motivation": ["alone"], "hours": ["clocked"]}
    special["random_graph"] = [SEEDS[0], "unsearched"]
    paths = {name: [str(made[n].path) for n in special.get(name, FOUR)] for name in FILES}
    out = f"--out={tmp_path}"
    calls = [[str(ANALYSIS / f"{name}.py"), *paths[name], out] for name in FILES]
    result = paths["sparsity"][0]
    calls.append([f"{ROOT}/dpfl_mpi/show.py", result])
    calls.append([f"{ROOT}/dpfl_mpi/export.py", result, f"{out}/o.csv"])
    done = run_without(calls, tmp_path, "torch", "mpi4py", "sklearn")
    assert done.returncode == 0, done.stderr
    for name in FILES:
        table = {"md", "tex"} if name.endswith("table") else {"pdf", "png"}
        written = list(tmp_path.glob(f"{name}.*"))
        endings = {"csv"} | ({"html"} if name == "report" else table)
        assert {p.suffix[1:] for p in written} == endings
        assert all(str(p) in done.stdout for p in written)


def called(capsys, monkeypatch, *arguments, runs=()):
    """Return exit code, output and errors of a figure's program."""
    monkeypatch.setattr(sys, "argv", ["sparsity", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        command.main("sparsity", "", runs, module("sparsity").draw)
    return end.value.code, *capsys.readouterr()


def test_a_missing_run_is_named_with_its_command(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results"
    small = {"clients": 4, "classes_per_client": 3, "rounds": 2, "budget": 3}
    runs = [Run(**small), Run(**small, seed=7), Run(dataset="nothing")]
    path, of_seed_7 = runs[0].path(results), runs[1].path(tmp_path)
    tiny_result.make(path)
    found, missing = command.gather(runs, results)
    assert [r.path for r in found] == [path]
    program = "mpirun -n 8 python -m dpfl_mpi"
    flags = "--classes_per_client=3 --clients=4 --rounds=2 --budget=3 --seed=7"
    assert missing[0] == f"missing: {program} {flags} --results={results}"
    assert missing[1].startswith(f"not available here: {program} --dataset=nothing (--dataset is")
    assert command.gather(runs[1:2], "my results")[1][0].endswith(" '--results=my results'")
    path.rename(of_seed_7)
    differs = f"({of_seed_7} holds another Run (different: partition_seed, seed))"
    wrong = f"not available here: {command.command(runs[1])} {differs}"
    assert command.gather(runs[1:2], tmp_path) == ([], [wrong])
    of_seed_7.rename(path)
    flags = ("--results", results, "--out", tmp_path / "out")
    code, out, err = called(capsys, monkeypatch, *flags, runs=runs)
    assert code == 0 and missing[0] in err and str(tmp_path / "out" / "sparsity.pdf") in out
    assert f" --results={results}\n" in err.partition("all of them at once: ")[2]
    # Nobody can compute them here, so no command is offered. Up to five are named each.
    monkeypatch.chdir(tmp_path)
    femnist = {"dataset": "femnist", "data": "data/ten.h5", "partition": "fedrep"}
    runs = [Run(dataset="cifar10", seed=s) for s in range(6)]
    runs += [Run(**femnist, seed=s) for s in range(7)]
    advice = "there is no such file: make it with `python -m dpfl_mpi.prepare"
    why = f"(--data is data/cifar10.h5; {advice} cifar10 --out data/cifar10.h5`)"
    other = f"(--data is data/ten.h5; {advice} femnist --source PATH --out data/ten.h5`)"
    not_here = "not available here:"
    counted = [f"{not_here} 6 of 13 Runs {why}", f"{not_here} 7 of 13 Runs {other}"]
    assert command.gather(runs, "results") == ([], counted)
    few = [f"{not_here} {command.command(run)} {why}" for run in runs[1:6]]
    assert command.gather(runs[1:6], "results") == ([], few)
    nothing = "error: there is nothing to draw: no result of this figure has a recorded round yet"
    advice = "results that were copied here are drawn by naming their files"
    errors = "\n".join([*counted, advice, nothing, ""])
    assert called(capsys, monkeypatch, runs=runs) == (2, "", errors)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar10.h5").touch()
    missing = [f"missing: {command.command(run)}" for run in runs[:2]]
    assert command.gather(runs[:2], "results")[1] == missing


GRAPH = {
    "edges": [5, 2, 3],
    "sparsity": [1 - 9 / 16, 1 - 6 / 16, 1 - 7 / 16],
    "one_way_edges": [1 / 5, 0, 1 / 3],
    "one_way_pairs": [1 / 6, 0, 1 / 6],
    "edges_sharing_a_class": [2 / 5, 1, 2 / 3],  # clients 0 and 2, and 1 and 2, share one
    "pairs_sharing_a_class": [4 / 12] * 3,
}
# seed 42: (.16 + .24 + 0 + .24) / 16, seed 52: (.09 + .21 + .09 + .25) / 16, of 5 test samples
VARIANCE = {"accuracy": [72.5], "variance": [387.5]}
VARIANCE |= {"sampling_variance": [400], "sampling_share": [400 / 387.5]}
RECEIVED = "0.62 models received per client and round (budget 2 others), 2.5 before round 1; "
RECEIVED += "MPI 3.00 MiB per round, 1.50 before"
TRAFFIC = {
    "received_mean": [2.5, 0.5, 0.75],
    "received_most": [4, 1, 2],
    "budget_others": [2] * 3,
    "mpi_rma_mib": [1, 2, 3],
    "mpi_collective_mib": [0.5] * 3,
    "seconds_graph": [4, 4, 4],  # the slowest rank's
}
GRAPHS_OVER_TIME = {"value": [1 / 5, 0, 1 / 3, 1 / 6, 0, 1 / 6]}
BOTH_GRAPHS = {"accuracy": [30, 40, 50, 52.5, 62.5, 72.5], "std": [0] * 3 + [5 / 2**0.5] * 3}
LOCAL = {"epochs": [10, 15, 20] * 2, "mean": [45, 55, 65, 0.5, 0.4, 0.3]}
CASES = {"candidates": [12, 5, 5], "a > 0, b > 0: coin": [1 / 12, 0, 0]}
BY_HAND = {  # figure: results, columns of its numbers, and a part of its text
    "graph_evolution": (SEEDS[:1], GRAPH, ""),
    "sparsity": (SEEDS, {"value": [0.4375, 0.625, 0.5625], "std": [0] * 3, "n": [2] * 3}, ""),
    "asymmetry": (SEEDS[:1], GRAPHS_OVER_TIME, ""),
    "greedy_cases": (SEEDS[:1], CASES, "coin 4.55 % of 22 candidates"),
    "random_graph": ((*SEEDS, "unsearched"), BOTH_GRAPHS, ""),
    "learning_curves": ([("local", 42)], LOCAL, "Local: 65.00 % after 20 epochs (round 2)"),
    "variance": (SEEDS, VARIANCE, ""),
    "traffic_and_time": (SEEDS[:1], TRAFFIC, RECEIVED),
}


@pytest.mark.parametrize("figure", BY_HAND)
def test_figures_by_hand(made, figure):
    results, columns, text = BY_HAND[figure]
    drawing = draw(figure, [made[n] for n in results])
    for name, values in columns.items():
        assert drawing.data[name].tolist() == pytest.approx(values), name
    assert text in drawing.text


def test_the_accuracy_table_by_hand(made, tmp_path):
    drawing = draw("accuracy_table", [made[n] for n in FOUR])
    data = drawing.data.set_index("method")
    dpfl, local = data.loc["DPFL (B_c = 3)"], data.loc["Local"]
    assert dpfl["mean"] == pytest.approx(72.5) and dpfl["std"] == pytest.approx(5 / 2**0.5)
    assert dpfl["n"] == 2
    assert local["mean"] == pytest.approx(65) and local["std"] == pytest.approx(0)
    # by client: 20 0 20 -20 and 30 10 10 -10; partition means 5 and 10; t(1) = 12.706
    assert dpfl["vs_local"] == pytest.approx(7.5)
    assert dpfl["vs_local_half_interval"] == pytest.approx(12.7062 * 2.5)
    assert dpfl["below_local_percent"] == pytest.approx(25)
    assert dpfl["worst_decile"] == pytest.approx(45)  # the lowest of four clients: 40 and 50
    assert dpfl["client_std"] == pytest.approx((500**0.5 + 275**0.5) / 2)
    assert dpfl["bold"] and local["bold"]  # 7.5 ± 14: the best does not beat Local
    lines = drawing.text.splitlines()
    assert lines[0].split() == ["|", "method", "|", "Digits", "Patho(3)", "|"]
    assert lines[2].split() == ["|", "Local", "|", "**65.00", "±", "0.00", "(2)**", "|"]
    assert len({len(line) for line in lines[:4]}) == 1  # legible as it is
    assert r"DPFL ($B_c = 3$) & \textbf{72.50 $\pm$ 3.54 (2)} \\" in drawing.latex
    escaped = {
        "DPFL (B_c = uniform:2:20)": r"DPFL (B\_c = uniform:2:20)",
        "A & B_1 #2": r"A \& B\_1 \#2",
        "DPFL (B_c = inf), tau_init 1": r"DPFL ($B_c = \infty$), $\tau_{\mathrm{init}}$ 1",
    }
    text = tables.latex(pd.DataFrame({"method": list(escaped)}))
    assert [each for each in escaped.values() if each not in text] == []
    better = tiny(tmp_path, "better", best=(0.7, 0.7, 0.9, 0.71))  # 10 10 10 11 above Local
    lines = of_results([better, made["local", 42]])["clients"]
    assert tables.unbeaten(lines, ROWS) == [True, False]
    [difference] = tables.paired(lines, *ROWS)
    assert difference.tolist() == pytest.approx([10, 10, 10, 11])
    lines = of_results([better, made["local", 52]])["clients"]  # on another partition
    assert tables.paired(lines, *ROWS) == [] and not tables.comparable([])
    gone, local = tiny(tmp_path, "gone", best=[np.nan] * 4), made["local", 42]
    lines = of_results([gone, local])["clients"]
    assert tables.unbeaten(lines, ROWS) == [False, True]
    assert tables.unbeaten(lines, ROWS[:1]) == [False]
    assert tables.mean_text(tables.means(lines, ROWS[0])) == "- (1)"
    text = draw("accuracy_table", [gone, local]).text
    assert "**65.00 (1)**" in text and "Note: rows differ" not in text
    fast = tiny(tmp_path, "fast", "local", lr=0.5, clip_norm=1.0)
    text = draw("accuracy_table", [fast, gone]).text
    assert "\nNote: rows differ in clip_norm, lr, not in the method alone.\n" in text
    figures = ("variance", "pareto", "controls_table", "learning_curves")
    assert "nan" not in text + "".join(draw(name, [gone, local]).text for name in figures)


def test_the_paper_stands_beside_runs_of_its_size_alone(made, tmp_path, monkeypatch):
    setting = "Digits Patho(3)"
    monkeypatch.setattr(paper, "COLUMNS", (setting,))
    results = [tiny(tmp_path, "inf", budget="inf"), made["local", 42]]

    def published():
        frames, table = of_results(results), module("tau_init_table").table
        by_tau = table(frames, "tau_init", "tau_init", paper.TAU_INIT, setting)
        return {*module("accuracy_table").measure(frames)["paper"], *by_tau.data["paper"]}

    assert published() == {""}  # these have 4 clients, the paper's 100
    monkeypatch.setattr(paper, "CLIENTS", 4)
    assert published() == {"80.38 ± 1.62", "84.39 ± 0.43", "83.04"}
    period = paper.by_budget(paper.PERIOD[5])
    assert period["20"] == period["0.2N"] == "84.01"


def test_repetitions(made, tmp_path):
    repeated = of_results([made[n] for n in (*SEEDS, SEEDS[0])])
    assert len(repeated.runs) == 2 and len(repeated.rows) == 1
    fields = {"options": {"lam": 0.5}, "graphs": "results/a.h5", "contents": {"graphs": 6 * "ab"}}
    run = SimpleNamespace(run=SimpleNamespace(**fields))
    assert names.value_of(run, "options") == "lam 0.5"
    assert names.value_of(run, "graphs") == "of a [ababab]"
    file = SimpleNamespace(partition="file:p.json", contents={"partition": f"file:{6 * 'cd'}"})
    assert names.value_of(SimpleNamespace(run=file), "partition") == "file:p.json [cdcdcd]"
    periods = [tiny_result.make(tmp_path / f"{p}.h5", omega_period=p) for p in ("inf", 1)]
    (_, usual, _), (_, other, _) = names.named(names.repetitions(map(Result, periods)))
    assert other == f"{usual}, omega_period 1"

    def group(method, *best):  # one result per seed, all on one partition
        one = {"partition_seed": 1}
        pairs = zip((42, 52, 62), best, strict=False)
        return [tiny(tmp_path, f"{method}{s}", method, s, best=b, **one) for s, b in pairs]

    a = group("dpfl", *((first, 0.5, 0.5, 0.5) for first in (0.8, 0.9, 1.0)))
    b = group("local", (0.6, 0.5, 0.5, 0.4), (0.5, 0.5, 0.5, 0.2))  # without the third seed
    [both] = tables.paired(of_results([*a, *b])["clients"], *ROWS)
    assert both.tolist() == pytest.approx([30, 0, 0, 20])  # means of .2 and .4, of .1 and .3
    [rest] = tables.paired(of_results([*a[2:], *b])["clients"], *ROWS)
    assert rest.tolist() == pytest.approx([45, 0, 0, 20])  # no common seed: all of each


def test_rows_curves_and_panels_say_how_runs_differ(unlike, made, tmp_path):
    size = unlike[0].run.batch_size
    numbers = ((10, 5, size), (10, 3, size), (1, 3, size), (10, 5, 7))
    labels = [f"DPFL ($B_c=3$), tau_init {a}, tau_train {b}, batch_size {c}" for a, b, c in numbers]
    lines = draw("sparsity", unlike).figure.axes[0].lines
    assert [line.get_label() for line in lines] == labels
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 4
    seeds = [f"DPFL ($B_c=3$), seed {s}" for s in (42, 52)]
    for results, titles in ((unlike, labels), ([made[n] for n in SEEDS], seeds)):
        panels = draw("greedy_cases", results).figure.axes
        assert [" ".join(a.get_title().split("\n")[:-1]) for a in panels] == titles
    table = draw("tau_init_table", unlike)
    assert table.data["mean"].tolist() == pytest.approx([50, 70, 70, 70])
    for a, b, c in numbers:
        assert f"{a}, tau_train {b}, batch_size {c}" in table.text
    shas = (("aaaaaaaa", 0.5), ("bbbbbbbb", 0.7))
    data = draw("accuracy_table", [tiny(tmp_path, sha, best=(x,) * 4, sha=sha) for sha, x in shas])
    means = dict(zip(data.data["method"], data.data["mean"], strict=True))
    name = "DPFL (B_c = 3), data_sha256"
    assert means == pytest.approx({f"{name} aaaaaa": 50, f"{name} bbbbbb": 70})
    results, file = [], tmp_path / "b.txt"
    for x, budgets in ((0.5, "1 2 3 4"), (0.6, "2 2 2 2")):
        results.append(tiny(tmp_path, x, budget=text_file(file, budgets), best=(x,) * 4))
    marks = [r.run.contents["budget"][:6] for r in results]
    for mark, row in zip(marks, of_results(results).rows["row"], strict=True):
        assert f"budget {file} [{mark}]" in row
    for name in ("accuracy_table", "tau_init_table"):
        text = draw(name, results).text
        assert "50.00 (1)" in text and "60.00 (1)" in text


def test_a_method_has_one_colour_in_every_figure(made):
    looks = {m: style.method_look(find("method", m)) for m in shipped("method")}
    assert looks["dpfl"] == ("#0072B2", "-", "X")
    assert len({look[:2] for look in looks.values()}) == len(looks)
    own = {style.method_look(Method(title=f"mine{i}"))[:2] for i in range(100)}
    assert len(own) > 9 and not own & {look[:2] for look in looks.values() if look[1] == "-"}
    invalid = Method(title="x", look="red; drop")  # as a result's file may have it
    assert style.method_look(invalid) == style.method_look(Method(title="x"))
    results = [made[n] for n in FOUR]

    def colours(name):
        lines = draw(name, results).figure.axes[0].lines
        return {line.get_label().split(" ")[0]: line.get_color().upper() for line in lines}

    expected = {"DPFL": looks["dpfl"][0], "Local": looks["local"][0]}
    assert colours("learning_curves") == expected
    assert set(colours("variance").values()) == set(expected.values())
    for name in ("pareto", "omega"):
        drawn = set(colours(name).values())
        assert drawn <= set(expected.values()) and expected["DPFL"] in drawn


def test_legends_panels_and_ticks(unlike, made, tmp_path):
    many = [tiny(tmp_path, t, tau_init=t) for t in range(1, 12)]
    figures = ("sparsity", "asymmetry", "random_graph", "learning_curves", "variance")
    for name in (*figures, "greedy_cases"):
        with pyplot.rc_context(style.STYLE):
            figure = draw(name, [*unlike, *many, made["unsearched"]]).figure
            figure.draw_without_rendering()
        (box,) = [legend.get_window_extent() for legend in figure.legends]
        assert box.x0 >= 0 and box.y0 >= 0, name
        assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, name
    pairs = [(t, s) for t in range(1, 14) for s in (42, 52)]
    results = [tiny(tmp_path, f"{t}-{s}", seed=s, tau_init=t) for t, s in pairs]
    for name in ("graph_evolution", "greedy_cases"):
        drawing = draw(name, results)
        runs = set(drawing.data["run"])
        assert len(runs) == len({run.rpartition("-")[0] for run in runs}) == 12
        assert drawing.text.startswith("12 of 26 results are drawn, one seed of each Run")
    assert draw("graph_evolution", results[:12]).data["seed"].nunique() == 2
    figures = ("omega", "sparsity", "asymmetry", "random_graph", "learning_curves", "greedy_cases")
    for name in figures:
        figure = draw(name, [made[SEEDS[0]], made["unsearched"]]).figure
        ticks = np.concatenate([axes.get_xticks() for axes in figure.axes])
        assert (ticks == ticks.round()).all(), name


def test_a_budget_per_client_is_drawn_as_any_other(tmp_path):
    budgets = ("uniform:2:4", 2, "inf")
    results = [tiny(tmp_path, i, budget=budget) for i, budget in enumerate(budgets)]
    for name in set(FILES) - {"label_flip", "motivation", "random_graph", "report", "hours"}:
        draw(name, results)
    assert [names.budget_order(r.run) for r in results] == [3, 2, float("inf")]
    assert "B_c = uniform:2:4" in draw("accuracy_table", results).text


def test_results_that_a_figure_cannot_draw(made, tmp_path, monkeypatch, capsys):
    for figure, result, missing in (
        ("greedy_cases", "unsearched", "has searched for its graph"),
        ("sparsity", ("local", 42), "has a collaboration graph"),
        ("label_flip", ("dpfl", 42), "has clients with flipped labels"),
        ("motivation", ("dpfl", 42), "has the three clients of the example"),
        ("random_graph", ("dpfl", 42), "is of a random graph"),
    ):
        refused(f"none of these results {missing}", draw, figure, [made[result]])
    sentence = "--draws is 0; allowed is a whole number of at least 1"
    refused(sentence, draw, "omega", [made["dpfl", 42]], draws=0)
    evolution = module("graph_evolution")
    for asked, shown in (("every", [0, 1, 2]), ("0,last", [0, 2])):
        assert evolution.rounds_to_show(0, 2, evolution.round_list(asked), "") == shown
    assert evolution.rounds_to_show(1, 45, ["every"], "") == [1, 10, 20, 30, 40, 45]
    sentence = "--rounds has 3, but ... has graphs of rounds 0 to 2"
    refused(sentence, draw, "graph_evolution", [made["dpfl", 42]], rounds=["3"])
    allowed = "allowed are round numbers and last, as in 0,50,last, or every"
    for wrong in ("abc", "0,every", "", "\u00b2"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{wrong!r}; {allowed}"):
            evolution.round_list(wrong)
    monkeypatch.chdir(tmp_path)
    file, no_file = made["dpfl", 42].path, "error: nothing.h5: there is no such result file\n"
    assert called(capsys, monkeypatch, "nothing.h5") == (2, "", no_file)
    code, _, error = called(capsys, monkeypatch, file, "--out", file)
    assert code == 2 and error.startswith(f"error: --out is {file}, where nothing can be written: ")
    done = run_without([[str(ANALYSIS / "omega.py")]], tmp_path, "networkx")
    needed = "error: the figures need networkx: pip install networkx\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", needed)


def test_label_flip(made, tmp_path):
    """Clients 1 and 3 are flipped. In round 2 client 0 averages with 1 and 2, client 2 with 0."""
    drawing = draw("label_flip", [made["flip"]], rounds=["every"])
    axes = drawing.figure.axes
    assert drawing.data["edge_share_from_flipped"].tolist() == pytest.approx([2 / 4, 0, 1 / 3])
    assert "in round 2 benign clients have 25.0 % flipped collaborators" in drawing.text
    assert "66.7 % by chance" in drawing.text
    first = [True, False, False, False]
    no_graph = tiny(tmp_path, "served", "fedavg", flipped=first, best=(0.5,) * 4)
    assert draw("label_flip", [made["flip"], no_graph]).text == drawing.text
    assert [a.get_title() for a in axes] == [r"$\Omega$ (before round 1)", "round 1", "round 2"]
    # order: benign 0 and 2 by class, then flipped 1 and 3
    cells = [[3, 1, 2, 0], [1, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]
    assert axes[2].images[0].get_array().tolist() == cells
    [axes] = draw("label_flip", [made["flip"]], rounds=["2"]).figure.axes
    assert axes.get_title() == "round 2"
    row = draw("accuracy_table", [made["flip"]]).data.iloc[0]  # .8 and 1.0 are benign
    assert row[["mean", "worst_decile", "last_round"]].tolist() == pytest.approx([90, 80, 90])
    assert made["flip"].mean("round/test_acc").tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_motivation(made, tmp_path):
    assert draw("motivation", [made["alone"]]).data["accuracy"].tolist() == [50]
    results = [made[n] for n in ("all", "alone", "pair", ("dpfl", 42))]
    assert draw("motivation", results).text.splitlines() == [
        "client 1 alone: 50.0 % (1 seeds)",
        "client 1 with 2: 40.0 % (1 seeds), -10.0 points against alone",
        "client 1 with 2 and 3: 70.0 % (1 seeds), +20.0 points against alone",
        "Left out: 1 of 4 results, which are not of the example (--partition motivation).",
    ]
    # two learning rates are two bars; other partitions are refused
    rates = []
    for seed, lr, x in ((42, 0.01, 0.5), (42, 0.1, 0.3), (52, 0.1, 0.4)):
        fields = THREE | {"best": (x, 0.9, 0.9), "lr": lr}
        rates.append(tiny(tmp_path, f"{seed}{lr}", "local", seed, **fields))
    assert draw("motivation", [*rates, made["all"]]).text.splitlines() == [
        "client 1 alone (Local, lr 0.01): 50.0 % (1 seeds)",
        "client 1 alone (Local, lr 0.1): 35.0 % (2 seeds)",
        "client 1 with 2 and 3: 70.0 % (1 seeds)",
    ]
    others = [tiny(tmp_path, f"o{lr}", "local", clients=3, lr=lr) for lr in (0.01, 0.1)]
    refused("--partition motivation", draw, "motivation", others)


def test_groups_of_clients(tmp_path):
    """Clients 1 and 3 are in the first group, with 60 and 40 %; 0 and 2 have 80 and 100 %."""
    grouped = tiny(tmp_path, "grouped", named=NAMED, classes=["ash", "birch", "cedar"])
    drawing = draw("graph_evolution", [grouped])
    axes = drawing.figure.axes[2]
    # 0 chose 1 and 2; 2 chose 0, 3 is in Omega; 1 chose nobody, 0 is in Omega
    expected = [[3, 0, 1, 0], [0, 3, 0, 0], [2, 0, 3, 2], [0, 1, 2, 3]]
    assert axes.images[0].get_array().tolist() == expected
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["home", "é", "site-1", "site-2"]  # by group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module("graph_evolution"), "NAMED", 3)
        axes = draw("graph_evolution", [grouped]).figure.axes[2]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["east", "north"]
    assert "66.7 % inside a group (of all pairs 33.3 %)" in drawing.text
    assert drawing.data["edges_inside_a_group"].tolist() == [0.4, 1.0, 2 / 3]
    omega = draw("omega", [grouped], 3).data
    assert omega[omega["measure"] == "homophily"]["value"].tolist() == [0.4, 1.0, 2 / 3]
    table = draw("accuracy_table", [grouped]).text
    assert re.search(r"\| method +\| +east \| +north \|\n.*\n\| DPFL.* 50.00 \| +90.00 \|", table)
    page = draw("report", [grouped]).html
    assert (
        '"block":[1,0,1,0],"blocks":["east","north"]' in page
        and '"inside":[40.0,100.0,66.7]' in page
    )
    assert '"names":["site-1","home","site-2","\\u00e9"],"by":"group"' in page


def test_names_of_the_data_are_shown_as_they_are(tmp_path):
    groups = ["$a_b$", "5|6", "{x}^2", "5|6"]
    result = tiny(tmp_path, "a", named={"group": groups})
    figure = draw("graph_evolution", [result]).figure
    figure.savefig(io.BytesIO())  # reads mathtext
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert [tick for tick in ticks if tick] == [r"\$a_b\$", "5|6", "{x}^2"]
    assert names.text_label("$1 (B_c = 3)") == r"\$1 ($B_c=3$)"
    assert names.wrapped("Abcdef (B_c = 3)", 12) == "Abcdef\n($B_c=3$)"
    table = draw("accuracy_table", [result])
    assert r" 5\|6 |" in table.text
    text = tables.latex(pd.DataFrame({"a": [r"$a_b$ {x}^2 \ 5 %"]}))
    assert r"\$a\_b\$ \{x\}\textasciicircum{}2 \textbackslash{} 5 \%" in text
    folded = fitted_page(table.text)  # by its columns, of which a bar in a name is no end
    heads = [line.split(" | ") for line in folded.splitlines() if r"5\|6" in line]
    assert len(heads) == 1 and max(map(len, folded.splitlines())) <= 80


def test_omega(tmp_path):
    """Clients are ordered by class: 0 (class 0 alone), 2 (class 0, then 1), 1, 3."""
    result = tiny(tmp_path, "anew", omega_period=2)
    drawing = draw("graph_evolution", [result])
    axes = drawing.figure.axes
    before, after = (a.images[0].get_array().tolist() for a in axes[1:3])
    assert axes[1].get_title() == "round 1\nsparsity 62.5 %"
    # 0 chose 2, 1 is in Omega; 2 chose 0, 3 is in Omega; 1 chose nobody, 0 is in Omega
    assert before == [[3, 2, 1, 0], [2, 3, 0, 1], [1, 0, 3, 0], [0, 0, 0, 3]]
    assert after == [[3, 2, 2, 0], [2, 3, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]
    sentence = "on Omega is another, which is not recorded"
    assert f"from round 2 {sentence}" in drawing.text
    assert sentence not in draw("graph_evolution", [result], rounds=["0", "1"]).text
    churn = tiny(tmp_path, "churn", churn="0.2:0.5")
    assert f"from round 1 {sentence}" in draw("graph_evolution", [churn]).text
    fields = {"best": (0.5,) * 4, "graphs": [[[]] * 4, [[2], [], [0], []], [[1, 2], [], [0], []]]}
    pens = [tiny(tmp_path, f"p{s}", "pens", s, **fields) for s in (42, 52)]
    dpfl = tiny(tmp_path, "d")
    for name in ("sparsity", "asymmetry"):
        drawing = draw(name, pens)
        assert drawing.data["round"].min() == 1 and "in round 1, " in drawing.text
        assert "before round 1" in draw(name, [dpfl]).text
    evolution = draw("graph_evolution", [*pens[::-1], dpfl]).data
    expected = [["dpfl", 42, t] for t in (0, 1, 2)]
    expected += [["pens", s, t] for s in (42, 52) for t in (1, 2)]
    assert evolution[["method", "seed", "round"]].values.tolist() == expected
    omega = draw("omega", [pens[0], dpfl], 3)
    assert "Agreement" not in omega.text and omega.text.count("Omega") == 1
    assert omega.data[omega.data["method"].str.startswith("PENS")]["round"].min() == 1
    assert "to build Omega" not in summary(pens[0].path)
    assert "to build Omega" in summary(dpfl.path)


def test_an_unfinished_run_is_drawn_and_noted(made, tmp_path, capsys):
    result = tiny(tmp_path, "running", finished=False)
    assert command.has_rounds(result)
    assert "is stopped after round 2 of 2: drawn up to there" in capsys.readouterr().err
    text = draw("accuracy_table", [result, made["local", 42]]).text
    assert "**70.00 (1), not finished** |" in text
    assert "\n\nNote: not finished: DPFL (B_c = 3).\n" in text
    assert "not finished" not in draw("accuracy_table", [made[n] for n in FOUR]).text
    fewer = tiny(tmp_path, "fewer", best=(0.5, 0.5, 0.5, np.nan))
    note = "\nNote: DPFL (B_c = 3) has means over 3 of 4 clients, 1 took no part."
    assert note in draw("accuracy_table", [fewer]).text
    tuned = tiny(tmp_path, "tuned", "local", finetune_epochs=1, finished=False)
    measures = set(draw("learning_curves", [tuned]).data["measure"])
    assert measures == {"round/test_acc", "round/val_loss"}
    # A kill between two appends: round 2 has its traffic, but not its seconds.
    path = tiny_result.make(tmp_path / "cut.h5", finished=False)
    with h5py.File(path, "a") as file:
        for array in file["seconds"].values():
            array.resize(2, 0)
    assert list(module("traffic_and_time").measure(Result(path), "", "")["round"]) == [0, 1]


def test_what_is_compared_is_most_similar(tmp_path, unlike, made):
    fields = {"a": ("local", 0.2, 0.05), "b": ("local", 0.65, 0.01), "c": ("dpfl", 0.7, 0.01)}
    results = {n: tiny(tmp_path, n, m, best=(x,) * 4, lr=lr) for n, (m, x, lr) in fields.items()}
    for order in ("abc", "bac"):
        drawn = draw("accuracy_table", [results[name] for name in order])
        gain = drawn.data.set_index("method")["vs_local"]
        assert gain.filter(like="DPFL").tolist() == [pytest.approx(5)]
        assert gain.filter(like="Local").isna().all()
    text = draw("random_graph", [*unlike[:3], made["unsearched"]]).text
    [line] = [line.split("|") for line in text.splitlines() if "Random graph" in line]
    cells = [cell.strip() for cell in line[2:4]]
    assert cells == ["DPFL (B_c = 3), tau_init 10, tau_train 5", "70.00 (1)"]


def test_epochs_are_those_of_both_models(tmp_path):
    ditto = tiny(tmp_path, "ditto", "ditto", best=(0.5,) * 4, graphs=[[[]] * 4] * 3)
    assert draw("accuracy_table", [ditto]).data["epochs"].tolist() == [40]
    assert draw("learning_curves", [ditto]).data["epochs"].max() == 40
    assert draw("report", [ditto]).data["local epochs"].tolist() == [40]
    assert ditto.all_epochs() == 40
    assert Result(ditto.path).curves()["epochs"].tolist() == [20, 30, 40]
    path = tiny_result.make(tmp_path / "tuned.h5", "local", finetune_epochs=4)
    with h5py.File(path, "a") as file:
        file["finetune/test_acc"] = np.linspace(0.5, 0.9, 5)[:, None] * np.ones(4)
        file["finetune/epochs"] = 20 + np.arange(5)
    line = draw("learning_curves", [Result(path)]).figure.axes[0].lines[1]
    assert line.get_xdata().tolist() == [20, 21, 22, 23, 24]
    assert line.get_ydata().tolist() == pytest.approx([50, 60, 70, 80, 90])


def test_a_full_disk_leaves_no_half_of_a_figure(tmp_path, at_most):
    drawing = draw("learning_curves", [tiny(tmp_path)])
    files = {path: path.read_bytes() for path in command.save(drawing, "c", tmp_path)}
    sentence = f"--out is {tmp_path}, where nothing can be written: File too large"
    at_most(resource.RLIMIT_FSIZE, 8000)
    refused(sentence, command.save, drawing, "c", tmp_path)
    assert files == {path: path.read_bytes() for path in files}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("colour", ["#123456", ""])
def test_a_method_from_outside_has_the_looks_of_its_file(tmp_path, result_of, colour):
    """Its table may show another score."""
    method = Method(title="Mine", look=f"{colour} --")
    code = f"METHOD = {method!r}\ninit, round = local.init, local.round\n"
    code = code.replace("<class 'dpfl_mpi.settings.fields.NoOptions'>", "Method().options")
    code = f"from dpfl_mpi.methods import Method, local\n{code}"
    fields = {"method": text_file(tmp_path / "mine.py", code), "clients": 3, "rounds": 1}
    result = result_of(fields)
    drawing = draw("accuracy_table", [result], score="macro_f1")
    assert drawing.data["mean"].tolist() == [pytest.approx(100 * result.score("macro_f1").mean())]
    assert "Test macro F1, %" in drawing.text
    [line] = draw("learning_curves", [result]).figure.axes[0].lines
    assert line.get_color() == style.method_look(method)[0].lower()
    assert line.get_color() == colour or not colour
    assert line.get_label() == r"Mine ($B_c=\infty$)"


def test_pareto_shows_ten_points_below_the_best_and_names_the_rest(made, tmp_path):
    """DPFL ends at 70 and 75 %: 72.5 and a band. The random graph ends at 50 %, one seed."""
    drawing = draw("pareto", [made[n] for n in (*SEEDS, "unsearched")])
    axes = drawing.figure.axes[0]
    assert axes.get_ylim()[0] == pytest.approx(62.5) and len(axes.collections) == 1
    assert drawing.data["std"].tolist() == pytest.approx([0] * 3 + [5 / 2**0.5] * 3)
    assert "Too low for the picture: Random graph (B_c = 3) (50.0 %)." in drawing.text
    dirichlet = {"partition": "dirichlet"}
    plain, clocked = (tiny(tmp_path, str(n), network=n, **dirichlet) for n in (None, "phones"))
    two = draw("pareto", [made["dpfl", 42], plain]), draw("hours", [made["clocked"], clocked])
    for drawing in two:
        assert len(set(drawing.figure.axes[0].get_legend_handles_labels()[1])) == 2
    # Clients receive 2 and 3 models in rounds 1 and 2, and none in the second seed.
    none = tiny(tmp_path, "none", "dpfl", 52, graphs=[[[], [], [], []]] * 3)
    drawing = draw("traffic_and_time", [made["dpfl", 42], none, made["local", 42]])
    left, middle, _ = drawing.figure.axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["DPFL ($B_c=3$)", "Local"]
    assert [bar.get_width() for bar in left.patches] == pytest.approx([0.3125, 0])
    assert middle.get_xlim()[0] == 0 and list(left.lines[0].get_xdata()) == [2, 2]
    assert "DPFL (B_c = 3), seed 42, 52: 0.31 models" in drawing.text
