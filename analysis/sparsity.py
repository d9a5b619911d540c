"""Sparsity of the collaboration graph over rounds, 1 - (edges and the clients themselves) / N^2, for every budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from _common import COLUMN, Drawing, curve, first_graph, graphs, legend, main, over_rounds

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import labels, looks
from _names import budget_order
from _tables import named, repetitions
from matplotlib.axes import Axes

from dpfl_mpi.graph import sparsity
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [Run(dataset="cifar10", budget=budget) for budget in ("inf", 20, 10, 5)]


def of_graphs(measure: Callable[[np.ndarray], float]) -> Callable[[Result], np.ndarray]:
    """Return the function that measures the graph `[N, N]` of every round of a result."""
    return lambda r: np.array([measure(r.graph(t)) for t in range(r.last_round + 1)])


def lines(axes: Axes, results: Sequence[Result], name: str, measure: Callable[[np.ndarray], float]) -> pd.DataFrame:
    """Draw a percentage of the graph over rounds, one curve per group of repetitions, and return its numbers."""
    rows = []
    groups = sorted(repetitions(graphs(results)), key=lambda g: -budget_order(g[0].run))
    entries = zip(named(groups), labels(groups), looks([g[0].run.method for g in groups]), strict=True)
    for (where, row, group), text, look in entries:
        first = max(map(first_graph, group))
        x, mean, spread = (values[first:] for values in over_rounds(group, of_graphs(measure)))
        curve(axes, x, 100 * mean, 100 * spread, label=text, **look)
        rows += [
            {"setting": where, "method": row, "round": t, "measure": name, "value": m, "std": s, "n": len(group)}
            for t, m, s in zip(x, mean, spread, strict=True)
        ]
    axes.set_xlabel("round")
    return pd.DataFrame(rows)


def first_and_last(data: pd.DataFrame) -> str:
    """Return one sentence per curve: its first and its last value."""
    out = []
    for (where, row, name), part in data.groupby(["setting", "method", "measure"], sort=False):
        start, end = part.iloc[0], part.iloc[-1]
        when = f"in round {start['round']}" if start["round"] else "before round 1"
        out.append(
            f"{where}, {row}: {name} {100 * start.value:.1f} % {when}, {100 * end.value:.1f} % in round {end['round']}"
        )
    return "\n".join(out)


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure."""
    figure, axes = plt.subplots(figsize=(COLUMN, 2.2))
    data = lines(axes, results, "sparsity", sparsity)
    axes.set_ylabel("sparsity, %")
    legend(figure, *axes.get_legend_handles_labels(), "outside upper center")
    return Drawing(data, figure, first_and_last(data))


if __name__ == "__main__":
    main("sparsity", __doc__, RUNS, draw)
