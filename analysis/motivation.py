"""The paper's motivating example: client 1 gains from clients 2 and 3 together more than from either alone.

Client 1 has little of four classes; client 2 shares two of them and client 3 the other two. In each group everyone trains and averages with
everyone (a full graph, scored after local training); shown is the test accuracy of client 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import COLUMN, DARK, GREY, SEEDS, SKY, Drawing, accuracy, main

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _names import setting
from _tables import Group, named, repetitions

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

EXAMPLE = {"dataset": "cifar10", "partition": "motivation"}
RUNS = [
    Run(**EXAMPLE, **row, seed=seed)
    for seed in SEEDS
    for row in (
        {"method": "local"},
        {"method": "random_graph", "budget": "inf", "reach": "groups:0,1;2"},
        {"method": "random_graph", "budget": "inf", "reach": "groups:0,2;1"},
        {"method": "random_graph", "budget": "inf"},
    )
]


def partners(result: Result) -> str:
    """Return with whom client 1 averages, counted from 1 as in the paper."""
    others = result.omega().of(0) + 1
    return "with " + " and ".join(map(str, others)) if len(others) else "alone"


def example(result: Result) -> bool:
    """Return whether a result is of the example: its partition of three clients, and a method of `RUNS`."""
    return str(result.run.partition) == EXAMPLE["partition"] and result.run.method in {run.method for run in RUNS}


def bars(results: Sequence[Result]) -> list[tuple[str, Group]]:
    """Return (name, repetitions) of each bar: with whom client 1 averages, and where several bars share that, in what they differ."""
    by_partners: dict[str, list[Group]] = {}
    for group in repetitions(results):
        for name in dict.fromkeys(map(partners, group)):
            by_partners.setdefault(name, []).append([r for r in group if partners(r) == name])
    out = []
    for name in sorted(by_partners, key=lambda name: (len(name), name)):
        groups = by_partners[name]
        several = len({setting(g[0].run) for g in groups}) > 1
        said = [f"{where}, {what}" if several else what for where, what, _ in named(groups)]
        out += [(name if len(groups) == 1 else f"{name} ({s})", g) for s, g in zip(said, groups, strict=True)]
    return out


def measure(results: Sequence[Result]) -> pd.DataFrame:
    """Return one row per run of the example: with whom client 1 averages, and its test accuracy in percent.

    Raises:
        UserError: none of the results is of the example.
    """
    shown = [r for r in results if example(r)]
    if not shown:
        raise UserError("none of these results has the three clients of the example (--partition motivation)")
    rows = [
        {"group": name, "seed": r.run.seed, "accuracy": 100 * accuracy(r)[0], "n_test": r["client/n_test"][0]}
        for name, group in bars(shown)
        for r in group
    ]
    return pd.DataFrame(rows)


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure."""
    data = measure(results)
    figure, axes = plt.subplots(figsize=(COLUMN, 2.0))
    groups = list(dict.fromkeys(data["group"]))
    by_oneself = [g for g in groups if g.startswith("alone")]
    # of several that differ in settings none is the one to compare with
    alone = data[data["group"] == by_oneself[0]]["accuracy"].mean() if len(by_oneself) == 1 else np.nan
    text = []
    for x, group in enumerate(groups):
        values = data[data["group"] == group]["accuracy"].to_numpy()
        axes.bar(x, values.mean(), 0.6, color=GREY if group in by_oneself else SKY)
        axes.plot(np.full(len(values), x), values, "o", color=DARK, ms=2.5)
        against = (
            f", {values.mean() - alone:+.1f} points against alone"
            if group not in by_oneself and not np.isnan(alone)
            else ""
        )
        text.append(f"client 1 {group}: {values.mean():.1f} % ({len(values)} seeds){against}")
    others = sum(not example(r) for r in results)
    if others:
        text.append(
            f"Left out: {others} of {len(results)} results, which are not of the example (--partition motivation)."
        )
    if not np.isnan(alone):
        axes.axhline(alone, color=GREY, lw=0.6, ls=":")
    axes.set_xticks(range(len(groups)), [g.replace(" (", "\n(") for g in groups])
    axes.set_ylabel("test accuracy of client 1, %")
    return Drawing(data, figure, "\n".join(text))


if __name__ == "__main__":
    main("motivation", __doc__, RUNS, draw)
