"""The collaboration graph over the rounds, as adjacency matrices: who is chosen, who is in Omega.

Clients are ordered by their groups where the data have any, else by their most frequent class (then
the second, and so on), so that similar clients are blocks on the diagonal. Up to 24 clients that
have names are shown by them. One run: every tenth round, or every quarter of a short run. Several
runs: one row per run, with the first graph, the middle and the last. --rounds draws others.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import Drawing, cifar10, limit_panels
from dpfl_mpi.figures.frames import Frames, client_order, with_graphs
from dpfl_mpi.figures.names import labels, text_label, wrapped
from dpfl_mpi.figures.style import BLUE, DARK, GREY, TEXT, patches
from dpfl_mpi.graph import CollaborationGraph, asymmetry, sparsity, within
from dpfl_mpi.results import Result

RUNS = cifar10(budget=("inf", 20, 10, 5))
# A block is a group of clients, or those with the same most frequent class, or one client. Blocks
# are the clients in the order of their blocks [N], the number of each client's block [N], and the
# blocks' names.
Blocks = tuple[np.ndarray, np.ndarray, list[str]]
NAMED = 24  # clients at most whose names are shown
CHOSEN, LEFT_OUT = BLUE, "#F2B48C"  # dark and pale: distinct in grey print too
MEANING = {"chosen": CHOSEN, r"in $\Omega$, not chosen": LEFT_OUT, "the client itself": DARK}


def round_list(text: str) -> list[str]:
    """Return the words of --rounds: numbers, "last" or "every"."""
    words = text.split(",")
    if text != "every" and not all(word == "last" or word.isdecimal() for word in words):
        allowed = "allowed are round numbers and last, as in 0,50,last, or every"
        raise argparse.ArgumentTypeError(f"{text!r}; {allowed}")
    return words


ROUNDS = "rounds to draw: 0,50,last, or every"
OPTIONS: dict[str, Any] = {"rounds": {"type": round_list, "metavar": "R,R,...", "help": ROUNDS}}


def rounds_to_show(first: int, last: int, asked: Sequence[str], run: str) -> list[int]:
    """Return the rounds asked for. "every" is every tenth, or every quarter below 40 rounds."""
    if list(asked) == ["every"]:
        step = 10 if last >= 40 else max(1, -(-last // 4))
        return sorted({first, *range(step, last + 1, step), last})
    rounds = [last if r == "last" else int(r) for r in asked]
    if beyond := [r for r in rounds if not first <= r <= last]:
        graphs = f"{run} has graphs of rounds {first} to {last}"
        raise UserError(f"--rounds has {beyond[0]}, but {graphs}")
    return rounds


def round_name(t: int) -> str:
    return r"$\Omega$ (before round 1)" if t == 0 else f"round {t}"


def squares(
    axes: Axes,
    cells: np.ndarray,
    colours: Sequence[str],
    lines: Iterable[float],
    names: dict[float, str],
) -> None:
    """Draw a matrix of cells `[N, N]`, numbers of `colours`. The last colour is for the diagonal.

    `lines` are where lines separate blocks of clients; `names` are the blocks' names by position on
    both axes.
    """
    cells = cells.copy()
    last = len(colours) - 1
    np.fill_diagonal(cells, last)
    pixels: dict[str, Any] = {"interpolation": "nearest", "rasterized": True}
    axes.imshow(cells, cmap=ListedColormap(list(colours)), vmin=0, vmax=last, **pixels)
    for line in lines:
        axes.axhline(line, color=GREY, lw=0.25)
        axes.axvline(line, color=GREY, lw=0.25)
    texts = list(map(text_label, names.values()))
    axes.set_xticks(list(names), texts)
    axes.set_yticks(list(names), texts)
    axes.tick_params(length=0, labelsize=5, pad=1.5)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5)


def matrix(
    axes: Axes, chosen: CollaborationGraph, omega: CollaborationGraph, blocks: Blocks, t: int
) -> None:
    """Draw round t's graph as a matrix: who chose whom, and who is in Omega."""
    order, block, block_names = blocks
    n = len(order)
    # the name of each block, in its middle, where it overlaps no other
    starts = np.flatnonzero(np.diff(block[order], prepend=-2))
    upright = all(len(name) < 3 for name in block_names)
    names = {}
    for start, end in zip(starts, np.append(starts[1:], n), strict=True):
        name = dict(enumerate(block_names)).get(int(block[order[start]]), "-1")
        fits = (end - start) / n >= 0.04 * (len(name) if upright else 1)
        names[(start + end - 1) / 2] = name if fits else ""
    cells = np.where(chosen.matrix(), 2, np.where(omega.matrix(), 1, 0))[np.ix_(order, order)]
    squares(axes, cells, ("white", LEFT_OUT, CHOSEN, DARK), starts[1:] - 0.5, names)
    if not upright:  # long names are turned below, and beside the first column of panels alone
        axes.tick_params(axis="x", labelrotation=90)
        panel = axes.get_subplotspec()
        axes.tick_params(axis="y", labelleft=panel is not None and panel.is_first_col())
    axes.set_title(f"{round_name(t)}\nsparsity {100 * sparsity(chosen):.1f} %", fontsize=7, pad=3)


def blocks_of(clients: pd.DataFrame, result: Result | None) -> Blocks:
    """Return the blocks of a Run's clients, which are lines of the frame `clients`."""
    order, block = client_order(clients["classes"], groups := clients.get("group"))
    if groups is not None:
        return order, block, sorted(set(groups))
    names = list(map(str, range(block.max() + 1)))  # without a result names are not known
    return order, block, result.class_names if result else names


