"""The figures that a run is told by, in the terminal (`show`) and on the page that `analysis/report.py` draws."""

from __future__ import annotations

import math

from dpfl_mpi.methods import local_epochs
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES

DIGITS = {
    "test accuracy, %": 2,
    "std over clients": 2,
    "lowest client, %": 1,
    "last round, %": 2,
    "local epochs": 0,
    "edges in Omega": 0,
    "edges at the end": 0,
    "models received per client": 1,
    "seconds": 1,
}


def epochs(result: Result) -> int:
    """Return the local epochs that a client has trained, of all its models together, fine-tuning included."""
    tuned = result.run.finetune_epochs if "finetune/epochs" in result else 0
    return int(local_epochs(result)[result.last_round]) + tuned


def outcome(result: Result) -> dict[str, float]:
    """Return the figures of `DIGITS` by name: accuracies in percent over the clients that are scored, nan where none is.

    The accuracy is that of each client's best model by validation. Models received are a mean over all clients, seconds the sum over rounds and
    phases of those of the slowest rank.
    """
    best, now, last = result.scored(), result.scored("last/test_acc"), result.last_round
    some = len(best) > 0
    return {
        "test accuracy, %": float(best.mean()) if some else math.nan,
        "std over clients": float(best.std()) if some else math.nan,
        "lowest client, %": float(best.min()) if some else math.nan,
        "last round, %": float(now.mean()) if len(now) else math.nan,
        "local epochs": epochs(result),
        "edges in Omega": len(result.omega().senders),
        "edges at the end": len(result.chosen(last).senders),
        "models received per client": float(result["traffic/models_received"].sum() / len(result["client/p"])),
        "seconds": float(sum(result[f"seconds/{phase}"][:, 2].sum() for phase in PHASES)),
    }


def for_json(figures: dict[str, float]) -> dict[str, float | None]:
    """Return figures with the digits that are shown, None for nan, as JSON has it."""
    return {
        name: None if math.isnan(value) else round(value, DIGITS[name]) if DIGITS[name] else int(value)
        for name, value in figures.items()
    }


def texts(figures: dict[str, float]) -> dict[str, str]:
    """Return figures as texts, a dash for nan."""
    return {name: "-" if math.isnan(value) else f"{value:.{DIGITS[name]}f}" for name, value in figures.items()}
