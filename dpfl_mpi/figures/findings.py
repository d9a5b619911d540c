"""The tables and figures of `docs/findings.md`, of the frames of `reproduction/controls/`: comparisons have 20 rounds or more, lies and the like 6."""

from collections.abc import Callable, Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dpfl_mpi.figures import pareto
from dpfl_mpi.figures.controls_table import gaps, percent
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.recomputed import Lines, intervals
from dpfl_mpi.figures.style import BLUE, DARK, GREY, PALE, TEXT, curves
from dpfl_mpi.figures.tables import Parts, cell, comparable, means, number, paired, told
from dpfl_mpi.settings.values import ATTACKS

DRAWN = 42  # the seed of which one curve per method is shown
SHORT = 6  # rounds of lies, newcomers and drift
COMPARED = (
    *("Local", "FedAvg", "FedAvg+FT", "Pairwise", "Random graph", "Random graph, DPFL's degrees"),
    *("Replay, rewired", "Replay, shuffled", "Replay, reversed", "Oracle", "PENS", "DPFL, search_share 0.5"),
)
COSTS = ("models", "evaluations", "steps")
OVER_COSTS = ("DPFL", "Pairwise", "Random graph", "Oracle", "PENS", "FedAvg+FT", "Local")
# deviation within and between partitions, and how many a difference takes
Needed = Callable[[Parts, float], tuple[float, float, int]]


def long(frames: Frames) -> Frames:
    """Return the frames of the comparisons."""
    return frames.where(frames.runs["rounds"] >= 20)


def short(frames: Frames) -> Frames:
    """Return the frames of the Runs of 6 rounds."""
    return frames.where(frames.runs["rounds"] == SHORT)


def in_order(rows: Iterable[str], without: str) -> list[str]:
    """Return rows as the page names them: DPFL, then as in `COMPARED`, others last; without those that have one of the words."""
    known = ("DPFL", *COMPARED)
    shown = {row for row in rows if not any(word in row for word in without.split("|"))}
    return sorted(shown, key=lambda row: (known.index(row) if row in known else len(known), row))


def costs(runs: pd.DataFrame, row: str, words: str = "") -> dict[str, str]:
    """Return what a row's Runs cost per client, means over the seeds."""
    mean = runs[runs["row"] == row][[f"{name}_per_client" for name in COSTS]].mean()
    return {pareto.COSTS[name] + words: number(mean[f"{name}_per_client"], ",.0f") for name in COSTS}


def benign(frames: Frames, method: str) -> pd.DataFrame:
    """Return the lines of clients of the Runs of 6 rounds, of the clients that lie in none of them: liars have no accuracy."""
    clients = short(frames)["clients"]
    lying = clients[clients["row"].str.startswith(f"{method}, attack")]
    return clients[clients["client"].isin(lying.dropna(subset=["test_acc"])["client"])]


# -- tables -------------------------------------------------------------------------------------------------------------------------------


def about(runs: pd.DataFrame, clients: pd.DataFrame, row: str, words: str, *pair: str) -> dict[str, str]:
    """Return the cells of every table: a row's accuracy, the difference of a pair of rows, the gap, and costs."""
    return {
        "method": row,
        "accuracy, %": cell(means(clients, row)),
        words: told(paired(clients, *pair)) if len(set(pair)) > 1 else "-",
        "validation - test": told(gaps(clients[clients["row"] == row])),
        **costs(runs, row),
    }


def compared(frames: Frames) -> Lines:
    """Yield the comparisons."""
    runs, clients = long(frames).runs, long(frames)["clients"]
    for row in ("DPFL", *COMPARED):
        if len(clients[clients["row"] == row]):
            yield about(runs, clients, row, "DPFL minus it", "DPFL", row)


def reached(frames: Frames) -> str:
    """Return what it took each method to have 78 % for the first time, seed 42."""
    runs = frames.runs
    shown = frames.where((runs["rounds"] >= 20) & (runs["seed"] == DRAWN) & ~runs["row"].str.contains("same clients"))
    return pareto.table(shown, 78, COSTS)


