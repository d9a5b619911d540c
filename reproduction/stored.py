"""The lines of a setting's CSV files, and what the tables of this folder say of them: means, paired differences, verdicts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
from _tables import Parts, comparable, deviation, interval
from accuracy_table import PAPER, PAPER_COLUMNS
from scipy.special import stdtrit

PAPER_SEEDS = 3


def slug(setting: str) -> str:
    """Return the folder of a setting that is named as in the paper's table."""
    return re.sub(r"[^a-z0-9]+", "-", setting.lower()).strip("-")


def read(folder: Path, name: str) -> pd.DataFrame:
    """Return one of the files, with every Run's row and seed."""
    texts = dict.fromkeys(("run", "classes", "collaborators"), str)  # lists of numbers; a single one is none
    frame = pd.read_csv(folder / f"{name}.csv", dtype=texts)
    if name == "runs":
        return frame
    return frame.merge(read(folder, "runs")[["run", "row", "seed"]], on="run")


def published(setting: str, row: str) -> tuple[float, float] | None:
    """Return the paper's mean and standard deviation over its seeds, None where its Table 1 has none."""
    if setting not in PAPER_COLUMNS or row not in PAPER:
        return None
    numbers = PAPER[row].split()
    at = 2 * PAPER_COLUMNS.index(setting)
    return float(numbers[at]), float(numbers[at + 1])


def paired(clients: pd.DataFrame, a: str, b: str) -> Parts:
    """Return row a minus row b in points for the clients of each seed that both have (empty: none); a seed is a partition of its own."""
    wide = clients.pivot(index=["seed", "client"], columns="row", values="test_acc")
    if a not in wide or b not in wide:
        return []
    difference = (100 * (wide[a] - wide[b])).dropna()
    return [part.to_numpy() for _, part in difference.groupby("seed")]


def difference(clients: pd.DataFrame, a: str, b: str) -> str:
    """Return "+3.45 ± 1.07 (3)": the paired difference, its 95 % interval and the partitions, a dash where there is none."""
    return "-" if a == b else told(paired(clients, a, b))


def told(values: Parts) -> str:
    """Return "+0.20 ± 1.08 (3)": mean, 95 % interval, partitions; a dash where there is none."""
    if not comparable(values):
        return "-"
    mean, half = interval(values)
    return f"{mean:+.2f} ± {half:.2f} ({len(values)})"


def over_clients(values: Parts) -> float:
    """Return the half width of the 95 % interval of paired differences over the clients within their partitions, in points.

    The partitions are taken as given: t(sum of n - 1) * sqrt(sum of s**2 / n) / partitions, s being the deviation over a partition's n clients.
    """
    error = np.sqrt(sum(part.var(ddof=1) / len(part) for part in values)) / len(values)
    return float(stdtrit(sum(len(part) - 1 for part in values), 0.975) * error)


def within(values: Parts) -> str:
    """Return "± 0.78", the interval over the clients within their partitions, a dash where there is none."""
    return f"± {over_clients(values):.2f}" if comparable(values) else "-"


def decided(values: Parts) -> bool:
    """Return whether paired differences are not 0: several partitions, and 0 outside both intervals, over partitions and over clients."""
    mean, half = interval(values)
    return len(values) > 1 and abs(mean) > max(half, over_clients(values))


def verdict(values: np.ndarray, paper: tuple[float, float]) -> str:
    """Return whether the mean over our partitions is where the paper's noise lets the mean of as many others fall, with 95 %.

    Student's prediction interval: t(2) * s * sqrt(1/n + 1/3), s the paper's deviation over its three seeds.
    """
    mean, spread = paper
    allowed = stdtrit(PAPER_SEEDS - 1, 0.975) * spread * np.sqrt(1 / len(values) + 1 / PAPER_SEEDS)
    gap = values.mean() - mean
    return (
        f"within ({gap:+.2f}, noise ± {allowed:.2f})"
        if abs(gap) <= allowed
        else f"**off by {gap:+.2f}** (noise ± {allowed:.2f})"
    )


def percent(runs: pd.DataFrame, row: str) -> np.ndarray:
    """Return a row's accuracy in percent, one per seed, seeds ascending."""
    return 100 * runs[runs["row"] == row].sort_values("seed")["test_acc"].to_numpy()


def ours(values: np.ndarray) -> str:
    """Return "83.04 ± 0.98 (3)", a dash where nothing was run."""
    if not len(values):
        return "-"
    return f"{values.mean():.2f}" + (f" ± {deviation(values):.2f}" if len(values) > 1 else "") + f" ({len(values)})"
