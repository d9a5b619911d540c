"""The tables and pictures of `reproduction/table1.md`, from the frames of its CSV files.

The paper's numbers stand beside ours: whether our mean is within the paper's noise, and which of
its claims on the order of methods hold. A table is a generator of its lines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtr, stdtrit

from dpfl_mpi.figures import graph_evolution, paper, random_graph, tables, variance
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.label_flip import chance, edge_share
from dpfl_mpi.figures.motivation import group_name
from dpfl_mpi.figures.names import text_label
from dpfl_mpi.figures.style import BLUE, DARK, GREY, TEXT, curves
from dpfl_mpi.figures.tables import Parts, difference_text, interval, mean_text, means, paired
from dpfl_mpi.graph import asymmetry, sparsity

Lines = Iterator[dict[str, str]]
DPFL = {f"DPFL (B_c = {budget})": budget for budget in paper.BUDGETS}
CASES = {
    "adding_gained": "only adding gains, %",
    "removing_gained": "only removing gains, %",
    "neither_gained": "neither gains, %",
    "both_gained": "both gain, %",
}
IN_CURVES = ("Local", "FedAvg", "Ditto", "DPFL (B_c = inf)", "DPFL (B_c = 0.1N)")


def text(lines: Iterable[Mapping[str, str]] | pd.DataFrame | str) -> str:
    """Return a table as markdown, "(not run)" if it is empty."""
    if isinstance(lines, str):
        return lines
    return tables.markdown(pd.DataFrame(lines)) or "(not run)"


def error_over_clients(parts: Parts) -> float:
    """Return the standard error over clients, points: sqrt(sum of s^2 / n) / partitions."""
    return float(np.sqrt(sum(part.var(ddof=1) / len(part) for part in parts)) / len(parts))


def over_clients(parts: Parts) -> float:
    """Return the half width of the 95 % interval over clients, by t with sum(n - 1) degrees."""
    freedom = sum(len(part) - 1 for part in parts)
    return float(stdtrit(freedom, 0.975) * error_over_clients(parts))


def chance_over_seeds(parts: Parts) -> float:
    """Return the p of a two-sided t-test over the means of two partitions or more."""
    values = np.array([part.mean() for part in parts])
    error = values.std(ddof=1) / np.sqrt(len(values))
    with np.errstate(divide="ignore"):  # equal means: t is infinite, and p is 0
        return 2 * float(stdtr(len(values) - 1, -abs(values.mean()) / error))


def holm(chances: Iterable[float]) -> np.ndarray:
    """Return p-values corrected for their number m: the i-th smallest (from 0) times m - i.

    A larger p keeps a corrected value at least as large; none exceeds 1 (Scandinavian Journal of
    Statistics 6, 1979).
    """
    p = np.array(list(chances))
    order, out = np.argsort(p, kind="stable"), np.empty_like(p)
    factors = np.arange(len(p), 0, -1)
    out[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1)
    return out


def verdict(values: np.ndarray, mean: float, spread: float) -> str:
    """Return whether our mean is within the paper's noise (95 %).

    That is Student's prediction interval t(2) * s * sqrt(1/n + 1/3) for the mean of n other
    partitions, with s = `spread`, the paper's deviation over its three seeds.
    """
    factor = np.sqrt(1 / len(values) + 1 / paper.SEEDS)
    noise = stdtrit(paper.SEEDS - 1, 0.975) * spread * factor
    gap = values.mean() - mean
    if abs(gap) <= noise:
        return f"within ({gap:+.2f}, noise ± {noise:.2f})"
    return f"**off by {gap:+.2f}** (noise ± {noise:.2f})"


def setting_of(frames: Frames) -> str:
    return str(frames.rows["setting"][0])


def paper_gap(frames: Frames, a: str, b: str) -> str:
    of_a, of_b = (paper.table_1(setting_of(frames), row) for row in (a, b))
    return f"{float(of_a[0]) - float(of_b[0]):+.2f}" if of_a and of_b and a != b else "-"


def table_1(frames: Frames) -> Lines:
    lines = frames["clients"]
    for row in paper.TABLE_1:
        values, theirs = means(lines, row), paper.table_1(setting_of(frames), row)
        parts = paired(lines, row, "Local") if row != "Local" else []
        known = len(values) and theirs
        yield {
            "method": row,
            "ours, %": mean_text(values),
            "paper, %": " ± ".join(theirs or "-"),
            "vs Local": difference_text(parts),
            "over clients": f"± {over_clients(parts):.2f}" if tables.comparable(parts) else "-",
            "paper, vs Local": paper_gap(frames, row, "Local"),
            "verdict": verdict(values, *map(float, theirs)) if known and theirs else "-",
        }


def order(frames: Frames) -> Lines:
    """Yield whether each claim of the paper's order holds.

    It does if it is significant over seeds, after Holm's correction for all claims with two seeds
    or more, and if 0 is outside the interval over clients.
    """
    pairs = {pair: paired(frames["clients"], *pair) for pair in paper.ORDER}
    pairs = {pair: parts for pair, parts in pairs.items() if tables.comparable(parts)}
    several = [pair for pair, parts in pairs.items() if len(parts) > 1]
    corrected = holm(chance_over_seeds(pairs[pair]) for pair in several)
    significant = {pair for pair, p in zip(several, corrected, strict=True) if p < 0.05}
    for (a, b), parts in pairs.items():
        mean, within = interval(parts)[0], over_clients(parts)
        holds = "holds" if mean > 0 else "**does not hold**"
        yield {
            "claim": f"{a} > {b}",
            "ours": difference_text(parts),
            "over clients": f"± {within:.2f}",
            "paper": paper_gap(frames, a, b),
            "": holds if (a, b) in significant and abs(mean) > within else "not decided",
        }


def ablation(frames: Frames, field: str, symbol: str, published: Mapping[int, str]) -> str:
    names = {f"{row}, {field} {value}" for row in DPFL for value in published} | {*DPFL}
    compared = of_shared_seeds(frames.where(frames.runs["row"].isin(names)))
    rows, setting = compared.rows.assign(variant=""), setting_of(frames)
    _, table, _ = tables.by_budget(compared, rows, field, symbol, published, setting, bold=False)
    return table.partition("\n\n")[0]


def against(frames: Frames) -> pd.DataFrame:
    """Return DPFL against random graphs, and against the graph of pairwise choice."""
    rows = frames.runs["row"]
    shown = rows.isin(list(DPFL)) | rows.str.match("Random graph|Pairwise")
    found = random_graph.compared(frames.where(shown))
    return found.assign(paper=paper.RANDOM_GRAPH.get(setting_of(frames), "-"))


def graphs(frames: Frames) -> Lines:
    for row, budget in DPFL.items():
        by_round = frames.of("graphs", setting_of(frames), row).sort_values("t")["graph"]
        ends = [graph() for graph in by_round.iloc[[0, -1]]]
        both = [(sparsity(m), *(1 - share for share in asymmetry(m))) for m in ends]
        sparse, edges, pairs = (
            f"{100 * first:.1f} to {100 * last:.1f}" for first, last in zip(*both, strict=True)
        )
        yield {
            "B_c": budget,
            "sparsity, %": sparse,
            "the paper's": paper.SPARSITY.get(budget, "-"),
            "edges with their reverse, %": edges,
            "pairs linked both ways or not at all, %": pairs,
        }


def searches(frames: Frames) -> Lines:
    """Yield the candidates of DPFL's greedy searches, and the share of each case."""
    for row, budget in DPFL.items():
        runs = frames.runs[frames.runs["row"] == row]
        counts = runs.reindex(columns=list(CASES)).dropna()
        total = counts.sum().sum()
        yield {
            "B_c": f"{budget} ({len(counts)})",
            "candidates per Run": f"{total / len(counts):,.0f}",
            **{head: f"{100 * counts[case].sum() / total:.1f}" for case, head in CASES.items()},
            "the paper's": paper.BOTH_GAIN,
        }


