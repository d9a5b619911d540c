"""The collaboration graph as adjacency matrices over the rounds: who is chosen, and who is in Omega but not chosen.

Clients are ordered by their most frequent class (then the second, and so on), so that groups of alike clients show as blocks on the diagonal.
One run: every tenth round. Several runs, or --budgets: one row per run; the first graph, the middle and the last.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from _common import (
    BLUE,
    DARK,
    GREY,
    TEXT,
    Drawing,
    client_order,
    dominant_class,
    first_graph,
    graphs,
    main,
    omega_until,
)

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import few, labels, singles
from _names import budget_order, label, plain, setting
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import asymmetry, sparsity
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [Run(dataset="cifar10", budget=budget) for budget in ("inf", 20, 10, 5)]

CHOSEN, LEFT_OUT = BLUE, "#F2B48C"  # dark on pale: told apart in grey print too
COLOURS = ListedColormap(["white", LEFT_OUT, CHOSEN, DARK])


def round_list(text: str) -> list[int | str]:
    """Return the rounds of an argument such as "0,50,last"."""
    out: list[int | str] = [w if w == "last" else int(w) for w in text.split(",") if w == "last" or w.isdecimal()]
    if len(out) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are round numbers and last, as in 0,50,last")
    return out


def rounds_to_show(result: Result, asked: Sequence[int | str] | None, several: bool) -> list[int]:
    """Return the rounds to draw: those asked for, else the first, the middle and the last, or every tenth (a quarter of a short run)."""
    first, last = first_graph(result), result.last_round
    if asked:
        rounds = [last if r == "last" else int(r) for r in asked]
        beyond = [r for r in rounds if r > last]
        if beyond:
            raise UserError(f"--rounds has {beyond[0]}, but {result.path} ends with round {last}")
        return rounds
    if several:
        return sorted({first, max(first, last // 2), last})
    step = 10 if last >= 40 else max(1, -(-last // 4))
    return sorted({first, *range(step, last + 1, step), last})


def cells(chosen: np.ndarray, omega: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return int `[N, N]` in the order of the clients `[N]`: 0 not in Omega, 1 in Omega but not chosen, 2 chosen, 3 the client itself."""
    out = np.where(chosen, 2, np.where(omega, 1, 0))
    np.fill_diagonal(out, 3)
    return out[np.ix_(order, order)]


def measure(result: Result, rounds: Sequence[int]) -> pd.DataFrame:
    """Return one row per round: edges, sparsity (the clients themselves counted), asymmetry, share of edges between clients that share a class."""
    held = (result["client/class_counts"] > 0).astype(int)
    shared = held @ held.T > 0
    np.fill_diagonal(shared, False)
    n = len(held)
    rows = []
    for t in rounds:
        a = result.graph(t)
        one_way, pairs = asymmetry(a)
        rows.append(
            {
                "path": str(result.path),
                "run": result.path.stem,
                "method": result.run.method,
                "setting": setting(result.run),
                "budget": str(result.run.budget),
                "seed": result.run.seed,
                "round": t,
                "edges": int(a.sum()),
                "sparsity": sparsity(a),
                "one_way_edges": one_way,
                "one_way_pairs": pairs,
                "edges_sharing_a_class": (a & shared).sum() / max(a.sum(), 1),
                "pairs_sharing_a_class": shared.sum() / max(n * (n - 1), 1),
            }
        )
    return pd.DataFrame(rows)


def matrix(axes: Axes, chosen: np.ndarray, omega: np.ndarray, order: np.ndarray, classes: np.ndarray, t: int) -> None:
    """Draw round t's adjacency matrix in the order of the clients `[N]`, with lines and numbers for their most frequent classes `[N]`."""
    n = len(order)
    axes.imshow(cells(chosen, omega, order), cmap=COLOURS, vmin=0, vmax=3, interpolation="nearest", rasterized=True)
    starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
    ends = np.append(starts[1:], n)
    for start in starts[1:]:
        axes.axhline(start - 0.5, color=GREY, lw=0.25)
        axes.axvline(start - 0.5, color=GREY, lw=0.25)
    names = [str(classes[order[s]]) if e - s >= 0.04 * n else "" for s, e in zip(starts, ends, strict=True)]
    axes.set_xticks((starts + ends - 1) / 2, names)
    axes.set_yticks((starts + ends - 1) / 2, names)
    axes.tick_params(length=0, labelsize=5, pad=1.5)
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_linewidth(0.5)
    name = r"$\Omega$ (before round 1)" if t == 0 else f"round {t}"
    axes.set_title(f"{name}\nsparsity {100 * sparsity(chosen):.1f} %", fontsize=7, pad=3)


