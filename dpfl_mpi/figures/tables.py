"""Accuracies in tables: paired differences with intervals, bold cells, markdown and LaTeX.

`lines` have a line per Run and client of one setting, as the frame `clients` of `frames` has. A row
is a method with its budget; its Runs, the repetitions, differ in the seed alone. Accuracies are in
percent, differences in points; docs/results.md defines both.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from dpfl_mpi.figures import paper
from dpfl_mpi.figures.frames import Frames

Parts = list[np.ndarray]  # of each partition, a number for each client


def interval(parts: Parts) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval by Student's t."""
    # the samples are the means of the partitions, or the clients of a single partition
    values = np.array([part.mean() for part in parts]) if len(parts) > 1 else parts[0]
    n = len(values)
    if n < 2:
        return float(values.mean()), float("nan")
    return float(values.mean()), float(stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n))


def paired(lines: pd.DataFrame, a: str, b: str, score: str = "test_acc") -> Parts:
    """Return the score of row a minus that of row b, points, per client of each shared partition.

    Repetitions on one partition are averaged first: those with seeds that both rows have, or all
    if there are none.
    """
    out = []
    of_a, of_b = (lines[lines["row"] == row] for row in (a, b))
    for partition, a_there in of_a.groupby("partition", sort=False):
        b_there = of_b[of_b["partition"] == partition]
        seeds = set(a_there["seed"]) & set(b_there["seed"])
        if len(b_there):
            means = []  # of each client, in a and in b
            for side in (a_there, b_there):
                side = side[side["seed"].isin(seeds)] if seeds else side
                by_client = side.pivot(index="client", columns="run", values=score)
                means.append(100 * by_client.mean(axis=1, skipna=False))
            out.append((means[0] - means[1]).dropna().to_numpy())
    return [difference for difference in out if len(difference)]


def comparable(parts: Parts) -> bool:
    """Return whether there is an interval: for several partitions, or several clients of one."""
    return len(parts) > 1 or (len(parts) == 1 and len(parts[0]) > 1)


def difference_text(parts: Parts, half: float | None = None) -> str:
    """Return "+0.20 ± 1.08 (3)": mean, 95 % interval, partitions; "-" without an interval.

    `half` is its half width, if it is another one than that of `interval`.
    """
    if not comparable(parts):
        return "-"
    mean, usual = interval(parts)
    half = usual if half is None else half
    return f"{round(mean, 2) + 0:+.2f} ± {half:.2f} ({len(parts)})"


def means(lines: pd.DataFrame, row: str, score: str = "test_acc") -> np.ndarray:
    """Return the mean score over clients of each repetition of a row, percent, seeds ascending."""
    of_runs = lines[lines["row"] == row].groupby(["seed", "run"])[score].mean()
    return 100 * of_runs.to_numpy(dtype=float)


def deviation(values: np.ndarray) -> float:
    """Return the standard deviation over repetitions (ddof 1), nan for a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def mean_text(values: np.ndarray) -> str:
    """Return "83.04 ± 0.98 (3)": mean and deviation over repetitions, and their number."""
    n = len(values)
    if n == 0:
        return "-"
    if np.isnan(values.mean()):
        return f"- ({n})"
    spread = f" ± {deviation(values):.2f}" if n > 1 else ""
    return f"{values.mean():.2f}{spread} ({n})"


def unbeaten(lines: pd.DataFrame, rows: Sequence[str], score: str = "test_acc") -> list[bool]:
    """Return for each row whether the interval of the best row minus this one reaches 0."""
    scores = {row: means(lines, row, score).mean() for row in rows}
    scored = [row for row in rows if np.isfinite(scores[row])]
    best = max(scored, key=scores.__getitem__, default="")

    def reaches_best(row: str) -> bool:
        parts = paired(lines, best, row, score) if row in scored else []
        return comparable(parts) and not np.subtract(*interval(parts)) > 0

    return [row == best or bool(reaches_best(row)) for row in rows]


def markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as aligned markdown, the first column flush left."""
    aligned = ("left", *("right",) * (len(table.columns) - 1))
    escaped = lambda text: str(text).replace("|", "\\|")  # noqa: E731
    table = table.map(escaped).rename(columns=escaped)
    return str(table.to_markdown(index=False, disable_numparse=True, colalign=aligned))


