"""Does the collaboration graph mean anything? What of it is chance, who agrees on it, and whom everybody asks.

Homophily, reciprocity, asked, gap and classes of each round's graph, and how far the Omegas of Runs on one partition agree, are what
docs/controls.md defines; an edge is one client that averages with another.
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
from dpfl_mpi.figures.style import TEXT, curves, legend
from dpfl_mpi.figures.tables import deviation, markdown, number
from dpfl_mpi.graph import CollaborationGraph, asymmetry, rewired
from dpfl_mpi.results import Result

RUNS = [*cifar10(seed=SEEDS, partition_seed=42), *cifar10(method=("pairwise", "oracle", "random_graph"))]
MEASURES = {  # each a number without unit, 0 to 1; classes is below 0 where the two agree less than by chance
    "homophily": "homophily: share of\nclasses in common",
    "reciprocity": "reciprocity: share of\nedges both ways",
    "asked": "asked: Gini index of\nhow often chosen",
    "gap": "gap of the averaging\nmatrix (1: all mixed)",
    "classes": "classes: Rand index\nof the communities",
}
OPTIONS = {"draws": {"type": int, "default": 50, "metavar": "R", "help": "random graphs per z-score (default: 50)"}}


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
    """Return the number of each client's community, int `[N]`, of the graph without its directions (greedy modularity)."""
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
    graph, counts = result.chosen(t), result["client/class_counts"]
    return {
        "homophily": homophily(graph, overlap(counts)),
        "reciprocity": 1 - asymmetry(graph.matrix())[0] if len(graph.senders) else float("nan"),
        "asked": gini(np.bincount(graph.senders, minlength=graph.n)),
        "gap": spectral_gap(graph, result["client/p"]),
        "classes": rand_index(communities(graph), counts.argmax(1)),
    }


def z_of_round(result: Result, t: int, draws: int) -> float:
    return z_score(result.chosen(t), overlap(result["client/class_counts"]), draws, np.random.default_rng(0))


def agreement(runs: pd.DataFrame, draws: int) -> pd.DataFrame:
    """Return one line per pair of Runs on one partition, lines of `runs` that have an Omega: its Jaccard index, and that of graphs with the same degrees."""
    rows = []
    for a, b in itertools.combinations(runs.itertuples(), 2):
        if a.partition == b.partition and a.result.run.clients == b.result.run.clients:
            rng, mine, theirs = np.random.default_rng(0), a.result.omega(), b.result.omega()
            null = [jaccard(rewired(mine, rng), theirs) for _ in range(draws)]
            pair = {"a": f"{a.row}, seed {a.seed}", "b": f"{b.row}, seed {b.seed}"}
            rows.append(pair | {"jaccard": jaccard(mine, theirs), "by chance": float(np.mean(null))})
    return pd.DataFrame(rows)


def agreement_table(same: pd.DataFrame) -> str:
    return markdown(same.assign(**{c: same[c].map(lambda v: number(v, ".3f")) for c in ("jaccard", "by chance")}))


def draw(frames: Frames, draws: int = 50) -> Drawing:
    if draws < 1:
        raise UserError(f"--draws is {draws}; allowed is a whole number of at least 1")
    figure, panels = plt.subplots(1, len(MEASURES), figsize=(TEXT, 2.0), sharex=True)
    graphs = with_graphs(frames).merge(frames.runs[["run", "result"]], on="run")
    graphs = graphs.join(pd.DataFrame([of_round(g.result, g.t) for g in graphs.itertuples()]))
    rows = frames.rows[frames.rows["run"].isin(graphs["run"])]
    parts, table = [], []
    for axes, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        drawn = curves(axes, rows, graphs, measure, "t").rename(columns={"t": "round", "mean": "value"})
        drawn.loc[drawn["n"] == 1, "std"] = np.nan
        parts.append(drawn.assign(measure=measure))
        axes.set_title(title, fontsize=7)
        axes.set_xlabel(r"round (0: $\Omega$)")
    for (where, row), mine in graphs.groupby(["setting", "row"], sort=False):
        whose, results = {"setting": where, "method": row}, mine.drop_duplicates("run")["result"]
        for t, when in ((0, "Omega"), (mine.groupby("run")["t"].max().min(), "last round")):
            if t < mine["t"].min():
                continue
            z = np.array([z_of_round(result, t, draws) for result in results])
            means = mine[mine["t"] == t][list(MEASURES)].mean(skipna=False).map(lambda v: number(v, ".3f"))
            table.append(whose | {"graph": when} | means.to_dict() | {"z of homophily": number(z.mean(), ".1f")})
            scored = {"measure": "z", "round": t, "value": z.mean(), "std": deviation(z), "n": len(z)}
            parts.append(pd.DataFrame([whose | scored]))
    legend(figure, panels[0], "outside upper center")
    units = f"Numbers without unit, 0 to 1 (classes: 0 is chance). z: against {draws} graphs with the same degrees."
    text = f"{markdown(pd.DataFrame(table))}\n\n{units}\n"
    searched = set(graphs[graphs["t"] == 0]["run"])
    in_order = [str(r.path) for group in repetitions(frames.files["result"]) for r in group if str(r.path) in searched]
    if len(same := agreement(frames.runs.set_index("run").loc[[*dict.fromkeys(in_order)]], draws)):
        head = "Agreement of two Omegas on one partition (Jaccard index, mean over clients)"
        text += f"\n{head}:\n\n{agreement_table(same)}"
        pairs = same.rename(columns={"a": "setting", "b": "method", "jaccard": "value"}).drop(columns="by chance")
        parts.append(pairs.assign(measure="jaccard", round=0, n=1))
    return Drawing(pd.concat(parts, ignore_index=True), figure, text)
