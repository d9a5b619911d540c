"""Tables and the picture of arena.md: each row of a setting against Local and random graphs.

`runs` has a line per Run (setting, epochs, row, seed, run, partition, costs per client), `clients`
a line per Run and client (run, client, accuracy). Differences are paired by client. The p of one is
the larger of two t-tests': over partition means, and over the clients within partitions. It is
significant if p < 0.05 after Holm's correction (Scandinavian Journal of Statistics 6, 1979) for all
differences of the page over two partitions or more; with one partition it never is.
"""

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from recomputed import Lines, error_over_clients, intervals, over_clients
from scipy.special import stdtr

from dpfl_mpi.figures import tables
from dpfl_mpi.figures.style import COLOURS, MARKS, TEXT
from dpfl_mpi.figures.tables import Parts, means, number, paired

RANDOM = "Random graph"  # with as many clients as the budget allows
DEGREES = "Random graph, DPFL's degrees"  # with as many as DPFL averages
BOTH = {"Local": "vs Local", RANDOM: "vs random graph"}  # with both intervals
OTHERS = {DEGREES: "vs DPFL's degrees", "FedAvg+FT": "vs FedAvg+FT", "Ditto": "vs Ditto"}
BASES = BOTH | OTHERS  # rows to which differences are shown, with their columns
# rows whose differences to a random graph are on the front page
ON_FRONT_PAGE = ("Oracle", "Nearest", "DPFL", "Pairwise", "Ditto", "FedAvg+FT")
COSTS = {"models": "models", "megabytes": "MB", "evaluations": "evaluations", "steps": "steps"}
LABELLED = ("DPFL", "Nearest", RANDOM)  # rows whose marks always have a name in the picture


def chance(parts: Parts) -> float:
    """Return the p of paired differences: the larger of the two t-tests' (see above)."""
    mean = np.array([part.mean() for part in parts]).mean()
    tests = [(mean / error_over_clients(parts), sum(len(part) - 1 for part in parts))]
    if len(parts) > 1:
        values = np.array([part.mean() for part in parts])
        tests.append((mean * np.sqrt(len(values)) / values.std(ddof=1), len(values) - 1))
    return max(2 * float(stdtr(freedom, -abs(t))) for t, freedom in tests)


def holm(chances: Iterable[float]) -> np.ndarray:
    """Return p-values corrected for their number m: the i-th smallest (from 0) times m - i.

    None is below a smaller one's, or above 1.
    """
    p = np.array(list(chances))
    order, out = np.argsort(p, kind="stable"), np.empty_like(p)
    factors = np.arange(len(p), 0, -1)
    out[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1)
    return out


