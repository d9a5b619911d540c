"""Nearest: a graph of the most similar clients, found before receiving a model (this project's).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

u_i is the sum of what client i's own training has moved its model, without what averages did.
After preprocessing, and in each round up to `until`, every client sends a sketch of u_i, a byte per
entry; later changes say more of a client's own images than of its kind.

Client i prefers the largest cos_ij - r_j / 2, where r_j is the mean of client j's own B_c - 1
largest cosines. Without r_j a few hubs would be in very many averages (Radovanovic et al., JMLR
2010; the order is that of CSLS, Conneau et al., ICLR 2018). A client less than `alike` times as
similar as the nearest is left out. B_c - 1 are drawn from the first `pool` times as many: the
very nearest often choose one another, so news from others of their kind would come late.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Candidates, Federation, State, Tensor, _given
from dpfl_mpi.settings import option

METHOD = _given.method("Nearest", ignores=OWN_GRAPH, sends_models=False, look="#882255 P")


@dataclass(frozen=True)
class Options:
    entries: int = option(1024, "entries of a sketch, a byte each", low=1)
    until: int = option(5, "the last round that chooses; later ones keep its graph", low=0)
    hubs: float = option(0.5, "how much of r_j is taken off; 0: the plain cosine", low=0, high=1)
    pool: int = option(2, "B_c - 1 are drawn from so many times as many of the nearest", low=1)
    alike: float = option(0.5, "least cosine, as a share of one's largest", low=0, high=1)


def init(fed: Federation) -> State:
    start = fed.common_row()
    u = start * 0
    state = _given.init(fed, lambda w: choose(fed, u.copy_(w - start), fed.candidates()))
    return {"client": {"u": u, **state["client"]}, "shared": state["shared"]}


def round(fed: Federation, state: State, t: int) -> State:
    start, u = state["client"]["w"].clone(), state["client"]["u"]

    def of_round(w: Tensor) -> CollaborationGraph:
        u.add_(w - start)
        if t > fed.options["until"]:
            return state["shared"]["chosen"]
        found = choose(fed, u, fed.candidates())
        return found.where(fed.learners, state["shared"]["chosen"])  # an absent client's stays

    state = _given.round(fed, state, of_round, lambda _, candidates: choose(fed, u, candidates))
    return {"client": {"u": u, **state["client"]}, "shared": state["shared"]}


def choose(fed: Federation, u: Tensor, candidates: Candidates) -> CollaborationGraph:
    """Return whom each client averages with, by the sketches of u `[K, W]`. Collective."""
    options = fed.options
    cosine_KN = cosines(fed.ids, fed.tell(fed.sketches(u, options["entries"])))
    r = options["hubs"] * fed.tell(hub_scores(fed, cosine_KN))
    senders = []
    for k, cosine in zip(fed.ids, cosine_KN, strict=True):
        others, room = candidates.of(k), candidates.room[k]
        alike = others[cosine[others] >= options["alike"] * cosine[others].max(initial=0)]
        best_first = alike[np.argsort(r[alike] - cosine[alike], kind="stable")]
        senders.append(fed.shuffle(k, best_first[: options["pool"] * room], 0)[:room])
    return fed.collect(senders)


def hub_scores(fed: Federation, cosine_KN: np.ndarray) -> np.ndarray:
    """Return r `[K]`: the mean of each client's largest cosines with those that send to it."""
    # Clients that have stopped, or do not choose now (--churn), still send.
    active = np.flatnonzero(fed.active)
    r = np.zeros(len(fed.ids))
    for i, k in enumerate(fed.ids):
        senders = active if fed.reach is None else np.intersect1d(active, fed.reach.of(k))
        cosine = cosine_KN[i, np.setdiff1d(senders, k)]
        largest = np.sort(cosine)[::-1][: fed.budget[k]]
        r[i] = largest.sum() / max(len(largest), 1)
    return r


def cosines(ids: np.ndarray, sketch_N: np.ndarray) -> np.ndarray:
    """Return cosines of the sketches of `ids` with all, float64 `[K, N]`.

    The products are whole numbers, exact in any order.
    """
    entries = sketch_N.astype(np.float64)
    length = np.sqrt(np.maximum((entries**2).sum(1), 1))
    return (entries[ids] @ entries.T) / length / length[ids, None]
