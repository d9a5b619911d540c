"""DPFL against the same method on a random graph: test accuracy over rounds for three budgets (CIFAR-10, Dir(0.1))."""

from __future__ import annotations

from collections.abc import Sequence

from _common import COLUMN, SEEDS, Drawing, curve, legend, main, over_rounds

import matplotlib.pyplot as plt
import pandas as pd
from _looks import labels, looks
from _names import budget_order, has_budget, setting
from _tables import comparable, fields, interval, means, named, over, paired, repetitions

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [
    Run(dataset="cifar10", partition="dirichlet", dirichlet_alpha=0.1, method=method, budget=budget, seed=seed)
    for method in ("dpfl", "random_graph")
    for budget in ("0.2N", "0.1N", "0.05N")
    for seed in SEEDS
]


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure: a curve per method and budget, and per whatever else the runs differ in."""
    groups = repetitions(r for r in results if has_budget(r.run))
    if not groups:
        raise UserError("none of these results has a budget: their models do not move along a graph")
    groups.sort(key=lambda g: (setting(g[0].run), not g[0].method.searches, -budget_order(g[0].run)))
    figure, axes = plt.subplots(figsize=(COLUMN, 2.3))
    rows = []
    entries = zip(named(groups), labels(groups), looks([g[0].run.method for g in groups]), strict=True)
    for (where, name, group), text, look in entries:
        x, mean, spread = over_rounds(group, lambda r: 100 * r.mean("round/test_acc"))
        curve(axes, x, mean, spread, label=text, **look)
        rows += [
            {"setting": where, "method": name, "round": t, "accuracy": m, "std": s, "n": len(group)}
            for t, m, s in zip(x, mean, spread, strict=True)
        ]
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy, %")
    legend(figure, *axes.get_legend_handles_labels(), "outside upper center")
    return Drawing(
        pd.DataFrame(rows), figure, "\n".join(gaps(groups)) or "no budget has both DPFL and the random graph yet"
    )


def gaps(groups: Sequence[list[Result]]) -> list[str]:
    """Return one sentence for each pair of DPFL and random graph that are alike in all else, on common partitions: best models by validation."""
    out = []
    names = {id(g): name for g, (_, name, _) in zip(groups, named(groups), strict=True)}
    for a in groups:
        for b in groups:
            searches = [g[0].method.searches for g in (a, b)]
            difference = paired(a, b)
            if searches == [True, False] and alike(a[0], b[0]) and comparable(difference):
                mean, half = interval(difference)
                out.append(
                    f"{setting(a[0].run)}, {names[id(a)]} {means(a).mean():.2f} %, {names[id(b)]} {means(b).mean():.2f} %, difference client by client "
                    f"{mean:+.2f} ± {half:.2f} points (95 % over {over(difference)})"
                )
    return out


def alike(a: Result, b: Result) -> bool:
    """Return whether two runs differ in nothing but what their methods alone read."""
    own = {"method", "options", *a.method.unread, *b.method.unread}
    mine, theirs = fields(a), fields(b)
    return all(mine[name] == theirs.get(name) for name in mine if name not in own)


if __name__ == "__main__":
    main("random_graph", __doc__, RUNS, draw)
