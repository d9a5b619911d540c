"""The tables and pictures of docs/findings.md, from the frames of the folder `controls`.

There, comparisons have 20 rounds or more; attacks, newcomers and drift have 6.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import plan_power
from matplotlib.figure import Figure
from recomputed import Lines, intervals

from dpfl_mpi.figures import pareto, tables
from dpfl_mpi.figures.controls_table import gaps, percent
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.style import BLUE, DARK, GREY, PALE, TEXT, curves
from dpfl_mpi.figures.tables import difference_text, mean_text, means, number, paired
from dpfl_mpi.settings.values import ATTACKS

CURVE_SEED = 42  # the seed of which one curve per method is shown
COMPARED = ("Local", "FedAvg", "FedAvg+FT", "Pairwise", "Random graph")
COMPARED += ("Random graph, DPFL's degrees", "Replay, rewired", "Replay, shuffled")
COMPARED += ("Replay, reversed", "Oracle", "PENS", "DPFL, search_share 0.5")
COSTS = ("models", "evaluations", "steps")
IN_COSTS = ("DPFL", "Pairwise", "Random graph", "Oracle", "PENS", "FedAvg+FT", "Local")
ATTACK_ROWS = {kind: f"attack {kind}:0.2" for kind in ATTACKS}
AGES = (0, 1, 5)  # epochs of newcomers


def long(frames: Frames) -> Frames:
    return frames.where(frames.runs["rounds"] >= 20)


def short(frames: Frames) -> Frames:
    return frames.where(frames.runs["rounds"] == 6)


def in_order(rows: Iterable[str], without: str) -> list[str]:
    """Return rows in the order of the page, without those that match an expression."""
    known = ("DPFL", *COMPARED)
    shown = {row for row in rows if not re.search(without, row)}
    place = {row: i for i, row in enumerate(known)}
    return sorted(shown, key=lambda row: (place.get(row, len(known)), row))


def costs(runs: pd.DataFrame, row: str, words: str = "") -> dict[str, str]:
    """Return a row's costs per client, means over the seeds; `words` end the columns' names."""
    mean = runs[runs["row"] == row][[f"{name}_per_client" for name in COSTS]].mean()
    values = {name: number(mean[f"{name}_per_client"], ",.0f") for name in COSTS}
    return {pareto.COSTS[name] + words: value for name, value in values.items()}


def never_lying(frames: Frames, method: str) -> pd.DataFrame:
    """Return the lines, in the Runs of 6 rounds, of clients that lie in none of them."""
    clients = short(frames)["clients"]
    attacked = clients[clients["row"].str.startswith(f"{method}, attack")]
    benign = attacked.dropna(subset=["test_acc"])["client"]  # liars have no accuracy
    return clients[clients["client"].isin(benign)]


def row_cells(
    runs: pd.DataFrame, clients: pd.DataFrame, row: str, column: str, *pair: str
) -> dict[str, str]:
    """Return a row's accuracy, the difference of a pair of rows in `column`, the gap, and costs."""
    parts = paired(clients, *pair) if len(set(pair)) > 1 else []
    return {
        "method": row,
        "accuracy, %": mean_text(means(clients, row)),
        column: difference_text(parts),
        "validation - test": difference_text(gaps(clients[clients["row"] == row])),
        **costs(runs, row),
    }


def compared(frames: Frames) -> Lines:
    runs, clients = long(frames).runs, long(frames)["clients"]
    for row in ("DPFL", *COMPARED):
        if len(clients[clients["row"] == row]):
            yield row_cells(runs, clients, row, "DPFL minus it", "DPFL", row)


def reached(frames: Frames) -> str:
    runs = long(frames).runs
    shown = (runs["seed"] == CURVE_SEED) & ~runs["row"].str.contains("same clients")
    return pareto.table(long(frames).where(shown), 78, COSTS)


