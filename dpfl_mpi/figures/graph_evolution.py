"""The collaboration graph as adjacency matrices over the rounds: who is chosen, and who is in Omega but not chosen.

Clients are ordered by their most frequent class (then the second, and so on), so that groups of alike clients show as blocks on the diagonal.
One run: every tenth round. Several runs, or --budgets: one row per run; the first graph, the middle and the last.
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
from dpfl_mpi.figures.command import Drawing, cifar10, few
from dpfl_mpi.figures.frames import Frames, client_order, with_graphs
from dpfl_mpi.figures.names import labels, wrapped
from dpfl_mpi.figures.style import BLUE, DARK, GREY, TEXT, patches
from dpfl_mpi.graph import asymmetry, sparsity

RUNS = cifar10(budget=("inf", 20, 10, 5))
CHOSEN, LEFT_OUT = BLUE, "#F2B48C"  # dark on pale: told apart in grey print too
MEANING = {"chosen": CHOSEN, r"in $\Omega$, not chosen": LEFT_OUT, "the client itself": DARK}


def round_list(text: str) -> list[int | str]:
    out: list[int | str] = [w if w == "last" else int(w) for w in text.split(",") if w == "last" or w.isdecimal()]
    if len(out) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are round numbers and last, as in 0,50,last")
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    "rounds": {"type": round_list, "metavar": "R,R,...", "help": "rounds to draw, such as 0,50,last"},
    "budgets": {"metavar": "B,B,...", "help": "budgets to draw, one row each, such as inf,20,10,5"},
}


def rounds_to_show(first: int, last: int, asked: Sequence[int | str] | None, several: bool, run: str = "") -> list[int]:
    """Return the rounds to draw: those asked for, else the first, the middle and the last, or every tenth (a quarter of a short run)."""
    if asked:
        rounds = [last if r == "last" else int(r) for r in asked]
        if beyond := [r for r in rounds if not first <= r <= last]:
            raise UserError(f"--rounds has {beyond[0]}, but {run} has graphs of rounds {first} to {last}")
        return rounds
    if several:
        return sorted({first, max(first, last // 2), last})
    step = 10 if last >= 40 else max(1, -(-last // 4))
    return sorted({first, *range(step, last + 1, step), last})


def when(t: int) -> str:
    return r"$\Omega$ (before round 1)" if t == 0 else f"round {t}"


def squares(
    axes: Axes, cells: np.ndarray, colours: Sequence[str], lines: Iterable[float], names: dict[float, str]
) -> None:
    """Draw cells `[N, N]`, numbers of `colours`, the diagonal in the last, with lines between groups and their names on both axes, by place."""
    cells = cells.copy()
    np.fill_diagonal(cells, len(colours) - 1)
    how: dict[str, Any] = {"vmin": 0, "vmax": len(colours) - 1, "interpolation": "nearest", "rasterized": True}
    axes.imshow(cells, cmap=ListedColormap(list(colours)), **how)
    for line in lines:
        axes.axhline(line, color=GREY, lw=0.25)
        axes.axvline(line, color=GREY, lw=0.25)
    axes.set(xticks=list(names), xticklabels=list(names.values()), yticks=list(names), yticklabels=list(names.values()))
    axes.tick_params(length=0, labelsize=5, pad=1.5)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5)


def matrix(axes: Axes, chosen: np.ndarray, omega: np.ndarray, classes: Sequence[str], t: int) -> None:
    """Draw round t's graph, bool `[N, N]`, clients ordered by their classes, with lines and numbers for the most frequent ones."""
    order, most = client_order(classes)
    n = len(order)
    starts = np.flatnonzero(np.diff(most[order], prepend=-2))
    groups = zip(starts, np.append(starts[1:], n), strict=True)
    held = {(s + e - 1) / 2: (str(most[order[s]]), (e - s) / n) for s, e in groups}
    # none touches another
    names = {at: name if share >= 0.04 * len(name) else "" for at, (name, share) in held.items()}
    cells = np.where(chosen, 2, np.where(omega, 1, 0))[np.ix_(order, order)]
    squares(axes, cells, ("white", LEFT_OUT, CHOSEN, DARK), starts[1:] - 0.5, names)
    axes.set_title(f"{when(t)}\nsparsity {100 * sparsity(chosen):.1f} %", fontsize=7, pad=3)


