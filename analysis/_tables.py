"""Accuracies as numbers of a table: repetitions of one setting, paired differences with intervals, what the best does not beat, markdown, LaTeX.

Accuracies are in percent, differences in percentage points. Differences are paired: the same client of the same partition under two methods,
the mean over repetitions on one partition. An interval is Student's 95 % interval. Clients of one partition share what chance dealt to all of them,
so it is over the means of partitions where there are several, and over clients where there is one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from _common import accuracy

import numpy as np
import pandas as pd
from _names import budget_order, has_budget, method_name, paper_setting, setting
from scipy.special import stdtrit

from dpfl_mpi.plugins import CODE, short
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.run import REPEATED

Group = list[Result]  # the repetitions of one Run under different seeds
Parts = list[np.ndarray]  # a number per client, one array per partition


def interval(parts: Parts) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval: over partition means, of one partition over its clients (nan for a single value)."""
    values = np.array([part.mean() for part in parts]) if len(parts) > 1 else parts[0]
    n = len(values)
    half = stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n) if n > 1 else float("nan")  # Student's t
    return float(values.mean()), float(half)


def fields(result: Result) -> dict[str, Any]:
    """Return the settings in which repetitions do not differ; files are named by their content."""
    settings = as_dict(result.run) | result.run.contents
    out = {k: v for k, v in settings.items() if k not in REPEATED}
    return {**out, "data_sha256": result.fact("data_sha256")}


def repetitions(results: Iterable[Result]) -> list[Group]:
    """Return the results grouped into repetitions, seeds ascending; a Run that is there twice counts once."""
    groups: dict[str, Group] = {}
    seen = set()
    for r in sorted(results, key=lambda r: (r.run.seed, r.run.partition_seed)):
        variant = json.dumps(fields(r), sort_keys=True)
        if (variant, r.run.seed, r.run.partition_seed) not in seen:
            seen.add((variant, r.run.seed, r.run.partition_seed))
            groups.setdefault(variant, []).append(r)
    return list(groups.values())


def share(run: Run) -> str:
    """Return a resolved run's budget as a share of the clients, as the paper's tables name it: "0.1N" or "inf"; a budget per client as it is."""
    if not str(run.budget).replace(".", "").isdigit():
        return str(run.budget)
    return f"{budget_order(run) / run.clients:.3g}N"


def row_name(run: Run) -> str:
    """Return the name of a table's row: the method, with its budget as a share of N where it has one."""
    return method_name(run) + (f" (B_c = {share(run)})" if has_budget(run) else "")


def named(groups: Sequence[Group], name: Callable[[Run], str] = row_name) -> list[tuple[str, str, Group]]:
    """Return (setting, name, group); where two groups of a setting would share a name, it says in which fields they differ."""
    out = []
    for group in groups:
        run = group[0].run
        alike = [g[0] for g in groups if setting(g[0].run) == setting(run) and name(g[0].run) == name(run)]
        values, rivals = [fields(r) for r in alike], [r.run for r in alike]
        differ = [f for f in values[0] if len({json.dumps(v.get(f)) for v in values}) > 1]
        usual = {f.name: f.default for f in dataclasses.fields(Run)}  # what a Run leaves alone needs no words
        said = [f for f in differ if f not in usual or usual[f] is None or getattr(run, f) != usual[f]]
        extra = ", ".join(
            f"{f} {value_of(group[0], f)}{content(run, f, rivals)}".removeprefix("options ")
            for f in said
            if getattr(run, f, "other") is not None
        )
        out.append((setting(run), name(run) + (f", {extra}" if extra else ""), group))
    return out


def content(run: Run, field: str, rivals: Sequence[Run]) -> str:
    """Return " [HASH]" of a field's file where the file of a rival has the same name and another content, else nothing."""
    held = getattr(run, "contents", {}).get(field, "")
    same = {
        getattr(r, "contents", {}).get(field) for r in rivals if getattr(r, field, None) == getattr(run, field, None)
    }
    return f" [{held[:6]}]" if len(same) > 1 and held and not held.startswith(CODE) else ""


def value_of(result: Result, field: str) -> str:
    """Return what a row says of a field: of code that is not shipped its name and the start of its hash, of a result its name, options as words."""
    run = result.run
    held, value = getattr(run, "contents", {}).get(field, ""), getattr(run, field, "other")
    if field == "data_sha256":
        return result.fact(field)[:6]
    if field == "options":
        return ", ".join(f"{name} {chosen}" for name, chosen in value.items())
    if field == "graphs" and value:
        return f"of {Path(value).stem}"
    return (
        f"{short(getattr(run, field))} [{held[5:11]}]" if held.startswith(CODE) else str(getattr(run, field, "other"))
    )


def partition_of(result: Result) -> tuple[str, str]:
    """Return what two results must share to be compared client by client: the data and the partition."""
    return result.fact("data_sha256"), result.fact("partition_sha256")


def paired(a: Group, b: Group, metric: str = "accuracy") -> Parts:
    """Return accuracy (or `metric`) of a minus that of b in points, for every client of each partition that both have run (empty: none).

    Repetitions on one partition are averaged first, those of common seeds where there are any: they are the same clients.
    """
    out = []
    for part in dict.fromkeys(map(partition_of, a)):
        mine, theirs = ({r.run.seed: accuracy(r, metric) for r in group if partition_of(r) == part} for group in (a, b))
        common = mine.keys() & theirs.keys()
        if theirs:
            means = [
                np.mean([x for s, x in side.items() if s in common or not common], axis=0) for side in (mine, theirs)
            ]
            difference = 100 * (means[0] - means[1])
            out.append(difference[np.isfinite(difference)])
    return [difference for difference in out if len(difference)]