def graphs(frames: Frames) -> Lines:
    lines = long(frames)["measures"]
    measures = ["degree", "homophily", "z", "reciprocity", "asked", "gap", "classes"]
    digits = {"z": 1, "degree": 1}
    for row in in_order(lines["row"], "same clients|patience"):
        of_row = lines[lines["row"] == row]
        is_omega = of_row["round"] == 0
        for graph, shown in {"Omega": of_row[is_omega], "last round": of_row[~is_omega]}.items():
            means = shown[measures].mean().items()
            cells = {name: f"{value:.{digits.get(name, 3)}f}" for name, value in means}
            yield {"method": f"{row} ({shown['seed'].nunique()})", "graph": graph} | cells


def power(frames: Frames) -> Lines:
    """Yield how many partitions find a difference of 0.63 and of 2 points in 80 % of the cases."""
    for row in COMPARED:
        parts = paired(long(frames)["clients"], "DPFL", row)
        if len(parts) > 1:
            columns = {"partitions for 0.63": 0.63, "for 2": 2.0}
            yield {"DPFL minus": row} | plan_power.cells(parts, columns)


def attacks(frames: Frames) -> Lines:
    runs = short(frames).runs
    for method in ("DPFL", "FedAvg"):
        clients = never_lying(frames, method)
        attacked = runs["row"].str.startswith(f"{method}, attack")
        for line in runs[(runs["row"] == method) | attacked].itertuples():
            opened = f"{percent(line.backdoor)} ({percent(line.backdoor_unmarked)})"
            yield {
                **row_cells(runs, clients, line.row, "vs no attack", line.row, method),
                "liars among chosen, %": percent(line.liars_chosen),
                "backdoor, % (unmarked)": "-" if np.isnan(line.backdoor) else opened,
            }


def newcomers(frames: Frames) -> Lines:
    base, clients = "DPFL, newcomers 0.1", frames["clients"]
    last = frames["newcomers"].query("epochs == 5")
    for _, line in frames.runs[frames.runs["row"].str.contains("newcomers")].iterrows():
        row = line["row"]
        cells = {"method": row, "those who trained, %": mean_text(means(clients, row))}
        for age in AGES:
            both = [percent(line[f"newcomers_{age}{end}"]) for end in ("", "_half")]
            cells[f"newcomers, E = {age}"] = " ± ".join(both)
        parts = [] if row == base else paired(last, base, row)
        yield cells | {"DPFL minus it, E = 5": difference_text(parts)}


def moved(frames: Frames) -> Lines:
    changed = frames.runs["row"].str.contains("drift|omega_period|patience")
    for line in frames.runs[changed].itertuples():
        rounds, seed = frames.runs["rounds"], frames.runs["seed"]
        same = frames.where((rounds == line.rounds) & (seed == line.seed))
        base = line.row.split(",")[0]
        pair = line.row, base
        cells = row_cells(same.runs, same["clients"], line.row, "vs the run without", *pair)
        yield cells | costs(same.runs, base, " without it")


DRAWN = (compared, reached, graphs, power, attacks, newcomers, moved)
TABLES: dict[str, Callable[[Frames], Any]] = {table.__name__: table for table in DRAWN}


def draw_compared(frames: Frames) -> Figure:
    clients = long(frames)["clients"]
    found = {row: paired(clients, "DPFL", row) for row in COMPARED if row != "FedAvg"}
    pairs = {"DPFL": []} | {row: p for row, p in found.items() if tables.comparable(p)}
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 3.2), sharey=True)
    intervals(left, pairs)
    intervals(right, {row: gaps(clients[clients["row"] == row]) for row in pairs})
    left.set_xlabel("DPFL minus this method, points")
    right.set_xlabel("validation minus test accuracy, points")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def draw_costs(frames: Frames) -> Figure | None:
    runs = long(frames).runs
    shown = (runs["seed"] == CURVE_SEED) & runs["row"].isin(IN_COSTS)
    return pareto.draw(long(frames).where(shown), costs=COSTS).figure


