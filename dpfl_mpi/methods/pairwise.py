"""Pairwise: the models that do best alone on a client's validation images, as in PENS.

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

DPFL without the combination: Omega_k is the B_c - 1 reachable clients whose models have the
smallest loss, each scored alone; ties go to the smaller number. C_k = Omega_k in every round.
"""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Candidates, Federation, State, Tensor, _given

METHOD = _given.method(
    "Pairwise", ignores=("graphs",), elementwise=True, asks_all=True, look="#000000 -. d"
)


def init(fed: Federation) -> State:
    return _given.init(fed, lambda w: choose(fed, w, fed.candidates()))


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t; every `omega_period` rounds the choice is made anew."""
    chosen = state["shared"]["chosen"]

    def graph(w: Tensor) -> CollaborationGraph:
        if t % fed.run.omega_period:
            return chosen
        # an absent client's choice stays
        return choose(fed, w, fed.candidates()).where(fed.learners, chosen)

    return _given.round(fed, state, graph, lambda w, candidates: choose(fed, w, candidates))


def choose(fed: Federation, w: Tensor, candidates: Candidates) -> CollaborationGraph:
    """Return for each client the candidates of the smallest loss on its validation images."""
    loss = fed.losses_of_all(w, candidates)
    fed.notes["models_received"] += (~np.isnan(loss)).sum(1)
    return fed.collect([smallest(loss[i], candidates.room[k]) for i, k in enumerate(fed.ids)])


def smallest(loss: np.ndarray, limit: int) -> np.ndarray:
    """Return the numbers of the `limit` smallest losses `[N]`; those that are NaN are left out."""
    return np.argsort(loss, kind="stable")[: min(limit, int(np.isfinite(loss).sum()))]