def draw_rounds(
    rows: Sequence[Sequence[int]], names: Sequence[str], draw: Callable[[Axes, int, int], None]
) -> Figure:
    """Return a figure with a panel for each round of each row, at most 6 side by side."""
    # `rows` are lists of rounds, with `names`; `draw(axes, i, t)` draws round t of row i
    columns = min(max(map(len, rows)), 6)
    heights = [-(-len(rounds) // columns) for rounds in rows]
    side = min(TEXT / columns, 2.3)
    size = (side * columns, (side + 0.22) * sum(heights) + 0.3)
    layout: dict[str, Any] = {"squeeze": False, "layout": "constrained"}
    figure, grid = plt.subplots(sum(heights), columns, figsize=size, **layout)
    for axes in grid.flat:
        axes.set_axis_off()
    for i, rounds in enumerate(rows):
        for j, t in enumerate(rounds):
            axes = grid[sum(heights[:i]) + j // columns, j % columns]
            axes.set_axis_on()
            draw(axes, i, t)
            if j == 0:
                axes.set_ylabel(wrapped(names[i], 24), fontsize=7)
    return figure


def measure(graph: CollaborationGraph, shared: np.ndarray) -> dict[str, float]:
    """Return measures of a graph; `shared`: which clients share a class, bool `[N, N]`."""
    n, edges = graph.n, len(graph.senders)
    one_way, pairs = asymmetry(graph)
    return {
        "edges": edges,
        "sparsity": sparsity(graph),
        "one_way_edges": one_way,
        "one_way_pairs": pairs,
        "edges_sharing_a_class": shared[graph.receivers(), graph.senders].sum() / max(edges, 1),
        "pairs_sharing_a_class": shared.sum() / max(n * (n - 1), 1),
    }


def draw(frames: Frames, rounds: Sequence[str] | None = None) -> Drawing:
    # by Run and round, a function that reads the graph
    graphs = {}
    for run, lines in with_graphs(frames).groupby("run"):
        graphs[run] = dict(zip(lines["t"], lines["graph"], strict=True))
    runs = frames.runs[frames.runs["run"].isin(graphs)]
    keys = ["order", "method", "seed"]
    runs = runs.sort_values(keys, ascending=[False, True, True], kind="stable")
    runs, text = limit_panels(runs)
    several, names, lines = len(runs) > 1, labels(runs), list(runs.itertuples())
    # the rounds of each Run that are drawn
    shown = []
    for r in lines:
        first, last = min(graphs[r.run]), max(graphs[r.run])
        three = sorted({first, max(first, last // 2), last})
        asked = rounds or (["every"] if not several else list(map(str, three)))
        shown.append(rounds_to_show(first, last, asked, r.run))
    lines_of = frames["clients"].groupby("run")
    clients = {run: part.dropna(axis="columns", how="all") for run, part in lines_of}
    blocks = {r.run: blocks_of(clients[r.run], getattr(r, "result", None)) for r in lines}
    for run, of_run in clients.items():
        if run in blocks and len(of_run) <= NAMED and "name" in of_run:
            short = [name if len(name) < 20 else f"{name[:18]}..." for name in of_run["name"]]
            blocks[run] = blocks[run][0], np.arange(len(short)), short

    def panel(axes: Axes, i: int, t: int) -> None:
        line, of_run = lines[i], graphs[lines[i].run]
        chosen = of_run[t]()
        is_recorded = 0 in of_run and t < line.omega_until  # else this round has another Omega
        omega = of_run[0]() if is_recorded else CollaborationGraph.empty(chosen.n)
        matrix(axes, chosen, omega, blocks[line.run], t)

    figure = draw_rounds(shown, names if several else [""], panel)
    kinds = {"group" if "group" in clients[r.run] else "most frequent class" for r in lines}
    figure.supxlabel(f"sender, by {' or '.join(sorted(kinds))}", fontsize=7)
    figure.supylabel(f"receiver, by {' or '.join(sorted(kinds))}", fontsize=7)
    pads = {"w_pad": 0.01, "h_pad": 0.02, "wspace": 0.02, "hspace": 0.02}
    figure.get_layout_engine().set(**pads)  # type: ignore[union-attr]
    patches(figure, MEANING)
    # the numbers and the text of each Run and round drawn
    data = []
    for r, drawn in zip(lines, shown, strict=True):
        sets = [set(classes.split()) for classes in clients[r.run]["classes"]]
        shared = np.array([[bool(a & b) for b in sets] for a in sets])
        shared &= ~np.eye(len(sets), dtype=bool)
        groups = clients[r.run].get("group")
        columns_of_run = {key: getattr(r, key) for key in ("method", "setting", "budget", "seed")}
        text.append(f"{r.row} on {r.setting}, {r.seed_text}")
        for t in drawn:
            values = measure(graphs[r.run][t](), shared)
            data.append({"run": Path(r.run).stem} | columns_of_run | {"round": t} | values)
            edges = f"{values['edges']:5d} edges, sparsity {100 * values['sparsity']:5.1f} %"
            inside, what = "sharing_a_class", "between clients that share a class"
            if groups is not None:
                shares = within(graphs[r.run][t](), groups.to_numpy(str))
                inside, what = "inside_a_group", "inside a group"
                data[-1] |= dict(zip((f"edges_{inside}", f"pairs_{inside}"), shares, strict=True))
            alike = f"{100 * data[-1][f'edges_{inside}']:5.1f} % {what}"
            pairs = f"(of all pairs {100 * data[-1][f'pairs_{inside}']:.1f} %)"
            text.append(f"  round {t:3d}: {edges}, {alike} {pairs}")
        if max(drawn) >= r.omega_until:
            change = f"from round {r.omega_until:.0f} on Omega is another, which is not recorded"
            text.append(f"  {change}: clients in it that are not chosen are not shown")
    return Drawing(pd.DataFrame(data), figure, "\n".join(text))
