"""Redraw every table and figure of docs/findings.md from the CSV files: `python reproduction/draw_controls.py`.

The CSV files are in `controls/`; `controls.py` made them. Neither MPI, torch nor a result is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "analysis"), str(HERE.parent)]

from _common import BLUE, DARK, GREY, RED, STYLE, TEXT

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _tables import Parts, comparable, interval, markdown
from draw import filled, ours, paired, percent
from matplotlib.figure import Figure

from dpfl_mpi.plan_power import chance_of, needed

FOLDER, PAGE = HERE / "controls", HERE.parent / "docs" / "findings.md"
LONG, SHORT = 100, 60  # local epochs, at least: of the comparisons, of lies, newcomers and drift
COMPARED = (
    "Local",
    "FedAvg",
    "FedAvg+FT",
    "Pairwise",
    "Random graph",
    "Random graph, DPFL's degrees",
    "Replay, rewired",
    "Replay, shuffled",
    "Replay, reversed",
    "Oracle",
    "PENS",
    "Ditto",
    "FedRep",
    "DPFL, search_share 0.5",
    "Pairwise, search_share 0.5",
)
LIES = ("label_flip", "sign_flip", "noise", "scale", "stale", "backdoor")


def read(name: str) -> pd.DataFrame:
    """Return one of the CSV files, with every Run's row and seed."""
    frame = pd.read_csv(FOLDER / f"{name}.csv", dtype={"run": str})
    return frame if name == "runs" else frame.merge(read("runs")[["run", "row", "seed", "rounds"]], on="run")


