"""The paper's motivating example: client 1 gains from clients 2 and 3 together more than from either alone.

Client 1 has little of four classes; client 2 shares two of them and client 3 the other two. In each group everyone trains and averages with
everyone (a full graph, scored after local training); shown is the test accuracy of client 1.
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import SEEDS, Drawing
from dpfl_mpi.figures.frames import Frames, accuracy
from dpfl_mpi.figures.names import Group, named, repetitions, setting
from dpfl_mpi.figures.style import COLUMN, DARK, GREY, SKY
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

EXAMPLE: dict[str, Any] = {"dataset": "cifar10", "partition": "motivation"}
ROWS: list[dict[str, Any]] = [
    {"method": "local"},
    *({"method": "random_graph", "budget": "inf", "reach": of} for of in ("groups:0,1;2", "groups:0,2;1", None)),
]
RUNS = [Run(**EXAMPLE, **row, seed=seed) for seed in SEEDS for row in ROWS]


def with_whom(others: list[int]) -> str:
    """Return with whom client 1 averages, counted from 1 as in the paper."""
    return "with " + " and ".join(str(k + 1) for k in others) if others else "alone"


def partners(result: Result) -> str:
    return with_whom(list(result.omega().of(0)))


def example(result: Result) -> bool:
    """Return whether a result is of the example: its partition of three clients, and a method of `RUNS`."""
    return str(result.run.partition) == EXAMPLE["partition"] and result.run.method in {run.method for run in RUNS}


def bars(results: list[Result]) -> list[tuple[str, Group]]:
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


def draw(frames: Frames) -> Drawing:
    """Return the figure; its numbers are with whom client 1 averages, and its test accuracy in percent, a line per run."""
    shown = [r for r in frames.results if example(r)]
    if not shown:
        raise UserError("none of these results has the three clients of the example (--partition motivation)")
    rows = [
        {"group": name, "seed": r.run.seed, "accuracy": 100 * accuracy(r)[0], "n_test": r["client/n_test"][0]}
        for name, group in bars(shown)
        for r in group
    ]
    data = pd.DataFrame(rows)
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
        told = group not in by_oneself and not np.isnan(alone)
        against = f", {values.mean() - alone:+.1f} points against alone" if told else ""
        text.append(f"client 1 {group}: {values.mean():.1f} % ({len(values)} seeds){against}")
    if others := len(frames.results) - len(shown):
        of = f"{others} of {len(frames.results)} results"
        text.append(f"Left out: {of}, which are not of the example (--partition motivation).")
    if not np.isnan(alone):
        axes.axhline(alone, color=GREY, lw=0.6, ls=":")
    axes.set_xticks(range(len(groups)), [g.replace(" (", "\n(") for g in groups])
    axes.set_ylabel("test accuracy of client 1, %")
    return Drawing(data, figure, "\n".join(text))