def latex(table: pd.DataFrame) -> str:
    """Return a table of texts as LaTeX (package booktabs); **bold** becomes \\textbf."""

    def tex(text: str) -> str:
        words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
        text = re.sub(r"[%&#$\\{}~^]", lambda found: words.get(found[0], f"\\{found[0]}"), text)
        text = text.replace(" ± ", " $\\pm$ ")
        budget = r"B_c = (inf|[\d.]+N?)"
        text = re.sub(budget, lambda m: f"$B_c = {m[1]}$".replace("inf", "\\infty"), text)
        text = text.replace("tau_init", r"$\tau_{\mathrm{init}}$")
        text = re.sub(r"(?<!\$B)(?<!\$\\tau)_", r"\\_", text)
        return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)

    out = table.map(tex).rename(columns=tex)
    columns = "l" + "r" * (len(out.columns) - 1)
    return str(out.to_latex(index=False, escape=False, column_format=columns)).rstrip()


def cell_text(text: str, bold: bool, published: str) -> str:
    """Return a cell, bold or not, followed by the paper's number in brackets if there is one."""
    return (f"**{text}**" if bold else text) + (f" [{published}]" if published else "")


def number(value: float, form: str = ".2f") -> str:
    text = "-" if np.isnan(value) else format(value, form)
    is_zero = text != "-" and not text.strip("-0.")
    return text.lstrip("-") if is_zero else text  # no -0.00


def by_budget(
    frames: Frames,
    rows: pd.DataFrame,
    field: str,
    symbol: str,
    published: Mapping[Any, str],
    setting: str,
    bold: bool = True,
) -> tuple[pd.DataFrame, str, str]:
    """Return (data, markdown, LaTeX) of a table: a line per value of a Run field, a column per B_c.

    `rows` are lines of `frames.rows` with a column `variant`. Bold is what the best of its column
    does not beat, among rows of one variant. `published` are the paper's numbers on `setting`, by
    the field's value.
    """
    out = []
    several = rows["setting"].nunique() > 1
    columns = rows.groupby(["setting", "variant", "budget"], sort=False)
    for (where, variant, budget), column in columns:
        lines = frames.of("clients", where)
        is_best = unbeaten(lines, list(column["row"]))
        for line, best in zip(column.itertuples(), is_best, strict=True):
            values, value = means(lines, line.row), getattr(line, field)
            in_paper = line.paper == setting and not variant and value in published
            theirs = paper.by_budget(published[value]).get(budget, "") if in_paper else ""
            name = ", ".join(filter(None, (str(value), variant)))
            out.append({
                "setting": where, field: value, "variant": variant, "budget": budget,
                "mean": values.mean(), "std": deviation(values), "n": len(values),
                "bold": best, "paper": theirs, "row": f"{where}: {name}" if several else name,
                "cell": cell_text(mean_text(values), bold and best, theirs),
            })  # fmt: skip
    data = pd.DataFrame(out)
    data = data.sort_values(["setting", "variant", field], kind="stable", ignore_index=True)
    descending = rows.sort_values("order", ascending=False, kind="stable")
    budgets = list(dict.fromkeys(descending["budget"]))
    table = data.pivot(index="row", columns="budget", values="cell").fillna("-")
    table = table.loc[data["row"].unique(), budgets].reset_index(names=symbol)
    table = table.rename(columns={b: f"B_c = {b}" for b in budgets})
    text = f"""{markdown(table)}

Test accuracy, %, on {", ".join(sorted(data["setting"].unique()))}: \
mean ± standard deviation over seeds (number of seeds).
Bold: not beaten by the best of its column, among runs that differ only in {symbol} \
(the 95 % interval of the paired difference reaches 0)."""
    return data.drop(columns=["cell", "row"]), text, latex(table)
