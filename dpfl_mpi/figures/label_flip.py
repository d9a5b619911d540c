"""Who listens to clients whose labels are flipped: 40 % of the clients train on permuted labels (CIFAR-10).

One row per run, with flipped clients that only train locally and with flipped clients that search too: the graph before round 1 and at the end, the
clients grouped into benign and flipped; the share of benign clients' edges that come from flipped ones over rounds; and its distribution over the
benign clients at the end. With --rounds the graphs of these rounds alone: "every" is every tenth, as the paper shows them.
"""

import argparse
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import Drawing, cifar10, few
from dpfl_mpi.figures.frames import Frames, client_order, ranked_classes, with_graphs
from dpfl_mpi.figures.graph_evolution import panels, round_list, rounds_to_show, squares, when
from dpfl_mpi.figures.names import setting
from dpfl_mpi.figures.style import BLUE, DARK, GREY, PALE, RED, TEXT, patches
from dpfl_mpi.results import Result

RUNS = cifar10(budget="inf", flip_share=0.4, flipped_run_ggc=(False, True))
OPTIONS = {"rounds": {"metavar": "R,R,...", "help": "draw the graphs of these rounds, such as 0,50,last, or every"}}


def shares(adjacency: np.ndarray, flip: np.ndarray) -> np.ndarray:
    """Return for each benign client with senders the share of them that is flipped."""
    rows = adjacency[~flip]
    degree = rows.sum(1)
    return np.asarray(rows[:, flip].sum(1)[degree > 0] / degree[degree > 0])


def edge_share(adjacency: np.ndarray, flip: np.ndarray) -> float:
    """Return the share of all benign clients' edges that come from flipped clients (0 without edges)."""
    rows = adjacency[~flip]
    return float(rows[:, flip].sum() / max(rows.sum(), 1))


def chance(flip: np.ndarray) -> float:
    """Return the share of flipped clients among those whom a benign one may choose."""
    return float(flip.sum() / (len(flip) - 1))


def matrix(axes: Axes, result: Result, t: int) -> None:
    """Draw a round's graph, benign clients first, each group ordered by class; an edge has the colour of its sender's group."""
    flip, (order, _) = result["client/flipped"], client_order(ranked_classes(result))
    order = np.concatenate([order[~flip[order]], order[flip[order]]])
    cells = np.where(result.graph(t), np.where(flip, 2, 1)[None, :], 0)[np.ix_(order, order)]
    n, benign = len(flip), int((~flip).sum())
    names = {(benign - 1) / 2: "benign", (n + benign - 1) / 2: "flipped"}
    squares(axes, cells, ("white", BLUE, RED, DARK), [benign - 0.5], names)
    axes.tick_params(axis="y", labelrotation=90)
    axes.set_title(when(t), fontsize=7)


def draw(frames: Frames, rounds: str | Sequence[int | str] | None = None) -> Drawing:
    with_graphs(frames)
    files = frames.files[[r.method.topology == "graph" and "client/flipped" in r for r in frames.files["result"]]]
    runs = files[[0 < r["client/flipped"].sum() < r.run.clients for r in files["result"]]]
    if not len(runs):
        raise UserError("none of these results has clients with flipped labels (--flip_share)")
    searching = runs["result"].map(lambda r: r.run.flipped_run_ggc)
    runs = runs.assign(name=np.where(searching, "flipped clients search too", "flipped clients only train"))
    runs, text = few(runs.sort_values("name", kind="stable"))
    results, names = list(runs["result"]), list(runs["name"])
    figure, grid = plt.subplots(len(results), 4, figsize=(TEXT, 1.95 * len(results) + 0.25), squeeze=False)
    rows = []
    for (first, end, over, histogram), result, name in zip(grid, results, names, strict=True):
        flip, last = result["client/flipped"], result.last_round
        matrix(first, result, 0)
        matrix(end, result, last)
        first.set_ylabel(name, fontsize=7)
        line = 100 * np.array([edge_share(result.graph(t), flip) for t in range(last + 1)])
        by_chance = 100 * chance(flip)
        over.plot(line, color=RED)
        over.axhline(by_chance, color=GREY, lw=0.6, ls=":")
        over.set_ylim(0, max(by_chance, line.max()) * 1.15)
        over.text(last, by_chance, "chance ", ha="right", va="bottom", fontsize=6, color=GREY)
        over.set(xlabel="round", ylabel="edges from flipped, %")
        over.locator_params(axis="x", integer=True)
        share = 100 * shares(result.graph(last), flip)
        histogram.hist(share, bins=np.arange(0, 101, 10), color=PALE, edgecolor=DARK, lw=0.5)
        histogram.set(xlabel=f"collaborators flipped, %\n(round {last})", ylabel="benign clients")
        histogram.locator_params(axis="y", integer=True)
        text.append(
            f"{setting(result.run)}, B_c = {result.run.said_budget}, seed {result.run.seed}, {name}: "
            f"benign clients take {share.mean() if len(share) else 0:.1f} % of their collaborators from flipped ones in round {last} (mean over "
            f"{len(share)} clients that have any), {line[0]:.1f} % of all their edges in Omega, {line[-1]:.1f} % in round {last}; "
            f"by chance {by_chance:.1f} %"
        )
        who = {"run": result.path.stem, "flipped_run_ggc": result.run.flipped_run_ggc, "round": range(last + 1)}
        rows.append(pd.DataFrame(who | {"edge_share_from_flipped": line / 100, "chance": by_chance / 100}))
    if rounds is not None:
        plt.close(figure)
        try:
            asked = None if rounds == "every" else round_list(rounds) if isinstance(rounds, str) else rounds
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--rounds is {error}, or every") from None
        shown = [rounds_to_show(0, r.last_round, asked, False, str(r.path)) for r in results]
        figure = panels(shown, names, min(max(map(len, shown)), 6), lambda axes, i, t: matrix(axes, results[i], t))
    patches(figure, {"from a benign client": BLUE, "from a flipped client": RED}, "outside upper left")
    return Drawing(pd.concat(rows, ignore_index=True), figure, "\n".join(text))
