"""Does the collaboration graph mean anything? What of it is chance, who agrees on it, and whom everybody asks.

Of each round's graph, an edge being one client that averages with another:

    homophily    mean over edges of what the two clients' class distributions have in common (1: the same, 0: no class), and its z-score
                 against graphs with the same in- and out-degrees, drawn by exchanging edges (--draws of them)
    reciprocity  share of edges whose reverse is an edge
    asked        Gini coefficient of how often each client is chosen: 0 where all are chosen equally often, near 1 where all choose one
    gap          1 - |second eigenvalue| of the averaging matrix: how fast repeated averaging would make all models one
    classes      adjusted Rand index of the graph's communities (greedy modularity) against each client's most frequent class

Agreement compares Omega of two runs on one partition, such as two seeds: the mean over clients of the Jaccard index of the two sets, and what
it would be against graphs with the same degrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import SEEDS, TEXT, Drawing, curve, dominant_class, first_graph, graphs, legend, main, over_rounds

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pandas as pd
from _looks import looks
from _names import text_label
from _tables import deviation, markdown, named, number, partition_of, repetitions
from matplotlib.axes import Axes
from scipy.special import comb

from dpfl_mpi.graph import CollaborationGraph, asymmetry, rewired
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [Run(dataset="cifar10", seed=seed, partition_seed=42) for seed in SEEDS] + [
    Run(dataset="cifar10", method=method) for method in ("pairwise", "oracle", "random_graph")
]
MEASURES = ("homophily", "reciprocity", "asked", "gap", "classes")
Rows = list[dict[str, Any]]
Scores = Mapping[Path, Sequence[Mapping[str, float]]]  # of each result, by round, by measure


def overlap(counts: np.ndarray) -> np.ndarray:
    """Return what each two clients' class distributions have in common, 0 to 1, `[N, N]`: 1 - their total variation distance."""
    q = counts / counts.sum(1, keepdims=True)
    return np.minimum(q[:, None], q[None]).sum(2)


def homophily(graph: CollaborationGraph, common: np.ndarray) -> float:
    """Return the mean of `common` `[N, N]` over the edges, nan without any."""
    return float(common[graph.receivers(), graph.senders].mean()) if len(graph.senders) else float("nan")


def z_score(graph: CollaborationGraph, common: np.ndarray, draws: int, rng: np.random.Generator) -> float:
    """Return how many standard deviations the homophily lies above that of random graphs with the same degrees; nan where these are all alike."""
    null = np.array([homophily(rewired(graph, rng), common) for _ in range(draws)])
    spread = null.std(ddof=1) if draws > 1 else 0.0
    return float((homophily(graph, common) - null.mean()) / spread) if spread > 1e-12 else float("nan")


def gini(counts: np.ndarray) -> float:
    """Return the Gini coefficient of counts `[N]`, 0 where all are equal, nan where all are 0."""
    n, total = len(counts), counts.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ np.sort(counts) / (n * total)) if total else float("nan")


def spectral_gap(graph: CollaborationGraph, p: np.ndarray) -> float:
    """Return 1 - |second eigenvalue| of the matrix that averages along the graph (equation 4)."""
    weights = (graph.matrix() | np.eye(graph.n, dtype=bool)) * p
    weights /= weights.sum(1, keepdims=True)
    sizes = np.sort(np.abs(np.linalg.eigvals(weights)))
    return float(1 - sizes[-2]) if graph.n > 1 else 1.0


def communities(graph: CollaborationGraph) -> np.ndarray:
    """Return the number of each client's community, int `[N]`, of the graph without its directions."""
    whole = nx.Graph()
    whole.add_nodes_from(range(graph.n))
    whole.add_edges_from(zip(graph.receivers().tolist(), graph.senders.tolist(), strict=True))
    out = np.arange(graph.n)  # without an edge: each alone
    if len(graph.senders):
        for number, members in enumerate(nx.community.greedy_modularity_communities(whole)):
            out[list(members)] = number
    return out


def rand_index(a: np.ndarray, b: np.ndarray) -> float:
    """Return the adjusted Rand index of two groupings `[N]` (Hubert and Arabie, 1985): 1 for the same, 0 on average by chance."""
    table = pd.crosstab(a, b).to_numpy()
    both, mine, theirs = (comb(x, 2).sum() for x in (table, table.sum(1), table.sum(0)))
    chance = mine * theirs / comb(len(a), 2)
    most = (mine + theirs) / 2
    return float((both - chance) / (most - chance)) if most != chance else 1.0


def jaccard(a: CollaborationGraph, b: CollaborationGraph) -> float:
    """Return the mean over clients of |A & B| / |A or B|; clients that chose nobody in both are left out."""
    x, y = a.matrix(), b.matrix()
    either = (x | y).sum(1)
    here = either > 0
    return float(((x & y).sum(1)[here] / either[here]).mean()) if here.any() else float("nan")


