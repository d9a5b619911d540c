"""What moves and how long it takes: models received by a client against its budget, bytes that MPI carried, seconds by phase.

Left is the simulated network: one model over one edge counts once, whichever ranks the two clients live on. Middle is what MPI carried on this
machine: edges inside a rank cost nothing there. Right are the seconds of the slowest rank in each phase of each round, added up.
"""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import labels, row_name, setting, text_label
from dpfl_mpi.figures.style import BLUE, COLOURS, DARK, GREY, SKY, TEXT, patches
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES

RUNS = [*cifar10(budget=("inf", 20, 10, 5)), *cifar10(method="local")]


def measure(result: Result) -> pd.DataFrame:
    """Return one row per round: models received (mean and most of a client), MiB that MPI carried, seconds by phase (slowest rank)."""
    rounds = slice(0, result.last_round + 1)  # one that is being written may have some of its arrays
    received = result["traffic/models_received"][rounds]
    out: dict[str, object] = {"run": result.path.stem, "setting": setting(result.run), "method": row_name(result.run)}
    out |= {"round": np.arange(len(received)), "received_mean": received.mean(1), "received_most": received.max(1)}
    out["budget_others"] = (result["client/budget"] - result.run.budget_counts_self).max()
    out |= {f"mpi_{how}_mib": result[f"traffic/bytes_{how}"][rounds] / 2**20 for how in ("rma", "collective")}
    return pd.DataFrame(out | {f"seconds_{p}": result[f"seconds/{p}"][rounds, 2] for p in PHASES})


def draw(frames: Frames) -> Drawing:
    order = {"setting": True, "method": True, "order": True, "seed": False}
    runs = frames.files.sort_values(list(order), ascending=list(order.values()), kind="stable")
    parts = [measure(line.result) for line in runs.itertuples()]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(TEXT, 0.32 * len(runs) + 1.15), sharey=True)
    text = []
    for y, (data, result) in enumerate(zip(parts, runs["result"], strict=True)):
        later, first = data[data["round"] > 0], data.iloc[0]
        rounds = max(len(later), 1)
        received = later["received_mean"].sum() / rounds
        left.barh(y, received, 0.55, color=BLUE)
        left.plot([later["received_most"].max() if len(later) else 0] * 2, [y - 0.27, y + 0.27], color=SKY, lw=1.5)
        budget = int(first["budget_others"])
        limit = f" (budget {budget} others)" if result.method.topology == "graph" else ""
        if limit:
            left.plot([budget] * 2, [y - 0.38, y + 0.38], color=DARK, lw=1, ls=":")
        rma, collective = later["mpi_rma_mib"].sum() / rounds, later["mpi_collective_mib"].sum() / rounds
        middle.barh(y, rma, 0.55, color=BLUE)
        middle.barh(y, collective, 0.55, left=rma, color=GREY)
        seconds = data[[f"seconds_{p}" for p in PHASES]].sum().to_numpy()
        right.barh([y] * len(PHASES), seconds, 0.55, left=np.cumsum(seconds) - seconds, color=COLOURS[: len(PHASES)])
        text.append(
            f"{setting(result.run)}, {row_name(result.run)}, seed {result.run.seed}: "
            f"{received:.2f} models received per client and round{limit}, {first.received_mean:.1f} before round 1; "
            f"MPI {rma + collective:.2f} MiB per round, {first.mpi_rma_mib + first.mpi_collective_mib:.2f} before; "
            + ", ".join(f"{p} {s:.1f} s" for p, s in zip(PHASES, seconds, strict=True))
            + f" on {result.starts()[-1]['ranks']} ranks"
        )
    names = ["\n".join(textwrap.wrap(text_label(name), 30)) for name in labels(runs)]
    left.set_yticks(range(len(runs)), names)
    left.tick_params(axis="y", labelsize=7 if len(runs) < 20 else 5)
    left.invert_yaxis()
    left.set_xlabel("models received\nper client and round")
    middle.set_xlabel("MiB that MPI carried\na round, all ranks")
    right.set_xlabel("seconds, slowest rank,\nall rounds")
    left.plot([], [], color=SKY, lw=1.5, label="most of any client")
    left.plot([], [], color=DARK, lw=1, ls=":", label="budget (others)")
    middle.bar([0], [0], color=BLUE, label="mean; MPI: one-sided")
    middle.bar([0], [0], color=GREY, label="MPI: collective")
    how = {"handlelength": 1, "columnspacing": 1}
    figure.legend(loc="outside lower left", ncols=2, handleheight=0.9, **how)
    patches(figure, dict(zip(PHASES, COLOURS, strict=False)), "outside lower right", ncols=3, **how)
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))