def draw_graphs(frames: Frames) -> Figure:
    """Return measures of Omega and of the last graph, means over the partitions."""
    lines = long(frames)["measures"]
    rows = in_order(lines["row"], "same clients|patience|search_share")
    figure, panels = plt.subplots(1, 3, figsize=(TEXT, 2.2), sharey=True)
    is_omega = lines["round"] == 0
    bars = (("Omega", is_omega, -0.2, BLUE), ("last round", ~is_omega, 0.2, PALE))
    for axes, measure in zip(panels, ("homophily", "reciprocity", "gap"), strict=True):
        for name, shown, shift, colour in bars:
            values = lines[shown].groupby("row")[measure].mean().reindex(rows)
            axes.barh(np.arange(len(rows)) + shift, values, 0.38, color=colour, label=name)
        axes.set_xlabel(measure)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def draw_power(frames: Frames) -> Figure:
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    points, looks = np.linspace(0.4, 3, 27), frames.rows.set_index("row")
    for row in ("Local", "FedAvg+FT", "Pairwise"):
        chance = plan_power.chance_of(paired(long(frames)["clients"], "DPFL", row))
        counts = [plan_power.needed(chance, each, chance.clients) for each in points]
        look = {"color": looks["colour"][row], "ls": looks["line"][row]}
        axes.plot(points, counts, label=f"DPFL minus {row}", **look)
    axes.axhline(3, color=GREY, lw=0.6)
    axes.axvline(0.63, color=GREY, lw=0.6)
    axes.set(xlabel="difference to find, points", ylabel="partitions")
    axes.set_ylim(0)
    axes.legend()
    return figure


def draw_attacks(frames: Frames) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.3), width_ratios=(1.6, 1))
    kinds = range(len(ATTACKS))
    for shift, method in ((-0.2, "DPFL"), (0.2, "FedAvg")):
        colour = frames.rows.set_index("row")["colour"][method]
        values = 100 * never_lying(frames, method).groupby("row")["test_acc"].mean()
        bars = values.reindex([f"{method}, {attack}" for attack in ATTACK_ROWS.values()])
        left.bar(np.arange(len(ATTACKS)) + shift, bars, 0.38, color=colour, label=method)
        left.axhline(values[method], color=colour, lw=0.8, ls="--")
    left.set_ylabel("accuracy of benign clients, %")
    chosen = 100 * short(frames).runs.set_index("row")["liars_chosen"]
    bars = [chosen[f"DPFL, {attack}"] for attack in ATTACK_ROWS.values()]
    right.bar(kinds, bars, 0.6, color=BLUE)
    right.axhline(20, color=DARK, lw=0.8, ls="--")
    right.set_ylabel("liars among chosen, %")
    for axes in (left, right):
        axes.set_xticks(kinds, [kind.replace("_", "\n") for kind in ATTACKS], fontsize=6)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def draw_epochs(frames: Frames, name: str, words: str, xlabel: str, ylabel: str) -> Figure:
    """Return test accuracy over epochs, of the frame `name` and the rows with some words."""
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    rows = frames.rows[frames.rows["row"].str.contains(words)]
    by_epoch = frames[name].groupby(["setting", "row", "run", "epochs"], as_index=False)
    curves(axes, rows, by_epoch["test_acc"].mean(), "test_acc", "epochs", 100)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def pictures(frames: Frames) -> Iterator[tuple[str, Figure | None]]:
    yield "compared", draw_compared(frames)
    yield "costs", draw_costs(frames)
    yield "graphs", draw_graphs(frames)
    yield "power", draw_power(frames)
    yield "attacks", draw_attacks(frames)
    axes = ("epochs of their own", "newcomers' accuracy, %")
    yield "newcomers", draw_epochs(frames, "newcomers", "newcomers", *axes)
    yield "drift", draw_epochs(frames, "curves", "drift", "local epochs", "test accuracy, %")
