"""Does the collaboration graph mean anything, or is it chance?

In the graph of a round, an edge is one client that averages with another; Omega is the graph before
round 1. `python analysis/omega.py` calls `draw`, which shows five measures of each round's graph
(`MEASURES`, docs/experiments.md), and how far the Omegas of Runs on one partition agree. Both are
compared with random graphs in which each client has as many senders and receivers.
"""

import itertools

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pandas as pd
from scipy.special import comb

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import SEEDS, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames, with_graphs
from dpfl_mpi.figures.names import repetitions
from dpfl_mpi.figures.sparsity import draw_over_rounds
from dpfl_mpi.figures.style import TEXT
from dpfl_mpi.figures.tables import deviation, markdown, number
from dpfl_mpi.graph import CollaborationGraph, asymmetry, rewired
from dpfl_mpi.results import Result

RUNS = [
    *cifar10(seed=SEEDS, partition_seed=42),
    *cifar10(method=("pairwise", "oracle", "random_graph")),
]
# measures of a graph, from 0 to 1, and their titles; "classes" is below 0 if the communities of the
# graph agree with the classes less than by chance
MEASURES = {
    "homophily": "homophily: classes\n(groups) in common",
    "reciprocity": "reciprocity: share of\nedges both ways",
    "asked": "asked: Gini index of\nhow often chosen",
    "gap": "gap of the averaging\nmatrix (1: all mixed)",
    "classes": "classes (groups): Rand\nindex of the communities",
}
DRAWS = "random graphs per z-score (default: 50)"
OPTIONS = {"draws": {"type": int, "default": 50, "metavar": "R", "help": DRAWS}}


def in_common(result: Result) -> np.ndarray:
    """Return what each pair of clients has in common, 0 to 1, `[N, N]`."""
    # it is 1 if they share a group, or without groups in the data the `overlap` of their classes
    if (groups := result.groups) is not None:
        return groups[:, None] == groups
    return overlap(result["client/class_counts"])


def overlap(counts: np.ndarray) -> np.ndarray:
    """Return 1 - the total variation distance of clients' class distributions, `[N, N]`."""
    # `counts` are each client's samples by class, `[N, C]`
    shares = counts / counts.sum(1, keepdims=True)
    return np.stack([np.minimum(of_client, shares).sum(1) for of_client in shares])


def homophily(graph: CollaborationGraph, common: np.ndarray) -> float:
    """Return the mean of `common` `[N, N]` over the edges, nan without any."""
    if not len(graph.senders):
        return float("nan")
    return float(common[graph.receivers(), graph.senders].mean())


def z_score(
    graph: CollaborationGraph, common: np.ndarray, draws: int, rng: np.random.Generator
) -> float:
    """Return by how many standard deviations the homophily exceeds that of random graphs."""
    # These are `draws` graphs with the same degrees. It is nan if they are all alike.
    null = np.array([homophily(rewired(graph, rng), common) for _ in range(draws)])
    spread = null.std(ddof=1) if draws > 1 else 0.0
    if not spread > 1e-12:  # also if it is nan
        return float("nan")
    return float((homophily(graph, common) - null.mean()) / spread)


def gini(counts: np.ndarray) -> float:
    """Return the Gini coefficient of counts `[N]`: 0 if all are equal, nan if all are 0."""
    n, total = len(counts), counts.sum()
    if not total:
        return float("nan")
    return float((2 * np.arange(1, n + 1) - n - 1) @ np.sort(counts) / (n * total))


def spectral_gap(graph: CollaborationGraph, p: np.ndarray) -> float:
    """Return 1 - |second eigenvalue| of the matrix that averages along the graph (equation 4).

    A client averages itself and its senders with weights in proportion to `p` `[N]`. With a gap of
    1 one round mixes all models; with 0 some clients never exchange anything.
    """
    weights = (graph.matrix() | np.eye(graph.n, dtype=bool)) * p
    weights /= weights.sum(1, keepdims=True)
    sizes = np.sort(np.abs(np.linalg.eigvals(weights)))
    return float(1 - sizes[-2]) if graph.n > 1 else 1.0


def communities(graph: CollaborationGraph) -> np.ndarray:
    """Return each client's community, int `[N]`, ignoring directions (greedy modularity)."""
    undirected = nx.Graph()
    undirected.add_nodes_from(range(graph.n))
    edges = zip(graph.receivers().tolist(), graph.senders.tolist(), strict=True)
    undirected.add_edges_from(edges)
    out = np.arange(graph.n)  # without an edge each client is alone
    if len(graph.senders):
        found = nx.community.greedy_modularity_communities(undirected)
        for community, members in enumerate(found):
            out[list(members)] = community
    return out


def rand_index(a: np.ndarray, b: np.ndarray) -> float:
    """Return the adjusted Rand index of two groupings `[N]` (Hubert and Arabie, 1985)."""
    # it counts the pairs of clients that are in one group in both: 1 if all are, 0 by chance
    table = pd.crosstab(a, b).to_numpy()
    both, in_a, in_b = (comb(sizes, 2).sum() for sizes in (table, table.sum(1), table.sum(0)))
    chance = in_a * in_b / comb(len(a), 2)
    most = (in_a + in_b) / 2
    return float((both - chance) / (most - chance)) if most != chance else 1.0


def jaccard(a: CollaborationGraph, b: CollaborationGraph) -> float:
    """Return the Jaccard index of a client's senders in two graphs: common ones among all of them.

    It is the mean over the clients that have senders in a or b.
    """
    in_a, in_b = a.matrix(), b.matrix()
    common, either = (in_a & in_b).sum(1), (in_a | in_b).sum(1)
    some = either > 0
    return float((common[some] / either[some]).mean()) if some.any() else float("nan")


