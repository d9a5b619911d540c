"""The paper's experiments beside Table 1, from the CSV files: ablations, the random graph, the graphs themselves, flipped labels, the example.

Axes: N clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ggc_period_table
import numpy as np
import pandas as pd
import tau_init_table
from _tables import comparable, interval, markdown
from accuracy_table import PAPER
from label_flip import edge_share
from stored import difference, ours, paired, percent, read, told
from variance import sampling_variance

from dpfl_mpi.graph import asymmetry, sparsity

BUDGETS = ("inf", "0.2N", "0.1N", "0.05N")  # as the paper's tables have them
USUAL = {"tau_init": 10, "ggc_period": 1}  # what the rows of Table 1 were run with
SPARSITY = {"DPFL (B_c = 0.1N)": "80 to 88 %", "DPFL (B_c = 0.05N)": "95 to 96 %"}  # the paper's, Omega to round 99
RIVALS = {  # their rows, by what they are called
    "Random graph": "Random graph (B_c = {})",
    "Random graph, drawn anew each round": "Random graph (B_c = {}), redraw True",
    "Pairwise": "Pairwise (B_c = {})",
}
FLIPPED = {False: "none in the end", True: "under 10 % in the end"}  # the paper's, by whether flipped clients search
SYNERGY = {1: "about -11", 2: "about +6"}  # the paper's, in percent, by the number of collaborators

VARIANCE = {  # squared points, read by eye off the figures of the paper's code
    "cifar-10-patho-3": {
        **{"Local": 99, "FedRep": 103, "pFedGraph": 115, "APFL": 103, "PerFedAvg": 98, "Ditto": 96, "FedAvg+FT": 97},
        **{"kNN-Per": 91, "DPFL (B_c = inf)": 81, "DPFL (B_c = 0.2N)": 92, "DPFL (B_c = 0.1N)": 80},
        **{"DPFL (B_c = 0.05N)": 91},
    },
    "cifar-10-dir-0-1": {
        **{"Local": 249, "FedRep": 232, "pFedGraph": 225, "PerFedAvg": 259, "kNN-Per": 205, "APFL": 196, "Ditto": 191},
        **{"FedAvg+FT": 191, "DPFL (B_c = inf)": 188, "DPFL (B_c = 0.2N)": 191, "DPFL (B_c = 0.1N)": 174},
        **{"DPFL (B_c = 0.05N)": 200},
    },
}


def row_at(budget: str, **fields: Any) -> str:
    """Return the name of DPFL's row at a budget, with the fields that are not the usual."""
    said = [f"{name} {value}" for name, value in fields.items() if USUAL.get(name) != value]
    return ", ".join([f"DPFL (B_c = {budget})", *said])


def by_budget(folder: Path, field: str, symbol: str, paper: dict[int, Sequence[str]]) -> str:
    """Return accuracy by a field of the Run and by budget, the paper's in brackets."""
    runs, rows = read(folder, "runs"), []
    for value, published in paper.items():
        cells = {
            f"B_c = {budget}": f"{ours(percent(runs, row_at(budget, **{field: value})))} [{theirs}]"
            for budget, theirs in zip(BUDGETS, published, strict=True)
        }
        rows.append({symbol: str(value), **cells})
    return markdown(pd.DataFrame(rows))


def random_graph(folder: Path, paper: str) -> str:
    """Return DPFL beside the same method on a random graph, and on the graph of the clients that are best one by one, by budget."""
    runs, clients = read(folder, "runs"), read(folder, "clients")
    rows = []
    for budget in BUDGETS:
        row = row_at(budget)
        for name, named in RIVALS.items():
            if comparable(gap := paired(clients, row, other := named.format(budget))):
                rows.append(
                    {
                        "B_c": budget,
                        "against": name,
                        "its accuracy, %": ours(percent(runs, other)),
                        "DPFL minus it": told(gap),
                        "paper": paper if name.startswith("Random") else "-",
                    }
                )
    return markdown(pd.DataFrame(rows)) if rows else "(not run)"