def graphs(frames: Frames) -> Lines:
    """Yield the measures of Omega and of the last graph, means over the partitions."""
    lines = long(frames)["measures"]
    for row in in_order(lines["row"], "same clients|patience"):
        mine = lines[lines["row"] == row]
        for when, part in (("Omega", mine[mine["round"] == 0]), ("last round", mine[mine["round"] > 0])):
            values = part[["degree", "homophily", "z", "reciprocity", "asked", "gap", "classes"]].mean()
            cells = {n: f"{v:.1f}" if n in ("z", "degree") else f"{v:.3f}" for n, v in values.items()}
            yield {"method": f"{row} ({part['seed'].nunique()})", "graph": when} | cells


def power(frames: Frames, needed: Needed) -> Lines:
    """Yield how many partitions of 100 clients it takes to find a difference as large as the measured one, and of 0.63 points."""
    for row in COMPARED:
        parts = paired(long(frames)["clients"], "DPFL", row)
        if len(parts) > 1:
            spread, between, few = needed(parts, 0.63)
            found = (str(number) if number else "> 10,000" for number in (few, needed(parts, 2.0)[2]))
            deviations = {"deviation within": f"{spread:.1f}", "between partitions": f"{between:.2f}"}
            counts = dict(zip(("partitions for 0.63", "for 2"), found, strict=True))
            yield {"DPFL minus": row, "points": told(parts)} | deviations | counts


def attacks(frames: Frames) -> Lines:
    """Yield what lies did to the benign."""
    runs = short(frames).runs
    for method in ("DPFL", "FedAvg"):
        clients = benign(frames, method)
        for line in runs[(runs["row"] == method) | runs["row"].str.startswith(f"{method}, attack")].itertuples():
            opened = f"{percent(line.backdoor)} ({percent(line.backdoor_unmarked)})"
            yield about(runs, clients, line.row, "to no lie", line.row, method) | {
                "liars of those chosen, %": percent(line.liars_chosen),
                "backdoor opens, % (unmarked)": "-" if np.isnan(line.backdoor) else opened,
            }


def newcomers(frames: Frames) -> Lines:
    """Yield the accuracy of those who trained and of newcomers, and DPFL's minus it, paired by client."""
    base, clients, later = "DPFL, newcomers 0.1", frames["clients"], frames["newcomers"].query("epochs == 5")
    for _, line in frames.runs[frames.runs["row"].str.contains("newcomers")].iterrows():
        came = {e: [percent(line[f"newcomers_{e}{end}"]) for end in ("", "_half")] for e in (0, 1, 5)}
        yield {
            "method": line["row"],
            "those who trained, %": cell(means(clients, line["row"])),
            **{f"newcomers, E = {epochs}": " ± ".join(both) for epochs, both in came.items()},
            "DPFL minus it, E = 5": "-" if line["row"] == base else told(paired(later, base, line["row"])),
        }


def moved(frames: Frames) -> Lines:
    """Yield what drift, new Omegas and early stopping did."""
    for line in frames.runs[frames.runs["row"].str.contains("drift|omega_period|patience")].itertuples():
        same = frames.where((frames.runs["rounds"] == line.rounds) & (frames.runs["seed"] == line.seed))
        base = line.row.split(",")[0]
        mine = about(same.runs, same["clients"], line.row, "to the run without", line.row, base)
        yield mine | costs(same.runs, base, " without it")


# -- figures ------------------------------------------------------------------------------------------------------------------------------


def colours(frames: Frames) -> dict[str, Any]:
    """Return colour and line style of each row's method, as in all figures."""
    return {row.row: {"color": row.colour, "ls": row.line} for row in frames.rows.itertuples()}


def differences(frames: Frames) -> Figure:
    """Return DPFL minus every other row, and validation minus test accuracy, with 95 % intervals."""
    clients = long(frames)["clients"]
    pairs = {row: paired(clients, "DPFL", row) for row in COMPARED if row != "FedAvg"}
    pairs = {"DPFL": [], **{row: parts for row, parts in pairs.items() if comparable(parts)}}
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 3.2), sharey=True)
    intervals(left, pairs)
    intervals(right, {row: gaps(clients[clients["row"] == row]) for row in pairs})
    left.set_xlabel("DPFL minus this method, points")
    right.set_xlabel("validation minus test accuracy, points")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def over_costs(frames: Frames) -> Figure | None:
    """Return accuracy of the best models so far over what they took, seed 42."""
    runs = frames.runs
    shown = frames.where((runs["rounds"] >= 20) & (runs["seed"] == DRAWN) & runs["row"].isin(OVER_COSTS))
    figure = pareto.draw(shown, costs=COSTS).figure
    if figure:
        figure.axes[0].set_ylim(60)
    return figure


