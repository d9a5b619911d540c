"""pFedSV: averages weighted by Shapley values (in the way of Wu et al., arXiv 2202.02502).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Client i receives the n models of the largest relevance r_ij, where n is B_c - 1: the budget B_c
counts its own model, too. phi_j is the Shapley value of each of these models, and of its own, in a
game. There a coalition's worth is minus the loss of the plain mean of its models, on i's training
images. r_ij becomes 0.2 r_ij + 0.8 phi_j, and w_i the mean with weights max(phi_j, 0). Where all
are 0, w_i stays.

Paper: read from its abstract and another's code: n, r, phi and the weights are as there.
Paper: in that code a coalition's worth is its accuracy on training images, and 0 without members;
    here minus the loss, and minus that of a guess, ln C, without members.
Paper: that code visits all B_c! orders; here `orders` random ones, 0 for all. Equal relevance is
    ordered by a shuffle.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor, local
from dpfl_mpi.methods._senders import highest
from dpfl_mpi.settings import option

CITATION = """@article{wu2022pfedsv,
  title = {A Coalition Formation Game Approach for Personalized Federated Learning},
  author = {Wu, Leijie and Guo, Song and Ding, Yaohong and Zhan, Yufeng and Zhang, Jie},
  journal = {arXiv:2202.02502}, year = {2022}
}"""
METHOD = Method("pFedSV", CITATION, searches=False, ignores=OWN_GRAPH, look="#CC79A7 :")
ALL_ORDERS = 8  # most models of which all orders are tried, 40,320
KEPT = 0.2  # share of a relevance that stays when a new value comes


@dataclass(frozen=True)
class Options:
    orders: int = option(
        10, "random orders per Shapley value; 0: all B_c! of them", low=0, high=999
    )


def init(fed: Federation) -> State:
    models = 1 + int(fed.most_senders.max())
    if fed.options["orders"] == 0 and models > ALL_ORDERS:
        allowed = f"allowed are at most {ALL_ORDERS} models, or --options.orders of 1 or more"
        orders = f"all {models}! orders of {models} models"
        raise UserError(f"--options.orders is 0, {orders}; {allowed}")
    return local.init(fed, r=np.zeros((len(fed.ids), fed.n)))


def round(fed: Federation, state: State, t: int) -> State:
    w, r = state["client"]["w"], state["client"]["r"].copy()
    w = fed.local_opt(w, epochs=fed.run.tau_train)
    fed.evaluate(w)
    relevant = []
    for r_i, k in zip(r, fed.ids, strict=True):
        candidates = fed.shuffle(k, fed.reachable(k))
        relevant.append(highest(candidates, r_i, fed.most_senders[k]))
    chosen = fed.collect(relevant)
    received, senders = fed.exchange(w, chosen), [chosen.of(k) for k in fed.ids]
    # by local client, the models in its game: its own, then its senders' in the order of `senders`
    models = [[row] for row in w]
    for i, _, w_mW in received.models():
        models[i].extend(w_mW.clone())  # other models take their place in memory
    weights = np.zeros((len(w), fed.n))
    for i, k in enumerate(fed.ids):
        if len(senders[i]):
            members = np.array([k, *senders[i]])
            phi = values(fed, i, models[i])
            r[i, members] = KEPT * r[i, members] + (1 - KEPT) * phi
            weights[i, members] = np.maximum(phi, 0)
    w = fed.average(w, chosen, received, weights=weights)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w, "r": r}, "shared": {"chosen": chosen}}


def values(fed: Federation, i: int, models: list[Tensor]) -> np.ndarray:
    """Return the Shapley value of each of m models for local client i, float64 `[m]`."""
    m, repeats = len(models), fed.options["orders"]
    if repeats:
        players = np.arange(m)
        drawn = [fed.shuffle(int(fed.ids[i]), players, 1 + repeat) for repeat in range(repeats)]
        orders = [order.tolist() for order in drawn]
    else:
        orders = [list(order) for order in itertools.permutations(range(m))]

    def worth(coalitions: Sequence[frozenset[int]]) -> np.ndarray:
        means = models[0].repeat(len(coalitions), 1)
        for row, coalition in zip(means, coalitions, strict=True):
            row.copy_(sum(models[j].double() for j in sorted(coalition)) / len(coalition))
        return -np.asarray(fed.training_losses(i, means))

    classes = fed.class_counts.shape[1]
    return shapley(orders, worth, -math.log(classes))


def shapley(
    orders: Sequence[Sequence[int]],
    worth: Callable[[Sequence[frozenset[int]]], np.ndarray],
    worth_of_empty: float,
) -> np.ndarray:
    """Return the Shapley value of each of m players, float64 `[m]` (Castro et al., 2009).

    That is what it adds to the players before it, averaged over the orders. `worth` is called once,
    with all coalitions of at least one player; `worth_of_empty` is that of none.
    """
    # of each order the coalitions of its first 0, 1, ..., m players
    growing = [[frozenset(order[:n]) for n in range(len(order) + 1)] for order in orders]
    coalitions = list(dict.fromkeys(s for row in growing for s in row[1:]))
    worths = dict(zip(coalitions, worth(coalitions).tolist(), strict=True))
    worths[frozenset()] = worth_of_empty
    phi = np.zeros(len(orders[0]))
    for order, row in zip(orders, growing, strict=True):
        for j, smaller, larger in zip(order, row, row[1:], strict=False):
            phi[j] += worths[larger] - worths[smaller]
    return phi / len(orders)
