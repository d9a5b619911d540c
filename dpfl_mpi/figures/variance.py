"""Mean test accuracy against the variance over clients, one panel per data set.

The filled marker is the variance of the clients' accuracies in squared points; the line goes down to what is left of it without the share that
the size of the clients' test sets alone explains: a client of accuracy a and n test images has a sampling variance of a (1 - a) / (n - 1).
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
REACH = 10.0  # points below the best: what is further away (FedAvg by 35) would press all others together, and is only printed


def sampling_variance(a: np.ndarray, n: np.ndarray) -> float:
    """Return what the size of the test sets `[N]` alone adds to the variance of the accuracies `[N]` that are not nan: squared points."""
    a, n = a[np.isfinite(a)], n[np.isfinite(a)]
    return float(1e4 * np.mean(np.where(n > 1, a * (1 - a) / np.maximum(n - 1, 1), 0.25))) if len(a) else float("nan")


def measure(frames: Frames) -> pd.DataFrame:
    """Return one line per setting and row: accuracy in percent, variances in squared points, means over the seeds."""
    out = []
    for line in frames.rows.itertuples():
        lines = frames.of("clients", line.setting, line.row)
        each = [part for _, part in lines.groupby("run")]
        total = np.mean([1e4 * part["test_acc"].var(ddof=0) for part in each])
        chance = np.mean([sampling_variance(part["test_acc"].to_numpy(), part["test"].to_numpy()) for part in each])
        who = {"setting": line.setting, "method": line.row, "accuracy": means(lines, line.row).mean()}
        share = {"sampling_variance": chance, "sampling_share": chance / total if total else np.nan}
        out.append(who | {"variance": total} | share | {"n": len(each)})
    return pd.DataFrame(out)


def table(data: pd.DataFrame, published: str = "") -> str:
    """Return the table as markdown, beside it the paper's numbers, one for each row of its Table 1."""
    cells = {
        "setting": data["setting"],
        "method": [f"{row} ({n})" for row, n in zip(data["method"], data["n"], strict=True)],
        "accuracy, %": data["accuracy"].map(number),
        "variance, squared points": data["variance"].map(lambda v: number(v, ".0f")),
        "of which by the size of the test sets": data["sampling_variance"].map(lambda v: number(v, ".0f")),
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
    shown = dict(zip(kinds["row"], zip(looks(kinds), marks(kinds), strict=True), strict=True))
    handles = {}
    for axes, where in zip(panels, settings, strict=True):
        here = data[data["setting"] == where]
        for r in here[here["accuracy"] >= here["accuracy"].max() - REACH].itertuples():
            left, (look, mark) = max(r.variance - r.sampling_variance, 0), shown[r.method]
            colour = look["color"]
            axes.plot([r.accuracy] * 2, [left, r.variance], color=colour, lw=0.6, alpha=0.6, zorder=1)
            axes.plot(r.accuracy, left, marker="_", color=colour, ms=4, mew=0.8, zorder=1)
            (handles[r.method],) = axes.plot(r.accuracy, r.variance, mark, color=colour, mec="white", mew=0.3, zorder=2)
        axes.set(title=where, xlabel="test accuracy, %")
        axes.margins(0.12)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("variance over clients, points$^2$")
    drawn = {text_label(row): handles[row] for row in kinds["row"] if row in handles}
    drawn["line: by the size of the test sets"] = Line2D([], [], color=GREY, lw=0.8, marker="_", ms=4)
    legend(figure, drawn, "outside lower center", handlelength=1.0, handletextpad=0.3)
    return Drawing(data, figure, table(data))