def flips(frames: Frames) -> Lines:
    for search, theirs in paper.FLIPPED.items():
        only_train = "" if search else ", flipped_run_ggc False"
        row = f"DPFL (B_c = inf), flip_share 0.4{only_train}"
        lines, graphs = (frames.of(n, setting_of(frames), row) for n in ("clients", "graphs"))
        flipped = lines.sort_values("client")["test_acc"].isna().to_numpy()
        ends = [graph().matrix() for graph in graphs["graph"].iloc[[0, -1]]]
        omega, last = (edge_share(matrix, flipped) for matrix in ends)
        senders = ends[1][~flipped][:, flipped].sum(1).mean()
        yield {
            "flipped clients": "search too" if search else "only train",
            "accuracy of the others, %": mean_text(means(lines, row)),
            "edges from flipped, Omega": f"{100 * omega:.1f} %",
            "last round": f"{100 * last:.1f} %",
            "in % of all other clients": f"{100 * senders / (len(flipped) - 1):.1f} %",
            "by chance": f"{100 * chance(flipped):.1f} %",
            "the paper's": theirs,
        }


def example(frames: Frames) -> Lines:
    first = frames["clients"].query("client == 0")
    accuracy = 100 * first.pivot(index="seed", columns="row", values="test_acc")
    both = "Random graph (B_c = inf)"
    rows = {"Local": [], both + ", reach groups:0,1;2": [1], both + ", reach groups:0,2;1": [2]}
    rows[both] = [1, 2]
    for row, others in rows.items():
        mean, half = interval([(accuracy[row] - accuracy["Local"]).to_numpy()])
        yield {
            "client 1": group_name(others),
            "accuracy, %": mean_text(accuracy[row].to_numpy()),
            "vs alone": f"{mean:+.1f} ± {half:.1f}" if others else "-",
            "paper": paper.SYNERGY[len(others)] if others else "-",
        }


