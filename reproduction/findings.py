"""The tables of the controls in tables.md, from the frames of the folder `controls`.

There, comparisons have 20 rounds or more; attacks, newcomers and drift have 6.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd
from recomputed import Lines

from dpfl_mpi.figures import pareto
from dpfl_mpi.figures.controls_table import gaps, percent
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.tables import difference_text, mean_text, means, number, paired

CURVE_SEED = 42  # the seed of which one curve per method is shown
COMPARED = ("Local", "FedAvg", "FedAvg+FT", "Pairwise", "Random graph")
COMPARED += ("Random graph, DPFL's degrees", "Replay, rewired", "Replay, shuffled")
COMPARED += ("Replay, reversed", "Oracle", "PENS", "DPFL, search_share 0.5")
COSTS = ("models", "evaluations", "steps")
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
    benign = attacked.dropna(subset=["test_acc"])["client"]  # attackers have no accuracy
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


def attacks(frames: Frames) -> Lines:
    runs = short(frames).runs
    for method in ("DPFL", "FedAvg"):
        clients = never_lying(frames, method)
        attacked = runs["row"].str.startswith(f"{method}, attack")
        for line in runs[(runs["row"] == method) | attacked].itertuples():
            opened = f"{percent(line.backdoor)} ({percent(line.backdoor_unmarked)})"
            yield {
                **row_cells(runs, clients, line.row, "vs no attack", line.row, method),
                "attackers among chosen, %": percent(line.attackers_chosen),
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


DRAWN = (compared, reached, graphs, attacks, newcomers, moved)
TABLES: dict[str, Callable[[Frames], Any]] = {table.__name__: table for table in DRAWN}
