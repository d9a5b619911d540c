"""Sparsity of the collaboration graph over rounds, for every budget.

It is 1 - (edges + N) / N^2: the clients themselves count as edges.
"""

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames, with_graphs
from dpfl_mpi.figures.style import COLUMN, curves, legend
from dpfl_mpi.graph import CollaborationGraph, sparsity

RUNS = cifar10(budget=("inf", 20, 10, 5))
Measures = Mapping[str, Callable[[CollaborationGraph], float]]  # by name


def draw_over_rounds(
    figure: Figure, frames: Frames, graphs: pd.DataFrame, columns: list[str], factor: float = 1
) -> pd.DataFrame:
    """Draw a column of `graphs` in each panel, one curve per row; return the numbers."""
    rows, parts = frames.rows[frames.rows["run"].isin(graphs["run"])], []
    for axes, column in zip(figure.axes, columns, strict=True):
        parts.append(curves(axes, rows, graphs, column, "t", factor).assign(measure=column))
    legend(figure, figure.axes[0], "outside upper center")
    return pd.concat(parts, ignore_index=True).rename(columns={"t": "round", "mean": "value"})


def draw_measures(frames: Frames, measures: Measures, width: float, **look: Any) -> Drawing:
    """Return a figure with a panel per measure, in percent over rounds, one curve per row."""
    figure, panels = plt.subplots(1, len(measures), figsize=(width, 2.2), squeeze=False)
    graphs, text = with_graphs(frames), []
    for name, measure in measures.items():
        graphs[name] = [measure(graph()) for graph in graphs["graph"]]
    data = draw_over_rounds(figure, frames, graphs, list(measures), 100)
    for axes, name in zip(panels[0], measures, strict=True):
        axes.set(xlabel="round", ylabel=f"{name}, %", **look)
    for (where, row, name), part in data.groupby(["setting", "method", "measure"], sort=False):
        first, last = part.iloc[0], part.iloc[-1]
        when = f"in round {first['round']}" if first["round"] else "before round 1"
        values = f"{100 * first.value:.1f} % {when}, {100 * last.value:.1f} %"
        text.append(f"{where}, {row}: {name} {values} in round {last['round']}")
    return Drawing(data, figure, "\n".join(text))


def draw(frames: Frames) -> Drawing:
    return draw_measures(frames, {"sparsity": sparsity}, COLUMN)