def only_long(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of the Runs of 110 local epochs."""
    return frame[frame["rounds"] >= 20]


def told(parts: Parts, digits: int = 2) -> str:
    """Return "+0.20 ± 1.08 (3)": mean, 95 % interval, partitions; a dash where there is none."""
    if not comparable(parts):
        return "-"
    mean, half = interval(parts)
    return f"{mean:+.{digits}f} ± {half:.{digits}f} ({len(parts)})"


def gaps(clients: pd.DataFrame, row: str) -> Parts:
    """Return validation minus test accuracy of every client's best model, points, for each seed."""
    mine = clients[clients["row"] == row]
    return [(100 * (part["val_acc"] - part["test_acc"])).dropna().to_numpy() for _, part in mine.groupby("seed")]


def mean_of(runs: pd.DataFrame, row: str, column: str, digits: int = 0) -> str:
    """Return a column's mean over a row's seeds, a dash where there is none."""
    values = runs[runs["row"] == row][column].dropna() if column in runs else []
    return f"{np.mean(values):,.{digits}f}" if len(values) else "-"


def compared() -> str:
    """Return the table of the comparisons."""
    runs, clients = only_long(read("runs")), only_long(read("clients"))
    rows = []
    for row in ("DPFL", *COMPARED):
        if row not in set(runs["row"]):
            continue
        difference = paired(clients, "DPFL", row)
        rows.append(
            {
                "method": row,
                "accuracy, %": ours(percent(runs, row)),
                "DPFL minus it": "-" if row == "DPFL" else told(difference),
                "validation - test": told(gaps(clients, row)),
                "models received": mean_of(runs, row, "models_per_client"),
                "models evaluated": mean_of(runs, row, "evaluations_per_client"),
                "steps": mean_of(runs, row, "steps_per_client"),
            }
        )
    return markdown(pd.DataFrame(rows))


def reached(accuracy: float = 78.0) -> str:
    """Return what it took each method to have this accuracy for the first time, per client, seed 42."""
    lines = only_long(read("costs"))
    lines = lines[(lines["seed"] == 42) & ~lines["row"].str.contains("same clients")]
    rows = []
    for row, part in lines.groupby("row", sort=False):
        at = part.sort_values("point")
        there = at[at["accuracy"] >= accuracy]
        if not len(there):
            rows.append({"method": row, "best, %": f"{at['accuracy'].iloc[-1]:.2f}", "models received": "-", "models evaluated": "-", "steps": "-"})  # fmt: skip
            continue
        first = there.iloc[0]
        rows.append(
            {
                "method": row,
                "best, %": f"{at['accuracy'].iloc[-1]:.2f}",
                "models received": f"{first['models']:,.0f}",
                "models evaluated": f"{first['evaluations']:,.0f}",
                "steps": f"{first['steps']:,.0f}",
            }
        )
    return markdown(pd.DataFrame(rows))


def graph_table() -> str:
    """Return the measures of Omega and of the last graph, means over the partitions."""
    lines = only_long(read("graphs"))
    lines = lines[~lines["row"].str.contains("same clients|patience")]
    rows = []
    for row, mine in lines.groupby("row", sort=False):
        for when, part in (("Omega", mine[mine["round"] == 0]), ("last round", mine[mine["round"] > 0])):
            values = part[["degree", "homophily", "z", "reciprocity", "asked", "gap", "classes"]].mean()
            rows.append({"method": f"{row} ({part['seed'].nunique()})", "graph": when, **{n: f"{v:.1f}" if n in ("z", "degree") else f"{v:.3f}" for n, v in values.items()}})  # fmt: skip
    return markdown(pd.DataFrame(rows))


def agreement() -> str:
    """Return how far Omegas of one partition under several seeds agree."""
    frame = pd.read_csv(FOLDER / "agreement.csv")
    return markdown(frame.assign(**{c: frame[c].map("{:.3f}".format) for c in ("jaccard", "by chance")}))


def power() -> str:
    """Return how many partitions of 100 clients it takes to find a difference as large as the measured one, and of 0.63 points."""
    clients = only_long(read("clients"))
    rows = []
    for row in COMPARED:
        parts = paired(clients, "DPFL", row)
        if len(parts) < 2:
            continue
        chance = chance_of(parts)
        rows.append(
            {
                "DPFL minus": row,
                "points": told(parts),
                "deviation within": f"{chance.within:.1f}",
                "between partitions": f"{chance.between:.2f}",
                "partitions for 0.63": partitions(needed(chance, 0.63, chance.clients, 0.8, 0.05)),
                "for 2": partitions(needed(chance, 2.0, chance.clients, 0.8, 0.05)),
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(one partition alone)"


def partitions(number: int) -> str:
    """Return a number of partitions as a text; 0 says that no number in reach suffices."""
    return str(number) if number else "> 10,000"


def attacks() -> str:
    """Return the table of lies."""
    runs, clients = read("runs"), read("clients")
    runs, clients = runs[runs["rounds"] == 10], clients[clients["rounds"] == 10]
    rows = []
    for method in ("DPFL", "FedAvg"):
        for kind in (None, *LIES):
            row = method + (f", attack {kind}:0.2" if kind else "")
            line = runs[runs["row"] == row]
            if not len(line):
                continue
            line = line.iloc[0]
            rows.append(
                {
                    "method": method,
                    "lie": kind or "none",
                    "accuracy of the benign, %": f"{100 * line['test_acc']:.2f}",
                    "to no lie": told(paired(clients, row, method)) if kind else "-",
                    "liars of those chosen, %": share(line["liars_chosen"]),
                    "backdoor opens, % (unmarked)": f"{share(line['backdoor'])} ({share(line['backdoor_unmarked'])})" if kind == "backdoor" else "-",
                }
            )  # fmt: skip
    return markdown(pd.DataFrame(rows))


def share(value: float) -> str:
    """Return a share in percent."""
    return "-" if np.isnan(value) else f"{100 * value:.1f}"


def came_later() -> str:
    """Return the table of newcomers."""
    runs = read("runs")
    rows = []
    for row, part in runs[runs["row"].str.contains("newcomers")].groupby("row", sort=False):
        line = part.iloc[0]
        rows.append(
            {
                "method": row.split(",")[0],
                "those who trained, %": f"{100 * line['test_acc']:.2f}",
                **{f"newcomers, {e} epochs": f"{100 * line[f'newcomers_{e}']:.2f}" for e in (0, 1, 5)},
            }
        )
    return markdown(pd.DataFrame(rows))


def moved() -> str:
    """Return the table of drift, new Omegas and early stopping."""
    runs, clients = read("runs"), read("clients")
    rows = []
    for row, part in runs[runs["row"].str.contains("drift|omega_period|patience")].groupby("row", sort=False):
        line = part.iloc[0]
        base = row.split(",")[0]
        same = [frame[frame["rounds"] == line["rounds"]] for frame in (runs, clients)]
        rows.append(
            {
                "run": row,
                "accuracy, %": f"{100 * line['test_acc']:.2f}",
                "to the run without": told(paired(same[1], row, base)),
                "models received": f"{line['models_per_client']:,.0f}",
                "of without": mean_of(same[0], base, "models_per_client"),
                "steps": f"{line['steps_per_client']:,.0f}",
                "steps without": mean_of(same[0], base, "steps_per_client"),
            }
        )
    return markdown(pd.DataFrame(rows))


def blocks() -> dict[str, str]:
    """Return every table of the page by the name of its mark."""
    return {
        "compared": compared(),
        "reached": reached(),
        "graphs": graph_table(),
        "agreement": agreement(),
        "power": power(),
        "attacks": attacks(),
        "newcomers": came_later(),
        "moved": moved(),
    }


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
    rows = ("DPFL", "Pairwise", "Random graph", "Oracle", "PENS", "FedAvg+FT", "Ditto", "FedRep", "Local")
    figure, axes = plt.subplots(1, 3, figsize=(TEXT, 2.6), sharey=True)
    for i, row in enumerate(rows):
        part = lines[lines["row"] == row].sort_values("point")
        if not len(part):
            continue
        for panel, cost in zip(axes, ("models", "evaluations", "steps"), strict=True):
            look = {"color": f"C{i % 7}", "ls": ("-", "--")[i // 7]}
            panel.plot(part[cost], part["accuracy"], label=row if panel is axes[0] else None, **look)
            panel.plot(part[cost].iloc[-1], part["accuracy"].iloc[-1], "o", color=look["color"])
    for panel, text in zip(axes, ("models received", "models evaluated", "gradient steps"), strict=True):
        panel.set_xlabel(f"{text} per client")
    axes[0].set_ylim(60)
    axes[0].set_ylabel("test accuracy, %")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def lies_figure() -> Figure:
    """Return accuracy of the benign under every lie, beside how often liars are chosen."""
    runs = read("runs")
    runs = runs[runs["rounds"] == 10].set_index("row")
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.3), width_ratios=(1.6, 1))
    for shift, method, colour in ((-0.2, "DPFL", BLUE), (0.2, "FedAvg", RED)):
        rows = [f"{method}, attack {kind}:0.2" for kind in LIES]
        if not set(rows) <= set(runs.index):
            continue
        left.bar(np.arange(len(LIES)) + shift, 100 * runs.loc[rows, "test_acc"], 0.38, color=colour, label=method)
        left.axhline(100 * runs.loc[method, "test_acc"], color=colour, lw=0.8, ls="--")
    left.set_ylabel("accuracy of the benign, %")
    chosen = [100 * runs.loc[f"DPFL, attack {kind}:0.2", "liars_chosen"] for kind in LIES]
    right.bar(range(len(LIES)), chosen, 0.6, color=BLUE)
    right.axhline(20, color=DARK, lw=0.8, ls="--")
    right.set_ylabel("liars of those chosen, %")
    for panel in (left, right):
        panel.set_xticks(range(len(LIES)), [kind.replace("_", "\n") for kind in LIES], fontsize=6)
    left.legend(loc="lower right", frameon=True)
    return figure


def newcomers_figure() -> Figure:
    """Return newcomers' accuracy over their own epochs."""
    runs = read("runs")
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    for i, (row, part) in enumerate(runs[runs["row"].str.contains("newcomers")].groupby("row", sort=False)):
        line = part.iloc[0]
        axes.plot((0, 1, 5), [100 * line[f"newcomers_{e}"] for e in (0, 1, 5)], "o-", color=f"C{i % 7}", label=row.split(",")[0])  # fmt: skip
    axes.set_xlabel("epochs of their own")
    axes.set_ylabel("newcomers' test accuracy, %")
    axes.legend(loc="lower right", ncols=2)
    return figure


def drift_figure() -> Figure:
    """Return accuracy over rounds where classes change their names after round 5."""
    lines = read("curves")
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    for i, (row, part) in enumerate(lines[lines["row"].str.contains("drift")].groupby("row", sort=False)):
        axes.plot(part["epochs"], 100 * part["test_acc"], color=f"C{i % 7}", label=row.replace(", drift 0.5:5", "").replace(", drift 0.5:7", ""))  # fmt: skip
    axes.set_xlabel("local epochs")
    axes.set_ylabel("test accuracy, %")
    axes.legend(loc="lower right")
    return figure


FIGURES = {
    "compared": differences,
    "costs": cost_figure,
    "attacks": lies_figure,
    "newcomers": newcomers_figure,
    "drift": drift_figure,
}


def main() -> None:
    """Fill the page, draw the pictures, print their paths."""
    PAGE.write_text(filled(PAGE.read_text(), blocks()))
    print(PAGE)
    for name, draw in FIGURES.items():
        with plt.rc_context(STYLE):
            path = PAGE.parent / "pictures" / f"findings-{name}.png"
            draw().savefig(path, dpi=160)
        print(path)


if __name__ == "__main__":
    main()
