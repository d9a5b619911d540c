"""How often each of the four cases of the greedy search occurs: whether adding helps (a > 0) and whether removing helps (b > 0).

One panel per run: the shares among all candidates considered in a round. Round 0 is the search for Omega.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from _common import BLUE, COLUMN, ORANGE, PALE, RED, TEXT, Drawing, graphs, legend, main

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import few, labels, singles
from _names import budget_order, label, plain, setting
from sparsity import RUNS as SPARSITY

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CASES
from dpfl_mpi.results import Result

RUNS = SPARSITY  # the same runs
COLOURS = (BLUE, PALE, ORANGE, RED)


def measure(result: Result) -> pd.DataFrame:
    """Return one row per round in which candidates were considered: how many, and the share of each case."""
    cases = result["graph/cases"].sum(1)
    rounds = np.flatnonzero(cases.sum(1) > 0)
    total = cases[rounds].sum(1, keepdims=True)
    data = pd.DataFrame(cases[rounds] / total, columns=list(CASES))
    data.insert(0, "candidates", total[:, 0])
    data.insert(0, "round", rounds)
    data.insert(0, "method", label(result.run))
    data.insert(0, "setting", setting(result.run))
    data.insert(0, "run", result.path.stem)
    return data


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure."""
    results = [r for r in graphs(results) if r["graph/cases"].any()]
    if not results:
        raise UserError("none of these results has searched for its graph")
    results = sorted(results, key=lambda r: (-budget_order(r.run), r.run.seed))
    results, left_out = few(results)
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    width = COLUMN if columns == 1 else TEXT
    figure, grid = plt.subplots(rows, columns, figsize=(width, 1.8 * rows + 0.4), squeeze=False, sharey=True)
    parts, text = [], [left_out] if left_out else []
    for axes, result, name in zip(grid.flat, results, labels(singles(results)), strict=False):
        data = measure(result)
        parts.append(data)
        axes.stackplot(data["round"], *(100 * data[c] for c in CASES), colors=COLOURS, labels=CASES, lw=0)
        both = np.average(data[CASES[3]], weights=data["candidates"])
        axes.set_title(
            "\n".join(textwrap.wrap(name, 26 if columns > 2 else 50)) + f"\nboth positive: {100 * both:.1f} %",
            fontsize=7,
        )
        axes.set_xlim(data["round"].min(), max(data["round"].max(), 1))
        axes.set_ylim(0, 100)
        axes.set_xlabel("round")
        overall = [np.average(data[c], weights=data["candidates"]) for c in CASES]
        text.append(
            f"{setting(result.run)}, {plain(name)}: "
            + "; ".join(f"{c} {100 * s:.2f} %" for c, s in zip(CASES, overall, strict=True))
            + f" of {data['candidates'].sum()} candidates"
        )
    for axes in list(grid.flat)[len(results) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("candidates, %")
    handles, names = grid[0, 0].get_legend_handles_labels()
    names = [f"${n.split(':')[0]}$:{n.split(':')[1]}" for n in names]
    legend(figure, handles, names, "outside lower center", handlelength=1, handleheight=0.9)
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))


if __name__ == "__main__":
    main("greedy_cases", __doc__, RUNS, draw)
