"""Table: test accuracy of every method on every data set, with what is behind the mean.

The first table is the paper's Table 1. A table for each data set follows: the spread over clients, the difference to Local client by client on
the same partition, the clients that are below their own Local, the worst decile, and the last round beside the best by validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _common import SEEDS, Drawing, accuracy, main

import numpy as np
import pandas as pd
from _names import budget_order, paper_setting
from _tables import (
    Group,
    Parts,
    cell,
    deviation,
    fields,
    interval,
    latex,
    markdown,
    means,
    named,
    number,
    paired,
    printed,
    repetitions,
    unbeaten,
)

from dpfl_mpi.results import Result
from dpfl_mpi.results.scores import METRICS
from dpfl_mpi.results.summary import epochs
from dpfl_mpi.settings import Run

SETTINGS = (
    {"dataset": "cifar10", "partition": "dirichlet", "dirichlet_alpha": 0.1},
    {"dataset": "cifar10"},
    {"dataset": "cinic10", "partition": "dirichlet", "dirichlet_alpha": 0.1},
    {"dataset": "cinic10"},
    {"dataset": "femnist", "partition": "fedrep", "data": "data/femnist-a-j.h5"},  # what the paper's numbers come from
)
ROWS = (
    {"method": "local"},
    {"method": "fedavg"},
    {"method": "fedavg", "finetune_epochs": 10},  # 2 tau_train
    {"method": "fedprox"},
    {"method": "fedprox", "finetune_epochs": 10},
    {"method": "apfl"},
    {"method": "perfedavg"},
    {"method": "ditto"},
    {"method": "fedrep"},
    {"method": "knnper"},
    {"method": "pfedgraph"},
    {"method": "dpfl", "budget": "inf"},
    {"method": "dpfl", "budget": "0.2N"},
    {"method": "dpfl", "budget": "0.1N"},
    {"method": "dpfl", "budget": "0.05N"},
)
FEMNIST_TUNING = {"finetune_epochs": 4}  # its tau_train is 2


def rows_on(data: dict[str, Any]) -> list[Run]:
    """Return the Runs of all rows on this data, for every seed."""
    tuning = FEMNIST_TUNING if data["dataset"] == "femnist" else {}
    return [
        Run(**data | row | (tuning if "finetune_epochs" in row else {}), seed=seed) for row in ROWS for seed in SEEDS
    ]


RUNS = [run for data in SETTINGS for run in rows_on(data)]
ORDER = [
    "local",
    "fedavg",
    "fedprox",
    "apfl",
    "perfedavg",
    "ditto",
    "scaffold",
    "fedper",
    "fedbn",
    "fedrep",
    "pfedme",
    "fedala",
    "knnper",
    "pfedgraph",
    "cobo",
    "pens",
    "random_graph",
    "dpfl",
]

PAPER_COLUMNS = ("CIFAR-10 Dir(0.1)", "CIFAR-10 Patho(3)", "CINIC-10 Dir(0.1)", "CINIC-10 Patho(3)", "FEMNIST fedrep")
PAPER = {
    "Local": "80.38 1.62 78.32 0.49 78.59 1.00 77.53 0.47 87.27 0.27",
    "FedAvg": "47.22 1.20 50.93 1.97 38.48 0.37 39.27 1.29 87.41 0.72",
    "FedAvg+FT": "82.84 0.88 81.89 0.92 80.31 0.33 79.18 0.46 91.56 0.29",
    "FedProx": "48.83 1.88 51.14 0.79 38.16 0.82 38.53 0.54 88.14 0.39",
    "FedProx+FT": "78.86 0.51 73.61 1.29 76.59 1.19 73.04 1.08 93.58 0.29",
    "APFL": "82.56 0.38 80.96 0.71 80.02 1.07 78.21 0.39 90.80 0.37",
    "PerFedAvg": "82.38 1.43 81.17 0.52 78.88 1.25 78.90 0.37 91.69 0.40",
    "Ditto": "83.10 0.70 81.19 0.63 80.33 1.27 79.52 0.31 90.83 0.46",
    "FedRep": "80.81 1.09 78.61 1.67 79.56 1.12 78.46 0.69 90.04 0.28",
    "kNN-Per": "82.45 0.69 81.04 0.40 80.42 1.07 79.54 0.32 91.29 0.40",
    "pFedGraph": "80.48 0.75 78.34 1.04 78.73 1.04 77.58 0.16 87.70 0.13",
    "DPFL (B_c = inf)": "84.39 0.43 83.04 0.98 81.49 1.32 80.32 0.51 94.25 0.18",
    "DPFL (B_c = 0.2N)": "84.01 0.44 82.83 0.91 81.24 1.30 80.51 0.39 94.31 0.06",
    "DPFL (B_c = 0.1N)": "83.86 0.46 82.52 0.78 81.32 1.20 80.24 0.35 94.09 0.14",
    "DPFL (B_c = 0.05N)": "82.91 0.81 82.17 0.54 80.91 1.31 80.11 0.30 93.82 0.17",
}


def published(where: str, name: str) -> str:
    """Return the paper's "mean ± std" for a setting and a row, or nothing."""
    column = next((i for i, c in enumerate(PAPER_COLUMNS) if where == c), None)
    if column is None or name not in PAPER:
        return ""
    numbers = PAPER[name].split()
    return f"{numbers[2 * column]} ± {numbers[2 * column + 1]}"


