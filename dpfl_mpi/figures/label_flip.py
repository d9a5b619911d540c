"""Who listens to clients whose labels are flipped: 40 % of the clients train on permuted labels.

One row per run: in one, flipped clients only train; in the other they also choose collaborators.
Each row shows the graph before round 1 and at the end (clients grouped into benign and flipped),
the share of benign clients' edges that come from flipped ones over the rounds, and the distribution
of that share at the end. With --rounds it shows only the graphs of these rounds; "every" is every
tenth, as in the paper.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import Drawing, cifar10, limit_panels
from dpfl_mpi.figures.frames import Frames, client_order, ranked_classes, with_graphs
from dpfl_mpi.figures.graph_evolution import OPTIONS as OPTIONS
from dpfl_mpi.figures.graph_evolution import draw_rounds, round_name, rounds_to_show, squares
from dpfl_mpi.figures.names import setting
from dpfl_mpi.figures.style import BLUE, DARK, GREY, PALE, RED, TEXT, patches
from dpfl_mpi.results import Result

RUNS = cifar10(budget="inf", flip_share=0.4, flipped_run_ggc=(False, True))


def shares(adjacency: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    """Return the share of flipped senders of each benign client that has senders."""
    # `adjacency` `[N, N]` says who receives from whom, `flipped` `[N]` whose labels are flipped
    rows = adjacency[~flipped]
    degree = rows.sum(1)
    return np.asarray(rows[:, flipped].sum(1)[degree > 0] / degree[degree > 0])


def edge_share(adjacency: np.ndarray, flipped: np.ndarray) -> float:
    """Return the share of benign clients' edges that come from flipped ones; 0 without edges."""
    rows = adjacency[~flipped]
    return float(rows[:, flipped].sum() / max(rows.sum(), 1))


def chance(flipped: np.ndarray) -> float:
    """Return the share of flipped clients among those that a benign one may choose."""
    return float(flipped.sum() / (len(flipped) - 1))


def matrix(axes: Axes, result: Result, t: int) -> None:
    """Draw a round's graph, benign clients first. An edge has the colour of its sender's group."""
    order, _ = client_order(ranked_classes(result), result.groups)
    flipped = result["client/flipped"]
    order = np.concatenate([order[~flipped[order]], order[flipped[order]]])
    colour = np.where(flipped, 2, 1)[None, :]
    cells = np.where(result.graph(t), colour, 0)[np.ix_(order, order)]
    n, benign = len(flipped), int((~flipped).sum())
    names = {(benign - 1) / 2: "benign", (n + benign - 1) / 2: "flipped"}
    squares(axes, cells, ("white", BLUE, RED, DARK), [benign - 0.5], names)
    axes.tick_params(axis="y", labelrotation=90)
    axes.set_title(round_name(t), fontsize=7)


def draw_row(panels: Sequence[Axes], result: Result, name: str) -> tuple[pd.DataFrame, str]:
    """Draw one run in four panels; return its numbers and a sentence."""
    first, end, over_rounds, histogram = panels
    flipped, last = result["client/flipped"], result.last_round
    # the graphs before round 1 and at the end
    matrix(first, result, 0)
    matrix(end, result, last)
    first.set_ylabel(name, fontsize=7)
    # the share of edges from flipped clients over the rounds
    line = 100 * np.array([edge_share(result.graph(t), flipped) for t in range(last + 1)])
    by_chance = 100 * chance(flipped)
    over_rounds.plot(line, color=RED)
    over_rounds.axhline(by_chance, color=GREY, lw=0.6, ls=":")
    over_rounds.set_ylim(0, max(by_chance, line.max()) * 1.15)
    at_end: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 6, "color": GREY}
    over_rounds.text(last, by_chance, "chance ", **at_end)
    over_rounds.set(xlabel="round", ylabel="edges from flipped, %")
    over_rounds.locator_params(axis="x", integer=True)
    # how that share is distributed over benign clients at the end
    share = 100 * shares(result.graph(last), flipped)
    histogram.hist(share, bins=range(0, 101, 10), color=PALE, edgecolor=DARK, lw=0.5)
    histogram.set(xlabel=f"collaborators flipped, %\n(round {last})", ylabel="benign clients")
    histogram.locator_params(axis="y", integer=True)
    run, mean = result.run, share.mean() if len(share) else 0
    text = (
        f"{setting(run)}, B_c = {run.typed_budget}, seed {run.seed}, {name}: "
        f"in round {last} benign clients have {mean:.1f} % flipped collaborators (mean over "
        f"{len(share)} clients with any); of all their edges {line[0]:.1f} % come from flipped "
        f"ones in Omega, {line[-1]:.1f} % in round {last}, {by_chance:.1f} % by chance"
    )
    columns = {
        "run": result.path.stem,
        "flipped_run_ggc": run.flipped_run_ggc,
        "round": range(last + 1),
        "edge_share_from_flipped": line / 100,
        "chance": by_chance / 100,
    }
    return pd.DataFrame(columns), text


def draw(frames: Frames, rounds: Sequence[str] | None = None) -> Drawing:
    with_graphs(frames)

    def has_both_kinds(result: Result) -> bool:
        if result.method.topology != "graph" or "client/flipped" not in result:
            return False
        return 0 < result["client/flipped"].sum() < result.run.clients

    runs = frames.files[[has_both_kinds(r) for r in frames.files["result"]]]
    if not len(runs):
        raise UserError("none of these results has clients with flipped labels (--flip_share)")
    searching = [r.run.flipped_run_ggc for r in runs["result"]]
    kinds = np.where(searching, "flipped clients search too", "flipped clients only train")
    runs, text = limit_panels(runs.assign(name=kinds).sort_values("name", kind="stable"))
    results, names = list(runs["result"]), list(runs["name"])
    size = (TEXT, 1.95 * len(results) + 0.25)
    figure, grid = plt.subplots(len(results), 4, figsize=size, squeeze=False)
    parts = []
    for panels, result, name in zip(grid, results, names, strict=True):
        numbers, sentence = draw_row(panels, result, name)
        parts.append(numbers)
        text.append(sentence)
    if rounds:
        plt.close(figure)
        shown = [rounds_to_show(0, r.last_round, rounds, str(r.path)) for r in results]
        figure = draw_rounds(shown, names, lambda axes, i, t: matrix(axes, results[i], t))
    colours = {"from a benign client": BLUE, "from a flipped client": RED}
    patches(figure, colours, "outside upper left")
    return Drawing(pd.concat(parts, ignore_index=True), figure, "\n".join(text))
