"""The figures of docs/findings.md, by the name of their picture; `draw_controls.py` draws them."""

from __future__ import annotations

from _common import BLUE, DARK, GREY, PALE, TEXT

import matplotlib.pyplot as plt
import numpy as np
from _looks import look
from _tables import comparable, interval
from control_lines import COMPARED, SHORT, benign, gaps, in_order, only_long, read
from matplotlib.figure import Figure
from stored import paired

from dpfl_mpi.settings.values import ATTACKS
from dpfl_mpi.studies.plan_power import chance_of, needed


def style(row: str) -> dict[str, str]:
    """Return colour and line style of a row's method, as in all figures."""
    runs = read("runs")
    colour, line = look(runs[runs["row"] == row]["method"].iloc[0])
    return {"color": colour, "ls": line}


def differences() -> Figure:
    """Return DPFL minus every other row, and validation minus test accuracy, with 95 % intervals."""
    clients = only_long(read("clients"))
    rows = [row for row in COMPARED if comparable(paired(clients, "DPFL", row)) and row != "FedAvg"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 3.2), sharey=True)
    for y, row in enumerate(["DPFL", *rows]):
        several = clients[clients["row"] == row]["seed"].nunique() > 1
        look = {"fmt": "o", "capsize": 2, "color": BLUE if several else GREY}
        if row != "DPFL":
            mean, half = interval(paired(clients, "DPFL", row))
            left.errorbar(mean, y, xerr=half, **look)
        mean, half = interval(gaps(clients, row))
        right.errorbar(mean, y, xerr=half, **look)
    left.set_yticks(range(len(rows) + 1), ["DPFL", *rows])
    left.invert_yaxis()
    for panel, text in ((left, "DPFL minus this method, points"), (right, "validation minus test accuracy, points")):
        panel.axvline(0, color=GREY, lw=0.6)
        panel.set_xlabel(text)
    left.plot([], [], "o", color=BLUE, label="over partitions")
    left.plot([], [], "o", color=GREY, label="over clients of one")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def cost_figure() -> Figure:
    """Return accuracy of the best models so far over what they took, seed 42."""
    lines = only_long(read("costs"))
    lines = lines[lines["seed"] == 42]
    rows = ("DPFL", "Pairwise", "Random graph", "Oracle", "PENS", "FedAvg+FT", "Local")
    figure, axes = plt.subplots(1, 3, figsize=(TEXT, 2.6), sharey=True)
    for row in rows:
        part = lines[lines["row"] == row].sort_values("point")
        if not len(part):
            continue
        for panel, cost in zip(axes, ("models", "evaluations", "steps"), strict=True):
            panel.plot(part[cost], part["accuracy"], label=row if panel is axes[0] else None, **style(row))
            panel.plot(part[cost].iloc[-1], part["accuracy"].iloc[-1], "o", color=style(row)["color"])
    for panel, text in zip(axes, ("models received", "models evaluated", "gradient steps"), strict=True):
        panel.set_xlabel(f"{text} per client")
    axes[0].set_ylim(60)
    axes[0].set_ylabel("test accuracy, %")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def graphs_figure() -> Figure:
    """Return homophily, reciprocity and the spectral gap of Omega and of the last graph, means over the partitions."""
    lines = only_long(read("graphs"))
    lines = lines[~lines["row"].str.contains("same clients|patience|search_share")]
    rows = in_order(lines["row"])
    figure, axes = plt.subplots(1, 3, figsize=(TEXT, 2.2), sharey=True)
    for panel, measure in zip(axes, ("homophily", "reciprocity", "gap"), strict=True):
        for when, shift, colour, name in ((True, -0.2, BLUE, "Omega"), (False, 0.2, PALE, "last round")):
            values = lines[(lines["round"] == 0) == when].groupby("row")[measure].mean().reindex(rows)
            panel.barh(
                np.arange(len(rows)) + shift, values, 0.38, color=colour, label=name if panel is axes[0] else None
            )
        panel.set_xlabel(measure)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def power_figure() -> Figure:
    """Return how many partitions of 100 clients find a difference with a power of 80 %, for three comparisons."""
    clients = only_long(read("clients"))
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    points = np.linspace(0.4, 3, 27)
    for row in ("Local", "FedAvg+FT", "Pairwise"):
        chance = chance_of(paired(clients, "DPFL", row))
        partitions = [needed(chance, d, chance.clients, 0.8, 0.05) for d in points]
        axes.plot(points, partitions, label=f"DPFL minus {row}", **style(row))
    axes.axhline(3, color=GREY, lw=0.6)
    axes.axvline(0.63, color=GREY, lw=0.6)
    axes.set_xlabel("difference to find, points")
    axes.set_ylabel("partitions")
    axes.set_ylim(0)
    axes.legend()
    return figure


def lies_figure() -> Figure:
    """Return accuracy of the benign under every lie, beside how often liars are chosen."""
    runs = read("runs")
    runs = runs[runs["rounds"] == SHORT].set_index("row")
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.3), width_ratios=(1.6, 1))
    for shift, method in ((-0.2, "DPFL"), (0.2, "FedAvg")):
        colour, means = style(method)["color"], 100 * benign(read("clients"), method).groupby("row")["test_acc"].mean()
        rows = [f"{method}, attack {kind}:0.2" for kind in ATTACKS]
        left.bar(np.arange(len(ATTACKS)) + shift, means.reindex(rows), 0.38, color=colour, label=method)
        left.axhline(means[method], color=colour, lw=0.8, ls="--")
    left.set_ylabel("accuracy of the benign, %")
    chosen = [100 * runs.loc[f"DPFL, attack {kind}:0.2", "liars_chosen"] for kind in ATTACKS]
    right.bar(range(len(ATTACKS)), chosen, 0.6, color=BLUE)
    right.axhline(20, color=DARK, lw=0.8, ls="--")
    right.set_ylabel("liars of those chosen, %")
    for panel in (left, right):
        panel.set_xticks(range(len(ATTACKS)), [kind.replace("_", "\n") for kind in ATTACKS], fontsize=6)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def newcomers_figure() -> Figure:
    """Return newcomers' accuracy over their own epochs."""
    runs = read("runs")
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    for row, part in runs[runs["row"].str.contains("newcomers")].groupby("row"):
        values = [100 * part.iloc[0][f"newcomers_{epochs}"] for epochs in (0, 1, 5)]
        axes.plot((0, 1, 5), values, marker="o", label=row.split(",")[0], **style(row))
    axes.set_xlabel("epochs of their own")
    axes.set_ylabel("newcomers' test accuracy, %")
    axes.legend(loc="lower right", ncols=2)
    return figure


def drift_figure() -> Figure:
    """Return accuracy over rounds where classes change their names."""
    lines = read("curves")
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    for row, part in lines[lines["row"].str.contains("drift")].groupby("row"):
        anew = "omega_period" in row
        name = row.split(",")[0] + (", Omega anew every 2 rounds" if anew else "")
        axes.plot(part["epochs"], 100 * part["test_acc"], label=name, **style(row) | ({"ls": "--"} if anew else {}))
    axes.set_xlabel("local epochs")
    axes.set_ylabel("test accuracy, %")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


FIGURES = {
    "compared": differences,
    "costs": cost_figure,
    "graphs": graphs_figure,
    "power": power_figure,
    "attacks": lies_figure,
    "newcomers": newcomers_figure,
    "drift": drift_figure,
}
