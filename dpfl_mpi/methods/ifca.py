"""IFCA: k global models, of which a client trains the best (Ghosh et al., NeurIPS 2020).

Shared: k models theta_j, one for each cluster.
Personal: the number of the client's cluster.
Scored: the model of the client's cluster after aggregation.

In each round a client receives all k models and estimates its cluster: the model of the smallest
loss on its training images. It trains that one. Each model becomes the mean of those trained from
it; a model that nobody trained stays as it is.

Paper: read from its abstract and published code, which takes tau steps of plain descent on all
    images; here tau_train epochs. It weighs clients alike; here by p_i, as in every other method.
Paper: starts anew from several random draws of the models; here there is one draw.
Paper: its code scores the model of smallest loss after aggregation; here the estimate stays.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation, Method, Newcomer, State, Tensor
from dpfl_mpi.methods._senders import least, same_cluster
from dpfl_mpi.settings import option

CITATION = """@inproceedings{ghosh2020ifca,
  title = {An Efficient Framework for Clustered Federated Learning},
  author = {Ghosh, Avishek and Chung, Jichan and Yin, Dong and Ramchandran, Kannan},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)}, year = {2020}
}"""
METHOD = Method(
    "IFCA", CITATION, topology="server", sends_models=False, elementwise=True, look="#332288 -."
)


@dataclass(frozen=True)
class Options:
    k: int = option(2, "k, the number of models and of clusters", low=1, high=100)


def init(fed: Federation) -> State:
    theta = fed.initial_row().repeat(fed.options["k"], 1)
    for j in range(1, len(theta)):
        theta[j] = fed.initial_row(j)
    cluster = estimate(fed, theta, np.zeros(len(fed.ids), np.int32))
    fed.evaluate(theta[cluster])
    return {"client": {"cluster": cluster}, "shared": {"theta": theta}}


def round(fed: Federation, state: State, t: int) -> State:
    theta, k = state["shared"]["theta"], fed.options["k"]
    cluster = estimate(fed, theta, state["client"]["cluster"])
    w = fed.local_opt(theta[cluster], epochs=fed.run.tau_train)  # LocalUpdate
    cluster_N = fed.tell(cluster, CollaborationGraph.empty(fed.n))  # to the server alone
    theta = fed.means(w, cluster_N, theta, down=k)
    fed.evaluate(theta[cluster])
    shared = {"theta": theta, "chosen": same_cluster(fed, cluster_N)}
    return {"client": {"cluster": cluster}, "shared": shared}


def estimate(fed: Federation, theta: Tensor, cluster: np.ndarray) -> np.ndarray:
    """Return argmin_j F_i(theta_j) for each local client, `[K]`; an absent one keeps its own."""
    cluster = cluster.copy()
    for i in np.flatnonzero(fed.learners[fed.ids]).tolist():
        cluster[i] = least(fed.training_losses(i, theta))
    return cluster


def newcomer(fed: Federation, state: State) -> Newcomer:
    """Return the model of the smallest loss on each client's training images."""
    theta = state["shared"]["theta"]
    cluster = [least(fed.training_losses(i, theta)) for i in range(len(fed.ids))]
    return Newcomer(theta[np.array(cluster, int)])
