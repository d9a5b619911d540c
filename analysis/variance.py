"""Mean test accuracy against the variance over clients, one panel per data set.

The filled marker is the variance of the clients' accuracies in squared points; the line goes down to what is left of it without the share that
the size of the clients' test sets alone explains: a client of accuracy a and n test images has a sampling variance of a (1 - a) / (n - 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import COLUMN, TEXT, Drawing, accuracy, legend, main

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import looks
from _names import text_label
from _tables import named, repetitions
from accuracy_table import RUNS as TABLE
from accuracy_table import rank

from dpfl_mpi.results import Result

RUNS = TABLE  # the same runs as the table
REACH = 10.0  # points below the best: what is further away (FedAvg by 35) would press all others together, and is only printed
MARKS = "oosDv^<>pPX*d"


def sampling_variance(a: np.ndarray, n: np.ndarray) -> float:
    """Return what the size of the test sets `[N]` alone adds to the variance of the clients' accuracies, 0 to 1 `[N]`: squared points.

    A client that is not scored (nan) does not count; without any that is scored it is nan.
    """
    scored = np.isfinite(a)
    a, n = a[scored], n[scored]
    return float(1e4 * np.mean(np.where(n > 1, a * (1 - a) / np.maximum(n - 1, 1), 0.25))) if len(a) else float("nan")


def measure(results: Sequence[Result]) -> pd.DataFrame:
    """Return one row per setting and method: accuracy in percent, variances in squared points, means over the seeds."""
    rows = []
    for where, name, group in named(sorted(repetitions(results), key=lambda g: rank(g[0].run))):
        total, sampling = [], []
        for r in group:
            a, n = accuracy(r), r["client/n_test"]
            total.append(1e4 * np.nanvar(a))
            sampling.append(sampling_variance(a, n))
        rows.append(
            {
                "setting": where,
                "method": name,
                "accuracy": np.mean([100 * np.nanmean(accuracy(r)) for r in group]),
                "variance": np.mean(total),
                "sampling_variance": np.mean(sampling),
                "sampling_share": np.mean(sampling) / np.mean(total) if np.mean(total) else np.nan,
                "n": len(group),
            }
        )
    return pd.DataFrame(rows)


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure: one panel per setting, every method with its colour, every row with a mark of its own."""
    data = measure(results)
    settings = list(dict.fromkeys(data["setting"]))
    columns = min(len(settings), 3)
    rows = -(-len(settings) // columns)
    width = COLUMN if columns == 1 else TEXT
    figure, grid = plt.subplots(rows, columns, figsize=(width, 2.1 * rows + 0.6), squeeze=False)
    names = list(dict.fromkeys(data["method"]))
    runs = {name: group[0].run for _, name, group in named(repetitions(results))}
    colours = [look["color"] for look in looks([runs[n].method for n in names])]
    look = {n: (MARKS[i % len(MARKS)], colour) for i, (n, colour) in enumerate(zip(names, colours, strict=True))}
    handles = {}
    for axes, where in zip(grid.flat, settings, strict=False):
        here = data[data["setting"] == where]
        for _, r in here[here["accuracy"] >= here["accuracy"].max() - REACH].iterrows():
            mark, colour = look[r.method]
            left = max(r.variance - r.sampling_variance, 0)
            axes.plot([r.accuracy] * 2, [left, r.variance], color=colour, lw=0.6, alpha=0.6, zorder=1)
            axes.plot(r.accuracy, left, marker="_", color=colour, ms=4, mew=0.8, zorder=1)
            (handles[r.method],) = axes.plot(
                r.accuracy, r.variance, mark, color=colour, mec="white", mew=0.3, label=r.method, zorder=2
            )
        axes.set_title(where)
        axes.set_xlabel("test accuracy, %")
        axes.margins(0.12)
        axes.set_ylim(bottom=0)
    grid[0, 0].set_ylabel("variance over clients, %$^2$")
    for axes in list(grid.flat)[len(settings) :]:
        axes.set_axis_off()
    drawn = [n for n in names if n in handles]
    marks, texts = [handles[n] for n in drawn], [text_label(n) for n in drawn]
    legend(figure, marks, texts, "outside lower center", handlelength=1.0, handletextpad=0.3)
    lines = [
        f"{r.setting}, {r.method}: accuracy {r.accuracy:.2f} %, variance {r.variance:.1f} %^2, of which test-set size alone explains "
        f"{100 * r.sampling_share:.0f} %"
        for _, r in data.iterrows()
    ]
    return Drawing(data, figure, "\n".join(lines))


if __name__ == "__main__":
    main("variance", __doc__, RUNS, draw)
