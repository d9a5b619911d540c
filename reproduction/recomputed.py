"""The tables and pictures of `reproduction/README.md`, of the frames of its CSV files. A table is a generator of its lines.

The paper's row stands beside ours: whether ours is where the paper's noise lets it fall, and which of its claims on the order of methods hold.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtrit

from dpfl_mpi.figures import graph_evolution, paper, random_graph, variance
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.label_flip import chance, edge_share
from dpfl_mpi.figures.motivation import group_name
from dpfl_mpi.figures.names import text_label
from dpfl_mpi.figures.style import BLUE, DARK, GREY, TEXT, curves
from dpfl_mpi.figures.tables import (
    Parts,
    by_budget,
    comparable,
    difference_text,
    interval,
    markdown,
    mean_text,
    means,
    paired,
)
from dpfl_mpi.graph import asymmetry, sparsity

Lines = Iterator[dict[str, str]]
CURVES = ("Local", "FedAvg", "Ditto", "DPFL (B_c = inf)", "DPFL (B_c = 0.1N)")  # of the accuracy over epochs
DPFL = {f"DPFL (B_c = {budget})": budget for budget in paper.BUDGETS}


def text(lines: Iterable[Mapping[str, str]] | pd.DataFrame | str) -> str:
    """Return a table as markdown, a word where it has no line."""
    return lines if isinstance(lines, str) else markdown(pd.DataFrame(lines)) or "(not run)"


def error_over_clients(parts: Parts) -> float:
    """Return the standard error of the mean of paired differences over the clients within their partitions, in points.

    The partitions are taken as given: sqrt(sum of s**2 / n) / partitions, s being the deviation over a partition's n clients.
    """
    return float(np.sqrt(sum(part.var(ddof=1) / len(part) for part in parts)) / len(parts))


def over_clients(parts: Parts) -> float:
    """Return the half width of its 95 % interval, t(sum of n - 1)."""
    return float(stdtrit(sum(len(part) - 1 for part in parts), 0.975) * error_over_clients(parts))


def verdict(values: np.ndarray, mean: float, spread: float) -> str:
    """Return whether the mean over our partitions is where the paper's noise lets the mean of as many others fall, with 95 %.

    Student's prediction interval: t(2) * s * sqrt(1/n + 1/3), s = `spread` the paper's deviation over its three seeds.
    """
    noise = stdtrit(paper.SEEDS - 1, 0.975) * spread * np.sqrt(1 / len(values) + 1 / paper.SEEDS)
    gap = values.mean() - mean
    return (f"within ({gap:+.2f}, " if abs(gap) <= noise else f"**off by {gap:+.2f}** (") + f"noise ± {noise:.2f})"


def where(frames: Frames) -> str:
    return str(frames.rows["setting"][0])


def paper_gap(frames: Frames, a: str, b: str) -> str:
    one, two = (paper.table_1(where(frames), row) for row in (a, b))
    return f"{float(one[0]) - float(two[0]):+.2f}" if one and two and a != b else "-"


def table_1(frames: Frames) -> Lines:
    lines = frames["clients"]
    for row in paper.TABLE_1:
        values, theirs = means(lines, row), paper.table_1(where(frames), row)
        difference = paired(lines, row, "Local") if row != "Local" else []
        yield {
            "method": row,
            "ours, %": mean_text(values),
            "paper, %": " ± ".join(theirs or "-"),
            "to Local, paired": difference_text(difference),
            "over clients": f"± {over_clients(difference):.2f}" if comparable(difference) else "-",
            "paper, to Local": paper_gap(frames, row, "Local"),
            "verdict": verdict(values, *map(float, theirs)) if len(values) and theirs else "-",
        }


def order(frames: Frames) -> Lines:
    for a, b in paper.ORDER:
        if comparable(parts := paired(frames["clients"], a, b)):
            (mean, half), within = interval(parts), over_clients(parts)
            decided = len(parts) > 1 and abs(mean) > max(half, within)  # 0 is outside both intervals
            found = "holds" if mean > 0 else "**does not hold**"
            yield {
                "claim": f"{a} > {b}",
                "ours": difference_text(parts),
                "over clients": f"± {within:.2f}",
                "paper": paper_gap(frames, a, b),
                "": found if decided else "not decided",
            }


def ablation(frames: Frames, field: str, symbol: str, published: Mapping[int, str]) -> str:
    names = {f"{row}, {field} {value}" for row in DPFL for value in published} | {*DPFL}
    rows = frames.rows[frames.rows["row"].isin(names)].assign(variant="")
    return by_budget(frames, rows, field, symbol, published, where(frames), bold=False)[1].partition("\n\n")[0]


def against(frames: Frames) -> pd.DataFrame:
    """Return DPFL beside the same method on a random graph, and on the graph of the clients that are best one by one."""
    rows = frames.runs["row"]
    found = random_graph.compared(frames.where(rows.isin(list(DPFL)) | rows.str.match("Random graph|Pairwise")))
    return found.assign(paper=paper.RANDOM_GRAPH.get(where(frames), "-"))


def graphs(frames: Frames) -> Lines:
    for row, budget in DPFL.items():
        drawn = frames.of("graphs", where(frames), row).sort_values("t")["graph"]
        ends = [graph().matrix() for graph in drawn.iloc[[0, -1]]]
        both = [(sparsity(matrix), *(1 - share for share in asymmetry(matrix))) for matrix in ends]
        sparse, edges, pairs = (f"{100 * a:.1f} to {100 * b:.1f}" for a, b in zip(*both, strict=True))
        yield {
            "B_c": budget,
            "sparsity, %": sparse,
            "the paper's": paper.SPARSITY.get(budget, "-"),
            "edges with their reverse, %": edges,
            "pairs linked both ways or not at all, %": pairs,
        }


def searches(frames: Frames) -> Lines:
    """Yield how many candidates DPFL's greedy searches looked at, and what share gained by being added, removed, both or neither."""
    heads = ("only adding gains, %", "only removing gains, %", "neither gains, %", "both gain, %")
    for row, budget in DPFL.items():
        mine = frames.runs[frames.runs["row"] == row]
        counts = mine.reindex(columns=[f"{name}_gained" for name in ("adding", "removing", "neither", "both")]).dropna()
        total = counts.sum().sum()
        shares = (f"{100 * count / total:.1f}" for count in counts.sum())
        found = {"B_c": f"{budget} ({len(counts)})", "candidates per Run": f"{total / len(counts):,.0f}"}
        yield found | dict(zip(heads, shares, strict=True)) | {"the paper's": paper.BOTH_GAIN}