def of_round(result: Result, t: int) -> dict[str, float]:
    """Return the measures of one round's graph."""
    graph, common = result.chosen(t), overlap(result["client/class_counts"])
    edges = len(graph.senders)
    return {
        "homophily": homophily(graph, common),
        "reciprocity": 1 - asymmetry(graph.matrix())[0] if edges else float("nan"),
        "asked": gini(np.bincount(graph.senders, minlength=graph.n)),
        "gap": spectral_gap(graph, result["client/p"]),
        "classes": rand_index(communities(graph), dominant_class(result)),
    }


def agreement(results: Sequence[Result], names: Sequence[str], draws: int) -> pd.DataFrame:
    """Return one row per pair of runs on one partition: the Jaccard index of their Omegas, and that of graphs with the same degrees."""
    rows = []
    for (one, a), (two, b) in itertools.combinations(zip(names, results, strict=True), 2):
        if partition_of(a) != partition_of(b) or first_graph(a) or first_graph(b):
            continue
        rng, mine, theirs = np.random.default_rng(0), a.omega(), b.omega()
        null = [jaccard(rewired(mine, rng), theirs) for _ in range(draws)]
        pair = {"a": f"{one}, seed {a.run.seed}", "b": f"{two}, seed {b.run.seed}"}
        rows.append(pair | {"jaccard": jaccard(mine, theirs), "by chance": float(np.mean(null))})
    return pd.DataFrame(rows)


def over_time(axes: Sequence[Axes], group: Sequence[Result], scores: Scores, first: int, **look: Any) -> Rows:
    """Draw each measure over rounds from `first` on, a panel for each; return what is drawn."""
    rows: Rows = []
    for panel, measure in zip(axes, MEASURES, strict=True):
        x, mean, spread = over_rounds(group, lambda r, m=measure: np.array([row[m] for row in scores[r.path]]))
        x, mean, spread = x[first:], mean[first:], spread[first:]
        curve(panel, x, mean, spread, **look)
        panel.set_title(measure)
        panel.set_xlabel("round")
        rows += [
            {"measure": measure, "round": t, "value": m, "std": s if len(group) > 1 else np.nan, "n": len(group)}
            for t, m, s in zip(x, mean, spread, strict=True)
        ]
    return rows


def z_scores(group: Sequence[Result], t: int, draws: int) -> np.ndarray:
    """Return the z-score of the homophily of each result's graph of round t, `[results]`."""
    return np.array(
        [z_score(r.chosen(t), overlap(r["client/class_counts"]), draws, np.random.default_rng(0)) for r in group]
    )


def draw(results: Sequence[Result], draws: int = 50) -> Drawing:
    """Return the figure: measures over rounds; the text: Omega and the last round, z-scores, agreement."""
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(TEXT, 1.9), sharex=True)
    rows, lines, flat = [], [], []
    groups = repetitions(graphs(results))
    for (where, name, group), look in zip(named(groups), looks([g[0].run.method for g in groups]), strict=True):
        whose = {"setting": where, "method": name}
        flat += [(name, r) for r in group]
        first = max(map(first_graph, group))
        scores = {r.path: [of_round(r, t) for t in range(r.last_round + 1)] for r in group}
        rows += [whose | row for row in over_time(axes, group, scores, first, label=text_label(name), **look)]
        for t, when in ((0, "Omega"), (min(r.last_round for r in group), "last round"))[first:]:
            z = z_scores(group, t, draws)
            means = {m: number(np.mean([scores[r.path][t][m] for r in group]), 3) for m in MEASURES}
            lines.append(whose | {"graph": when} | means | {"z of homophily": number(z.mean(), 1)})
            rows.append(
                whose | {"measure": "z", "round": t, "value": float(z.mean()), "std": deviation(z), "n": len(group)}
            )
    legend(figure, *axes[0].get_legend_handles_labels(), "outside upper center")
    same = agreement([r for _, r in flat], [n for n, _ in flat], draws)
    text = markdown(pd.DataFrame(lines)) + f"\n\nz: against {draws} graphs with the same degrees.\n"
    if len(same):
        shown = same.assign(**{c: same[c].map(lambda v: number(v, 3)) for c in ("jaccard", "by chance")})
        text += f"\nAgreement of two Omegas on one partition (Jaccard index, mean over clients):\n\n{markdown(shown)}"
        pairs = same.rename(columns={"a": "setting", "b": "method", "jaccard": "value"}).drop(columns="by chance")
        rows += pairs.assign(measure="jaccard", round=0, n=1).to_dict("records")
    return Drawing(pd.DataFrame(rows), figure, text)


DRAWS = {"type": int, "default": 50, "metavar": "R", "help": "random graphs per z-score (default: 50)"}

if __name__ == "__main__":
    main("omega", __doc__, RUNS, draw, {"draws": DRAWS})
