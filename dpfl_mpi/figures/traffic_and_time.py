"""What moves and how long it takes: models received by a client against its budget, bytes that MPI carried, seconds by phase.

Left is the simulated network: one model over one edge counts once, whichever ranks the two clients live on. Middle is what MPI carried on this
machine: edges inside a rank cost nothing there. Right are the seconds of the slowest rank in each phase of each round, added up. Bars are means over
seeds, the most of any client is that of all of them.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import wrapped
from dpfl_mpi.figures.style import BLUE, COLOURS, DARK, GREY, SKY, TEXT, patches
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES

RUNS = [*cifar10(budget=("inf", 20, 10, 5)), *cifar10(method="local")]
MOVED = ["received_mean", "mpi_rma_mib", "mpi_collective_mib"]


def measure(result: Result, where: str, row: str) -> pd.DataFrame:
    """Return one row per round: models received (mean and most of a client), MiB that MPI carried, seconds by phase (slowest rank)."""
    rounds = slice(0, result.last_round + 1)  # one that is being written may have some of its arrays
    received = result["traffic/models_received"][rounds]
    out: dict[str, object] = {"run": result.path.stem, "setting": where, "method": row}
    out |= {"round": np.arange(len(received)), "received_mean": received.mean(1), "received_most": received.max(1)}
    out["budget_others"] = (result["client/budget"] - result.run.budget_counts_self).max()
    out |= {f"mpi_{how}_mib": result[f"traffic/bytes_{how}"][rounds] / 2**20 for how in ("rma", "collective")}
    return pd.DataFrame(out | {f"seconds_{p}": result[f"seconds/{p}"][rounds, 2] for p in PHASES})


def draw(frames: Frames) -> Drawing:
    runs = frames.files.assign(ranks=[str(result.starts()[-1]["ranks"]) for result in frames.files["result"]])
    runs = runs.sort_values(["setting", "method", "order", "seed"], kind="stable")
    groups = list(runs.groupby(["setting", "row", "ranks"], sort=False))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(TEXT, 0.32 * len(groups) + 1.3), sharey=True)
    parts, names, text = [], [], []
    for y, ((where, row, ranks), group) in enumerate(groups):
        each = [measure(result, where, row) for result in group["result"]]
        parts += each
        rounds = pd.concat(each, keys=range(len(each)))
        later = rounds[rounds["round"] > 0]
        mean = later.groupby(level=0)[MOVED].mean().mean().fillna(0.0)
        left.barh(y, mean["received_mean"], 0.55, color=BLUE)
        left.plot([later["received_most"].max()] * 2, [y - 0.27, y + 0.27], color=SKY, lw=1.5)
        limit = ""
        if group["topology"].iloc[0] == "graph":
            budget = int(each[0]["budget_others"].iloc[0])
            left.plot([budget] * 2, [y - 0.38, y + 0.38], color=DARK, lw=1, ls=":")
            limit = f" (budget {budget} others)"
        rma, collective = mean["mpi_rma_mib"], mean["mpi_collective_mib"]
        middle.barh(y, rma, 0.55, color=BLUE)
        middle.barh(y, collective, 0.55, left=rma, color=GREY)
        seconds = rounds.groupby(level=0)[[f"seconds_{phase}" for phase in PHASES]].sum().mean().to_numpy()
        right.barh([y] * len(PHASES), seconds, 0.55, left=np.cumsum(seconds) - seconds, color=COLOURS[: len(PHASES)])
        several = [where] * (runs["setting"].nunique() > 1) + [f"{ranks} ranks"] * (runs["ranks"].nunique() > 1)
        names.append(wrapped(", ".join([row, *several]), 30))
        before = rounds[rounds["round"] == 0][MOVED].mean()
        text.append(
            f"{where}, {row}, seed {', '.join(map(str, group['seed']))}: {mean['received_mean']:.2f} models received per client and round"
            f"{limit}, {before['received_mean']:.1f} before round 1; MPI {rma + collective:.2f} MiB per round, {before[MOVED[1:]].sum():.2f} before; "
            + ", ".join(f"{p} {s:.1f} s" for p, s in zip(PHASES, seconds, strict=True))
            + f" on {ranks} ranks"
        )
    left.set_yticks(range(len(groups)), names)
    left.invert_yaxis()
    left.set_xlabel("models received\nper client and round")
    middle.set_xlabel("MiB that MPI carried\na round, all ranks")
    middle.set_xlim(left=0)  # one rank carries nothing
    right.set_xlabel("seconds, slowest rank,\nall rounds")
    left.plot([], [], color=BLUE, lw=5, label="mean of clients")
    left.plot([], [], color=SKY, lw=1.5, label="most of any client")
    left.plot([], [], color=DARK, lw=1, ls=":", label="budget (others)")
    how = {"handlelength": 1, "columnspacing": 1}
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", **how)
    patches(figure, {"one-sided": BLUE, "collective": GREY}, "outside lower center", ncols=1, **how)
    patches(figure, dict(zip(PHASES, COLOURS, strict=False)), "outside lower right", ncols=2, **how)
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))
