"""The paper's motivating example: client 1 gains from clients 2 and 3 together more than from either alone.

Client 1 has little of four classes; client 2 shares two of them and client 3 the other two. In each group everyone trains and averages with
everyone (a full graph, scored after local training); shown is the test accuracy of client 1.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import SEEDS, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import wrapped
from dpfl_mpi.figures.style import COLUMN, DARK, GREY, SKY

EXAMPLE, GROUPS = "motivation", ("groups:0,1;2", "groups:0,2;1", None)
RUNS = [*cifar10(partition=EXAMPLE, method="local", seed=SEEDS)]
RUNS += cifar10(partition=EXAMPLE, method="random_graph", budget="inf", seed=SEEDS, reach=GROUPS)


def with_whom(others: list[int]) -> str:
    """Return with whom client 1 averages, counted from 1 as in the paper."""
    return "with " + " and ".join(str(k + 1) for k in others) if others else "alone"


def draw(frames: Frames) -> Drawing:
    methods = {run.method for run in RUNS}
    of_example = [str(r.run.partition) == EXAMPLE and r.run.method in methods for r in frames.runs["result"]]
    if not len(shown := frames.runs[of_example]):
        raise UserError("none of these results has the three clients of the example (--partition motivation)")
    shown = shown.assign(group=[with_whom(list(r.omega().of(0))) for r in shown["result"]])
    parts = []
    for name, part in sorted(shown.groupby("group"), key=lambda each: (len(each[0]), each[0])):
        said = part["row"] if part["setting"].nunique() == 1 else part["setting"] + ", " + part["row"]
        parts.append(part.assign(group=name if said.nunique() == 1 else name + " (" + said + ")"))
    first = frames["clients"].query("client == 0").set_index("run")
    data = pd.concat(parts)[["group", "seed", "run"]].join(first[["test_acc", "test"]], on="run")
    data = data.assign(accuracy=100 * data["test_acc"], n_test=data["test"])[["group", "seed", "accuracy", "n_test"]]
    figure, axes = plt.subplots(figsize=(COLUMN, 2.0))
    groups = list(data["group"].unique())
    by_oneself = [g for g in groups if g.startswith("alone")]
    # of several that differ in settings none is the one to compare with
    alone = data[data["group"] == by_oneself[0]]["accuracy"].mean() if len(by_oneself) == 1 else np.nan
    text = []
    for x, group in enumerate(groups):
        values = data[data["group"] == group]["accuracy"].to_numpy()
        axes.bar(x, values.mean(), 0.6, color=GREY if group in by_oneself else SKY)
        axes.plot(np.full(len(values), x), values, "o", color=DARK, ms=2.5)
        told = group not in by_oneself and not np.isnan(alone)
        against = f", {values.mean() - alone:+.1f} points against alone" if told else ""
        text.append(f"client 1 {group}: {values.mean():.1f} % ({len(values)} seeds){against}")
    if others := len(frames.runs) - len(shown):
        left_out = f"Left out: {others} of {len(frames.runs)} results"
        text.append(f"{left_out}, which are not of the example (--partition motivation).")
    if not np.isnan(alone):
        axes.axhline(alone, color=GREY, lw=0.6, ls=":")
    axes.set_xticks(range(len(groups)), [wrapped(group, max(56 // len(groups), 8)) for group in groups])
    axes.set_ylabel("test accuracy of client 1, %")
    return Drawing(data, figure, "\n".join(text))