def panel(axes: Axes, result: Result, t: int) -> None:
    """Draw one adjacency matrix of a result; who is in Omega but not chosen only where the recorded Omega is that of the round."""
    omega = result.omega().matrix() & (t < omega_until(result))
    matrix(axes, result.graph(t), omega, client_order(result), dominant_class(result), t)


def legend(figure: Figure) -> None:
    """Draw what the colours mean."""
    figure.legend(
        handles=[
            Patch(color=CHOSEN, label="chosen"),
            Patch(color=LEFT_OUT, label=r"in $\Omega$, not chosen"),
            Patch(color=DARK, label="the client itself"),
        ],
        loc="outside upper center",
        ncols=3,
        handlelength=0.9,
        handleheight=0.9,
    )


def draw(results: Sequence[Result], rounds: Sequence[int | str] | None = None, budgets: str | None = None) -> Drawing:
    """Return the figure: one run over many rounds, or one row per run."""
    results = sorted(graphs(results), key=lambda r: (-budget_order(r.run), r.run.method, r.run.seed))
    if budgets:
        asked = budgets.split(",")
        results = [r for b in asked for r in results if str(r.run.budget) == b]
        if not results:
            raise UserError(f"--budgets is {budgets}; none of the results has one of these")
    results, left_out = few(results)
    several = len(results) > 1
    names = labels(singles(results))
    shown = {r.path: rounds_to_show(r, rounds, several) for r in results}
    wide = max(len(s) for s in shown.values())
    # the fewest empty cells
    columns = wide if several or wide <= 5 else 3 if wide == 6 else min((5, 4), key=lambda c: -wide % c)
    rows = len(results) if several else -(-wide // columns)
    side = min(TEXT / columns, 2.3)
    figure, grid = plt.subplots(
        rows, columns, figsize=(side * columns, (side + 0.22) * rows + 0.3), squeeze=False, layout="constrained"
    )
    for a in grid.flat:
        a.set_axis_off()
    for i, result in enumerate(results):
        for j, t in enumerate(shown[result.path]):
            axes = grid[i, j] if several else grid.flat[j]
            axes.set_axis_on()
            panel(axes, result, t)
            if several and j == 0:
                axes.set_ylabel("\n".join(textwrap.wrap(names[i], 24)), fontsize=7)
    figure.supxlabel("sender, by most frequent class", fontsize=7)
    figure.supylabel("receiver, by most frequent class", fontsize=7)
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.02, wspace=0.02, hspace=0.02)  # type: ignore[union-attr]
    legend(figure)
    data = pd.concat([measure(r, shown[r.path]) for r in results], ignore_index=True)
    lines = [left_out] if left_out else []
    for result, name in zip(results, names, strict=True):
        part = data[data["path"] == str(result.path)]
        lines.append(f"{plain(label(result.run))} on {setting(result.run)}, seed {result.run.seed}")
        lines[-1] += f": {plain(name)}" if several else ""
        lines += [
            f"  round {r['round']:3d}: {r.edges:5d} edges, sparsity {100 * r.sparsity:5.1f} %, "
            f"{100 * r.edges_sharing_a_class:5.1f} % between clients that share a class (of all pairs {100 * r.pairs_sharing_a_class:.1f} %)"
            for _, r in part.iterrows()
        ]
        if max(shown[result.path]) >= omega_until(result):
            lines.append(
                f"  from round {omega_until(result)} on Omega is another, which is not recorded: who is in it but not chosen is left out"
            )
    return Drawing(data.drop(columns="path"), figure, "\n".join(lines))


OPTIONS = {
    "rounds": {"type": round_list, "metavar": "R,R,...", "help": "rounds to draw, such as 0,50,last"},
    "budgets": {"metavar": "B,B,...", "help": "budgets to draw, one row each, such as inf,20,10,5"},
}

if __name__ == "__main__":
    main("graph_evolution", __doc__, RUNS, draw, OPTIONS)
