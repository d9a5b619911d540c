"""Nearest: DPFL along a graph of the most similar clients, found without receiving a model. A choice of this project, no paper's.

Personal: w_i. Shared: nothing. Scored: w_i after training, before averaging, as DPFL.
u_i sums what client i's own training has moved. Averages are not part of it: else whom a client has averaged with seems more and more like it. After the
epochs before round 1, and in each round up to `until`, all tell signatures of u_i (`sketch`); later movements tell one's own images more than one's kind.
Client i averages with the B_c - 1 reachable j of the largest cos_ij - r_j / 2, r_j the mean of client j's own B_c - 1 largest cosines. Without r_j a few
models that are near to all, hubs (Radovanovic, Nanopoulos and Ivanovic, JMLR 2010), are in the averages of very many. This order is that of CSLS
(Conneau et al., ICLR 2018), 2 cos_ij - r_i - r_j.
"""

from dataclasses import dataclass

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Federation, State, Tensor, _given, sketch
from dpfl_mpi.settings import option

METHOD = _given.method("Nearest", ignores=OWN_GRAPH, sends_models=False, colour="#882255", marker="P")


@dataclass(frozen=True)
class Options(sketch.Options):
    until: int = option(5, "the last round that chooses; later ones keep its graph", low=0)
    hubs: float = option(0.5, "how much of r_j is taken off; 0: the plain cosine", low=0, high=1)


def init(fed: Federation) -> State:
    start = fed.common_row()
    u = start * 0

    def choose(w: Tensor) -> CollaborationGraph:
        return sketch.choose(fed, u.copy_(w - start), fed.options["hubs"])

    state = _given.init(fed, choose)
    return {"client": {"u": u, **state["client"]}, "shared": state["shared"]}


def round(fed: Federation, state: State, t: int) -> State:
    start, u = state["client"]["w"].clone(), state["client"]["u"]

    def choose(w: Tensor) -> CollaborationGraph:
        u.add_(w - start)
        return nearest(w) if t <= fed.options["until"] else state["shared"]["chosen"]

    def nearest(_: Tensor) -> CollaborationGraph:
        return sketch.choose(fed, u, fed.options["hubs"])

    state = _given.round(fed, state, choose, nearest)
    return {"client": {"u": u, **state["client"]}, "shared": state["shared"]}