def measure(results: Sequence[Result], score: str = "accuracy") -> pd.DataFrame:
    """Return one row per setting and method: accuracies (or `score`) in percent, differences in points, means over the seeds."""
    groups = repetitions(results)
    entries = named(groups)
    rows = []
    for where in dict.fromkeys(w for w, _, _ in entries):
        here = [(name, group) for w, name, group in entries if w == where]
        here.sort(key=lambda e: (rank(e[1][0].run), e[1][0].run.finetune_epochs))
        alone = [g for _, g in here if g[0].run.method == "local"]
        bold = unbeaten([g for _, g in here], score)
        for (name, group), is_bold in zip(here, bold, strict=True):
            values = means(group, score)
            scores = [100 * a[np.isfinite(a)] for a in (accuracy(r, score) for r in group)]
            accuracies = [a for a in scores if len(a)]  # of repetitions in which somebody was scored
            last = [a for a in (r.scored("last/test_acc") for r in group) if len(a)]
            difference = to_local(group, alone, score)
            gain, half = interval(difference) if difference else (np.nan, np.nan)
            rows.append(
                {
                    "setting": where,
                    "method": name,
                    "mean": values.mean(),
                    "std": deviation(values),
                    "n": len(values),
                    "bold": is_bold,
                    "client_std": mean_of([a.std() for a in accuracies]),
                    "vs_local": gain,
                    "vs_local_half_interval": half,
                    "below_local_percent": 100 * np.mean(np.concatenate(difference) < 0) if difference else np.nan,
                    "worst_decile": mean_of([np.sort(a)[: -(-len(a) // 10)].mean() for a in accuracies]),
                    "last_round": mean_of([a.mean() for a in last]),
                    "epochs": epochs(group[0]),
                    "finished": all(r.finished for r in group),
                    "paper": published(paper_setting(group[0].run), name) if score == "accuracy" else "",
                    "cell": cell(group, score),
                }
            )
    return pd.DataFrame(rows)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean, nan of nothing."""
    return float(np.mean(values)) if values else float("nan")


def to_local(group: Group, alone: Sequence[Group], score: str) -> Parts:
    """Return a group minus Local client by client, of several Local the one that is most alike; nothing for Local itself."""
    if group[0].run.method == "local":
        return []
    near = sorted(alone, key=lambda local: unlike(group[0], local[0]))
    return next((found for local in near if (found := paired(group, local, score))), [])


def unlike(a: Result, b: Result) -> tuple[int, int]:
    """Return how far two Runs are from differing in their methods alone: settings that both read and have otherwise, then local epochs."""
    own = {
        "method",
        "options",
        "budget",
        "rounds",
        "finetune_epochs",
        *a.method.unread,
        *b.method.unread,
    }
    mine, theirs = fields(a), fields(b)
    return sum(mine[name] != theirs.get(name) for name in mine if name not in own), abs(epochs(a) - epochs(b))


def rank(run: Run) -> tuple[int, float]:
    """Return where a method stands in the table: as in the paper, budgets descending, unknown methods last."""
    return (ORDER.index(run.method) if run.method in ORDER else len(ORDER), -budget_order(run))


def draw(results: Sequence[Result], paper: bool = False, score: str = "accuracy") -> Drawing:
    """Return the tables."""
    data = measure(results, score)
    settings = list(dict.fromkeys(data["setting"]))
    shown = [
        printed(r.cell if r.finished else f"{r.cell}, not finished", r.bold, r.paper if paper else "")
        for r in data.itertuples()
    ]
    table = data.assign(cell=shown).pivot(index="method", columns="setting", values="cell").fillna("-")
    table = table.loc[data["method"].unique(), settings].reset_index()
    parts = [
        markdown(table),
        f"\nTest {METRICS[score]}, %: mean over clients of their best model by validation; mean ± standard deviation over seeds (ddof 1; number of seeds)."
        "\nBold: what the best of its column does not beat (the 95 % interval of the paired difference reaches 0; only runs on common partitions are compared)."
        + ("\nIn brackets: the paper's Table 1." if paper else ""),
    ]
    for where in settings:
        part = data[data["setting"] == where]
        gain = [
            "-" if np.isnan(r.vs_local) else f"{r.vs_local:+.2f} ± {number(r.vs_local_half_interval)}"
            for r in part.itertuples()
        ]
        details = pd.DataFrame(
            {
                "method": part["method"],
                METRICS[score]: part["mean"].map(number),
                "std over clients": part["client_std"].map(number),
                "vs Local": gain,
                "below own Local, %": part["below_local_percent"].map(lambda v: number(v, 0)),
                "worst decile": part["worst_decile"].map(number),
                "last round" if score == "accuracy" else "last round, accuracy": part["last_round"].map(number),
                "epochs": part["epochs"].map(str),
            }
        )
        parts.append(f"\n{where}\n\n{markdown(details)}")
        if part["epochs"].nunique() > 1:
            by = {e: list(part[part["epochs"] == e]["method"]) for e in sorted(set(part["epochs"]))}
            parts.append(
                "\nNote: local epochs differ: " + "; ".join(f"{e} ({', '.join(m)})" for e, m in by.items()) + "."
            )
        if not part["finished"].all():
            parts.append(f"\nNote: not finished: {', '.join(part[~part['finished']]['method'])}.")
    parts.append(
        "\nvs Local: difference client by client on the same partition, points, with its 95 % interval: over partitions, of one partition over its clients."
        " Of several Local the one whose settings and epochs are nearest."
    )
    return Drawing(data.drop(columns="cell"), text="\n".join(parts), latex=latex(table))


OPTIONS = {
    "paper": {"action": "store_true", "help": "add the paper's figures in brackets"},
    "score": {"choices": tuple(METRICS), "default": "accuracy", "help": "what is scored (default: accuracy)"},
}

if __name__ == "__main__":
    main("accuracy_table", __doc__, RUNS, draw, OPTIONS)
