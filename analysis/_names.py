"""What runs, data and classes are called in figures and tables."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import _common  # noqa: F401  # finds the package of this checkout

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find, shipped, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.declared import declared
from dpfl_mpi.settings import Run

PAPER_CLIENTS = 100  # N of all the paper's tables
DATASETS = {"cifar10": "CIFAR-10", "cinic10": "CINIC-10", "femnist": "FEMNIST", "digits": "Digits"}


def has_budget(run: Run) -> bool:
    """Return whether a run's models move along a graph, under its budget."""
    return declared(run).topology == "graph"


def method_name(run: Run) -> str:
    """Return the printed name of a run's method, "+FT" where it is fine-tuned."""
    return declared(run).title + ("+FT" if run.finetune_epochs else "")


def budget_label(run: Run) -> str:
    """Return a resolved run's budget for mathtext, such as "$B_c = 10$"."""
    return "$B_c = \\infty$" if run.budget.kind == "inf" else f"$B_c = {run.budget}$"


def label(run: Run) -> str:
    """Return the name of one result's row: the method, and the budget where the method has one.

    Runs that differ in anything else share it, two versions of a method too: `_tables.named` tells those of several results apart.
    """
    return method_name(run) + (f" ({budget_label(run)})" if has_budget(run) else "")


def data_name(run: Run) -> str:
    """Return the name of the data. That of one's own data ends in the start of their hash: two of them never share a column of a table."""
    name = short(run.dataset)
    own = getattr(run, "declared", {}).get("dataset", {}).get("data_sha256", "")
    if not own and run.dataset in shipped("dataset") and getattr(find("dataset", run.dataset), "OWN_DATA", False):
        name, own = Path(str(run.data)).stem, getattr(run, "contents", {}).get("data", "")
    return f"{name} [{own[:6]}]" if own else DATASETS.get(name, name)


def setting(run: Run) -> str:
    """Return the name of the data and the way they are dealt, such as "CIFAR-10 Patho(3)"."""
    dealt = {
        "pathological": f"Patho({run.classes_per_client})",
        "dirichlet": f"Dir({run.dirichlet_alpha})",
    }.get(run.partition.kind, Path(run.partition.path).stem)
    return f"{data_name(run)} {dealt}"


def paper_setting(run: Run) -> str:
    """Return the name of a run's setting where the paper may have figures of it, "" where its N is another."""
    return setting(run) if run.clients == PAPER_CLIENTS else ""


def budget_order(run: Run) -> float:
    """Return a resolved run's budget as a number to sort by: of a range its middle, of a file of budgets 0."""
    budget = str(run.budget)
    if budget.startswith("uniform:"):
        return float(np.mean([float(end) for end in budget.split(":")[1:]]))
    try:
        return float(budget)
    except ValueError:
        return 0.0


def class_names(result: Result) -> list[str]:
    """Return the names of the classes, or their numbers where neither the result nor the data set names them."""
    classes = result["client/class_counts"].shape[1]
    names = list(map(str, result.listed("class_names")))
    with contextlib.suppress(UserError):  # a data set of another version, or code of its own
        names = names or getattr(find("dataset", result.run.dataset), "CLASSES", None)
    return list(names) if names and len(names) == classes else [str(c) for c in range(classes)]


def text_label(name: str) -> str:
    """Return a row's or a curve's name for mathtext."""
    return re.sub(r"B_c = (inf|[\d.]+N?)", lambda m: f"$B_c = {m[1]}$".replace("inf", r"\infty"), name)


def plain(name: str) -> str:
    """Return a name of mathtext as plain text: "B_c = inf"."""
    return name.replace("$", "").replace(r"\infty", "inf")