def differences(runs: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """Return each difference of the page once: setting, epochs, row, to, parts, p, significant."""
    out, bases = [], list(BASES)
    for (setting, epochs), of_setting in runs.groupby(["setting", "epochs"], sort=False):
        lines = clients.merge(of_setting, on="run")
        for row in dict.fromkeys(of_setting["row"]):
            for base in bases[: bases.index(row)] if row in BASES else bases:
                parts = paired(lines, row, base, "accuracy")
                if tables.comparable(parts):
                    out.append((setting, epochs, row, base, parts, chance(parts)))
    found = pd.DataFrame(out, columns=["setting", "epochs", "row", "to", "parts", "p"])
    several = found["parts"].map(len).to_numpy() > 1
    significant = np.zeros(len(found), bool)
    significant[several] = holm(found["p"][several]) < 0.05
    return found.assign(significant=significant)


def bold(text: str, significant: bool) -> str:
    return f"**{text}**" if significant else text


def table(runs: pd.DataFrame, clients: pd.DataFrame, found: pd.DataFrame) -> Lines:
    """Yield a table line per row of a setting; significant differences are bold."""
    lines = clients.merge(runs, on="run")
    for row, of_row in runs.groupby("row", sort=False):
        out = {"row": str(row), "accuracy, %": tables.mean_text(means(lines, str(row), "accuracy"))}
        differences = found[found["row"] == row].set_index("to")
        for base, column in BASES.items():
            out[column] = "-"
            if base in differences.index:
                parts, significant = differences.loc[base, ["parts", "significant"]]
                both = f", clients ± {over_clients(parts):.2f}" if base in BOTH else ""
                out[column] = bold(tables.difference_text(parts) + both, significant)
        for cost, column in COSTS.items():
            out[column] = number(of_row[cost].mean(), ",.0f")
        yield out | {"core hours": number(of_row["core_hours"].min())}


def answer(runs: pd.DataFrame, found: pd.DataFrame) -> Lines:
    """Yield a line per setting: a random graph over Local, and other rows over a random graph.

    Of several lengths the one with the most partitions is shown, then the longest.
    """
    for setting in dict.fromkeys(runs["setting"]):
        of_setting = found[found["setting"] == setting]
        to_random = of_setting[of_setting["to"] == RANDOM]
        partitions = to_random["parts"].map(len).groupby(to_random["epochs"]).max()
        epochs = max(partitions.items(), key=lambda item: (item[1], item[0]), default=(0, 0))[0]
        shown = of_setting[of_setting["epochs"] == epochs].itertuples()
        by_pair = {(line.row, line.to): line for line in shown}
        out = {"setting": str(setting), "epochs": number(epochs, ".0f")}
        columns = {"random graph over Local": (RANDOM, "Local")}
        columns |= {row: (row, RANDOM) for row in ON_FRONT_PAGE}
        for column, pair in columns.items():
            line = by_pair.get(pair)
            text = tables.difference_text(line.parts) if line else "-"
            out[column] = bold(text, bool(line and line.significant))
        yield out


def draw_costs(axes: Axes, runs: pd.DataFrame, parts: dict[str, Parts], looks: dict) -> None:
    """Draw differences to a random graph over models received; name `LABELLED` and the best."""
    models = runs.groupby("row", sort=False)["models"].mean()
    points = {row: tables.interval(of_row)[0] for row, of_row in parts.items()} | {RANDOM: 0.0}
    highest = -np.inf
    for row in sorted(points, key=lambda row: (models[row], -points[row])):
        colour, mark = looks[row]
        axes.plot(models[row], points[row], mark, ms=3, color=colour)
        if points[row] > highest or row in LABELLED:
            place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 5}
            axes.annotate(row, (models[row], points[row]), (3, 2), **place)
        highest = max(highest, points[row])
    axes.margins(x=0.25)
    axes.set(xlabel="models received per client", ylabel="points to a random graph")


def picture(runs: pd.DataFrame, found: pd.DataFrame) -> Figure:
    """Return per setting the differences to a random graph: with intervals, and over costs."""
    groups = runs.groupby(["setting", "epochs"], sort=False)
    each = [(name, group) for name, group in groups if group["row"].nunique() > 1]
    rows, n = list(dict.fromkeys(runs["row"])), len(COLOURS)
    looks = {row: (COLOURS[i % n], MARKS[1 + i // n]) for i, row in enumerate(rows)}
    heights = [1.2 + 0.13 * group["row"].nunique() for _, group in each]
    size = (TEXT, sum(heights))
    figure, panels = plt.subplots(len(each), 2, figsize=size, height_ratios=heights, squeeze=False)
    to_random = found[found["to"] == RANDOM]
    for (left, right), ((setting, epochs), group) in zip(panels, each, strict=True):
        shown = (to_random["setting"] == setting) & (to_random["epochs"] == epochs)
        parts = dict(zip(to_random["row"][shown], to_random["parts"][shown], strict=True))
        intervals(left, parts)
        left.set(title=f"{setting}, {epochs} epochs", xlabel="points to a random graph")
        left.tick_params(axis="y", length=0, pad=7)
        beside = {"transform": left.get_yaxis_transform(), "clip_on": False}
        for y, row in enumerate(parts):
            colour, mark = looks[row]
            left.plot(-0.02, y, mark, ms=3, color=colour, **beside)
        draw_costs(right, group, parts, looks)
    return figure
