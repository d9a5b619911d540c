"""Replay: the graphs that another run recorded (--graphs), as they are or changed.

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

The budget must allow the most that the graphs ask for: of `reversed` that may be more than in the
recorded run.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph, rewired
from dpfl_mpi.methods import Federation, State, _given
from dpfl_mpi.settings import option

METHOD = _given.method("Replay", ignores=("omega_period",), elementwise=True, colour="#009E73", line=":")


@dataclass(frozen=True)
class Options:
    variant: Literal["as_is", "reversed", "rewired", "shuffled"] = option("as_is", "what is done to the graphs")


def init(fed: Federation) -> State:
    if not fed.graphs:
        raise UserError("--graphs is not set; replay takes the graphs of a result: --graphs results/RESULT.h5")
    return _given.init(fed, lambda w: graph_of(fed, 0))


def round(fed: Federation, state: State, t: int) -> State:
    return _given.round(fed, state, lambda w: graph_of(fed, t))


def graph_of(fed: Federation, t: int) -> CollaborationGraph:
    """Return the graph of round t; that it asks for more models than a budget allows, or beyond reach, is a `UserError` on every rank."""
    variant, seed = fed.options["variant"], fed.run.seed
    if variant == "shuffled" and t > 0:
        t = 1 + int(streams.stream(seed, streams.SHUFFLE, 0, 0).permutation(fed.run.rounds)[t - 1])
    graph = fed.graphs[t]
    if variant == "reversed":
        graph = CollaborationGraph.from_edges(graph.n, graph.senders, graph.receivers())
    if variant == "rewired":
        graph = rewired(graph, streams.stream(seed, streams.REWIRE, 0, t))
    degrees, what = graph.degrees(), f"the {variant} graph of round {t}"
    k = int(np.argmax((degrees - fed.most_senders) * fed.active))
    if fed.active[k] and degrees[k] > fed.most_senders[k]:
        allowed = f"--budget lets client {k} receive {fed.most_senders[k]} models"
        raise UserError(f"{allowed}; {what} has {degrees[k]} for it: raise --budget, or set it to inf")
    if fed.reach is not None and not graph.within(fed.reach):
        raise UserError(f"--graphs is {fed.run.graphs}: {what} goes beyond --reach")
    return graph
