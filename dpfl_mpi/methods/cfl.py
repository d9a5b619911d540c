"""CFL: clusters halved where their clients disagree (Sattler et al., IEEE TNNLS 2020).

Shared: a model theta_c for each cluster c, one at first.
Personal: nothing.
Scored: the model of the client's cluster after aggregation.

An update is how far a client's training has moved the model of its cluster. A cluster is halved by
the cosines of its clients' updates where the updates are long but cancel out: their mean is shorter
than eps1, and one of them is longer than eps2. Both halves go on from the cluster's model.

Paper: read from its abstract and published code, which has no halving in the first 20 rounds, nor
    of two clients, and these defaults. How long updates are depends on model and learning rate.
Paper: weighs clients by their samples, the code all alike; here by p_i.
Paper: all clients take part; here a cluster is halved only in a round in which all of it do.
Paper: a newcomer finds its cluster by its update; here by the smallest loss, as in IFCA.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation, Method, State, Tensor, ifca
from dpfl_mpi.methods._senders import same_cluster
from dpfl_mpi.settings import option

CITATION = """@article{sattler2020cfl,
  title = {Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under
            Privacy Constraints},
  author = {Sattler, Felix and M{\\"u}ller, Klaus-Robert and Samek, Wojciech},
  journal = {IEEE Transactions on Neural Networks and Learning Systems}, year = {2020},
  note = {arXiv:1910.01991}
}"""
METHOD = Method(
    "CFL", CITATION, topology="server", sends_models=False, every_row=1, look="#999933 -."
)


@dataclass(frozen=True)
class Options:
    eps1: float = option(0.4, "halve a cluster whose mean update is shorter than this", above=0)
    eps2: float = option(1.6, "and whose longest update is longer than this", low=0)
    after: int = option(20, "halve no cluster in so many first rounds", low=0)
    linkage: Literal["complete", "single"] = option(
        "complete", "the cosine of two groups: the smallest of their pairs, or the largest"
    )


newcomer = ifca.newcomer


def init(fed: Federation) -> State:
    theta, cluster = fed.initial_row()[None], np.zeros(fed.n, np.int32)
    fed.evaluate(theta[cluster[fed.ids]])
    return {"client": {}, "shared": {"theta": theta, "cluster": cluster}}


def round(fed: Federation, state: State, t: int) -> State:
    theta, cluster = state["shared"]["theta"], state["shared"]["cluster"].copy()
    start = theta[cluster[fed.ids]]
    update = fed.local_opt(start.clone(), epochs=fed.run.tau_train) - start
    if t > fed.options["after"]:
        parents = halve(fed, cluster, products(fed, update, cluster))
        theta = theta[parents]
    theta = theta + fed.means(update, cluster, theta * 0)
    fed.evaluate(theta[cluster[fed.ids]])
    shared = {"theta": theta, "cluster": cluster, "chosen": same_cluster(fed, cluster)}
    return {"client": {}, "shared": shared}


def products(fed: Federation, update: Tensor, cluster: np.ndarray) -> np.ndarray:
    """Return the scalar products of active clients' updates in each cluster, `[N, N]`. Collective.

    Others are 0.
    """
    own, active = update.double(), fed.active[fed.ids]
    out = own.new_zeros(len(own), fed.n)
    for j, row in fed.every_row(update):
        other = row.double()
        for i in np.flatnonzero(active & (cluster[fed.ids] == cluster[j])):
            out[i, j] = own[i].dot(other)  # one at a time: the same bits for any number of ranks
    return fed.tell(out.cpu().numpy(), CollaborationGraph.empty(fed.n))  # to the server alone


def halve(fed: Federation, cluster: np.ndarray, product: np.ndarray) -> np.ndarray:
    """Halve clusters `[N]` in place; return of which old one each of the C now is a part, `[C]`."""
    parents = list(range(cluster.max() + 1))
    for c in parents.copy():
        members = np.flatnonzero((cluster == c) & fed.participants)
        if len(members) < 3 or not fed.active[members].all():
            continue
        of_pairs, p = product[np.ix_(members, members)], fed.p[members] / fed.p[members].sum()
        norm = np.sqrt(of_pairs.diagonal())
        mean = math.sqrt(max(math.fsum((p[:, None] * of_pairs * p).ravel()), 0))
        if mean < fed.options["eps1"] and norm.max() > fed.options["eps2"]:
            cosine = of_pairs / np.maximum(np.outer(norm, norm), 1e-12)
            cluster[members[second_half(cosine, fed.options["linkage"])]] = len(parents)
            parents.append(c)
    return np.array(parents)


def second_half(cosine: np.ndarray, linkage: str) -> np.ndarray:
    """Return which of n clients are apart from the first when two groups are left, bool `[n]`.

    The two groups of the largest cosine are joined until then. The cosine of two groups is the
    smallest of their pairs, "complete", or the largest, "single". By "single", the largest cosine
    between the halves is as small as it can be.
    """
    cosine, group = cosine.copy(), np.arange(len(cosine))
    np.fill_diagonal(cosine, -np.inf)
    of_pairs = {"complete": np.minimum, "single": np.maximum}[linkage]
    for _ in range(len(cosine) - 2):
        i, j = np.unravel_index(cosine.argmax(), cosine.shape)
        joined = of_pairs(cosine[i], cosine[j])
        joined[i] = -np.inf
        cosine[i], cosine[:, i] = joined, joined
        cosine[j], cosine[:, j] = -np.inf, -np.inf
        group[group == j] = i
    return group != group[0]
