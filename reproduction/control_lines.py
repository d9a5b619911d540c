"""The lines of `controls/*.csv`, and which of them docs/findings.md compares: what its tables and its figures read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from _tables import Parts

FOLDER = Path(__file__).resolve().parent / "controls"
SHORT = 6  # rounds of lies, newcomers and drift; the comparisons have 20 or more
COMPARED = (
    "Local",
    "FedAvg",
    "FedAvg+FT",
    "Pairwise",
    "Random graph",
    "Random graph, DPFL's degrees",
    "Replay, rewired",
    "Replay, shuffled",
    "Replay, reversed",
    "Oracle",
    "PENS",
    "DPFL, search_share 0.5",
)


def benign(clients: pd.DataFrame, method: str) -> pd.DataFrame:
    """Return the lines of the Runs of 6 rounds, of the clients that lie in none of them: liars have no accuracy."""
    clients = clients[clients["rounds"] == SHORT]
    lying = clients[clients["row"].str.startswith(f"{method}, attack")]
    return clients[clients["client"].isin(lying.dropna(subset=["test_acc"])["client"])]


def read(name: str) -> pd.DataFrame:
    """Return one of the CSV files, with every Run's row and seed."""
    frame = pd.read_csv(FOLDER / f"{name}.csv", dtype={"run": str})
    return frame if name == "runs" else frame.merge(read("runs")[["run", "row", "seed", "rounds"]], on="run")


def in_order(rows: Iterable[str]) -> list[str]:
    """Return rows as the page names them: DPFL, then as in `COMPARED`, others last."""
    known = ("DPFL", *COMPARED)
    return sorted(set(rows), key=lambda row: (known.index(row) if row in known else len(known), row))


def only_long(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of the Runs of 110 local epochs."""
    return frame[frame["rounds"] >= 20]


def gaps(clients: pd.DataFrame, row: str) -> Parts:
    """Return validation minus test accuracy of every client's best model, points, for each seed."""
    mine = clients[clients["row"] == row]
    return [(100 * (part["val_acc"] - part["test_acc"])).dropna().to_numpy() for _, part in mine.groupby("seed")]
