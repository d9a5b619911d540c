"""One table of Runs: a row each, of settings, scores and costs.

`dpfl_mpi.table` returns it, `export` writes it, and `show` prints parts of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.plugins import KINDS, short
from dpfl_mpi.results.result import METRICS, Result, mean
from dpfl_mpi.settings.fields import as_dict

# settings that are shown even where they are the same in all Runs
MAIN = ["dataset", "partition", "clients", "model", "method"]
MAIN += ["budget", "budget_models", "rounds", "seed"]
OWNERS = {"options": "method", "model_options": "model"}  # whose options they are
# the outcomes that are shown: in words, the factor by which they are multiplied, and decimals
SHOWN = {
    "accuracy": ("test accuracy, %", 100, 2),
    "std": ("std over clients", 100, 2),
    "lowest": ("lowest client, %", 100, 1),
    "last": ("last round, %", 100, 2),
    **{m: (f"{words}, %", 100, 2) for m, words in METRICS.items() if m != "accuracy"},
    "epochs": ("local epochs", 1, 0),
    "edges": ("edges at the end", 1, 0),
    "models_received": ("models received per client", 1, 1),
    "seconds": ("seconds", 1, 1),
}


def in_folder(folder: Path) -> list[Result]:
    """Return the results in a folder that have recorded a round, by their names."""
    out = []
    for path in sorted(folder.glob("*.h5")):
        try:
            result = Result(path)
            result.check_begun()
            out.append(result)
        except UserError as error:
            complain(f"left out: {error}")
    if not out:
        raise UserError(f"{folder} has no results with a round in it (*.h5)")
    return out


def of_runs(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Return the columns of the table by name, a value per result.

    Settings: `MAIN`, and those in which Runs differ whose methods read them (None: off, or not
    read). `budget` is B_c as it was typed, `budget_models` the number that it stands for (None: it
    differs between clients).
    Scores are from 0 to 1, means over benign clients; `std` and `lowest` are those of the accuracy.
    Costs are of a client: local epochs of all its models (the most of any client), models received
    (mean over benign clients), megabytes sent; `edges` those of the last graph, `seconds` of a
    rank, `hours` simulated. What is not known is nan.
    """
    settings = [flat_settings(result) for result in results]
    unread = [result.method.unread for result in results]
    out: dict[str, list[Any]] = {"path": [str(result.path) for result in results]}
    for name in dict.fromkeys([*MAIN, *(name for of_run in settings for name in of_run)]):
        if name in MAIN or len(values_read(name, settings, unread)) > 1:
            out[name] = [of_run.get(name) for of_run in settings]
    outcomes = [outcome(result) for result in results]
    return out | {name: [of_run[name] for of_run in outcomes] for name in outcomes[0]}


def values_read(
    name: str, settings: list[dict[str, Any]], unread: list[frozenset[str]]
) -> set[str]:
    """Return the values of a setting in the Runs that read it, as JSON; null where it is off.

    An option is read by the Runs whose method, or model, has it in some Run.
    """
    setting, _, option = name.removesuffix("_sha256").partition(".")
    owner = OWNERS[setting] if option else ""
    owners = {of_run[owner] for of_run in settings if name in of_run} if owner else set()
    return {
        json.dumps(of_run.get(name))
        for of_run, not_read in zip(settings, unread, strict=True)
        if setting not in not_read and (not owner or of_run[owner] in owners)
    }


def flat_settings(result: Result) -> dict[str, Any]:
    """Return the settings of a Run as numbers and texts, options as `options.NAME`.

    Files and the user's own code have the start of their SHA-256 in a setting NAME_sha256. A
    setting that the method does not read is None.
    """
    run, out = result.run, dict[str, Any]()
    for name, value in as_dict(run).items():
        if isinstance(value, dict):
            out |= {f"{name}.{option}": chosen for option, chosen in value.items()}
        else:
            out[name] = short(value) if name in KINDS else value
    out |= {f"{name}_sha256": text.split(":")[-1][:8] for name, text in run.contents.items()}
    models = {"inf": math.inf, "number": run.budget.fields.get("number")}
    out |= {"budget": run.typed_budget, "budget_models": models.get(run.budget.kind)}
    unread = {*result.method.unread}
    unread |= {"budget_models"} if "budget" in unread else set()
    return out | dict.fromkeys(unread)


def outcome(result: Result) -> dict[str, Any]:
    """Return the scores and the costs of a Run, by the name of their column."""
    rounds, accuracies = result.by_round(), result.benign_percentages() / 100
    accuracies = accuracies if len(accuracies) else np.array([math.nan])
    ended = "best/confusion" in result
    benign = result.benign
    scores = {m: float(mean(result.score(m)[benign])) if ended else math.nan for m in METRICS}
    return {
        "state": result.state,
        **scores,
        "accuracy": float(accuracies.mean()),
        "std": float(accuracies.std()),
        "lowest": float(accuracies.min()),
        "last": float(mean(result.benign_percentages("last/test_acc") / 100)),
        "epochs": result.all_epochs(),
        "edges": int(rounds["edges"][-1]),
        "models_received": float(rounds["models_received"].sum()),
        "megabytes_sent": float(sum(rounds.get("bytes_sent", [math.nan]))) / 1e6,
        "seconds": float(rounds["seconds"].sum()),
        "hours": float(rounds.get("hours", [math.nan])[-1]),
    }


def in_words(result: Result) -> dict[str, float]:
    """Return the outcomes of a Run that are shown, accuracies in percent, by their labels."""
    outcomes = outcome(result)
    return {words: factor * outcomes[name] for name, (words, factor, _) in SHOWN.items()}


def texts(figures: dict[str, float]) -> dict[str, str]:
    """Return the outcomes of `in_words` as texts, a dash for nan."""
    decimals = {words: digits for words, _, digits in SHOWN.values()}
    return {n: "-" if math.isnan(x) else f"{x:.{decimals.get(n, 1)}f}" for n, x in figures.items()}


def opened(results: Iterable[Any]) -> list[Result]:
    """Return results, or those at paths; a folder stands for the results in it."""
    out: list[Result] = []
    for given in results:
        if isinstance(given, Result):
            out.append(given)
        else:
            out += in_folder(Path(given)) if Path(given).is_dir() else [Result(given)]
    return out
