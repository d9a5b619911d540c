"""The paper's motivating example: two collaborators help client 1, either one alone does not.

Client 1 has few samples of four classes. Client 2 shares two of them, client 3 the other two. In
each group everyone trains and averages with everyone; the figure shows client 1's test accuracy.
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
AVERAGING = {"method": "random_graph", "budget": "inf"}
RUNS = cifar10(partition=EXAMPLE, method="local", seed=SEEDS)
RUNS += cifar10(partition=EXAMPLE, **AVERAGING, seed=SEEDS, reach=GROUPS)


def group_name(others: list[int]) -> str:
    """Return with whom client 1 averages, counted from 1 as in the paper."""
    return "with " + " and ".join(str(k + 1) for k in others) if others else "alone"


def accuracies(frames: Frames, runs: pd.DataFrame) -> pd.DataFrame:
    """Return group, seed, accuracy (percent) and n_test of client 1 in each Run."""
    runs = runs.assign(group=[group_name(list(r.omega().of(0))) for r in runs["result"]])
    parts = []
    for name, part in sorted(runs.groupby("group"), key=lambda each: (len(each[0]), each[0])):
        rows = part["row"]
        if part["setting"].nunique() > 1:
            rows = part["setting"] + ", " + rows
        parts.append(part.assign(group=name if rows.nunique() == 1 else name + " (" + rows + ")"))
    first = frames["clients"].query("client == 0").set_index("run")
    data = pd.concat(parts)[["group", "seed", "run"]].join(first[["test_acc", "test"]], on="run")
    data = data.assign(accuracy=100 * data["test_acc"], n_test=data["test"])
    return data[["group", "seed", "accuracy", "n_test"]]


def draw(frames: Frames) -> Drawing:
    methods = {run.method for run in RUNS}
    runs = [result.run for result in frames.runs["result"]]
    in_example = [str(run.partition) == EXAMPLE and run.method in methods for run in runs]
    shown = frames.runs[in_example]
    if not len(shown):
        missing = "has the three clients of the example (--partition motivation)"
        raise UserError(f"none of these results {missing}")
    data = accuracies(frames, shown)
    groups = list(data["group"].unique())
    alone = [g for g in groups if g.startswith("alone")]
    baseline = np.nan  # not known if there are several Runs of client 1 alone
    if len(alone) == 1:
        baseline = data[data["group"] == alone[0]]["accuracy"].mean()
    figure, axes = plt.subplots(figsize=(COLUMN, 2.0))
    text = []
    for x, group in enumerate(groups):
        values = data[data["group"] == group]["accuracy"].to_numpy()
        axes.bar(x, values.mean(), 0.6, color=GREY if group in alone else SKY)
        axes.plot(np.full(len(values), x), values, "o", color=DARK, ms=2.5)
        gain = ""
        if group not in alone and not np.isnan(baseline):
            gain = f", {values.mean() - baseline:+.1f} points against alone"
        text.append(f"client 1 {group}: {values.mean():.1f} % ({len(values)} seeds){gain}")
    if others := len(runs) - len(shown):
        reason = "which are not of the example (--partition motivation)"
        text.append(f"Left out: {others} of {len(runs)} results, {reason}.")
    if not np.isnan(baseline):
        axes.axhline(baseline, color=GREY, lw=0.6, ls=":")
    width = max(56 // len(groups), 8)
    axes.set_xticks(range(len(groups)), [wrapped(group, width) for group in groups])
    axes.set_ylabel("test accuracy of client 1, %")
    return Drawing(data, figure, "\n".join(text))
