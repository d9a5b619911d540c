"""Models received per client against the budget, bytes that MPI carried, and seconds by phase.

Left, the simulated network: a model counts once per edge, wherever the two clients live. Middle,
the bytes MPI carried on this machine: edges within a rank cost nothing there. Right, the seconds of
the slowest rank in each phase, summed over rounds. Bars are means over seeds; "most of any client"
is over all seeds.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import wrapped
from dpfl_mpi.figures.style import BLUE, COLOURS, DARK, GREY, SKY, TEXT, patches
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES

RUNS = [*cifar10(budget=("inf", 20, 10, 5)), *cifar10(method="local")]
MOVED = ["received_mean", "mpi_rma_mib", "mpi_collective_mib"]


def measure(result: Result, where: str, row: str) -> pd.DataFrame:
    """Return one line per round: models received, MiB that MPI carried, seconds by phase."""
    rounds = slice(0, result.last_round + 1)  # a round that an error ended may lack some arrays
    received = result["traffic/models_received"][rounds]
    budget = result["client/budget"] - result.run.budget_counts_self
    columns: dict[str, object] = {
        "run": result.path.stem,
        "setting": where,
        "method": row,
        "round": np.arange(len(received)),
        "received_mean": received.mean(1),
        "received_most": received.max(1),
        "budget_others": budget.max(),
    }
    for kind in ("rma", "collective"):
        columns[f"mpi_{kind}_mib"] = result[f"traffic/bytes_{kind}"][rounds] / 2**20
    for phase in PHASES:
        columns[f"seconds_{phase}"] = result[f"seconds/{phase}"][rounds, 2]  # the slowest rank's
    return pd.DataFrame(columns)


def draw_bars(panels: tuple[Axes, Axes, Axes], y: int, rounds: pd.DataFrame, graph: bool) -> str:
    """Draw the bars of a row at height y, and return its text.

    `rounds` are the lines of `measure` of all its Runs, indexed by Run; `graph` says whether the
    method has a graph, and so a budget.
    """
    left, middle, right = panels
    later, before = rounds[rounds["round"] > 0], rounds[rounds["round"] == 0][MOVED].mean()
    received, rma, collective = later.groupby(level=0)[MOVED].mean().mean().fillna(0.0)
    # models received, with the most of any client and the budget
    left.barh(y, received, 0.55, color=BLUE)
    left.plot([later["received_most"].max()] * 2, [y - 0.27, y + 0.27], color=SKY, lw=1.5)
    limit = ""
    if graph:
        budget = int(rounds["budget_others"].max())
        left.plot([budget] * 2, [y - 0.38, y + 0.38], color=DARK, lw=1, ls=":")
        limit = f" (budget {budget} others)"
    # bytes that MPI carried, and seconds of each phase
    middle.barh(y, rma, 0.55, color=BLUE)
    middle.barh(y, collective, 0.55, left=rma, color=GREY)
    by_phase = rounds.groupby(level=0)[[f"seconds_{phase}" for phase in PHASES]].sum()
    seconds = by_phase.mean().to_numpy()
    starts = np.cumsum(seconds) - seconds
    right.barh([y] * len(PHASES), seconds, 0.55, left=starts, color=COLOURS[: len(PHASES)])
    phases = ", ".join(f"{p} {s:.1f} s" for p, s in zip(PHASES, seconds, strict=True))
    return (
        f"{received:.2f} models received per client and round{limit}, "
        f"{before['received_mean']:.1f} before round 1; MPI {rma + collective:.2f} MiB per round, "
        f"{before[MOVED[1:]].sum():.2f} before; {phases}"
    )


def draw(frames: Frames) -> Drawing:
    ranks = [str(result.starts()[-1]["ranks"]) for result in frames.files["result"]]
    runs = frames.files.assign(ranks=ranks)
    runs = runs.sort_values(["setting", "method", "order", "seed"], kind="stable")
    groups = list(runs.groupby(["setting", "row", "ranks"], sort=False))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(TEXT, 1.3), sharey=True)
    parts, names, text = [], [], []
    for y, ((where, row, rank_count), group) in enumerate(groups):
        measured = [measure(result, where, row) for result in group["result"]]
        parts += measured
        rounds = pd.concat(measured, keys=range(len(measured)))
        is_graph = group["topology"].iloc[0] == "graph"
        costs = draw_bars((left, middle, right), y, rounds, is_graph)
        name = [row]
        if runs["setting"].nunique() > 1:
            name.append(where)
        if runs["ranks"].nunique() > 1:
            name.append(f"{rank_count} ranks")
        names.append(wrapped(", ".join(name), 30))
        seeds = ", ".join(map(str, group["seed"]))
        text.append(f"{where}, {row}, seed {seeds}: {costs} on {rank_count} ranks")
    lines = max(name.count("\n") + 1 for name in names)
    figure.set_figheight(max(0.32, 0.13 * lines) * len(groups) + 1.3)
    left.set_yticks(range(len(groups)), names)
    left.invert_yaxis()
    left.set_xlabel("models received\nper client and round")
    middle.set_xlabel("MiB that MPI carried\nper round, all ranks")
    middle.set_xlim(left=0)  # one rank carries nothing
    right.set_xlabel("seconds, slowest rank,\nall rounds")
    left.plot([], [], color=BLUE, lw=5, label="mean of clients")
    left.plot([], [], color=SKY, lw=1.5, label="most of any client")
    left.plot([], [], color=DARK, lw=1, ls=":", label="budget (others' models)")
    look = {"handlelength": 1, "columnspacing": 1}
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", **look)
    kinds = {"one-sided": BLUE, "collective": GREY}
    patches(figure, kinds, "outside lower center", ncols=1, **look)
    phases = dict(zip(PHASES, COLOURS, strict=False))
    patches(figure, phases, "outside lower right", ncols=2, **look)
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))
