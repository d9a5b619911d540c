"""Nearest: DPFL along graphs of the most similar models, found without receiving a model. A choice of this project, no paper's.

Personal: w_i. Shared: nothing. Scored: w_i after training, before averaging, as DPFL.
All tell signatures of their models (`sketch`) after the epochs before round 1, and again in each round. Client i averages with the B_c - 1 reachable j of
the largest cos_ij - r_j / 2, r_j the mean of client j's own B_c - 1 largest cosines. Without r_j a few models that are near to all, hubs
(Radovanovic, Nanopoulos and Ivanovic, JMLR 2010), are in the averages of very many. This order is that of CSLS (Conneau et al., ICLR 2018), 2 cos_ij - r_i - r_j.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import OWN_GRAPH, Federation, State, _given, sketch
from dpfl_mpi.settings import option

METHOD = _given.method("Nearest", ignores=OWN_GRAPH, sends_models=False, colour="#009E73", line=":", marker="P")


@dataclass(frozen=True)
class Options(sketch.Options):
    hubs: float = option(0.5, "how much of r_j is taken off; 0: the plain cosine", low=0, high=1)


def init(fed: Federation) -> State:
    return _given.init(fed, lambda w: sketch.choose(fed, w, fed.options["hubs"]))


def round(fed: Federation, state: State, t: int) -> State:
    return _given.round(fed, state, lambda w: sketch.choose(fed, w, fed.options["hubs"]))
