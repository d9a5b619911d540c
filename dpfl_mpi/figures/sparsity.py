"""Sparsity of the collaboration graph over rounds, for every budget.

It is 1 - (edges + N) / N^2: the clients themselves count as edges.
"""

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames, with_graphs
from dpfl_mpi.figures.style import COLUMN, curves, legend
from dpfl_mpi.graph import sparsity

RUNS = cifar10(budget=("inf", 20, 10, 5))
Measures = Mapping[str, Callable[[np.ndarray], float]]  # functions of a graph `[N, N]`, by name


def draw_measures(frames: Frames, measures: Measures, width: float, **look: Any) -> Drawing:
    """Return a figure with a panel per measure, in percent over rounds, one curve per row."""
    figure, panels = plt.subplots(1, len(measures), figsize=(width, 2.2), squeeze=False)
    graphs, parts, text = with_graphs(frames), [], []
    rows = frames.rows[frames.rows["run"].isin(graphs["run"])]
    for axes, (name, measure) in zip(panels[0], measures.items(), strict=True):
        values = graphs.assign(value=[measure(graph().matrix()) for graph in graphs["graph"]])
        numbers = curves(axes, rows, values, "value", "t", factor=100)
        numbers = numbers.rename(columns={"t": "round", "mean": "value"})
        axes.set(xlabel="round", ylabel=f"{name}, %", **look)
        parts.append(numbers.assign(measure=name))
    legend(figure, panels[0, 0], "outside upper center")
    data = pd.concat(parts, ignore_index=True)
    for (where, row, name), part in data.groupby(["setting", "method", "measure"], sort=False):
        first, last = part.iloc[0], part.iloc[-1]
        when = f"in round {first['round']}" if first["round"] else "before round 1"
        values = f"{100 * first.value:.1f} % {when}, {100 * last.value:.1f} %"
        text.append(f"{where}, {row}: {name} {values} in round {last['round']}")
    return Drawing(data, figure, "\n".join(text))


def draw(frames: Frames) -> Drawing:
    return draw_measures(frames, {"sparsity": sparsity}, COLUMN)
