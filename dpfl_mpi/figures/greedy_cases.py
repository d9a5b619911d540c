"""How often each of the four cases of the greedy search occurs: whether adding helps (a > 0) and whether removing helps (b > 0).

One panel per run: the shares among all candidates considered in a round. Round 0 is the search for Omega.
"""

from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import sparsity
from dpfl_mpi.figures.command import Drawing, few
from dpfl_mpi.figures.frames import Frames, with_graphs
from dpfl_mpi.figures.names import labels, row_name, wrapped
from dpfl_mpi.figures.style import BLUE, ORANGE, PALE, RED, grid, legend
from dpfl_mpi.graph import CASES

RUNS = sparsity.RUNS
COLOURS = (BLUE, PALE, ORANGE, RED)


def measure(line: Any) -> pd.DataFrame:
    """Return one line per round in which candidates were considered: how many, and the share of each case."""
    cases = line.result["graph/cases"].sum(1)
    rounds = np.flatnonzero(cases.sum(1) > 0)
    total = cases[rounds].sum(1)
    who = {"run": line.result.path.stem, "setting": line.setting, "method": row_name(line.result.run)}
    shares = pd.DataFrame(cases[rounds] / total[:, None], columns=list(CASES))
    return pd.concat([pd.DataFrame(who | {"round": rounds, "candidates": total}), shares], axis=1)


def draw(frames: Frames) -> Drawing:
    with_graphs(frames)
    runs = frames.files[[r["graph/cases"].any() for r in frames.files["result"]]]
    if not len(runs):
        raise UserError("none of these results has searched for its graph")
    runs, text = few(runs.sort_values(["order", "seed"], ascending=[False, True], kind="stable"))
    figure, panels = grid(len(runs), 4, 1.8, 0.4, sharey=True)
    parts = [measure(line) for line in runs.itertuples()]
    for axes, data, name in zip(panels, parts, labels(runs), strict=True):
        axes.stackplot(data["round"], *(100 * data[c] for c in CASES), colors=COLOURS, labels=CASES, lw=0)
        overall = [100 * np.average(data[c], weights=data["candidates"]) for c in CASES]
        title = wrapped(name, 26 if len(runs) > 2 else 50)
        axes.set_title(f"{title}\nboth positive: {overall[3]:.1f} %", fontsize=7)
        axes.set(xlim=(data["round"].min(), max(data["round"].max(), 1)), ylim=(0, 100), xlabel="round")
        axes.locator_params(axis="x", integer=True)
        shares = "; ".join(f"{c} {share:.2f} %" for c, share in zip(CASES, overall, strict=True))
        text.append(f"{data['setting'][0]}, {name}: {shares} of {data['candidates'].sum()} candidates")
    for axes in panels[::4]:
        axes.set_ylabel("candidates, %")
    handles, names = panels[0].get_legend_handles_labels()
    drawn = {f"${n.split(':')[0]}$:{n.split(':')[1]}": handle for n, handle in zip(names, handles, strict=True)}
    legend(figure, drawn, "outside lower center", handlelength=1, handleheight=0.9)
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))
