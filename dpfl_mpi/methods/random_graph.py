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
from dpfl_mpi.methods import Candidates, Federation, State, Tensor, _given
from dpfl_mpi.settings import option

METHOD = _given.method(
    "Random graph", ignores=("omega_period",), elementwise=True, look="#000000 *"
)


@dataclass(frozen=True)
class Options:
    # Paper: does not say; drawn once is DPFL's frozen Omega
    redraw: bool = option(False, "draw the graph anew each round")


def init(fed: Federation) -> State:
    return _given.init(fed, lambda w: draw(fed, 0, fed.candidates()))


def round(fed: Federation, state: State, t: int) -> State:
    def choose(w: Tensor) -> CollaborationGraph:
        if fed.options["redraw"] or fed.graphs:
            return draw(fed, t, fed.candidates())
        return state["shared"]["chosen"]

    return _given.round(fed, state, choose, lambda w, candidates: draw(fed, t, candidates))


def draw(fed: Federation, t: int, candidates: Candidates) -> CollaborationGraph:
    """Return the graph of round t: the first candidates in each client's keyed order.

    With --graphs a client has as many as in that round there.
    """
    room = candidates.room
    if not fed.graphs:
        drawn = [fed.shuffle(k, candidates.of(k), first=room[k]) for k in fed.ids]
    else:
        most = np.minimum(fed.graphs[t].degrees(), room)
        drawn = [stable_order(fed, int(k), t, candidates)[: most[k]] for k in fed.ids]
    return fed.collect(drawn)


def stable_order(fed: Federation, k: int, t: int, candidates: Candidates) -> np.ndarray:
    """Return client k's candidates in an order that does not depend on who is absent."""
    reachable = np.arange(fed.n) if fed.reach is None else fed.reach.of(k)
    order = fed.shuffle(k, reachable[reachable != k], number=t if fed.options["redraw"] else 0)
    return order[np.isin(order, candidates.of(k))]
