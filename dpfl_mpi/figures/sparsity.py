"""Sparsity of the collaboration graph over rounds, 1 - (edges and the clients themselves) / N^2, for every budget."""

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


def drawn(frames: Frames, measures: Mapping[str, Callable[[np.ndarray], float]], width: float, **look: Any) -> Drawing:
    """Return percentages of the graph `[N, N]` over rounds, by name: each on axes of its own that `look` sets, one curve per row."""
    figure, panels = plt.subplots(1, len(measures), figsize=(width, 2.2), squeeze=False)
    graphs, parts = with_graphs(frames), []
    rows = frames.rows[frames.rows["run"].isin(graphs["run"])]
    for axes, (name, measure) in zip(panels[0], measures.items(), strict=True):
        values = graphs.assign(value=[measure(graph().matrix()) for graph in graphs["graph"]])
        numbers = curves(axes, rows, values, "value", "t", factor=100).rename(columns={"t": "round", "mean": "value"})
        axes.set(xlabel="round", ylabel=f"{name}, %", **look)
        parts.append(numbers.assign(measure=name))
    legend(figure, panels[0, 0], "outside upper center")
    data, text = pd.concat(parts, ignore_index=True), []
    for (where, row, name), part in data.groupby(["setting", "method", "measure"], sort=False):
        start, end = part.iloc[0], part.iloc[-1]
        when = f"in round {start['round']}" if start["round"] else "before round 1"
        values = f"{100 * start.value:.1f} % {when}, {100 * end.value:.1f} % in round {end['round']}"
        text.append(f"{where}, {row}: {name} {values}")  # of each curve the first and the last value
    return Drawing(data, figure, "\n".join(text))


def draw(frames: Frames) -> Drawing:
    return drawn(frames, {"sparsity": sparsity}, COLUMN)
