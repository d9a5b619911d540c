"""Who listens to clients whose labels are flipped: 40 % of the clients train on permuted labels (CIFAR-10).

One row per run, with flipped clients that only train locally and with flipped clients that search too: the graph before round 1 and at the end, the
clients grouped into benign and flipped; the share of benign clients' edges that come from flipped ones over rounds; and its distribution over the
benign clients at the end. With --rounds the graphs of these rounds alone: "every" is every tenth, as the paper shows them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from _common import BLUE, DARK, GREY, PALE, RED, TEXT, Drawing, client_order, graphs, main

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import few
from _names import budget_label, setting
from graph_evolution import round_list, rounds_to_show
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [Run(dataset="cifar10", budget="inf", flip_share=0.4, flipped_run_ggc=searches) for searches in (False, True)]
COLOURS = ListedColormap(["white", BLUE, RED, DARK])


def flipped(result: Result) -> np.ndarray:
    """Return which clients have flipped labels, bool `[N]`."""
    return result["client/flipped"].astype(bool)


def shares(adjacency: np.ndarray, flip: np.ndarray) -> np.ndarray:
    """Return for each benign client with senders the share of them that is flipped."""
    rows = adjacency[~flip]
    degree = rows.sum(1)
    return rows[:, flip].sum(1)[degree > 0] / degree[degree > 0]


def edge_share(adjacency: np.ndarray, flip: np.ndarray) -> float:
    """Return the share of all benign clients' edges that come from flipped clients (0 without edges)."""
    rows = adjacency[~flip]
    return float(rows[:, flip].sum() / max(rows.sum(), 1))


def matrix(axes: Axes, result: Result, t: int) -> None:
    """Draw a round's graph, benign clients first, each group ordered by class; an edge has the colour of its sender's group."""
    flip = flipped(result)
    order = client_order(result)
    order = np.concatenate([order[~flip[order]], order[flip[order]]])
    cells = np.where(result.graph(t), np.where(flip, 2, 1)[None, :], 0)
    np.fill_diagonal(cells, 3)
    axes.imshow(cells[np.ix_(order, order)], cmap=COLOURS, vmin=0, vmax=3, interpolation="nearest", rasterized=True)
    n, benign = len(flip), int((~flip).sum())
    axes.axhline(benign - 0.5, color=GREY, lw=0.5)
    axes.axvline(benign - 0.5, color=GREY, lw=0.5)
    axes.set_xticks([(benign - 1) / 2, (n + benign - 1) / 2], ["benign", "flipped"])
    axes.set_yticks([(benign - 1) / 2, (n + benign - 1) / 2], ["benign", "flipped"], rotation=90, va="center")
    axes.tick_params(length=0, labelsize=6)
    for spine in axes.spines.values():
        spine.set_visible(True)
    axes.set_title(r"$\Omega$ (before round 1)" if t == 0 else f"round {t}", fontsize=7)


def evolution(results: Sequence[Result], rounds: str) -> Figure:
    """Return the graphs of the rounds asked for, one row per run."""
    try:
        asked = None if rounds == "every" else round_list(rounds)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--rounds is {error}, or every") from None
    shown = [rounds_to_show(r, asked, several=False) for r in results]
    most = max(map(len, shown))
    columns, lines = min(most, 6), -(-most // 6)  # lines per run
    height = (TEXT / columns + 0.15) * lines * len(results) + 0.3
    figure, grid = plt.subplots(lines * len(results), columns, figsize=(TEXT, height), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for i, (result, ts) in enumerate(zip(results, shown, strict=True)):
        for j, t in enumerate(ts):
            axes = grid[i * lines + j // columns, j % columns]
            axes.set_axis_on()
            matrix(axes, result, t)
            if j == 0:
                axes.set_ylabel(name_of(result), fontsize=7)
    return figure


def name_of(result: Result) -> str:
    """Return what the flipped clients of a run do."""
    searches = result.run.flipped_run_ggc
    return "flipped clients search too" if searches else "flipped clients only train"


def draw(results: Sequence[Result], rounds: str | None = None) -> Drawing:
    """Return the figure: graphs and shares, or with `rounds` the graphs of these rounds."""
    results = [r for r in graphs(results) if "client/flipped" in r and 0 < flipped(r).sum() < len(flipped(r))]
    if not results:
        raise UserError("none of these results has clients with flipped labels (--flip_share)")
    results, left_out = few(sorted(results, key=lambda r: r.run.flipped_run_ggc))
    figure, grid = plt.subplots(len(results), 4, figsize=(TEXT, 1.95 * len(results) + 0.25), squeeze=False)
    rows, text = [], [left_out] if left_out else []
    for (first, end, over, histogram), result in zip(grid, results, strict=True):
        flip, last = flipped(result), result.last_round
        matrix(first, result, 0)
        matrix(end, result, last)
        name = name_of(result)
        first.set_ylabel(name, fontsize=7)
        line = [edge_share(result.graph(t), flip) for t in range(last + 1)]
        chance = flip.sum() / (len(flip) - 1)
        over.plot(100 * np.array(line), color=RED)
        over.axhline(100 * chance, color=GREY, lw=0.6, ls=":")
        over.set_ylim(0, max(100 * chance, 100 * max(line)) * 1.15)
        over.text(last, 100 * chance, "chance ", ha="right", va="bottom", fontsize=6, color=GREY)
        over.set_xlabel("round")
        over.set_ylabel("edges from flipped, %")
        share = shares(result.graph(last), flip)
        histogram.hist(100 * share, bins=np.arange(0, 101, 10), color=PALE, edgecolor=DARK, lw=0.5)
        histogram.set_xlabel(f"collaborators flipped, %\n(round {last})")
        histogram.set_ylabel("benign clients")
        histogram.yaxis.set_major_locator(MaxNLocator(integer=True))
        mean = 100 * share.mean() if len(share) else 0.0
        text.append(
            f"{setting(result.run)}, {budget_label(result.run).strip('$').replace(chr(92) + 'infty', 'inf')}, seed {result.run.seed}, {name}: "
            f"benign clients take {mean:.1f} % of their collaborators from flipped ones in round {last} (mean over {len(share)} clients that have "
            f"any), {100 * line[0]:.1f} % of all their edges in Omega, {100 * line[-1]:.1f} % in round {last}; by chance {100 * chance:.1f} %"
        )
        rows += [
            {
                "run": result.path.stem,
                "flipped_run_ggc": result.run.flipped_run_ggc,
                "round": t,
                "edge_share_from_flipped": s,
                "chance": chance,
            }
            for t, s in enumerate(line)
        ]
    if rounds is not None:
        plt.close(figure)
        figure = evolution(results, rounds)
    figure.legend(
        handles=[Patch(color=BLUE, label="from a benign client"), Patch(color=RED, label="from a flipped client")],
        loc="outside upper left",
        ncols=2,
        handlelength=0.9,
        handleheight=0.9,
    )
    return Drawing(pd.DataFrame(rows), figure, "\n".join(text))


OPTIONS = {"rounds": {"metavar": "R,R,...", "help": "draw the graphs of these rounds, such as 0,50,last, or every"}}

if __name__ == "__main__":
    main("label_flip", __doc__, RUNS, draw, OPTIONS)
