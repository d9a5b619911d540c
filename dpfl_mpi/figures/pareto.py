"""Is it worth its cost? Accuracy against what it took: models received, models evaluated while choosing, gradient steps, seconds.

docs/controls.md says how they are counted; of methods with a server too, one model down and one up per round. Seconds are those of the slowest
rank: compare only runs of one machine. Fine-tuning adds steps, no models; its seconds are not recorded.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.figures.command import SEEDS, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import labels, text_label
from dpfl_mpi.figures.style import TEXT, curve, legend, looks, over
from dpfl_mpi.figures.tables import markdown, number
from dpfl_mpi.figures.variance import REACH

METHODS = ("dpfl", "random_graph", "pairwise", "fedavg", "fedprox", "ditto", "fedrep", "pfedgraph", "local")
RUNS = [*cifar10(method=METHODS, seed=SEEDS), *cifar10(method="fedavg", finetune_epochs=10, seed=SEEDS)]
COSTS = {"models": "models received", "evaluations": "models evaluated", "steps": "gradient steps"}
COSTS |= {"seconds": "seconds"}
OPTIONS = {"reach": {"type": float, "default": 80.0, "metavar": "X", "help": "accuracy in percent (default: 80)"}}


def first_at(lines: pd.DataFrame, accuracy: float) -> dict[str, float]:
    """Return what it cost a Run to reach an accuracy, percent, for the first time; nan where it is not reached."""
    reached = lines[lines["accuracy"] >= accuracy]
    return {name: float(reached[name].iloc[0]) if len(reached) else float("nan") for name in COSTS}


def shown(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def table(frames: Frames, reach: float, costs: Sequence[str] = tuple(COSTS)) -> str:
    out = []
    for line in frames.rows.itertuples():
        lines = frames.of("costs", line.setting, line.row)
        each = [first_at(part, reach) for _, part in lines.groupby("run")]
        first = pd.DataFrame(each).mean(skipna=False)  # nan where a repetition does not reach it
        # of each repetition its own, the seconds of +FT those before
        end = lines.groupby("run")[["accuracy", *COSTS]].last().mean()
        cells = {"setting": line.setting, "method": line.row}
        cells["accuracy"] = f"{number(end['accuracy'])} ({len(each)})"
        cells |= {COSTS[name]: shown(end[name]) for name in costs}
        out.append(cells | {f"{name} to {reach:g} %": shown(first[name]) for name in costs})
    return markdown(pd.DataFrame(out))


def draw(frames: Frames, reach: float = 80.0, costs: Sequence[str] = tuple(COSTS)) -> Drawing:
    figure, panels = plt.subplots(1, len(costs), figsize=(TEXT, 2.2), sharey=True)
    parts = []
    for line, look, name in zip(frames.rows.itertuples(), looks(frames.rows), labels(frames.rows), strict=True):
        lines = frames.of("costs", line.setting, line.row)
        spread = over(lines, "accuracy", "point")["std"]  # as far as all repetitions are
        means = lines.groupby("point")[["accuracy", *COSTS]].agg(lambda column: column.mean(skipna=False))
        mean = means.join(spread, how="right")
        for axes, cost in zip(panels, costs, strict=True):
            curve(axes, mean[cost], mean["accuracy"], mean["std"], label=text_label(name), **look)
            axes.plot(mean[cost].iloc[-1:], mean["accuracy"].iloc[-1:], "o", color=look["color"])
            axes.set_xlabel(COSTS[cost])
            axes.locator_params(axis="x", nbins=4)
        parts.append(mean.reset_index().assign(setting=line.setting, method=line.row, n=lines["run"].nunique()))
    data = pd.concat(parts, ignore_index=True)
    ends = data.groupby(["setting", "method"], sort=False)["accuracy"].last()
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(max(low, ends.max() - REACH), min(high, 101, ends.max() + data["std"].max() + 1))
    panels[0].set_ylabel("test accuracy, %")
    legend(figure, panels[0], "outside upper center")
    units = "Accuracy in percent (number of seeds); costs per client, seconds of a rank. -: not reached by all seeds."
    if below := [f"{row} ({end:.1f} %)" for (_, row), end in ends.items() if end < ends.max() - REACH]:
        units += f" Too low for the picture: {', '.join(below)}."
    return Drawing(data, figure, f"{table(frames, reach, costs)}\n\n{units}")
