"""Oracle: the clients that share the most classes, which no real client knows.

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Omega_k is the B_c - 1 reachable clients that share the most classes with client k; ties go to the
larger p, then to the smaller number. A client that shares no class is left out, and where the data
have groups of clients, such as domains, one of another group. C_k = Omega_k.

With `by` overlap, Omega_k is those of the largest overlap of class distributions, the sum over
classes c of min(q_k(c), q_j(c)), where q_k(c) is the share of class c among client k's training and
validation images.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Candidates, Federation, State, _given
from dpfl_mpi.settings import option

METHOD = _given.method("Oracle", ignores=OWN_GRAPH, elementwise=True, look="#D55E00 :")


@dataclass(frozen=True)
class Options:
    by: Literal["classes", "overlap"] = option(
        "classes", "the classes in common, or the overlap of class distributions", added=True
    )


def init(fed: Federation) -> State:
    return _given.init(fed, lambda w: choose(fed, fed.candidates()))


def round(fed: Federation, state: State, t: int) -> State:
    chosen = state["shared"]["chosen"]
    return _given.round(fed, state, lambda w: chosen, lambda w, c: choose(fed, c))


def choose(fed: Federation, candidates: Candidates) -> CollaborationGraph:
    in_common = {"classes": shared_classes, "overlap": overlaps}[fed.options["by"]]
    counts, room = fed.class_counts, candidates.room
    senders = []
    for k in fed.ids:
        among = candidates.of(k)
        of_group = among[fed.groups[among] == fed.groups[k]]  # all, where the data have no groups
        senders.append(best(of_group, in_common(k, counts), fed.p, room[k]))
    return fed.collect(senders)


def best(candidates: np.ndarray, common_N: np.ndarray, p: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` candidates, of those with the most in common, more than 0."""
    common = common_N[candidates]
    order = np.lexsort((candidates, -p[candidates], -common))  # the last key counts first
    order = order[common[order] > 0]
    return candidates[order[:limit]]


def shared_classes(k: int, counts: np.ndarray) -> np.ndarray:
    """Return how many classes each client shares with client k, `[N]`, from counts `[N, C]`."""
    return ((counts > 0) & (counts[k] > 0)).sum(1)


def overlaps(k: int, counts: np.ndarray) -> np.ndarray:
    """Return the overlap of each client's class distribution with client k's, 0 to 1, `[N]`."""
    samples = counts.sum(1)
    # whole numbers, so that equal overlaps are equal on all processors
    common = np.minimum(counts * samples[k], counts[k] * samples[:, None]).sum(1)
    return common / (samples * samples[k])
