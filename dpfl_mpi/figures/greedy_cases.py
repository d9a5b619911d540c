"""How often each of the four cases of the greedy search occurs: whether adding helps (a > 0) and whether removing helps (b > 0).

One panel per run: the shares among all candidates considered in a round. Round 0 is the search for Omega.
"""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import sparsity
from dpfl_mpi.figures.command import Drawing, few
from dpfl_mpi.figures.frames import Frames, with_graphs
from dpfl_mpi.figures.names import budget_order, label, labels, setting, text_label
from dpfl_mpi.figures.style import BLUE, COLUMN, ORANGE, PALE, RED, TEXT, hide_rest, legend
from dpfl_mpi.graph import CASES
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS: list[Run] = sparsity.RUNS
COLOURS = (BLUE, PALE, ORANGE, RED)


def measure(result: Result) -> pd.DataFrame:
    """Return one line per round in which candidates were considered: how many, and the share of each case."""
    cases = result["graph/cases"].sum(1)
    rounds = np.flatnonzero(cases.sum(1) > 0)
    total = cases[rounds].sum(1)
    who = {"run": result.path.stem, "setting": setting(result.run), "method": label(result.run)}
    shares = pd.DataFrame(cases[rounds] / total[:, None], columns=list(CASES))
    return pd.concat([pd.DataFrame(who | {"round": rounds, "candidates": total}), shares], axis=1)


def draw(frames: Frames) -> Drawing:
    with_graphs(frames)
    results = [r for r in frames.results if r["graph/cases"].any()]
    if not results:
        raise UserError("none of these results has searched for its graph")
    results.sort(key=lambda r: (-budget_order(r.run), r.run.seed))
    runs, text = few(frames.singles(results))
    results = [r for r in results if str(r.path) in set(runs["run"])]
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    width = COLUMN if columns == 1 else TEXT
    figure, grid = plt.subplots(rows, columns, figsize=(width, 1.8 * rows + 0.4), squeeze=False, sharey=True)
    parts = [measure(r) for r in results]
    for axes, data, name in zip(grid.flat, parts, labels(runs), strict=False):
        axes.stackplot(data["round"], *(100 * data[c] for c in CASES), colors=COLOURS, labels=CASES, lw=0)
        overall = [100 * np.average(data[c], weights=data["candidates"]) for c in CASES]
        wrapped = textwrap.wrap(text_label(name), 26 if columns > 2 else 50)
        axes.set_title("\n".join([*wrapped, f"both positive: {overall[3]:.1f} %"]), fontsize=7)
        axes.set_xlim(data["round"].min(), max(data["round"].max(), 1))
        axes.set_ylim(0, 100)
        axes.set_xlabel("round")
        shares = "; ".join(f"{c} {share:.2f} %" for c, share in zip(CASES, overall, strict=True))
        text.append(f"{data['setting'][0]}, {name}: {shares} of {data['candidates'].sum()} candidates")
    hide_rest(list(grid.flat)[len(results) :])
    for axes in grid[:, 0]:
        axes.set_ylabel("candidates, %")
    handles, names = grid[0, 0].get_legend_handles_labels()
    drawn = {f"${n.split(':')[0]}$:{n.split(':')[1]}": handle for n, handle in zip(names, handles, strict=True)}
    legend(figure, drawn, "outside lower center", handlelength=1, handleheight=0.9)
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))
