"""Accuracies as numbers of a table: repetitions of one setting, paired differences with intervals, what the best does not beat, markdown, LaTeX.

Accuracies are in percent, differences in percentage points. An interval is Student's 95 % interval over clients: the pairs are the same client
of the same partition under two methods, the mean over repetitions on one partition, all partitions together.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from _common import accuracy, budget_order, has_budget, method_name, setting
from scipy.special import stdtrit

from dpfl_mpi.config import Run
from dpfl_mpi.results import Result

Group = list[Result]  # the repetitions of one Run under different seeds

SEEDS_AND_FILES = ("seed", "partition_seed", "data", "preset")  # what repetitions may differ in


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval (nan for a single value)."""
    n = len(values)
    half = stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n) if n > 1 else float("nan")  # Student's t
    return float(values.mean()), float(half)


def fields(result: Result) -> dict[str, Any]:
    """Return the settings in which two results may differ without being repetitions; the data are named by their content."""
    out = {k: v for k, v in dataclasses.asdict(result.run).items() if k not in SEEDS_AND_FILES}
    return {**out, "data_sha256": str(result.file["meta"].attrs["data_sha256"])}


def repetitions(results: Iterable[Result]) -> list[Group]:
    """Return the results grouped into repetitions, seeds ascending; a Run that is there twice counts once."""
    groups: dict[str, Group] = {}
    seen = set()
    for r in sorted(results, key=lambda r: (r.run.seed, r.run.partition_seed or 0)):
        variant = json.dumps(fields(r), sort_keys=True)
        if (variant, r.run.seed, r.run.partition_seed) not in seen:
            seen.add((variant, r.run.seed, r.run.partition_seed))
            groups.setdefault(variant, []).append(r)
    return list(groups.values())


def share(run: Run) -> str:
    """Return a resolved run's budget as a share of the clients, as the paper's tables name it: "0.1N" or "inf"; a budget per client as it is."""
    if not str(run.budget).replace(".", "").isdigit():
        return str(run.budget)
    return f"{budget_order(run) / int(run.clients or 1):.3g}N"


def row_name(run: Run) -> str:
    """Return the name of a table's row: the method, with its budget as a share of N where it has one."""
    return method_name(run) + (f" (B_c = {share(run)})" if has_budget(run) else "")


def named(groups: Sequence[Group], name: Callable[[Run], str] = row_name) -> list[tuple[str, str, Group]]:
    """Return (setting, name, group); where two groups of a setting would share a name, it says in which fields they differ."""
    out = []
    for group in groups:
        run = group[0].run
        rivals = [g[0] for g in groups if setting(g[0].run) == setting(run) and name(g[0].run) == name(run)]
        values = [fields(r) for r in rivals]
        differ = [
            f for f in values[0] if len({json.dumps(v.get(f)) for v in values}) > 1 and f not in ("method", "budget")
        ]
        extra = ", ".join(f"{f} {getattr(run, f, 'other')}" for f in differ)
        out.append((setting(run), name(run) + (f", {extra}" if extra else ""), group))
    return out


def partition_of(result: Result) -> tuple[str, str]:
    """Return what two results must share to be compared client by client: the data and the partition."""
    meta = result.file["meta"].attrs
    return str(meta["data_sha256"]), str(meta["partition_sha256"])


def paired(a: Group, b: Group) -> np.ndarray:
    """Return accuracy of a minus that of b in points, for every client of every partition both have run (empty: none).

    Repetitions on one partition are averaged first, those of common seeds where there are any: they are the same clients.
    """
    out = [np.zeros(0)]
    for part in dict.fromkeys(map(partition_of, a)):
        mine, theirs = ({r.run.seed: accuracy(r) for r in group if partition_of(r) == part} for group in (a, b))
        common = mine.keys() & theirs.keys()
        if theirs:
            means = [
                np.mean([x for s, x in side.items() if s in common or not common], axis=0) for side in (mine, theirs)
            ]
            out.append(100 * (means[0] - means[1]))
    difference = np.concatenate(out)
    return difference[np.isfinite(difference)]


def means(group: Group) -> np.ndarray:
    """Return each repetition's accuracy, percent: the plain mean over its clients."""
    return np.array([100 * np.nanmean(accuracy(r)) for r in group])


