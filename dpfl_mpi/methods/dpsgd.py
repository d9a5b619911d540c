"""D-PSGD: averages along the graph of --graphs, a ring by default (Lian et al., NeurIPS 2017).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Client i averages with all its senders in the graph of the round, or with `peers` of them, drawn in
each round (gossip). Absent senders are left out; d_i are left. Client j weighs
1 / (1 + max(d_i, d_j)), client i the rest of 1: with edges both ways these are the doubly
stochastic weights of Metropolis and Hastings.

Paper: a step on one mini-batch between two averages; here tau_train epochs.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation, Method, State, local
from dpfl_mpi.methods.replay import check_reach
from dpfl_mpi.settings import option

CITATION = """@inproceedings{lian2017dpsgd,
  title = {Can decentralized algorithms outperform centralized algorithms? {A} case study for
            decentralized parallel stochastic gradient descent},
  author = {Lian, Xiangru and Zhang, Ce and Zhang, Huan and Hsieh, Cho-Jui and Zhang, Wei and
            Liu, Ji},
  booktitle = {Advances in Neural Information Processing Systems}, year = {2017}
}"""
METHOD = Method(
    "D-PSGD", CITATION, searches=False, given=True, ignores=("omega_period",), look="#882255 --"
)


@dataclass(frozen=True)
class Options:
    peers: int = option(0, "gossip: senders drawn in each round; 0: all", low=0)


init = local.init


def round(fed: Federation, state: State, t: int) -> State:
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)
    check_reach(fed, fed.graphs[t], f"the graph of round {t}")
    chosen = fed.collect([senders(fed, k, fed.graphs[t].of(k)) for k in fed.ids])
    w = fed.average(w, chosen, weights=weights(fed.ids, chosen))
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"chosen": chosen}}


def senders(fed: Federation, k: int, of_graph: np.ndarray) -> np.ndarray:
    """Return whose models client k receives: all its active senders, or `peers` of them, drawn."""
    there = of_graph[fed.active[of_graph]] if fed.active[k] else of_graph[:0]
    drawn = fed.shuffle(k, there)[: fed.options["peers"]] if fed.options["peers"] else there
    return drawn[: fed.most_senders[k]]  # 0 of one that may not average (--no-flipped_run_ggc)


def weights(ids: np.ndarray, graph: CollaborationGraph) -> np.ndarray:
    """Return the weights of averages along a graph, float64 `[K, N]`; rows sum to 1."""
    degrees, out = graph.degrees(), np.zeros((len(ids), graph.n))
    for i, k in enumerate(ids):
        j = graph.of(k)
        out[i, j] = 1 / (1 + np.maximum(degrees[k], degrees[j]))
        out[i, k] = 1 - out[i, j].sum()
    return out