def panels(
    rows: Sequence[Sequence[int]], names: Sequence[str], columns: int, draw: Callable[[Axes, int, int], None]
) -> Figure:
    """Return a figure with a panel for each round of each row, at most `columns` beside one another; `draw(axes, i, t)` draws that of row i."""
    lines = [-(-len(rounds) // columns) for rounds in rows]
    side = min(TEXT / columns, 2.3)
    size = (side * columns, (side + 0.22) * sum(lines) + 0.3)
    figure, grid = plt.subplots(sum(lines), columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat:
        axes.set_axis_off()
    for i, rounds in enumerate(rows):
        for j, t in enumerate(rounds):
            axes = grid[sum(lines[:i]) + j // columns, j % columns]
            axes.set_axis_on()
            draw(axes, i, t)
            if j == 0:
                axes.set_ylabel(wrapped(names[i], 24), fontsize=7)
    return figure


def measure(adjacency: np.ndarray, shared: np.ndarray) -> dict[str, float]:
    """Return edges, sparsity (the clients themselves counted), asymmetry, share of edges between clients that share a class, bool `[N, N]`."""
    n, edges = len(adjacency), int(adjacency.sum())
    one_way, pairs = asymmetry(adjacency)
    return {
        "edges": edges,
        "sparsity": sparsity(adjacency),
        "one_way_edges": one_way,
        "one_way_pairs": pairs,
        "edges_sharing_a_class": (adjacency & shared).sum() / max(edges, 1),
        "pairs_sharing_a_class": shared.sum() / max(n * (n - 1), 1),
    }


def draw(frames: Frames, rounds: Sequence[int | str] | None = None, budgets: str | None = None) -> Drawing:
    graphs = {run: dict(zip(each["t"], each["graph"], strict=True)) for run, each in with_graphs(frames).groupby("run")}
    runs = frames.runs[frames.runs["run"].isin(graphs)]
    runs = runs.sort_values(["order", "method", "seed"], ascending=[False, True, True], kind="stable")
    if budgets:
        has = {b: runs[(runs["budget"] == b) | (runs["said_budget"] == b)] for b in budgets.split(",")}
        if not len(runs := pd.concat([*has.values()])):
            raise UserError(f"--budgets is {budgets}; none of the results has one of these")
    lacks = [budget for budget, some in has.items() if not len(some)] if budgets else []
    runs, text = few(runs)
    text += [f"no result has B_c = {', '.join(lacks)}"] if lacks else []
    several, names, each = len(runs) > 1, labels(runs), list(runs.itertuples())
    shown = [rounds_to_show(min(graphs[r.run]), max(graphs[r.run]), rounds, several, r.run) for r in each]
    of_clients = {run: list(lines["classes"]) for run, lines in frames["clients"].groupby("run")}
    wide = max(map(len, shown))
    # the fewest empty cells
    columns = wide if several or wide <= 5 else 3 if wide == 6 else min((5, 4), key=lambda c: -wide % c)

    def panel(axes: Axes, i: int, t: int) -> None:  # in Omega but not chosen only where the recorded one is the round's
        mine = graphs[each[i].run]
        chosen = mine[t]().matrix()
        omega = mine[0]().matrix() if 0 in mine and t < each[i].omega_until else np.zeros_like(chosen)
        matrix(axes, chosen, omega, of_clients[each[i].run], t)

    figure = panels(shown, names if several else [""], columns, panel)
    figure.supxlabel("sender, by most frequent class", fontsize=7)
    figure.supylabel("receiver, by most frequent class", fontsize=7)
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.02, wspace=0.02, hspace=0.02)  # type: ignore[union-attr, call-arg]
    patches(figure, MEANING)
    data = []
    for r, ts, name in zip(each, shown, names, strict=True):
        who = {"run": Path(r.run).stem, "method": r.method, "setting": r.setting, "budget": r.budget, "seed": r.seed}
        held = [set(classes.split()) for classes in of_clients[r.run]]
        shared = np.array([[bool(a & b) for b in held] for a in held]) & ~np.eye(len(held), dtype=bool)
        text.append(f"{name} on {r.setting}, seed {r.seed}")
        for t in ts:
            line = measure(graphs[r.run][t]().matrix(), shared)
            data.append(who | {"round": t} | line)
            _, sparse, *_, alike, pairs = (100 * number for number in line.values())
            among = f"{alike:5.1f} % between clients that share a class (of all pairs {pairs:.1f} %)"
            text.append(f"  round {t:3d}: {line['edges']:5d} edges, sparsity {sparse:5.1f} %, {among}")
        if max(ts) >= r.omega_until:
            another = "Omega is another, which is not recorded: who is in it but not chosen is left out"
            text.append(f"  from round {r.omega_until:.0f} on {another}")
    return Drawing(pd.DataFrame(data), figure, "\n".join(text))
