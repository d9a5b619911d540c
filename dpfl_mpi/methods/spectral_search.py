"""Spectral, then search: DPFL's greedy search among partners of one's own kind.

Shared: nothing; models move along a graph, and sketches to all.
Personal: w_i.
Scored: w_i after training, before averaging.

Omega is the graph that `spectral` finds. In each round a client receives the models of its senders
in Omega and searches among them, as DPFL does (Algorithm 1, lines 9 to 11).
"""

import math
from dataclasses import replace

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation, State, Tensor, dpfl, spectral

METHOD = replace(spectral.METHOD, title="Spectral, then search", searches=True, look="#332288 : P")
Options = spectral.Options
__all__ = ["METHOD", "Options", "init", "round"]


def init(fed: Federation) -> State:
    if (most := fed.run.candidates) < math.inf:
        why = "spectral_search receives models of its own kind alone: allowed is inf"
        raise UserError(f"--candidates is {most:g}; {why}")
    return spectral.init(fed)


def round(fed: Federation, state: State, t: int) -> State:
    def average(w: Tensor, omega: CollaborationGraph) -> tuple[Tensor, CollaborationGraph]:
        shared = state["shared"]
        chosen = dpfl.along_new(shared["chosen"], shared["omega"], omega)
        return dpfl.average_chosen(fed, w, omega, chosen, t)

    return spectral.round(fed, state, t, average)
