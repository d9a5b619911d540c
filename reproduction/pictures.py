"""The figures of this folder from the CSV files, by the name of their picture.

Axes: N clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _common import BLUE, COLUMN, DARK, GREY, TEXT, curve
from _common import legend as place_legend

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import looks
from _names import text_label
from _tables import comparable, interval
from accuracy_table import PAPER
from experiments import BUDGETS, graphs_of, row_at, spots
from graph_evolution import legend as legend_of_graphs
from graph_evolution import matrix
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from stored import paired, published, read
from variance import MARKS, REACH

from dpfl_mpi.plugins import find

CURVES = ("Local", "FedAvg", "Ditto", "DPFL (B_c = inf)", "DPFL (B_c = 0.1N)")  # of the accuracy over epochs


def methods_of(runs: pd.DataFrame, rows: Iterable[str]) -> list[str]:
    """Return each row's method."""
    flags = runs.drop_duplicates("row").set_index("row")["flags"]
    methods = flags.str.extract(r"--method=(\S+)", expand=False).fillna("dpfl")
    return [methods[row] for row in rows]


def styles(runs: pd.DataFrame, rows: Iterable[str]) -> list[dict[str, Any]]:
    """Return colour and line style of each row's method, as in all figures."""
    return looks(methods_of(runs, rows))


def over(axes: Axes, folder: Path, rows: Iterable[str], x: str) -> None:
    """Draw test accuracy over a column of curves.csv, a mean over seeds with a band per row; epochs are those of all of a client's models."""
    curves, runs = read(folder, "curves"), read(folder, "runs")
    shown = [row for row in rows if row in set(curves["row"])]
    for row, method, look in zip(shown, methods_of(runs, shown), styles(runs, shown), strict=True):
        values = curves[curves["row"] == row].groupby(x)["test_acc"]
        mean, spread = 100 * values.mean(), 100 * values.std().fillna(0)
        at = mean.index.to_numpy() * (find("method", method).models if x == "epochs" else 1)
        curve(axes, at, mean.to_numpy(), spread.to_numpy(), label=text_label(row), **look)


def accuracy(setting: str, folder: Path) -> Figure | None:
    """Return differences to Local beside the paper's, and accuracy over local epochs."""
    clients = read(folder, "clients")
    local = published(setting, "Local")
    rows = [r for r in PAPER if r != "Local" and comparable(paired(clients, r, "Local"))]
    if not rows:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.9), width_ratios=(1.25, 1))
    drawn = {}  # by the text of the legend
    for y, row in enumerate(rows):
        values = paired(clients, row, "Local")
        mean, half = interval(values)
        colour, over_what = (BLUE, "over partitions") if len(values) > 1 else (GREY, "over clients of one")
        drawn[f"ours, 95 % {over_what}"] = left.errorbar(mean, y, xerr=half, fmt="o", color=colour, capsize=2)[0]
        paper = published(setting, row)
        if paper and local:
            drawn["paper"] = left.plot(paper[0] - local[0], y, "D", mfc="none", color=DARK)[0]
    left.axvline(0, color=GREY, lw=0.6)
    left.set_yticks(range(len(rows)), [text_label(row) for row in rows])
    left.invert_yaxis()
    left.set_xlabel("difference to Local, points")
    order = [
        text for text in ("ours, 95 % over partitions", "ours, 95 % over clients of one", "paper") if text in drawn
    ]
    left.legend([drawn[text] for text in order], order, loc="best")
    over(right, folder, CURVES, "epochs")
    right.set_xlabel("local epochs, of all its models")
    right.set_ylabel("test accuracy, %")
    right.legend(loc="lower right")
    return figure


def variance(setting: str, folder: Path) -> Figure | None:
    """Return mean accuracy against the variance over clients, as the figure of that name in `analysis` draws it."""
    here = spots(folder)
    if len(here) < 2:
        return None
    figure, axes = plt.subplots(figsize=(COLUMN, 2.4))
    for i, (spot, look) in enumerate(zip(here.itertuples(), styles(read(folder, "runs"), here["row"]), strict=True)):
        if spot.accuracy < here["accuracy"].max() - REACH:
            continue
        left = max(spot.variance - spot.chance, 0)
        axes.plot([spot.accuracy] * 2, [left, spot.variance], color=look["color"], lw=0.6, alpha=0.6, zorder=1)
        axes.plot(spot.accuracy, left, "_", color=look["color"], ms=4, mew=0.8, zorder=1)
        how = {"color": look["color"], "mec": "white", "mew": 0.3, "zorder": 2}
        axes.plot(spot.accuracy, spot.variance, MARKS[i % len(MARKS)], label=text_label(spot.row), **how)
    axes.set_xlabel("test accuracy, %")
    axes.set_ylabel("variance over clients, %$^2$")
    axes.set_ylim(bottom=0)
    handles = axes.get_legend_handles_labels()
    place_legend(figure, *handles, "outside lower center", handlelength=1.0, handletextpad=0.3)
    return figure


def random_graph(setting: str, folder: Path) -> Figure | None:
    """Return test accuracy over rounds of DPFL and of the same method on a random graph, by budget."""
    here = set(read(folder, "runs")["row"])
    budgets = [b for b in BUDGETS if {row_at(b), f"Random graph (B_c = {b})"} <= here]
    if not budgets:
        return None
    figure, axes = plt.subplots(figsize=(COLUMN, 2.3))
    over(axes, folder, [row_at(b) for b in budgets] + [f"Random graph (B_c = {b})" for b in budgets], "round")
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy, %")
    place_legend(figure, *axes.get_legend_handles_labels(), "outside upper center")
    return figure


def graphs(setting: str, folder: Path) -> Figure | None:
    """Return the graph of each budget before round 1, half way and at the end; clients are ordered by their most frequent classes."""
    each = {budget: found for budget in BUDGETS if (found := graphs_of(folder, row_at(budget)))}
    if not each:
        return None
    columns = max(map(len, each.values()))
    figure, grid = plt.subplots(len(each), columns, figsize=(TEXT, 2.4 * len(each) + 0.3), squeeze=False)
    ranked = read(folder, "graphs").query("t == 0").drop_duplicates("client").sort_values("client")["classes"]
    classes = [[int(c) for c in held.split()] for held in ranked]
    order = np.array(sorted(range(len(classes)), key=classes.__getitem__))
    most = np.array([held[0] for held in classes])
    for panels, (budget, found) in zip(grid, each.items(), strict=True):
        for axes, (t, chosen) in zip(panels, found, strict=False):
            matrix(axes, chosen, found[0][1], order, most, t)
        panels[0].set_ylabel(text_label(f"B_c = {budget}"), fontsize=7)
    figure.supxlabel("sender, by most frequent class", fontsize=7)
    figure.supylabel("receiver, by most frequent class", fontsize=7)
    legend_of_graphs(figure)
    return figure


PICTURES: dict[str, Callable[[str, Path], Figure | None]] = {
    "accuracy": accuracy,
    "variance": variance,
    "random-graph": random_graph,
    "graphs": graphs,
}