def flips(frames: Frames) -> Lines:
    for search, theirs in paper.FLIPPED.items():
        row = "DPFL (B_c = inf), flip_share 0.4" + ("" if search else ", flipped_run_ggc False")
        lines, of_row = (frames.of(name, where(frames), row) for name in ("clients", "graphs"))
        flipped = lines.sort_values("client")["test_acc"].isna().to_numpy()
        omega, last = (edge_share(graph().matrix(), flipped) for graph in of_row["graph"].iloc[[0, -1]])
        yield {
            "flipped clients": "search too" if search else "only train",
            "accuracy of the others, %": mean_text(means(lines, row)),
            "edges from flipped, Omega": f"{100 * omega:.1f} %",
            "last round": f"{100 * last:.1f} %",
            "by chance": f"{100 * chance(flipped):.1f} %",
            "the paper's": theirs,
        }


def example(frames: Frames) -> Lines:
    first = frames["clients"].query("client == 0").pivot(index="seed", columns="row", values="test_acc") * 100
    both = "Random graph (B_c = inf)"
    rows = {"Local": [], f"{both}, reach groups:0,1;2": [1], f"{both}, reach groups:0,2;1": [2], both: [1, 2]}
    for row, others in rows.items():
        mean, half = interval([(first[row] - first["Local"]).to_numpy()])
        yield {
            "client 1": group_name(others),
            "accuracy, %": mean_text(first[row].to_numpy()),
            "to alone": f"{mean:+.1f} ± {half:.1f}" if others else "-",
            "paper": paper.SYNERGY[len(others)] if others else "-",
        }


def others(frames: Frames) -> Lines:
    """Yield the rows that no other table has, with the difference to the row without the change."""
    shown, lines = ("tau_init", "ggc_period", "flip_share", "Random graph", "Pairwise"), frames["clients"]
    for row in sorted(set(frames.rows["row"]) - set(paper.TABLE_1)):
        if not any(word in row for word in shown):
            base = row.split(", ")[0]
            difference = difference_text(paired(lines, row, base)) if base != row else "-"
            yield {"run": row, "accuracy, %": mean_text(means(lines, row)), "to the row without it, paired": difference}


def of_table_1(frames: Frames) -> Frames:
    return frames.where(frames.runs["row"].isin(list(paper.TABLE_1)))


def of_shared_partitions(frames: Frames) -> Frames:
    """Return the Runs of those seeds that every row has: one partition is points easier than another, so other means do not compare."""
    seeds = frames.runs.groupby("row")["seed"].agg(set)
    return frames.where(frames.runs["seed"].isin(set.intersection(*seeds)))


def without_tuning(frames: Frames) -> pd.DataFrame:
    """Return the Runs of a folder but those with +FT: their rounds are those of the row without."""
    return frames.runs[~frames.runs["row"].str.contains("+FT", regex=False)]


def total(folders: Mapping[str, Frames]) -> str:
    runs = pd.concat(map(without_tuning, folders.values()))
    return f"So far these are {len(runs)} Runs, {runs['core_hours'].sum():.0f} core hours in all, without the epochs of +FT."


def spent(folders: Mapping[str, Frames]) -> pd.DataFrame:
    runs = pd.concat([without_tuning(frames).assign(setting=name) for name, frames in folders.items()])
    runs["cpu"] += ", " + runs["kernels"] + " kernels"
    cells = {
        "Runs": ("run", "size"),
        "core hours": ("core_hours", lambda hours: f"{hours.sum():.1f}"),
        "starts": ("starts", "sum"),
        "computed by": ("cpu", lambda cpus: ", ".join(sorted(set(cpus)))),
    }
    return runs.groupby("setting", sort=False).agg(**cells).reset_index().astype(str)


