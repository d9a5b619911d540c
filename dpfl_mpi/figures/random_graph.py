"""DPFL against the same method on a random graph: test accuracy over rounds, three budgets.

CIFAR-10, Dir(0.1).
"""

import matplotlib.pyplot as plt
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import tables
from dpfl_mpi.figures.command import SEEDS, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.ggc_period_table import DIRICHLET
from dpfl_mpi.figures.names import unlike
from dpfl_mpi.figures.style import COLUMN, curves, legend

METHODS, BUDGETS = ("dpfl", "random_graph"), ("0.2N", "0.1N", "0.05N")
RUNS = cifar10(**DIRICHLET, method=METHODS, budget=BUDGETS, seed=SEEDS)


def draw(frames: Frames) -> Drawing:
    if not (frames.rows["method"] == "random_graph").any():
        missing = "name one of --method=random_graph too"
        raise UserError(f"none of these results is of a random graph: {missing}")
    rows = frames.rows[frames.rows["topology"] == "graph"]
    figure, axes = plt.subplots(figsize=(COLUMN, 2.3))
    data = curves(axes, rows, frames["curves"], "test_acc", factor=100)
    data = data.rename(columns={"mean": "accuracy"})
    data[["accuracy", "std"]] *= 100
    axes.set(xlabel="round", ylabel="test accuracy, %")
    legend(figure, axes, "outside upper center")
    found = compared(frames)
    text = "no budget has both DPFL and the random graph yet"
    if len(found):
        note = "Differences are paired by client, in points, with their 95 % interval"
        over = "over partitions, or over the clients of a single one"
        text = f"{tables.markdown(found)}\n\n{note} {over}."
    return Drawing(data, figure, text)


def compared(frames: Frames) -> pd.DataFrame:
    """Return a line for each DPFL and each other graph method that differs in the graph alone."""
    rows, out = frames.rows[frames.rows["topology"] == "graph"], []
    for a in rows[rows["searches"]].itertuples():
        lines = frames.of("clients", a.setting)
        for b in rows[~rows["searches"] & (rows["setting"] == a.setting)].itertuples():
            has_results = "result" in rows  # else the frames are of CSV files
            same = not unlike(a.result, b.result) if has_results else a.budget == b.budget
            parts = tables.paired(lines, a.row, b.row) if same else []
            if tables.comparable(parts):
                accuracies = [tables.mean_text(tables.means(lines, line.row)) for line in (a, b)]
                out.append({
                    "setting": a.setting,
                    "method": a.row,
                    "accuracy, %": accuracies[0],
                    "against": b.row,
                    "its accuracy, %": accuracies[1],
                    "difference": tables.difference_text(parts),
                })  # fmt: skip
    return pd.DataFrame(out)
