"""Redraw every table and figure of docs/findings.md from the CSV files: `python reproduction/draw_controls.py`.

The CSV files are in `controls/`; `controls.py` made them. Neither MPI, torch nor a result is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "analysis"), str(HERE.parent)]

from _common import STYLE

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _tables import markdown
from control_figures import FIGURES
from control_lines import COMPARED, FOLDER, SHORT, benign, gaps, in_order, only_long, read
from draw import filled
from stored import ours, paired, percent, told

from dpfl_mpi.settings.values import ATTACKS
from dpfl_mpi.studies.plan_power import chance_of, needed

PAGE = HERE.parent / "docs" / "findings.md"


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
            cells = {n: f"{v:.1f}" if n in ("z", "degree") else f"{v:.3f}" for n, v in values.items()}
            rows.append({"method": f"{row} ({part['seed'].nunique()})", "graph": when} | cells)
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
        honest = benign(clients, method)
        for kind in (None, *ATTACKS):
            row = method + (f", attack {kind}:0.2" if kind else "")
            line = runs[runs["row"] == row]
            if not len(line):
                continue
            line = line.iloc[0]
            rows.append(
                {
                    "method": method,
                    "lie": kind or "none",
                    "accuracy of the benign, %": f"{100 * honest[honest['row'] == row]['test_acc'].mean():.2f}",
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
    """Return the table of newcomers: their accuracy, and DPFL's minus it, paired by client."""
    runs, each = read("runs"), read("newcomers")
    wide = 100 * each[each["epochs"] == 5].pivot(index="client", columns="row", values="test_acc")
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
                "DPFL minus it, E = 5": "-"
                if row.startswith("DPFL")
                else told([(wide["DPFL, newcomers 0.1"] - wide[row]).to_numpy()]),
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
        same = [
            frame[(frame["rounds"] == line["rounds"]) & (frame["seed"] == line["seed"])] for frame in (runs, clients)
        ]
        rows.append(
            {
                "run": row,
                "accuracy, %": f"{100 * line['test_acc']:.2f}",
                "to the run without": told(paired(same[1], row, base)),
                "models per client": f"{line['models_per_client']:,.0f}",
                "models without it": mean_of(same[0], base, "models_per_client"),
                "steps per client": f"{line['steps_per_client']:,.0f}",
                "steps without it": mean_of(same[0], base, "steps_per_client"),
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