def deviation(values: np.ndarray) -> float:
    """Return the standard deviation over repetitions (ddof 1), nan for a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def unbeaten(groups: Sequence[Group]) -> list[bool]:
    """Return for each group whether the best one does not beat it: the interval of the paired difference to the best reaches 0."""
    if not groups:
        return []
    best = groups[int(np.argmax([means(g).mean() for g in groups]))]
    out = []
    for group in groups:
        difference = paired(best, group)
        centre, half = interval(difference) if len(difference) > 1 else (0.0, 0.0)
        comparable = len(difference) > 1
        out.append(group is best or (comparable and not centre - half > 0))
    return out


def cell(group: Group) -> str:
    """Return "83.04 ± 0.98 (3)": mean and standard deviation over repetitions and their number."""
    values = means(group)
    spread = f" ± {deviation(values):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread} ({len(values)})"


def markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as markdown that is legible as it is, the first column flush left."""
    return table.to_markdown(
        index=False, disable_numparse=True, colalign=("left", *("right",) * (len(table.columns) - 1))
    )


def latex(table: pd.DataFrame) -> str:
    """Return a table of texts as LaTeX (package booktabs); **bold** of markdown becomes \\textbf."""

    def tex(text: str) -> str:
        text = text.replace("%", "\\%").replace(" ± ", " $\\pm$ ")
        text = re.sub(r"B_c = (inf|[\d.]+N?)", lambda m: f"$B_c = {m[1]}$".replace("inf", "\\infty"), text)
        text = text.replace("tau_init", r"$\tau_{\mathrm{init}}$")
        text = re.sub(r"(?<!\$)_(?!c =|\{)", r"\\_", text)
        return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)

    out = table.map(tex).rename(columns=tex)
    return out.to_latex(index=False, escape=False, column_format="l" + "r" * (len(out.columns) - 1)).rstrip()


def printed(text: str, bold: bool, published: str) -> str:
    """Return a cell's text, bold where it is to be, with the paper's figure behind it where there is one."""
    return (f"**{text}**" if bold else text) + (f" [{published}]" if published else "")


def budgets_of(groups: Sequence[Group]) -> list[str]:
    """Return the budgets of the groups, the largest first."""
    return list(dict.fromkeys(str(g[0].run.budget) for g in sorted(groups, key=lambda g: -budget_order(g[0].run))))


def by_budget(
    results: Iterable[Result],
    field: str,
    symbol: str,
    paper: dict[Any, Sequence[str]] | None = None,
    paper_setting: str = "",
) -> tuple[pd.DataFrame, str, str]:
    """Return (data, markdown, LaTeX) of a table with a row for each value of a Run field and a column for each budget.

    Bold is what the best of its column does not beat. `paper` maps the field's value to the paper's figures for inf, 20, 10, 5,
    which are of one setting.
    """
    groups = repetitions(results)
    settings, budgets, rows = sorted({setting(g[0].run) for g in groups}), budgets_of(groups), []
    for where, budget in itertools.product(settings, budgets):
        column = [g for g in groups if str(g[0].run.budget) == budget and setting(g[0].run) == where]
        for group, bold in zip(column, unbeaten(column), strict=True):
            value, values = getattr(group[0].run, field), means(group)
            published = paper_value(paper, value, budget) if where == paper_setting else ""
            rows.append(
                {
                    "setting": where,
                    field: value,
                    "budget": budget,
                    "mean": values.mean(),
                    "std": deviation(values),
                    "n": len(values),
                    "bold": bold,
                    "paper": published,
                    "cell": printed(cell(group), bold, published),
                }
            )
    data = pd.DataFrame(rows).sort_values(["setting", field], kind="stable", ignore_index=True)
    table = data.pivot_table("cell", ["setting", field], "budget", aggfunc=" / ".join, fill_value="-")[budgets]
    table.insert(0, symbol, [f"{v}" if len(settings) == 1 else f"{where}: {v}" for where, v in table.index])
    table = table.rename(columns={b: f"B_c = {b}" for b in budgets})
    text = f"""{markdown(table)}

Test accuracy, %, on {", ".join(settings)}: mean ± standard deviation over seeds (number of seeds).
Bold: what the best of its column does not beat (95 % interval of the paired difference over clients)."""
    return data.drop(columns="cell"), text, latex(table)


def paper_value(paper: dict[Any, Sequence[str]] | None, value: Any, budget: str) -> str:
    """Return the paper's figure for a row and a budget of 100 clients, or nothing."""
    order = ("inf", "20", "10", "5")
    return paper[value][order.index(budget)] if paper and value in paper and budget in order else ""
