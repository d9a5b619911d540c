"""Mean test accuracy against the variance over clients, one panel per data set.

The filled marker is the variance of the clients' accuracies in squared points. The line goes down
to what remains without the variance that small test sets alone cause: a client with accuracy a and
n test images has a sampling variance of a (1 - a) / (n - 1).
"""

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from dpfl_mpi.figures import accuracy_table, paper
from dpfl_mpi.figures.command import Drawing
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import text_label
from dpfl_mpi.figures.style import GREY, grid, legend, looks, marks
from dpfl_mpi.figures.tables import markdown, means, number

RUNS = accuracy_table.RUNS
REACH = 10.0  # points below the best that are drawn; rows further below are only printed


def sampling_variance(a: np.ndarray, n: np.ndarray) -> float:
    """Return the variance, points^2, of accuracies `[N]` that test sizes `[N]` alone cause."""
    a, n = a[np.isfinite(a)], n[np.isfinite(a)]
    if not len(a):
        return float("nan")
    return float(1e4 * np.mean(np.where(n > 1, a * (1 - a) / np.maximum(n - 1, 1), 0.25)))


def measure(frames: Frames) -> pd.DataFrame:
    """Return one line per setting and row, means over seeds: percent, and squared points."""
    out = []
    for line in frames.rows.itertuples():
        lines = frames.of("clients", line.setting, line.row)
        each = [(part["test_acc"], part["test"].to_numpy()) for _, part in lines.groupby("run")]
        total = np.mean([1e4 * accuracies.var(ddof=0) for accuracies, _ in each])
        chance = np.mean([sampling_variance(a.to_numpy(), sizes) for a, sizes in each])
        out.append({
            "setting": line.setting,
            "method": line.row,
            "accuracy": means(lines, line.row).mean(),
            "variance": total,
            "sampling_variance": chance,
            "sampling_share": chance / total if total else np.nan,
            "n": len(each),
        })  # fmt: skip
    return pd.DataFrame(out)


def table(data: pd.DataFrame, published: str = "") -> str:
    """Return the table as markdown; `published` are the paper's numbers in Table 1's order."""
    cells = {
        "setting": data["setting"],
        "method": [f"{row} ({n})" for row, n in zip(data["method"], data["n"], strict=True)],
        "accuracy, %": data["accuracy"].map(number),
        "variance, squared points": data["variance"].map(lambda v: number(v, ".0f")),
        "expected of sampling": data["sampling_variance"].map(lambda v: number(v, ".0f")),
    }
    if published:
        theirs = dict(zip(paper.TABLE_1, published.split(), strict=True))
        cells["the paper's, read off its figure"] = data["method"].map(theirs)
    return markdown(pd.DataFrame(cells))


def draw(frames: Frames) -> Drawing:
    data = measure(frames)
    settings = list(dict.fromkeys(data["setting"]))
    figure, panels = grid(len(settings), 3, 2.1, 0.6)
    kinds = frames.rows.drop_duplicates("row")
    styles = zip(kinds["row"], looks(kinds), marks(kinds), strict=True)
    style_of = {row: (look["color"], mark) for row, look, mark in styles}
    handles = {}
    for axes, where in zip(panels, settings, strict=True):
        lines = data[data["setting"] == where]
        for r in lines[lines["accuracy"] >= lines["accuracy"].max() - REACH].itertuples():
            rest, (colour, mark) = max(r.variance - r.sampling_variance, 0), style_of[r.method]
            bar = {"color": colour, "lw": 0.6, "alpha": 0.6, "zorder": 1}
            axes.plot([r.accuracy] * 2, [rest, r.variance], **bar)
            axes.plot(r.accuracy, rest, marker="_", color=colour, ms=4, mew=0.8, zorder=1)
            point = {"color": colour, "mec": "white", "mew": 0.3, "zorder": 2}
            (handles[r.method],) = axes.plot(r.accuracy, r.variance, mark, **point)
        axes.set(title=text_label(where), xlabel="test accuracy, %")
        axes.margins(0.12)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("variance over clients, points$^2$")
    drawn = {text_label(row): handles[row] for row in kinds["row"] if row in handles}
    drawn["line: sampling variance"] = Line2D([], [], color=GREY, lw=0.8, marker="_", ms=4)
    legend(figure, drawn, "outside lower center", handlelength=1.0, handletextpad=0.3)
    return Drawing(data, figure, table(data))