def of_round(result: Result, t: int) -> dict[str, float]:
    """Return the `MEASURES` of round t's graph."""
    graph, counts = result.chosen(t), result["client/class_counts"]
    groups = counts.argmax(1) if result.groups is None else result.groups
    one_way = asymmetry(graph)[0] if len(graph.senders) else float("nan")
    return {
        "homophily": homophily(graph, in_common(result)),
        "reciprocity": 1 - one_way,
        "asked": gini(np.bincount(graph.senders, minlength=graph.n)),
        "gap": spectral_gap(graph, result["client/p"]),
        "classes": rand_index(communities(graph), groups),
    }


def z_of_round(result: Result, t: int, draws: int) -> float:
    common = in_common(result)
    return z_score(result.chosen(t), common, draws, np.random.default_rng(0))


def agreement(runs: pd.DataFrame, draws: int) -> pd.DataFrame:
    """Return the Jaccard index of the Omegas of each pair of Runs on one partition.

    `runs` are lines of `frames.runs` that have an Omega. "by chance" is the mean index over random
    graphs with the degrees of the first one.
    """
    rows = []
    for a, b in itertools.combinations(runs.itertuples(), 2):
        if a.partition == b.partition and a.result.run.clients == b.result.run.clients:
            rng, of_a, of_b = np.random.default_rng(0), a.result.omega(), b.result.omega()
            null = [jaccard(rewired(of_a, rng), of_b) for _ in range(draws)]
            names = {"a": f"{a.row}, seed {a.seed}", "b": f"{b.row}, seed {b.seed}"}
            values = {"jaccard": jaccard(of_a, of_b), "by chance": float(np.mean(null))}
            rows.append(names | values)
    return pd.DataFrame(rows)


def agreement_table(pairs: pd.DataFrame) -> str:
    columns = ("jaccard", "by chance")
    texts = {column: pairs[column].map(lambda v: number(v, ".3f")) for column in columns}
    return markdown(pairs.assign(**texts))


def z_lines(graphs: pd.DataFrame, draws: int) -> tuple[pd.DataFrame, str]:
    """Return the z-scores of each row's Omega and last graph, and a table with all measures."""
    # `graphs` has a line per Run and round, with the measures
    scores, table = [], []
    for (setting, row), lines in graphs.groupby(["setting", "row"], sort=False):
        names = {"setting": setting, "method": row}
        results = lines.drop_duplicates("run")["result"]
        last = lines.groupby("run")["t"].max().min()
        for t, when in ((0, "Omega"), (last, "last round")):
            if t < lines["t"].min():
                continue  # the method has no Omega
            z = np.array([z_of_round(result, t, draws) for result in results])
            means = lines[lines["t"] == t][list(MEASURES)].mean(skipna=False)
            texts = means.map(lambda v: number(v, ".3f")).to_dict()
            mean_z = {"z of homophily": number(z.mean(), ".1f")}
            table.append(names | {"graph": when} | texts | mean_z)
            values = {"value": z.mean(), "std": deviation(z), "n": len(z)}
            scores.append(names | {"measure": "z", "round": t} | values)
    return pd.DataFrame(scores), markdown(pd.DataFrame(table))


def draw(frames: Frames, draws: int = 50) -> Drawing:
    if draws < 1:
        raise UserError(f"--draws is {draws}; allowed is a whole number of at least 1")
    # the figure: a panel per measure, over rounds
    figure, panels = plt.subplots(1, len(MEASURES), figsize=(TEXT, 2.0), sharex=True)
    graphs = with_graphs(frames).merge(frames.runs[["run", "result"]], on="run")
    graphs = graphs.join(pd.DataFrame([of_round(g.result, g.t) for g in graphs.itertuples()]))
    data = draw_over_rounds(figure, frames, graphs, list(MEASURES))
    data.loc[data["n"] == 1, "std"] = np.nan
    for axes, title in zip(panels, MEASURES.values(), strict=True):
        axes.set_title(title, fontsize=7)
        axes.set_xlabel(r"round (0: $\Omega$)")
    # the text: a table of Omega and the last graph, and one of pairs of Omegas
    scores, table = z_lines(graphs, draws)
    parts = [data, scores]
    text = f"{table}\n\nAll are 0 to 1 (classes: 0 is chance). "
    text += f"z: against {draws} graphs with the same degrees.\n"
    if any(result.groups is not None for result in frames.runs["result"]):
        text += "Where clients have groups, homophily is the share of edges inside a group, "
        text += "and classes compares the communities with the groups.\n"
    # Runs that have an Omega, in the order given, repetitions together
    have_omega = set(graphs[graphs["t"] == 0]["run"])
    paths = [str(r.path) for group in repetitions(frames.files["result"]) for r in group]
    in_order = list(dict.fromkeys(path for path in paths if path in have_omega))
    pairs = agreement(frames.runs.set_index("run").loc[in_order], draws)
    if len(pairs):
        head = "Agreement of two Omegas on one partition (Jaccard index, mean over clients)"
        text += f"\n{head}:\n\n{agreement_table(pairs)}"
        pairs = pairs.rename(columns={"a": "setting", "b": "method", "jaccard": "value"})
        parts.append(pairs.drop(columns="by chance").assign(measure="jaccard", round=0, n=1))
    return Drawing(pd.concat(parts, ignore_index=True), figure, text)
