"""Nearest: a graph of the most similar clients, found before receiving a model (this project's).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

u_i sums what client i's own training has moved, without averages. After preprocessing, and in
each round up to `until`, every client sends a sketch of u_i, a byte per entry; later changes say
more of a client's own images than of its kind.

Client i prefers the largest cos_ij - r_j / 2, where r_j is the mean of client j's own B_c - 1
largest cosines. Without r_j a few hubs would be in very many averages (Radovanovic et al., JMLR
2010; the order is that of CSLS, Conneau et al., ICLR 2018). A client less than `alike` times as
similar as the nearest is left out. B_c - 1 are drawn from the first `pool` times as many: the
nearest are often one another's, so news from the rest of their kind would arrive late.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Candidates, Federation, State, Tensor, _given
from dpfl_mpi.settings import option

METHOD = _given.method("Nearest", ignores=OWN_GRAPH, sends_models=False, colour="#882255", marker="P")


@dataclass(frozen=True)
class Options:
    entries: int = option(1024, "entries of a sketch, a byte each", low=1)
    until: int = option(5, "the last round that chooses; later ones keep its graph", low=0)
    hubs: float = option(0.5, "how much of r_j is taken off; 0: the plain cosine", low=0, high=1)
    pool: int = option(2, "of so many times B_c - 1 of the nearest, B_c - 1 are drawn", low=1)
    alike: float = option(0.5, "the least cosine of those kept, a share of one's largest", low=0, high=1)


def init(fed: Federation) -> State:
    start = fed.common_row()
    u = start * 0
    state = _given.init(fed, lambda w: nearest(fed, u.copy_(w - start), fed.candidates()))
    return {"client": {"u": u, **state["client"]}, "shared": state["shared"]}


def round(fed: Federation, state: State, t: int) -> State:
    start, u = state["client"]["w"].clone(), state["client"]["u"]

    def choose(w: Tensor) -> CollaborationGraph:
        u.add_(w - start)
        return nearest(fed, u, fed.candidates()) if t <= fed.options["until"] else state["shared"]["chosen"]

    state = _given.round(fed, state, choose, lambda _, candidates: nearest(fed, u, candidates))
    return {"client": {"u": u, **state["client"]}, "shared": state["shared"]}


def nearest(fed: Federation, u: Tensor, candidates: Candidates) -> CollaborationGraph:
    """Return whom each client averages with, by the sketches of u `[K, W]`. Collective."""
    cosines = alike(fed.ids, fed.tell(fed.sketches(u, fed.options["entries"])))
    near, most = [candidates.of(k) for k in fed.ids], candidates.room[fed.ids]
    there = np.flatnonzero(fed.active)  # all that send: also who has stopped, or does not choose now (--churn)
    sends = [there if fed.reach is None else np.intersect1d(there, fed.reach.of(k)) for k in fed.ids]
    sends = [np.setdiff1d(senders, k) for k, senders in zip(fed.ids, sends, strict=True)]
    largest = [np.sort(row[j])[::-1][:m] for row, j, m in zip(cosines, sends, fed.budget[fed.ids], strict=True)]
    r = fed.options["hubs"] * fed.tell(np.array([values.sum() / max(len(values), 1) for values in largest]))
    best = []
    for row, n, m in zip(cosines, near, most, strict=True):
        kept = n[row[n] >= fed.options["alike"] * row[n].max(initial=0)]
        best.append(kept[np.argsort(r[kept] - row[kept], kind="stable")][: fed.options["pool"] * m])
    return fed.collect([fed.shuffle(k, pool, 0)[:m] for k, pool, m in zip(fed.ids, best, most, strict=True)])


def alike(ids: np.ndarray, told: np.ndarray) -> np.ndarray:
    """Return cosines of the sketches of `ids` with all, float64 `[K, N]`; the products are whole numbers, exact in any order."""
    whole = told.astype(np.float64)
    length = np.sqrt(np.maximum((whole**2).sum(1), 1))
    return (whole[ids] @ whole.T) / length / length[ids, None]
