"""The graphs that another run recorded (--graphs), read for `replay` and `random_graph`.

Axes: N clients, T rounds, E edges of all rounds.
"""

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Resolved


def graphs_of(run: Resolved, world: World) -> list[CollaborationGraph]:
    """Return the graphs of rounds 0 to T that the result of --graphs holds, on every rank; none without --graphs. Collective.

    Raises:
        UserError: on every rank; the result is of other clients, of fewer rounds, or recorded choices that were not averaged.
    """
    if run.graphs is None:
        return []
    held = world.share(lambda: edges_of(run))
    indptr = held["indptr"]
    return [CollaborationGraph(row - row[0], held["senders"][row[0] : row[-1]]) for row in indptr]


def edges_of(run: Resolved) -> dict[str, np.ndarray]:
    """Return the recorded graphs, `indptr` int64 `[T+1, N+1]` and `senders` int64 `[E]`, as the result has them."""
    with Result(str(run.graphs)) as result:
        n, rounds = len(result["client/p"]), result.last_round
        if n != run.clients or rounds < run.rounds:
            raise UserError(
                f"--graphs is {run.graphs}, with graphs of {n} clients in rounds 0 to {rounds}; this run has {run.clients} clients and {run.rounds} rounds"
            )
        if result.run.ggc_period > 1 and result.run.ggc_off_rounds == "skip":
            raise UserError(
                f"--graphs is {run.graphs}, a run that did not average in every round (--ggc_off_rounds skip)"
            )
        graphs = [result.chosen(t) for t in range(run.rounds + 1)]
        ends = np.concatenate([[0], np.cumsum([len(g.senders) for g in graphs])])
        return {
            "indptr": np.stack([g.indptr + end for g, end in zip(graphs, ends, strict=False)]),
            "senders": np.concatenate([g.senders for g in graphs]),
        }
