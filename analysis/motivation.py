"""The paper's motivating example: client 1 gains from clients 2 and 3 together more than from either alone.

Client 1 has little of four classes; client 2 shares two of them and client 3 the other two. In each group everyone trains and averages with
everyone (a full graph, scored after local training); shown is the test accuracy of client 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import COLUMN, DARK, GREY, SEEDS, SKY, Drawing, accuracy, main

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.config import Run
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result

EXAMPLE = {"dataset": "cifar10", "partition": "motivation"}
RUNS = [
    Run(**EXAMPLE, **row, seed=seed)
    for seed in SEEDS
    for row in (
        {"method": "local"},
        {"method": "random_graph", "budget": "inf", "reach": "groups:0,1;2"},
        {"method": "random_graph", "budget": "inf", "reach": "groups:0,2;1"},
        {"method": "random_graph", "budget": "inf"},
    )
]


def partners(result: Result) -> str:
    """Return with whom client 1 averages, counted from 1 as in the paper."""
    others = result.omega().of(0) + 1
    return "with " + " and ".join(map(str, others)) if len(others) else "alone"


def measure(results: Sequence[Result]) -> pd.DataFrame:
    """Return one row per run of three clients: with whom client 1 averages, and its test accuracy in percent."""
    rows = [
        {"group": partners(r), "seed": r.run.seed, "accuracy": 100 * accuracy(r)[0], "n_test": r["client/n_test"][0]}
        for r in results
        if len(r["client/p"]) == 3 and r.run.method in {run.method for run in RUNS}
    ]
    if not rows:
        raise UserError("none of these results has the three clients of the example (--partition motivation)")
    return (
        pd.DataFrame(rows)
        .sort_values(["group", "seed"], key=lambda c: c.map(lambda v: (len(str(v)), str(v))))
        .reset_index(drop=True)
    )


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure."""
    data = measure(results)
    figure, axes = plt.subplots(figsize=(COLUMN, 2.0))
    groups = list(dict.fromkeys(data["group"]))
    alone = data[data["group"] == "alone"]["accuracy"].mean()
    text = []
    for x, group in enumerate(groups):
        values = data[data["group"] == group]["accuracy"].to_numpy()
        axes.bar(x, values.mean(), 0.6, color=GREY if group == "alone" else SKY)
        axes.plot(np.full(len(values), x), values, "o", color=DARK, ms=2.5)
        against = (
            f", {values.mean() - alone:+.1f} points against alone" if group != "alone" and not np.isnan(alone) else ""
        )
        text.append(f"client 1 {group}: {values.mean():.1f} % ({len(values)} seeds){against}")
    if not np.isnan(alone):
        axes.axhline(alone, color=GREY, lw=0.6, ls=":")
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("test accuracy of client 1, %")
    return Drawing(data, figure, "\n".join(text))


if __name__ == "__main__":
    main("motivation", __doc__, RUNS, draw)
