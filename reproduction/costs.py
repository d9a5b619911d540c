"""What the Runs cost, and what a step and an evaluation took."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from _tables import markdown
from stored import read


def without_tuning(folder: Path) -> pd.DataFrame:
    """Return the Runs of a setting but those with +FT: their rounds are those of the row without."""
    runs = read(folder, "runs")
    return runs[~runs["row"].str.contains("+FT", regex=False)]


def total(folders: list[Path]) -> str:
    """Return how many Runs there are and their core hours, as a sentence."""
    runs = pd.concat([without_tuning(folder) for folder in folders])
    return f"So far these are {len(runs)} Runs, {runs['core_hours'].sum():.0f} core hours in all, without the epochs of +FT."


def spent(folders: list[Path]) -> str:
    """Return what the Runs cost, by setting."""
    rows = []
    for folder in folders:
        runs = without_tuning(folder)
        rows.append(
            {
                "setting": folder.name,
                "Runs": f"{len(runs)}",
                "core hours": f"{runs['core_hours'].sum():.1f}",
                "starts": f"{runs['starts'].sum()}",
                "computed by": ", ".join(sorted(set(runs["cpu"] + ", " + runs["kernels"] + " kernels"))),
            }
        )
    return markdown(pd.DataFrame(rows))


def measured(folders: list[Path]) -> str:
    """Return the mean Run of each row whose seconds are known: core minutes, what a step and an evaluation took, size of the result."""
    rows = []
    for folder in folders:
        runs = without_tuning(folder).dropna(subset=["train_seconds"])
        for row, part in runs.groupby("row"):
            evaluations, graph = part["evaluations"].sum(), part["graph_seconds"].sum()
            rows.append(
                {
                    "setting": folder.name,
                    "row": row,
                    "Runs": f"{len(part)}",
                    "core minutes per Run": f"{60 * part['core_hours'].mean():.1f}",
                    "training": f"{part['train_seconds'].mean() / 60:.1f}",
                    "ms per step": f"{1e3 * part['train_seconds'].sum() / part['gradient_steps'].sum():.2f}",
                    "choosing": f"{part['graph_seconds'].mean() / 60:.1f}" if evaluations else "-",
                    "ms per evaluation": f"{1e3 * graph / evaluations:.2f}" if evaluations else "-",
                    "MB": f"{part['megabytes'].mean():.1f}",
                }
            )
    return markdown(pd.DataFrame(rows)) if rows else "(not known)"