def others(frames: Frames) -> Lines:
    """Yield the rows that no other table has, against the row without the change."""
    shown = ("tau_init", "ggc_period", "flip_share", "Random graph", "Pairwise")
    lines = frames["clients"]
    for row in sorted(set(frames.rows["row"]) - set(paper.TABLE_1)):
        if any(word in row for word in shown):
            continue
        base = row.split(", ")[0]
        parts = paired(lines, row, base) if base != row else []
        if parts and not any(part.any() for part in parts):
            continue  # a row before +FT, which alone was changed
        yield {
            "run": row,
            "accuracy, %": mean_text(means(lines, row)),
            "vs the row without it": difference_text(parts),
            "the row's, paper, %": " ± ".join(paper.table_1(setting_of(frames), base) or "-"),
        }


def of_table_1(frames: Frames) -> Frames:
    return frames.where(frames.runs["row"].isin(list(paper.TABLE_1)))


def of_shared_seeds(frames: Frames) -> Frames:
    """Return the Runs of the seeds that every row has: partitions differ by points."""
    seeds = frames.runs.groupby("row")["seed"].agg(set)
    return frames.where(frames.runs["seed"].isin(set.intersection(*seeds)))


def without_tuning(frames: Frames) -> pd.DataFrame:
    """Return the Runs without +FT; the rounds of a Run with +FT are those of the Run without."""
    return frames.runs[~frames.runs["row"].str.contains("+FT", regex=False)]


def finished(folders: Mapping[str, Frames]) -> pd.DataFrame:
    """Return the lines of all Runs, without the epochs of +FT, and their folders as `setting`."""
    parts = [without_tuning(frames).assign(setting=name) for name, frames in folders.items()]
    return pd.concat(parts)


def spent(folders: Mapping[str, Frames]) -> pd.DataFrame:
    runs = finished(folders)
    runs["cpu"] += ", " + runs["kernels"] + " kernels"
    columns = {
        "Runs": ("run", "size"),
        "core hours": ("core_hours", lambda hours: f"{hours.sum():.1f}"),
        "starts": ("starts", "sum"),
        "computed by": ("cpu", lambda cpus: ", ".join(sorted(set(cpus)))),
    }
    return runs.groupby("setting", sort=False).agg(**columns).reset_index().astype(str)


