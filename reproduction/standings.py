"""Tables and the picture of `reproduction/arena.md`: each row of a setting against clients that train alone, and against random clients.

`runs` is a line per Run (setting, epochs, row, seed, run, partition, what it cost per client), `clients` a line per Run and client (run, client, accuracy).
A difference is paired by clients. Its chance p is the larger of two t-tests': over the means of partitions, and over the clients within them.
It is decided where p is below 0.05 after Holm's correction (Scandinavian Journal of Statistics 6, 1979) over all differences of the page that are of
two partitions or more; one partition decides nothing.
"""

from collections.abc import Iterable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from recomputed import Lines, error_over_clients, intervals, over_clients
from scipy.special import stdtr

from dpfl_mpi.figures.style import COLOURS, MARKS, TEXT
from dpfl_mpi.figures.tables import Parts, mean_text, comparable, means, number, paired, difference_text

RANDOM = "Random graph"  # of as many clients as the budget allows
DEGREES = "Random graph, DPFL's degrees"  # of as many as DPFL averages with
BOTH = {"Local": "to Local", RANDOM: "to a random graph"}  # with both intervals
TO = BOTH | {DEGREES: "to DPFL's degrees", "FedAvg+FT": "to FedAvg+FT", "Ditto": "to Ditto"}
# whose differences to a random graph the front page has
OVER = ("Oracle", "Nearest", "DPFL", "Pairwise", "Ditto", "FedAvg+FT")
COSTS = {"models": "models", "megabytes": "MB", "evaluations": "evaluations", "steps": "steps"}


def chance(parts: Parts) -> float:
    """Return the larger p of the t-tests of paired differences over partition means and over clients within partitions; of one partition the second."""
    error = error_over_clients(parts)
    values = np.array([part.mean() for part in parts])
    tests = [(values.mean() / error, sum(len(part) - 1 for part in parts))]
    if len(parts) > 1:
        tests.append((values.mean() * np.sqrt(len(values)) / values.std(ddof=1), len(values) - 1))
    return max(2 * float(stdtr(free, -abs(t))) for t, free in tests)


def holm(chances: Iterable[float]) -> np.ndarray:
    """Return chances corrected for their number: the i-th smallest of m, times m - i, and none below a smaller one's."""
    p = np.array(list(chances))
    order, out = np.argsort(p, kind="stable"), np.empty_like(p)
    out[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return out


def differences(runs: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """Return a line per difference of the page: setting, epochs, row, to, parts, p, and whether it is decided. No pair of rows comes twice."""
    out, known = [], list(TO)
    for (setting, epochs), mine in runs.groupby(["setting", "epochs"], sort=False):
        lines = clients.merge(mine, on="run")
        for row in dict.fromkeys(mine["row"]):
            for to in known[: known.index(row)] if row in TO else known:
                parts = paired(lines, row, to, "accuracy")
                if comparable(parts):
                    out.append((setting, epochs, row, to, parts, chance(parts)))
    found = pd.DataFrame(out, columns=["setting", "epochs", "row", "to", "parts", "p"])
    tested, decided = found["parts"].map(len).to_numpy() > 1, np.zeros(len(found), bool)
    decided[tested] = holm(found["p"][tested]) < 0.05
    return found.assign(decided=decided)


def table(runs: pd.DataFrame, clients: pd.DataFrame, found: pd.DataFrame) -> Lines:
    """Yield a line per row of a setting; bold is decided."""
    lines = clients.merge(runs, on="run")
    for row, mine in runs.groupby("row", sort=False):
        out = {"row": str(row), "accuracy, %": mean_text(means(lines, str(row), "accuracy"))}
        for to, name in TO.items():
            its = found[(found["row"] == row) & (found["to"] == to)]
            out[name] = "-"
            for parts, decided in zip(its["parts"], its["decided"], strict=True):
                text = difference_text(parts) + (f", clients ± {over_clients(parts):.2f}" if to in BOTH else "")
                out[name] = f"**{text}**" if decided else text
        costs = {name: number(mine[cost].mean(), ",.0f") for cost, name in COSTS.items()}
        yield out | costs | {"core hours": number(mine["core_hours"].min())}


def answer(runs: pd.DataFrame, found: pd.DataFrame) -> Lines:
    """Yield a line per setting: what a random graph is worth, and others over it, of so many epochs as most partitions are of, else of the most."""
    for setting in dict.fromkeys(runs["setting"]):
        mine = found[found["setting"] == setting]
        compared = mine[mine["to"] == RANDOM]
        partitions = compared["parts"].map(len).groupby(compared["epochs"]).max()
        epochs = max(partitions.items(), key=lambda of: (of[1], of[0]), default=(0, 0))[0]
        its = {(of.row, of.to): of for of in mine[mine["epochs"] == epochs].itertuples()}
        out = {"setting": str(setting), "epochs": number(epochs, ".0f")}
        for name, row, to in ("random graph over Local", RANDOM, "Local"), *((row, row, RANDOM) for row in OVER):
            of = its.get((row, to))
            text = difference_text(of.parts) if of else "-"
            out[name] = f"**{text}**" if of and of.decided else text
        yield out


def picture(runs: pd.DataFrame, found: pd.DataFrame) -> Figure:
    """Return for each setting the differences to a random graph, with their intervals and over the models received per client.

    A row's mark stands beside its name. On the right a name stands at DPFL, Nearest, the random graph, and each row that none with as few models is above.
    """
    each = [(name, mine) for name, mine in runs.groupby(["setting", "epochs"], sort=False) if len(set(mine["row"])) > 1]
    rows = list(dict.fromkeys(runs["row"]))
    several = len(COLOURS)  # rows with the same mark; a row looks the same in all panels
    looks = {row: (COLOURS[i % several], MARKS[1 + i // several]) for i, row in enumerate(rows)}
    tall = [1.2 + 0.13 * len(set(mine["row"])) for _, mine in each]
    figure, panels = plt.subplots(len(each), 2, figsize=(TEXT, sum(tall)), height_ratios=tall, squeeze=False)
    for (left, right), ((setting, epochs), mine) in zip(panels, each, strict=True):
        here = (found["setting"] == setting) & (found["epochs"] == epochs) & (found["to"] == RANDOM)
        parts = dict(zip(found["row"][here], found["parts"][here], strict=True))
        intervals(left, parts)
        left.set(title=f"{setting}, {epochs} epochs", xlabel="points to a random graph")
        left.tick_params(axis="y", length=0, pad=7)
        for y, row in enumerate(parts):
            colour, mark = looks[row]
            left.plot(-0.02, y, mark, ms=3, color=colour, transform=left.get_yaxis_transform(), clip_on=False)
        models, above = mine.groupby("row", sort=False)["models"].mean(), -np.inf
        points = {row: float(np.mean([part.mean() for part in parts[row]])) for row in parts} | {RANDOM: 0.0}
        for row in sorted(points, key=lambda row: (models[row], -points[row])):
            colour, mark = looks[row]
            right.plot(models[row], points[row], mark, ms=3, color=colour)
            if points[row] > above or row in ("DPFL", "Nearest", RANDOM):
                right.annotate(row, (models[row], points[row]), (3, 2), textcoords="offset points", fontsize=5)
            above = max(above, points[row])
        right.margins(x=0.25)
        right.set(xlabel="models received per client", ylabel="points to a random graph")
    return figure
