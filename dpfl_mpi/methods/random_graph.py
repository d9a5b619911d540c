"""Random graph: DPFL whose collaborators are drawn (Kharrat et al., AISTATS 2025, section 4).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Omega_k is B_c - 1 of the reachable clients, drawn uniformly, and C_k = Omega_k in every round.
With --graphs RESULT a client has in each round as many as in that result: DPFL keeps fewer.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Candidates, Federation, State, _given
from dpfl_mpi.settings import option

METHOD = _given.method("Random graph", ignores=("omega_period",), elementwise=True, colour="#000000", marker="*")


@dataclass(frozen=True)
class Options:
    redraw: bool = option(False, "draw the graph anew each round")  # Paper: does not say; once is DPFL's frozen Omega


def init(fed: Federation) -> State:
    return _given.init(fed, lambda w: draw(fed, 0, fed.candidates()))


def round(fed: Federation, state: State, t: int) -> State:
    again = fed.options["redraw"] or fed.graphs
    chosen = state["shared"]["chosen"]
    now = lambda w: draw(fed, t, fed.candidates()) if again else chosen  # noqa: E731
    return _given.round(fed, state, now, lambda w, candidates: draw(fed, t, candidates))


def draw(fed: Federation, t: int, candidates: Candidates) -> CollaborationGraph:
    """Return the graph of round t: each client's first B_c - 1 reachable clients in its keyed order, with --graphs as many as it had there."""
    if not fed.graphs:
        return fed.collect([fed.shuffle(k, candidates.of(k))[: candidates.room[k]] for k in fed.ids])
    counts = np.minimum(fed.graphs[t].degrees(), candidates.room)
    return fed.collect([order(fed, int(k), t, candidates)[: counts[k]] for k in fed.ids])


def order(fed: Federation, k: int, t: int, candidates: Candidates) -> np.ndarray:
    """Return whom client k can receive from in round t, in the order that it draws from among all that are ever there."""
    near = np.arange(fed.n) if fed.reach is None else fed.reach.of(k)
    drawn = fed.shuffle(k, near[near != k], number=t if fed.options["redraw"] else 0)
    return drawn[np.isin(drawn, candidates.of(k))]
