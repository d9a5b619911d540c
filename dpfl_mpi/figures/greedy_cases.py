"""How often each of the four cases of the greedy search occurs, one panel per run.

The cases are whether adding a candidate helps (a > 0) and whether removing it helps (b > 0), as
shares of all candidates of a round. Round 0 is the search for Omega.
"""

from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import sparsity
from dpfl_mpi.figures.command import Drawing, limit_panels
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import labels, row_name, wrapped
from dpfl_mpi.figures.style import BLUE, ORANGE, PALE, RED, grid, legend
from dpfl_mpi.graph import CASES

RUNS = sparsity.RUNS
COLOURS = (BLUE, PALE, ORANGE, RED)


def measure(line: Any) -> pd.DataFrame:
    """Return one line per round with candidates: their number, and the share of each case."""
    cases = line.result["graph/cases"].sum(1)
    rounds = np.flatnonzero(cases.sum(1) > 0)
    total = cases[rounds].sum(1)
    columns = {
        "run": line.result.path.stem,
        "setting": line.setting,
        "method": row_name(line.result.run),
        "round": rounds,
        "candidates": total,
    }
    shares = pd.DataFrame(cases[rounds] / total[:, None], columns=list(CASES))
    return pd.concat([pd.DataFrame(columns), shares], axis=1)


def draw(frames: Frames) -> Drawing:
    runs = frames.files[[r["graph/cases"].any() for r in frames.files["result"]]]
    if not len(runs):
        raise UserError("none of these results has searched for its graph")
    runs = runs.sort_values(["order", "seed"], ascending=[False, True], kind="stable")
    runs, text = limit_panels(runs)
    figure, panels = grid(len(runs), 4, 1.8, 0.4, sharey=True)
    parts = [measure(line) for line in runs.itertuples()]
    for axes, data, name in zip(panels, parts, labels(runs), strict=True):
        percent = [100 * data[case] for case in CASES]
        axes.stackplot(data["round"], *percent, colors=COLOURS, labels=CASES, lw=0)
        overall = [100 * np.average(data[case], weights=data["candidates"]) for case in CASES]
        title = wrapped(name, 26 if len(runs) > 2 else 50)
        axes.set_title(f"{title}\nboth positive: {overall[3]:.1f} %", fontsize=7)
        last = max(data["round"].max(), 1)
        axes.set(xlim=(data["round"].min(), last), ylim=(0, 100), xlabel="round")
        axes.locator_params(axis="x", integer=True)
        shares = "; ".join(f"{c} {share:.2f} %" for c, share in zip(CASES, overall, strict=True))
        where, count = data["setting"][0], data["candidates"].sum()
        text.append(f"{where}, {name}: {shares} of {count} candidates")
    for axes in panels[::4]:
        axes.set_ylabel("candidates, %")
    handles, names = panels[0].get_legend_handles_labels()
    formulas = [f"${name.split(':')[0]}$:{name.split(':')[1]}" for name in names]
    boxes = dict(zip(formulas, handles, strict=True))
    legend(figure, boxes, "outside lower center", handlelength=1, handleheight=0.9)
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))