def comparable(parts: Parts) -> bool:
    """Return whether paired differences have an interval: several partitions, or several clients of one."""
    return len(parts) > 1 or (len(parts) == 1 and len(parts[0]) > 1)


def over(parts: Parts) -> str:
    """Return what an interval is over, as a text."""
    return f"{len(parts)} partitions" if len(parts) > 1 else f"{len(parts[0])} clients of one partition"


def means(group: Group, metric: str = "accuracy") -> np.ndarray:
    """Return each repetition's accuracy (or `metric`), percent: the plain mean over its clients."""
    each = [accuracy(r, metric) for r in group]
    return np.array([100 * np.nanmean(a) if np.isfinite(a).any() else np.nan for a in each])


def deviation(values: np.ndarray) -> float:
    """Return the standard deviation over repetitions (ddof 1), nan for a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def unbeaten(groups: Sequence[Group], metric: str = "accuracy") -> list[bool]:
    """Return for each group whether the best one does not beat it: the interval of the paired difference to the best reaches 0."""
    if not groups:
        return []
    scores = [means(g, metric).mean() for g in groups]
    if not np.isfinite(scores).any():
        return [False] * len(groups)
    best = groups[int(np.nanargmax(scores))]
    out = []
    for group, score in zip(groups, scores, strict=True):
        if np.isnan(score):  # nobody was scored
            out.append(False)
            continue
        difference = paired(best, group, metric)
        if group is best or not comparable(difference):
            out.append(group is best)
            continue
        centre, half = interval(difference)
        out.append(not centre - half > 0)
    return out


def cell(group: Group, metric: str = "accuracy") -> str:
    """Return "83.04 ± 0.98 (3)": mean and standard deviation over repetitions and their number."""
    values = means(group, metric)
    if np.isnan(values.mean()):
        return f"- ({len(values)})"
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
        text = re.sub(r"[%&#]", r"\\\g<0>", text).replace(" ± ", " $\\pm$ ")
        text = re.sub(r"B_c = (inf|[\d.]+N?)", lambda m: f"$B_c = {m[1]}$".replace("inf", "\\infty"), text)
        text = text.replace("tau_init", r"$\tau_{\mathrm{init}}$")
        text = re.sub(r"(?<!\$B)(?<!\$\\tau)_", r"\\_", text)
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
    published_of: str = "",
) -> tuple[pd.DataFrame, str, str]:
    """Return (data, markdown, LaTeX) of a table with a row for each value of a Run field and a column for each budget.

    Bold is what the best of its column does not beat. `paper` maps the field's value to the paper's figures for inf, 20, 10, 5,
    which are of one setting.
    """
    groups = repetitions(results)
    budgets, rows = budgets_of(groups), []
    cells: dict[tuple[str, str, Any, str], tuple[Group, bool]] = {}
    for (where, variant), like in sorted(variants(groups, field).items()):
        for budget in budgets:
            column = [g for g in like if str(g[0].run.budget) == budget]
            for group, bold in zip(column, unbeaten(column), strict=True):
                cells[where, variant, getattr(group[0].run, field), budget] = group, bold
    several = len({key[0] for key in cells}) > 1
    for (where, variant, value, budget), (group, bold) in cells.items():
        values, name = means(group), ", ".join(filter(None, (str(value), variant)))
        same = paper_setting(group[0].run) == published_of and not variant
        published = paper_value(paper, value, budget) if same else ""
        rows.append(
            {
                "setting": where,
                field: value,
                "variant": variant,
                "budget": budget,
                "mean": values.mean(),
                "std": deviation(values),
                "n": len(values),
                "bold": bold,
                "paper": published,
                "row": f"{where}: {name}" if several else name,
                "cell": printed(cell(group), bold, published),
            }
        )
    data = pd.DataFrame(rows).sort_values(["setting", "variant", field], kind="stable", ignore_index=True)
    table = data.pivot(index="row", columns="budget", values="cell").fillna("-")
    table = table.loc[data["row"].unique(), budgets].reset_index(names=symbol)
    table = table.rename(columns={b: f"B_c = {b}" for b in budgets})
    text = f"""{markdown(table)}

Test accuracy, %, on {", ".join(sorted(data["setting"].unique()))}: mean ± standard deviation over seeds (number of seeds).
Bold: what the best of its column does not beat, among runs that differ in {symbol} alone (95 % interval of the paired difference, over partitions; over clients where there is one partition)."""
    return data.drop(columns=["cell", "row"]), text, latex(table)


def variants(groups: Sequence[Group], field: str) -> dict[tuple[str, str], list[Group]]:
    """Return the groups by setting and by what else they differ in, beside `field` and the budget: "" or such as "tau_train 5"."""
    out: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        where, mine = setting(group[0].run), fields(group[0])
        there = [g[0].run for g in groups if setting(g[0].run) == where]
        rivals = [fields(g[0]) for g in groups if setting(g[0].run) == where]
        differ = [f for f in mine if f not in (field, "budget") and len({json.dumps(v.get(f)) for v in rivals}) > 1]
        variant = ", ".join(f"{f} {value_of(group[0], f)}{content(group[0].run, f, there)}" for f in differ)
        if mark := content(group[0].run, "budget", there):
            variant = f"{variant}, budget{mark}".removeprefix(", ")
        out.setdefault((where, variant), []).append(group)
    return out


def number(value: float, digits: int = 2) -> str:
    """Return a number, or a dash where there is none."""
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def paper_value(paper: dict[Any, Sequence[str]] | None, value: Any, budget: str) -> str:
    """Return the paper's figure for a row and a budget of 100 clients, or nothing."""
    order = ("inf", "20", "10", "5")
    return paper[value][order.index(budget)] if paper and value in paper and budget in order else ""