def graphs_of(folder: Path, row: str) -> list[tuple[int, np.ndarray]]:
    """Return (round, adjacency, bool `[N, N]`) of the graphs that are stored of a row's Run: Omega, half way, and the last round's."""
    if not (folder / "graphs.csv").exists():
        return []
    lines = read(folder, "graphs")
    parts = lines[lines["row"] == row].groupby(["run", "t"])
    return [(int(t), adjacency(part)) for (_, t), part in parts]


def adjacency(lines: pd.DataFrame) -> np.ndarray:
    """Return a graph, bool `[N, N]`, of its lines in graphs.csv: who receives (rows) from whom (columns)."""
    out = np.zeros((len(lines), len(lines)), bool)
    for client, chosen in zip(lines["client"], lines["collaborators"].fillna(""), strict=True):
        out[client, [int(k) for k in chosen.split()]] = True
    return out


def graphs(folder: Path) -> str:
    """Return how sparse and how mutual the graphs of DPFL's rows are, Omega beside the last round."""
    rows = []
    for budget in BUDGETS:
        both = graphs_of(folder, row_at(budget))
        if not both:
            continue
        end = max(t for t, _ in both)
        omega, last = ([a for t, a in both if t == which] for which in (0, end))
        rows.append(
            {
                "B_c": budget,
                "sparsity, %": shares(sparsity, omega, last),
                "the paper's": SPARSITY.get(row_at(budget), "-"),
                "edges with their reverse, %": shares(lambda a: 1 - asymmetry(a)[0], omega, last),
                "pairs linked both ways or not at all, %": shares(lambda a: 1 - asymmetry(a)[1], omega, last),
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(not run)"


def searches(folder: Path) -> str:
    """Return how many candidates DPFL's greedy searches looked at, and what share gained by being added, removed, both or neither."""
    if "both_gained" not in (runs := read(folder, "runs")):
        return "(not run)"
    rows = []
    for budget in BUDGETS:
        mine = runs[runs["row"] == row_at(budget)].dropna(subset=["both_gained"])
        counts = mine[[f"{name}_gained" for name in ("adding", "removing", "neither", "both")]].sum()
        if not (total := counts.sum()):
            continue
        adding, removing, neither, both = (f"{100 * count / total:.1f}" for count in counts)
        rows.append(
            {
                "B_c": f"{budget} ({len(mine)})",
                "candidates per Run": f"{total / len(mine):,.0f}",
                "only adding gains, %": adding,
                "only removing gains, %": removing,
                "neither gains, %": neither,
                "both gain, %": both,
                "the paper's": "under 1 %",
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(not run)"


def shares(measure: Callable[[np.ndarray], float], omega: list[np.ndarray], last: list[np.ndarray]) -> str:
    """Return a measure's mean over Omegas and over last graphs, percent: "90.0 to 94.3"."""
    return " to ".join(f"{100 * np.mean([measure(a) for a in graphs]):.1f}" for graphs in (omega, last))


def flips(folder: Path) -> str:
    """Return what share of benign clients' edges comes from clients with flipped labels, which have no accuracy."""
    runs, clients = read(folder, "runs"), read(folder, "clients")
    rows = []
    for searches, paper in FLIPPED.items():
        row = ", ".join([row_at("inf"), "flip_share 0.4", *([] if searches else ["flipped_run_ggc False"])])
        found = graphs_of(folder, row)
        if not found:
            continue
        mine = clients[clients["row"] == row].sort_values("client")
        flipped = mine["test_acc"].isna().to_numpy()
        rows.append(
            {
                "flipped clients": "search too" if searches else "only train",
                "accuracy of the others, %": ours(percent(runs, row)),
                "edges from flipped, Omega": f"{100 * edge_share(found[0][1], flipped):.1f} %",
                "last round": f"{100 * edge_share(found[-1][1], flipped):.1f} %",
                "by chance": f"{100 * flipped.sum() / (len(flipped) - 1):.1f} %",
                "the paper's": paper,
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(not run)"


def example(folder: Path) -> str:
    """Return the accuracy of the example's client 1, alone and with others, and the difference to alone over the seeds."""
    first = read(folder, "clients").query("client == 0")
    wide = 100 * first.pivot(index="seed", columns="row", values="test_acc")
    rows = []
    for row, partners in (
        ("Local", ()),
        ("Random graph (B_c = inf), reach groups:0,1;2", (2,)),
        ("Random graph (B_c = inf), reach groups:0,2;1", (3,)),
        ("Random graph (B_c = inf)", (2, 3)),
    ):
        if row not in wide:
            continue
        gap, alone = (wide[row] - wide["Local"]).dropna().to_numpy(), row == "Local"
        mean, half = interval([gap])
        rows.append(
            {
                "client 1": "with " + " and ".join(map(str, partners)) if partners else "alone",
                "accuracy, %": ours(wide[row].dropna().to_numpy()),
                "to alone": "-" if alone else f"{mean:+.1f} ± {half:.1f}",
                "paper": "-" if alone else SYNERGY[len(partners)],
            }
        )
    return markdown(pd.DataFrame(rows))


def others(folder: Path) -> str:
    """Return the rows that no other table has, with the difference to the row without the change."""
    runs, clients = read(folder, "runs"), read(folder, "clients")
    shown = ("tau_init", "ggc_period", "flip_share", "Random graph", "Pairwise")
    rows = []
    for row in sorted(set(runs["row"]) - set(PAPER)):
        if any(word in row for word in shown):
            continue
        base = row.split(", ")[0]
        rows.append(
            {
                "run": row,
                "accuracy, %": ours(percent(runs, row)),
                "to the row without it, paired": difference(clients, row, base),
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(none yet)"


def spots(folder: Path) -> pd.DataFrame:
    """Return accuracy (percent) and its variance over clients (squared points) of the rows of Table 1, means over seeds.

    `chance` is what the size of the test sets alone adds to the variance.
    """
    clients, out = read(folder, "clients"), []
    for row in PAPER:
        each = [part for _, part in clients[clients["row"] == row].groupby("seed")]
        if not each:
            continue
        chance = [sampling_variance(part["test_acc"].to_numpy(), part["test"].to_numpy()) for part in each]
        out.append(
            {
                "row": row,
                "n": len(each),
                "accuracy": np.mean([100 * part["test_acc"].mean() for part in each]),
                "variance": np.mean([1e4 * np.nanvar(part["test_acc"]) for part in each]),
                "chance": np.mean(chance),
            }
        )
    return pd.DataFrame(out)


def variance(folder: Path) -> str:
    """Return the variance over clients by row, beside what is read off the paper's figure."""
    published = VARIANCE[folder.name]
    rows = [
        {
            "method": f"{spot.row} ({spot.n})",
            "accuracy, %": f"{spot.accuracy:.2f}",
            "variance, squared points": f"{spot.variance:.0f}",
            "of which by the size of the test sets": f"{spot.chance:.0f}",
            "the paper's, read off its figure": str(published.get(spot.row, "-")),
        }
        for spot in spots(folder).itertuples()
    ]
    return markdown(pd.DataFrame(rows))


# by mark and folder: what the paper did on which data
EXPERIMENTS: dict[str, dict[str, Callable[[Path], str]]] = {
    "cifar-10-patho-3": {
        "tau_init": partial(by_budget, field="tau_init", symbol="tau_init", paper=tau_init_table.PAPER),
        "random graph": partial(random_graph, paper="-"),
        "graphs": graphs,
        "searches": searches,
        "variance": variance,
        "flips": flips,
        "others": others,
    },
    "cifar-10-dir-0-1": {
        "variance": variance,
        "P": partial(by_budget, field="ggc_period", symbol="P", paper=ggc_period_table.PAPER),
        "random graph": partial(random_graph, paper="about +4"),
        "others": others,
    },
    "cifar-10-motivation": {"example": example},
}
