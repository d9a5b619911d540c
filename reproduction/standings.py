"""The arena in tables.md and README: rows against Local and random graphs.

`runs` has a line per Run (setting, epochs, row, seed, run, partition, costs per client), `clients`
a line per Run and client (run, client, accuracy). Differences are paired by client. The p of one is
the larger of two t-tests': over partition means, and over the clients within partitions. It is
significant if p < 0.05 after Holm's correction for all differences of the arena over two partitions
or more; with one partition it never is. An interval that stands alone is the wider one of the two.
"""

from typing import Any

import numpy as np
import pandas as pd
from recomputed import Lines, chance_over_seeds, error_over_clients, holm, over_clients
from scipy.special import stdtr

from dpfl_mpi.figures import tables
from dpfl_mpi.figures.tables import Parts, means, number, paired

RANDOM = "Random graph"  # with as many clients as the budget allows
DEGREES = "Random graph, DPFL's degrees"  # with as many as DPFL averages
HAR = "HAR, 30 people"
BOTH = {"Local": "vs Local", RANDOM: "vs random graph"}  # with both intervals
OTHERS = {DEGREES: "vs DPFL's degrees", "FedAvg+FT": "vs FedAvg+FT", "Ditto": "vs Ditto"}
BASES = BOTH | OTHERS  # rows to which differences are shown, with their columns
# rows whose differences to a random graph are on the front page
ON_FRONT_PAGE = ("Oracle", "Nearest", "DPFL", "Pairwise", "Ditto", "FedAvg+FT")
COSTS = {"models": "models", "megabytes": "MB", "evaluations": "evaluations", "steps": "steps"}
TITLES = {"Ditto": "Ditto (twice the steps)"}


def of_clients(setting: str, parts: Parts) -> Parts:
    """Return the differences of clients that are independent; HAR's people are always the same."""
    return [np.mean(parts, axis=0)] if setting == HAR else parts


def chance(parts: Parts, clients: Parts) -> float:
    """Return the p of paired differences: the larger of the two t-tests' (see above)."""
    t = np.mean([part.mean() for part in clients]) / error_over_clients(clients)
    p = 2 * float(stdtr(sum(len(part) - 1 for part in clients), -abs(t)))
    return max(p, chance_over_seeds(parts)) if len(parts) > 1 else p


def bounds(parts: Parts, clients: Parts) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval, the wider one of the two (see above)."""
    mean, half = tables.interval(parts)
    return mean, max(half, over_clients(clients))


def differences(runs: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """Return each difference once, a line per setting, epochs, row and base.

    `parts` are its points by partition, `clients` those of independent clients (`of_clients`).
    """
    out, bases = [], list(BASES)
    for (setting, epochs), of_setting in runs.groupby(["setting", "epochs"], sort=False):
        lines = clients.merge(of_setting, on="run")
        for row in dict.fromkeys(of_setting["row"]):
            for base in bases[: bases.index(row)] if row in BASES else bases:
                parts = paired(lines, row, base, "accuracy")
                if tables.comparable(parts):
                    clients_of = of_clients(str(setting), parts)
                    p = chance(parts, clients_of)
                    out.append((setting, epochs, row, base, parts, clients_of, p))
    columns = ["setting", "epochs", "row", "to", "parts", "clients", "p"]
    found = pd.DataFrame(out, columns=columns)
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
                parts, of, significant = differences.loc[base, ["parts", "clients", "significant"]]
                text = tables.difference_text(parts, bounds(parts, of)[1])
                if base in BOTH:
                    text = f"{tables.difference_text(parts)}, clients ± {over_clients(of):.2f}"
                out[column] = bold(text, significant)
        for cost, column in COSTS.items():
            out[column] = number(of_row[cost].mean(), ",.0f")
        yield out | {"core hours": number(of_row["core_hours"].min())}


def at_length(found: pd.DataFrame, setting: str) -> tuple[float, dict[tuple[str, str], Any]]:
    """Return a setting's local epochs, and its differences by row and base.

    Of several lengths the one with the most partitions is shown, then the longest.
    """
    of_setting = found[found["setting"] == setting]
    to_random = of_setting[of_setting["to"] == RANDOM]
    partitions = to_random["parts"].map(len).groupby(to_random["epochs"]).max()
    epochs = max(partitions.items(), key=lambda item: (item[1], item[0]), default=(0, 0))[0]
    lines = of_setting[of_setting["epochs"] == epochs].itertuples()
    return epochs, {(line.row, line.to): line for line in lines}


def answer(runs: pd.DataFrame, found: pd.DataFrame) -> Lines:
    """Yield a line per setting: a random graph over Local, and other rows over a random graph."""
    for setting in dict.fromkeys(runs["setting"]):
        epochs, by_pair = at_length(found, setting)
        out = {"setting": str(setting), "epochs": number(epochs, ".0f")}
        columns = {"random graph over Local": (RANDOM, "Local")}
        columns |= {TITLES.get(row, row): (row, RANDOM) for row in ON_FRONT_PAGE}
        for column, pair in columns.items():
            line = by_pair.get(pair)
            out[column] = "-"
            if line:
                half = bounds(line.parts, line.clients)[1]
                text = tables.difference_text(line.parts, half)
                out[column] = bold(text, bool(line.significant))
        yield out
