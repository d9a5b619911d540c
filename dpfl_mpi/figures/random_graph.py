"""DPFL against the same method on a random graph: test accuracy over rounds for three budgets (CIFAR-10, Dir(0.1))."""

import matplotlib.pyplot as plt
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import SEEDS, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import unlike
from dpfl_mpi.figures.style import COLUMN, curves, legend
from dpfl_mpi.figures.tables import cell, comparable, markdown, means, paired, told

DIRICHLET = {"partition": "dirichlet", "dirichlet_alpha": 0.1}
RUNS = cifar10(**DIRICHLET, method=("dpfl", "random_graph"), budget=("0.2N", "0.1N", "0.05N"), seed=SEEDS)


def draw(frames: Frames) -> Drawing:
    if not (frames.rows["method"] == "random_graph").any():
        raise UserError("none of these results is of a random graph: name one of --method=random_graph too")
    rows = frames.rows[frames.rows["topology"] == "graph"]
    figure, axes = plt.subplots(figsize=(COLUMN, 2.3))
    data = curves(axes, rows, frames["curves"], "test_acc", factor=100).rename(columns={"mean": "accuracy"})
    axes.set(xlabel="round", ylabel="test accuracy, %")
    legend(figure, axes, "outside upper center")
    data[["accuracy", "std"]] *= 100
    note = "Differences client by client, points, with their 95 % interval: over partitions, of one over its clients."
    found = compared(frames)
    text = f"{markdown(found)}\n\n{note}" if len(found) else "no budget has both DPFL and the random graph yet"
    return Drawing(data, figure, text)


def compared(frames: Frames) -> pd.DataFrame:
    """Return the table of each DPFL beside every method on another graph that is like it in all else."""
    rows, out = frames.rows[frames.rows["topology"] == "graph"], []
    for a in rows[rows["searches"]].itertuples():
        lines = frames.of("clients", a.setting)
        for b in rows[~rows["searches"] & (rows["setting"] == a.setting)].itertuples():
            same = not unlike(a.result, b.result) if "result" in rows else a.budget == b.budget
            if same and comparable(difference := paired(lines, a.row, b.row)):
                ours, theirs = (cell(means(lines, line.row)) for line in (a, b))
                cells = {"setting": a.setting, "method": a.row, "accuracy, %": ours, "against": b.row}
                out.append(cells | {"its accuracy, %": theirs, "difference": told(difference)})
    return pd.DataFrame(out)
