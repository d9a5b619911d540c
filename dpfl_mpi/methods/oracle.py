"""Oracle: the clients that share the most classes, which no real client knows.

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Omega_k is the B_c - 1 reachable clients that share the most classes with client k; ties go to the
larger p, then to the smaller number. A client that shares no class is left out, and where the data
have groups of clients, such as domains, one of another group. C_k = Omega_k.
"""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Candidates, Federation, State, _given

METHOD = _given.method("Oracle", ignores=OWN_GRAPH, elementwise=True, look="#D55E00 :")


def init(fed: Federation) -> State:
    return _given.init(fed, lambda w: choose(fed, fed.candidates()))


def round(fed: Federation, state: State, t: int) -> State:
    chosen = state["shared"]["chosen"]
    return _given.round(fed, state, lambda w: chosen, lambda w, c: choose(fed, c))


def choose(fed: Federation, candidates: Candidates) -> CollaborationGraph:
    holds, room = fed.class_counts > 0, candidates.room
    alike = lambda k: (among := candidates.of(k))[fed.groups[among] == fed.groups[k]]  # noqa: E731
    return fed.collect([best(k, alike(k), holds, fed.p, room[k]) for k in fed.ids])


def best(k: int, candidates: np.ndarray, holds: np.ndarray, p: np.ndarray, limit: int):
    """Return at most `limit` candidates that share the most classes with client k.

    `holds` `[N, C]` says which client holds which class.
    """
    shared = (holds[candidates] & holds[k]).sum(1)
    order = np.lexsort((candidates, -p[candidates], -shared))  # the last key counts first
    order = order[shared[order] > 0]
    return candidates[order[:limit]]
