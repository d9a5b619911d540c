"""Accuracies as numbers of a table: paired differences with intervals, what the best does not beat, markdown, LaTeX.

`lines` are the frame of clients of one setting (`frames`). Accuracies are in percent, differences in points; docs/analysis.md says how both are made.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from dpfl_mpi.figures import paper
from dpfl_mpi.figures.frames import Frames

Parts = list[np.ndarray]  # a number per client, one array per partition


def interval(parts: Parts) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval: over partition means, of one partition over its clients (nan for a single value)."""
    values = np.array([part.mean() for part in parts]) if len(parts) > 1 else parts[0]
    n = len(values)
    half = stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n) if n > 1 else float("nan")  # Student's t
    return float(values.mean()), float(half)


def paired(lines: pd.DataFrame, a: str, b: str, score: str = "test_acc") -> Parts:
    """Return a score of row a minus that of row b in points, for every client of each partition that both have (empty: none).

    Repetitions on one partition are averaged first, those of common seeds where there are any: they are the same clients.
    """
    out = []
    sides = [lines[lines["row"] == row] for row in (a, b)]
    for part, mine in sides[0].groupby("partition", sort=False):
        theirs = sides[1][sides[1]["partition"] == part]
        common = set(mine["seed"]) & set(theirs["seed"])
        if len(theirs):
            same = [side[side["seed"].isin(common)] if common else side for side in (mine, theirs)]
            each = [side.pivot(index="client", columns="run", values=score) for side in same]
            means = [100 * side.mean(axis=1, skipna=False) for side in each]
            out.append((means[0] - means[1]).dropna().to_numpy())
    return [difference for difference in out if len(difference)]


def comparable(parts: Parts) -> bool:
    """Return whether paired differences have an interval: several partitions, or several clients of one."""
    return len(parts) > 1 or (len(parts) == 1 and len(parts[0]) > 1)


def told(parts: Parts) -> str:
    """Return "+0.20 ± 1.08 (3)": mean, 95 % interval, partitions; a dash where there is none."""
    if not comparable(parts):
        return "-"
    mean, half = interval(parts)
    return f"{round(mean, 2) + 0:+.2f} ± {half:.2f} ({len(parts)})"


def means(lines: pd.DataFrame, row: str, score: str = "test_acc") -> np.ndarray:
    """Return the score of each repetition of a row, percent, seeds ascending: the plain mean over its clients."""
    each = lines[lines["row"] == row].groupby(["seed", "run"])[score].mean()
    return 100 * each.to_numpy(dtype=float)


def deviation(values: np.ndarray) -> float:
    """Return the standard deviation over repetitions (ddof 1), nan for a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def cell(values: np.ndarray) -> str:
    """Return "83.04 ± 0.98 (3)": mean and standard deviation over repetitions and their number; a dash where there is none."""
    if not len(values):
        return "-"
    if np.isnan(values.mean()):
        return f"- ({len(values)})"
    return f"{values.mean():.2f}" + (f" ± {deviation(values):.2f}" if len(values) > 1 else "") + f" ({len(values)})"


def unbeaten(lines: pd.DataFrame, rows: Sequence[str], score: str = "test_acc") -> list[bool]:
    """Return for each row whether the best one does not beat it: the interval of the paired difference to the best reaches 0."""
    scores = {row: means(lines, row, score).mean() for row in rows}
    scored = [row for row in rows if np.isfinite(scores[row])]
    best = max(scored, key=scores.__getitem__, default="")

    ahead = [paired(lines, best, row, score) if row in scored and row != best else [] for row in rows]
    stand = [comparable(parts) and not np.subtract(*interval(parts)) > 0 for parts in ahead]
    return [row == best or bool(stands) for row, stands in zip(rows, stand, strict=True)]


def markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as markdown that is legible as it is, the first column flush left."""
    return table.to_markdown(  # type: ignore[no-any-return]
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
    return str(out.to_latex(index=False, escape=False, column_format="l" + "r" * (len(out.columns) - 1))).rstrip()


def printed(text: str, bold: bool, published: str) -> str:
    """Return a cell's text, bold where it is to be, with the paper's figure behind it where there is one."""
    return (f"**{text}**" if bold else text) + (f" [{published}]" if published else "")


def number(value: float, form: str = ".2f") -> str:
    return "-" if np.isnan(value) else format(value, form)


def by_budget(
    frames: Frames, rows: pd.DataFrame, field: str, symbol: str, numbers: Mapping[Any, str], of: str, bold: bool = True
) -> tuple[pd.DataFrame, str, str]:
    """Return (data, markdown, LaTeX) of a table with a line for each value of a Run field and a column for each budget.

    Bold is what the best of its column does not beat, among rows of one variant. `rows` are lines of `frames.rows` with a column `variant`;
    `numbers` are the paper's by the field's value, `of` a setting.
    """
    out = []
    several = rows["setting"].nunique() > 1
    for (where, variant, budget), column in rows.groupby(["setting", "variant", "budget"], sort=False):
        lines = frames.of("clients", where)
        for line, best in zip(column.itertuples(), unbeaten(lines, list(column["row"])), strict=True):
            values, value = means(lines, line.row), getattr(line, field)
            same = line.paper == of and not variant and value in numbers
            theirs = paper.by_budget(numbers[value]).get(budget, "") if same else ""
            name = ", ".join(filter(None, (str(value), variant)))
            scores = {"mean": values.mean(), "std": deviation(values), "n": len(values), "bold": best, "paper": theirs}
            texts = {"row": f"{where}: {name}" if several else name}
            texts["cell"] = printed(cell(values), bold and best, theirs)
            out.append({"setting": where, field: value, "variant": variant, "budget": budget, **scores, **texts})
    data = pd.DataFrame(out).sort_values(["setting", "variant", field], kind="stable", ignore_index=True)
    budgets = list(dict.fromkeys(rows.sort_values("order", ascending=False, kind="stable")["budget"]))
    table = data.pivot(index="row", columns="budget", values="cell").fillna("-")
    table = table.loc[data["row"].unique(), budgets].reset_index(names=symbol)
    table = table.rename(columns={b: f"B_c = {b}" for b in budgets})
    text = f"""{markdown(table)}

Test accuracy, %, on {", ".join(sorted(data["setting"].unique()))}: mean ± standard deviation over seeds (number of seeds).
Bold: what the best of its column does not beat, among runs that differ in {symbol} alone (95 % interval of the paired difference, over partitions; over clients where there is one partition)."""
    return data.drop(columns=["cell", "row"]), text, latex(table)
