"""Redraw every table and figure of docs/findings.md from the CSV files: `python reproduction/draw_controls.py`.

The CSV files are in `controls/`; `controls.py` made them. Neither MPI, torch nor a result is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "analysis"), str(HERE.parent)]

from _common import BLUE, DARK, GREY, PALE, RED, STYLE, TEXT

import draw
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import look
from _tables import Parts, comparable, interval, markdown
from draw import filled, ours, paired, percent
from matplotlib.figure import Figure

from dpfl_mpi.plan_power import chance_of, needed

FOLDER, PAGE = HERE / "controls", HERE.parent / "docs" / "findings.md"
SHORT = 6  # rounds of lies, newcomers and drift; the comparisons have 20 or more
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
    "DPFL, search_share 0.5",
)
LIES = ("label_flip", "sign_flip", "noise", "scale", "stale", "backdoor")


def read(name: str) -> pd.DataFrame:
    """Return one of the CSV files, with every Run's row and seed."""
    frame = pd.read_csv(FOLDER / f"{name}.csv", dtype={"run": str})
    return frame if name == "runs" else frame.merge(read("runs")[["run", "row", "seed", "rounds"]], on="run")


def in_order(rows: Iterable[str]) -> list[str]:
    """Return rows as the page names them: DPFL, then as in `COMPARED`, others last."""
    known = ("DPFL", *COMPARED)
    return sorted(set(rows), key=lambda row: (known.index(row) if row in known else len(known), row))


def only_long(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of the Runs of 110 local epochs."""
    return frame[frame["rounds"] >= 20]


def told(parts: Parts) -> str:
    """Return "+0.20 ± 1.08 (3)": mean, 95 % interval, partitions; a dash where there is none."""
    return f"{draw.told(parts)} ({len(parts)})" if comparable(parts) else "-"


def gaps(clients: pd.DataFrame, row: str) -> Parts:
    """Return validation minus test accuracy of every client's best model, points, for each seed."""
    mine = clients[clients["row"] == row]
    return [(100 * (part["val_acc"] - part["test_acc"])).dropna().to_numpy() for _, part in mine.groupby("seed")]


def mean_of(runs: pd.DataFrame, row: str, column: str) -> str:
    """Return a column's mean over a row's seeds, a dash where there is none."""
    values = runs[runs["row"] == row][column].dropna() if column in runs else []
    return f"{np.mean(values):,.0f}" if len(values) else "-"


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
    for row in in_order(lines["row"]):
        at = lines[lines["row"] == row].sort_values("point")
        there = at[at["accuracy"] >= accuracy]
        costs = {"models": "models received", "evaluations": "models evaluated", "steps": "steps"}
        first = {text: f"{there[name].iloc[0]:,.0f}" if len(there) else "-" for name, text in costs.items()}
        rows.append({"method": row, "best, %": f"{at['accuracy'].iloc[-1]:.2f}", **first})
    return markdown(pd.DataFrame(rows))


def graph_table() -> str:
    """Return the measures of Omega and of the last graph, means over the partitions."""
    lines = only_long(read("graphs"))
    lines = lines[~lines["row"].str.contains("same clients|patience")]
    rows = []
    for row in in_order(lines["row"]):
        mine = lines[lines["row"] == row]
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
    return markdown(pd.DataFrame(rows))


def partitions(number: int) -> str:
    """Return a number of partitions as a text; 0 says that no number in reach suffices."""
    return str(number) if number else "> 10,000"


def attacks() -> str:
    """Return the table of lies."""
    runs, clients = read("runs"), read("clients")
    runs, clients = runs[runs["rounds"] == SHORT], clients[clients["rounds"] == SHORT]
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
                **{
                    f"newcomers, E = {e}": f"{100 * line[f'newcomers_{e}']:.1f} ± {100 * line[f'newcomers_{e}_half']:.1f}"
                    for e in (0, 1, 5)
                },
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
        axes.plot(points, [needed(chance, d, chance.clients, 0.8, 0.05) for d in points], label=f"DPFL minus {row}", **style(row))  # fmt: skip
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
    for shift, method, colour in ((-0.2, "DPFL", BLUE), (0.2, "FedAvg", RED)):
        rows = [f"{method}, attack {kind}:0.2" for kind in LIES]
        left.bar(np.arange(len(LIES)) + shift, 100 * runs["test_acc"].reindex(rows), 0.38, color=colour, label=method)
        left.axhline(100 * runs.loc[method, "test_acc"], color=colour, lw=0.8, ls="--")
    left.set_ylabel("accuracy of the benign, %")
    chosen = [100 * runs.loc[f"DPFL, attack {kind}:0.2", "liars_chosen"] for kind in LIES]
    right.bar(range(len(LIES)), chosen, 0.6, color=BLUE)
    right.axhline(20, color=DARK, lw=0.8, ls="--")
    right.set_ylabel("liars of those chosen, %")
    for panel in (left, right):
        panel.set_xticks(range(len(LIES)), [kind.replace("_", "\n") for kind in LIES], fontsize=6)
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


def main() -> None:
    """Fill the page, draw the pictures, print their paths."""
    PAGE.write_text(filled(PAGE.read_text(), blocks()))
    print(PAGE)
    for name, figure in FIGURES.items():
        with plt.rc_context(STYLE):
            path = PAGE.parent / "pictures" / f"findings-{name}.png"
            figure().savefig(path, dpi=160)
        print(path)


if __name__ == "__main__":
    main()