def measured(folders: Mapping[str, Frames]) -> Lines:
    for name, frames in folders.items():
        for row, part in without_tuning(frames).dropna(subset=["train_seconds"]).groupby("row"):
            evaluations, graph = part["evaluations"].sum(), part["graph_seconds"]
            yield {
                "setting": name,
                "row": str(row),
                "Runs": f"{len(part)}",
                "core minutes per Run": f"{60 * part['core_hours'].mean():.1f}",
                "training": f"{part['train_seconds'].mean() / 60:.1f}",
                "ms per step": f"{1e3 * part['train_seconds'].sum() / part['gradient_steps'].sum():.2f}",
                "choosing": f"{graph.mean() / 60:.1f}" if evaluations else "-",
                "ms per evaluation": f"{1e3 * graph.sum() / evaluations:.2f}" if evaluations else "-",
                "MB": f"{part['megabytes'].mean():.1f}",
            }


BOTH = {"table 1": table_1, "order": order}
CIFAR10 = BOTH | {
    "random graph": against,
    "variance": lambda frames: variance.table(variance.measure(of_table_1(frames)), paper.VARIANCE[where(frames)]),
    "others": others,
}
TABLES: dict[str, dict[str, Callable[[Frames], Any]]] = {  # by folder; of others `BOTH`
    "cifar-10-patho-3": CIFAR10
    | {"tau_init": lambda frames: ablation(frames, "tau_init", "tau_init", paper.TAU_INIT)}
    | {"graphs": graphs, "searches": searches, "flips": flips},
    "cifar-10-dir-0-1": CIFAR10 | {"P": lambda frames: ablation(frames, "ggc_period", "P", paper.PERIOD)},
    "cifar-10-motivation": {"example": example},
}


def tables(folders: Mapping[str, Frames]) -> dict[str, str]:
    """Return every table of the page by the name of its mark, of the frames of each folder."""
    full = {name: frames for name, frames in folders.items() if name != "controls"}  # the controls are shorter
    out: dict[str, Any] = {}
    for name, frames in full.items():
        out |= {f"{mark} {name}": lines(frames) for mark, lines in TABLES.get(name, BOTH).items()}
    shown = pd.DataFrame(measured(full)).set_index(["setting", "row"]).to_string()  # aligned; a setting is said once
    out |= {"spent": spent(folders), "measured": "\n".join(["```", *map(str.rstrip, shown.splitlines()), "```"])}
    return {mark: text(lines) for mark, lines in out.items()}


def intervals(axes: Axes, parts: Mapping[str, Parts]) -> None:
    """Draw means with their 95 % intervals, a line for each name, and say over what the intervals are."""
    for y, each in enumerate(parts.values()):
        if each:
            mean, half = interval(each)
            axes.errorbar(mean, y, xerr=half, fmt="o", capsize=2, color=BLUE if len(each) > 1 else GREY)
    axes.axvline(0, color=GREY, lw=0.6)
    axes.set_yticks(range(len(parts)), [text_label(name) for name in parts])
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.plot([], [], "o", color=BLUE, label="95 % over partitions")
    axes.plot([], [], "o", color=GREY, label="95 % over clients of one")


def accuracy(frames: Frames) -> Figure:
    lines = frames["clients"]
    rows = [row for row in paper.TABLE_1 if row != "Local"]
    parts = {row: each for row in rows if comparable(each := paired(lines, row, "Local"))}
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.9), width_ratios=(1.25, 1))
    intervals(left, parts)
    if known := [(float(gap), y) for y, row in enumerate(parts) if (gap := paper_gap(frames, row, "Local")) != "-"]:
        left.plot(*zip(*known, strict=True), "D", mfc="none", color=DARK, label="paper")
    left.set_xlabel("difference to Local, points")
    left.legend(loc="best")
    shown = of_shared_partitions(frames.where(frames.runs["row"].isin(CURVES)))
    curves(right, shown.rows, shown["curves"], "test_acc", "models_epochs", 100)
    right.set(xlabel="local epochs, of all its models", ylabel="test accuracy, %")
    right.legend(loc="lower right")
    return figure


def pictures(frames: Frames) -> Iterator[tuple[str, Figure | None]]:
    yield "accuracy", accuracy(frames)
    yield "variance", variance.draw(of_shared_partitions(of_table_1(frames))).figure
    rows = set(frames.rows["row"])
    both = [(row, f"Random graph (B_c = {budget})") for row, budget in DPFL.items()]
    if shown := [row for pair in both if {*pair} <= rows for row in pair]:
        both_ways = frames.where(frames.runs["row"].isin(shown))
        yield "random-graph", random_graph.draw(of_shared_partitions(both_ways)).figure
    mine = frames.runs["run"].isin(frames["graphs"]["run"]) & frames.runs["row"].isin(list(DPFL))
    yield "graphs", graph_evolution.draw(frames.where(mine)).figure
