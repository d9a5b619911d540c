"""Sparsity of the collaboration graph over rounds, 1 - (edges and the clients themselves) / N^2, for every budget."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames, with_graphs
from dpfl_mpi.figures.style import COLUMN, curves, legend
from dpfl_mpi.graph import sparsity

RUNS = cifar10(budget=("inf", 20, 10, 5))


def lines(axes: Axes, frames: Frames, name: str, measure: Callable[[np.ndarray], float]) -> pd.DataFrame:
    """Draw a percentage of the graph `[N, N]` over rounds, one curve per row, and return its numbers."""
    graphs = with_graphs(frames)
    graphs = graphs.assign(value=[measure(graph().matrix()) for graph in graphs["graph"]])
    rows = frames.rows[frames.rows["run"].isin(graphs["run"])]
    axes.set_xlabel("round")
    drawn = curves(axes, rows, graphs, "value", "t", factor=100)
    return drawn.rename(columns={"t": "round", "mean": "value"}).assign(measure=name)


def first_and_last(data: pd.DataFrame) -> str:
    """Return one sentence per curve: its first and its last value."""
    out = []
    for (where, row, name), part in data.groupby(["setting", "method", "measure"], sort=False):
        start, end = part.iloc[0], part.iloc[-1]
        when = f"in round {start['round']}" if start["round"] else "before round 1"
        values = f"{100 * start.value:.1f} % {when}, {100 * end.value:.1f} % in round {end['round']}"
        out.append(f"{where}, {row}: {name} {values}")
    return "\n".join(out)


def draw(frames: Frames) -> Drawing:
    figure, axes = plt.subplots(figsize=(COLUMN, 2.2))
    data = lines(axes, frames, "sparsity", sparsity)
    axes.set_ylabel("sparsity, %")
    legend(figure, axes, "outside upper center")
    return Drawing(data, figure, first_and_last(data))
