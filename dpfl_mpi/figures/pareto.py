"""Accuracy against its cost: models received and evaluated, gradient steps, seconds.

docs/methods.md says how models are counted. Seconds are the mean of the ranks: compare only runs of
one machine. Fine-tuning adds gradient steps; its seconds are not recorded.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.figures.command import SEEDS, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import labels, text_label
from dpfl_mpi.figures.style import TEXT, curve, legend, looks, over_repetitions
from dpfl_mpi.figures.tables import markdown, number
from dpfl_mpi.figures.variance import REACH

WITH_SERVER = ("fedavg", "fedprox", "ditto", "fedrep")
METHODS = ("dpfl", "random_graph", "pairwise", *WITH_SERVER, "pfedgraph", "local")
RUNS = cifar10(method=METHODS, seed=SEEDS)
RUNS += cifar10(method="fedavg", finetune_epochs=10, seed=SEEDS)
COSTS = {
    "models": "models received",
    "evaluations": "models evaluated",
    "steps": "gradient steps",
    "seconds": "seconds",
}
REACHED = {"type": float, "default": 80.0, "metavar": "X", "help": "accuracy, percent (80)"}
OPTIONS = {"target": REACHED}


def first_at(lines: pd.DataFrame, accuracy: float) -> dict[str, float]:
    """Return what it cost a Run to first reach an accuracy, percent; nan if it does not."""
    reached = lines[lines["accuracy"] >= accuracy]
    return {name: float(reached[name].iloc[0]) if len(reached) else np.nan for name in COSTS}


def cost_text(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def table(frames: Frames, target: float, costs: Sequence[str] = tuple(COSTS)) -> str:
    out = []
    for line in frames.rows.itertuples():
        lines = frames.of("costs", line.setting, line.row)
        each = [first_at(part, target) for _, part in lines.groupby("run")]
        first = pd.DataFrame(each).mean(skipna=False)  # nan if one repetition does not reach it
        last = lines.groupby("run")[["accuracy", *COSTS]].last().mean()
        out.append({
            "setting": line.setting,
            "method": line.row,
            "accuracy": f"{number(last['accuracy'])} ({len(each)})",
            **{COSTS[name]: cost_text(last[name]) for name in costs},
            **{f"{name} to {target:g} %": cost_text(first[name]) for name in costs},
        })  # fmt: skip
    return markdown(pd.DataFrame(out))


def mean_curve(lines: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return `point`, means of columns and `std` of accuracy, up to the shortest repetition."""
    spread = over_repetitions(lines, "accuracy", "point")["std"]
    means = lines.groupby("point")[list(columns)].agg(lambda column: column.mean(skipna=False))
    return means.join(spread, how="right").reset_index()


def draw(frames: Frames, target: float = 80.0) -> Drawing:
    figure, panels = plt.subplots(1, len(COSTS), figsize=(TEXT, 2.2), sharey=True)
    parts = []
    rows = zip(frames.rows.itertuples(), looks(frames.rows), labels(frames.rows), strict=True)
    for line, look, name in rows:
        lines = frames.of("costs", line.setting, line.row)
        mean = mean_curve(lines, ["accuracy", *COSTS])
        for axes, cost in zip(panels, COSTS, strict=True):
            label = text_label(name)
            curve(axes, mean[cost], mean["accuracy"], mean["std"], label=label, **look)
            last = mean.iloc[-1:]
            axes.plot(last[cost], last["accuracy"], "o", color=look["color"])
            axes.set_xlabel(COSTS[cost])
            axes.locator_params(axis="x", nbins=4)
        n = lines["run"].nunique()
        parts.append(mean.assign(setting=line.setting, method=line.row, n=n))
    data = pd.concat(parts, ignore_index=True)
    ends = data.groupby(["setting", "method"], sort=False)["accuracy"].last()
    lowest, (low, high) = ends.max() - REACH, panels[0].get_ylim()
    panels[0].set_ylim(max(low, lowest), min(high, 101, ends.max() + data["std"].max() + 1))
    panels[0].set_ylabel("test accuracy, %")
    legend(figure, panels[0], "outside upper center")
    text = (
        "Accuracy in percent (number of seeds); costs per client, seconds the mean of the ranks. "
    )
    text += "-: not reached by all seeds."
    if below := [f"{row} ({end:.1f} %)" for (_, row), end in ends.items() if end < lowest]:
        text += f" Too low for the picture: {', '.join(below)}."
    return Drawing(data, figure, f"{table(frames, target)}\n\n{text}")