def graph_figure(frames: Frames) -> Figure:
    """Return homophily, reciprocity and the spectral gap of Omega and of the last graph, means over the partitions."""
    lines = long(frames)["measures"]
    rows = in_order(lines["row"], "same clients|patience|search_share")
    figure, panels = plt.subplots(1, 3, figsize=(TEXT, 2.2), sharey=True)
    for axes, measure in zip(panels, ("homophily", "reciprocity", "gap"), strict=True):
        for when, shift, colour, name in ((True, -0.2, BLUE, "Omega"), (False, 0.2, PALE, "last round")):
            values = lines[(lines["round"] == 0) == when].groupby("row")[measure].mean().reindex(rows)
            label = name if axes is panels[0] else None
            axes.barh(np.arange(len(rows)) + shift, values, 0.38, color=colour, label=label)
        axes.set_xlabel(measure)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].invert_yaxis()
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def power_figure(frames: Frames, needed: Needed) -> Figure:
    """Return how many partitions of 100 clients find a difference with a power of 80 %, for three comparisons."""
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    points = np.linspace(0.4, 3, 27)
    for row in ("Local", "FedAvg+FT", "Pairwise"):
        parts = paired(long(frames)["clients"], "DPFL", row)
        partitions = [needed(parts, difference)[2] for difference in points]
        axes.plot(points, partitions, label=f"DPFL minus {row}", **colours(frames)[row])
    axes.axhline(3, color=GREY, lw=0.6)
    axes.axvline(0.63, color=GREY, lw=0.6)
    axes.set(xlabel="difference to find, points", ylabel="partitions")
    axes.set_ylim(0)
    axes.legend()
    return figure


def lies(frames: Frames) -> Figure:
    """Return accuracy of the benign under every lie, beside how often liars are chosen."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.3), width_ratios=(1.6, 1))
    for shift, method in ((-0.2, "DPFL"), (0.2, "FedAvg")):
        colour = colours(frames)[method]["color"]
        values = 100 * benign(frames, method).groupby("row")["test_acc"].mean()
        bars = values.reindex([f"{method}, attack {kind}:0.2" for kind in ATTACKS])
        left.bar(np.arange(len(ATTACKS)) + shift, bars, 0.38, color=colour, label=method)
        left.axhline(values[method], color=colour, lw=0.8, ls="--")
    left.set_ylabel("accuracy of the benign, %")
    runs = short(frames).runs.set_index("row")
    chosen = [100 * runs.loc[f"DPFL, attack {kind}:0.2", "liars_chosen"] for kind in ATTACKS]
    right.bar(range(len(ATTACKS)), chosen, 0.6, color=BLUE)
    right.axhline(20, color=DARK, lw=0.8, ls="--")
    right.set_ylabel("liars of those chosen, %")
    for axes in (left, right):
        axes.set_xticks(range(len(ATTACKS)), [kind.replace("_", "\n") for kind in ATTACKS], fontsize=6)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def over(frames: Frames, name: str, words: str, at: str, xlabel: str, ylabel: str) -> Figure:
    """Return test accuracy over a column of a frame, of the rows that have one of the words."""
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    rows = frames.rows[frames.rows["row"].str.contains(words)]
    lines = frames[name].groupby(["setting", "row", "run", at], as_index=False)["test_acc"].mean()  # of newcomers
    curves(axes, rows, lines, "test_acc", at, 100)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


TABLES = {f.__name__: f for f in (compared, reached, graphs, attacks, newcomers, moved)}


def pictures(frames: Frames, needed: Needed) -> dict[str, Figure | None]:
    """Return the figures by the name of their picture."""
    return {
        "compared": differences(frames),
        "costs": over_costs(frames),
        "graphs": graph_figure(frames),
        "power": power_figure(frames, needed),
        "attacks": lies(frames),
        "newcomers": over(frames, "newcomers", "newcomers", "epochs", "epochs of their own", "newcomers' accuracy, %"),
        "drift": over(frames, "curves", "drift", "epochs", "local epochs", "test accuracy, %"),
    }
