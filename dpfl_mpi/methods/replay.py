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

METHOD = _given.method("Replay", ignores=("omega_period",), elementwise=True, look="#009E73 :")


@dataclass(frozen=True)
class Options:
    variant: Literal["as_is", "reversed", "rewired", "shuffled"] = option(
        "as_is", "how the graphs are changed"
    )


def init(fed: Federation) -> State:
    if not fed.graphs:
        takes = "replay takes the graphs of a result: --graphs results/RESULT.h5"
        raise UserError(f"--graphs is not set; {takes}")
    return _given.init(fed, lambda w: graph_of(fed, 0))


def round(fed: Federation, state: State, t: int) -> State:
    return _given.round(fed, state, lambda w: graph_of(fed, t))


def graph_of(fed: Federation, t: int) -> CollaborationGraph:
    """Return the graph of round t; one beyond a budget or reach is a `UserError` on every rank."""
    variant, seed = fed.options["variant"], fed.run.seed
    if variant == "shuffled" and t > 0:
        order = streams.stream(seed, streams.SHUFFLE, 0, 0).permutation(fed.run.rounds)
        t = 1 + int(order[t - 1])
    graph = fed.graphs[t]
    if variant == "reversed":
        graph = CollaborationGraph.from_edges(graph.n, graph.senders, graph.receivers())
    if variant == "rewired":
        graph = rewired(graph, streams.stream(seed, streams.REWIRE, 0, t))
    check(fed, graph, f"the {variant} graph of round {t}")
    return graph


def check(fed: Federation, graph: CollaborationGraph, what: str) -> None:
    degrees = graph.degrees()
    k = int(np.argmax((degrees - fed.most_senders) * fed.active))  # who is furthest above
    if fed.active[k] and degrees[k] > fed.most_senders[k]:
        cause, mend = "--budget lets", "raise --budget, or set it to inf"
        if fed.run.flip_share and not (fed.run.flipped_run_ggc or fed.most_senders[k]):
            cause, mend = "--no-flipped_run_ggc lets", "leave it out"
        models = f"{cause} client {k} receive {fed.most_senders[k]} models"
        raise UserError(f"{models}; {what} has {degrees[k]} for it: {mend}")
    check_reach(fed, graph, what)


def check_reach(fed: Federation, graph: CollaborationGraph, what: str) -> None:
    if fed.reach is not None and not graph.within(fed.reach):
        raise UserError(f"--graphs is {fed.run.graphs}: {what} goes beyond --reach")
