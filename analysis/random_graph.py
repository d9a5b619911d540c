"""DPFL against the same method on a random graph: test accuracy over rounds for three budgets (CIFAR-10, Dir(0.1))."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from _common import (
    BLUE,
    COLUMN,
    GREEN,
    RED,
    SEEDS,
    Drawing,
    budget_order,
    curve,
    has_budget,
    main,
    method_name,
    method_of,
    over_rounds,
    text_label,
)
from _tables import budgets_of, interval, means, named, paired, repetitions
from matplotlib.lines import Line2D

from dpfl_mpi.config import Run
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result

RUNS = [
    Run(dataset="cifar10", partition="dirichlet", dirichlet_alpha=0.1, method=method, budget=budget, seed=seed)
    for method in ("dpfl", "random_graph")
    for budget in ("0.2N", "0.1N", "0.05N")
    for seed in SEEDS
]


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure: a colour a budget, DPFL solid, the random graph dashed."""
    groups = repetitions(r for r in results if has_budget(r.run))
    if not groups:
        raise UserError("none of these results has a budget: their models do not move along a graph")
    budgets = budgets_of(groups)
    colour = dict(zip(budgets, (BLUE, RED, GREEN, "#000000", "#E69F00", "#CC79A7", "#56B4E9"), strict=False))
    figure, axes = plt.subplots(figsize=(COLUMN, 2.3))
    rows = []
    for where, name, group in named(sorted(groups, key=lambda g: -budget_order(g[0].run))):
        run = group[0].run
        x, mean, spread = over_rounds(group, lambda r: 100 * r.mean("round/test_acc"))
        random = not method_of(run).searches
        curve(axes, x, mean, spread, color=colour[str(run.budget)], ls="--" if random else "-")
        rows += [
            {"setting": where, "method": name, "round": t, "accuracy": m, "std": s, "n": len(group)}
            for t, m, s in zip(x, mean, spread, strict=True)
        ]
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy, %")
    handles = [Line2D([], [], color=colour[b], label=text_label(f"B_c = {b}")) for b in budgets]
    handles += [Line2D([], [], color="#333333", ls=ls, label=n) for ls, n in (("-", "DPFL"), ("--", "random graph"))]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, columnspacing=1, handlelength=1.6)
    return Drawing(
        pd.DataFrame(rows), figure, "\n".join(gaps(groups)) or "no budget has both DPFL and the random graph yet"
    )


def gaps(groups: Sequence[list[Result]]) -> list[str]:
    """Return one sentence for each pair of DPFL and random graph with one budget on common partitions: best models by validation."""
    out = []
    for a in groups:
        for b in groups:
            searches = [method_of(g[0].run).searches for g in (a, b)]
            difference = paired(a, b)
            if searches == [True, False] and a[0].run.budget == b[0].run.budget and len(difference) > 1:
                mean, half = interval(difference)
                out.append(
                    f"B_c = {a[0].run.budget}: {method_name(a[0].run)} {means(a).mean():.2f} %, random graph {means(b).mean():.2f} %, difference client by client "
                    f"{mean:+.2f} ± {half:.2f} points (95 % over clients)"
                )
    return out


if __name__ == "__main__":
    main("random_graph", __doc__, RUNS, draw)