def variances(frames: Frames) -> str:
    published = paper.VARIANCE[setting_of(frames)]
    return variance.table(variance.measure(of_table_1(frames)), published)


Tables = dict[str, Callable[[Frames], Any]]
USUAL: Tables = {"table 1": table_1, "order": order}
CIFAR10: Tables = {**USUAL, "random graph": against, "variance": variances, "others": others}
PATHO: Tables = {
    **CIFAR10,
    "tau_init": lambda frames: ablation(frames, "tau_init", "tau_init", paper.TAU_INIT),
    "graphs": graphs,
    "searches": searches,
    "flips": flips,
}
TABLES: dict[str, Tables] = {  # by folder; other folders have `USUAL`
    "cifar-10-patho-3": PATHO,
    "cifar-10-dir-0-1": {
        **CIFAR10,
        "P": lambda frames: ablation(frames, "ggc_period", "P", paper.PERIOD),
    },
    "femnist-fedrep": {**USUAL, "others": others},
    "cifar-10-motivation": {"example": example},
}


def page_tables(folders: Mapping[str, Frames]) -> dict[str, str]:
    """Return every table of the page by the name of its mark."""
    full = {name: frames for name, frames in folders.items() if name != "controls"}
    out = {"spent": text(spent(folders))}
    for name, frames in full.items():
        for mark, lines in TABLES.get(name, USUAL).items():
            out[f"{mark} {name}"] = text(lines(frames))
    return out


def intervals(axes: Axes, parts: Mapping[str, Parts]) -> None:
    """Draw means with their 95 % intervals, one line per name, coloured by what they are over."""
    for y, each in enumerate(parts.values()):
        if each:
            mean, half = interval(each)
            colour = BLUE if len(each) > 1 else GREY
            axes.errorbar(mean, y, xerr=half, fmt="o", capsize=2, color=colour)
    axes.axvline(0, color=GREY, lw=0.6)
    axes.set_yticks(range(len(parts)), [text_label(name) for name in parts])
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.plot([], [], "o", color=BLUE, label="95 % over partitions")
    axes.plot([], [], "o", color=GREY, label="95 % over clients of one")


def accuracy(frames: Frames) -> Figure:
    found = {r: paired(frames["clients"], r, "Local") for r in paper.TABLE_1 if r != "Local"}
    parts = {row: of_row for row, of_row in found.items() if tables.comparable(of_row)}
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.9), width_ratios=(1.25, 1))
    intervals(left, parts)
    published = {y: paper_gap(frames, row, "Local") for y, row in enumerate(parts)}
    points = [(float(gap), y) for y, gap in published.items() if gap != "-"]
    if points:
        left.plot(*zip(*points, strict=True), "D", mfc="none", color=DARK, label="paper")
    left.set_xlabel("difference to Local, points")
    left.legend(loc="best")
    shown = of_shared_seeds(frames.where(frames.runs["row"].isin(IN_CURVES)))
    curves(right, shown.rows, shown["curves"], "test_acc", "models_epochs", 100)
    right.set(xlabel="local epochs of all models", ylabel="test accuracy, %")
    right.legend(loc="lower right")
    return figure


def pictures(frames: Frames) -> Iterator[tuple[str, Figure | None]]:
    yield "accuracy", accuracy(frames)
    yield "variance", variance.draw(of_shared_seeds(of_table_1(frames))).figure
    rows = set(frames.rows["row"])
    pairs = [(row, f"Random graph (B_c = {budget})") for row, budget in DPFL.items()]
    shown = [row for pair in pairs if {*pair} <= rows for row in pair]
    if shown:
        both = frames.where(frames.runs["row"].isin(shown))
        yield "random-graph", random_graph.draw(of_shared_seeds(both)).figure
    with_graphs = frames.runs["run"].isin(frames["graphs"]["run"])
    searched = frames.where(with_graphs & frames.runs["row"].isin(list(DPFL)))
    yield "graphs", graph_evolution.draw(searched).figure
