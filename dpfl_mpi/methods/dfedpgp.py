"""DFedPGP: a body by directed push-sum, a head of one's own (in the way of Liu et al., CVPR 2024).

Shared: the body u_i and a scalar mu_i, along a graph of random senders.
Personal: the head v_i.
Scored: (u_i / mu_i, v_i) after training.

v_i trains at the body z_i = u_i / mu_i, then u_i by the gradients at z_i. Then each client shares
its body and mu evenly among its receivers and itself: u_i = sum_j u_j / (1 + out_j), and mu_i
alike. A client that receives nothing, or has stopped, sends nothing either, so that no mu shrinks
or grows for ever.

Paper: read from its abstract and published code (arXiv 2405.17876): head epochs, then body
    epochs, and new random senders in each round.
Paper: the published code's weights are equal, so its mu stays 1; push-sum here follows Assran et
    al. (ICML 2019). Both parts have one learning rate.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor, local
from dpfl_mpi.methods._senders import random_graph
from dpfl_mpi.settings import option

CITATION = """@inproceedings{liu2024dfedpgp,
  title = {Decentralized Directed Collaboration for Personalized Federated Learning},
  author = {Liu, Yingqi and Shi, Yifan and Li, Qinglun and Wu, Baoyuan and Wang, Xueqian and
            Shen, Li},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)}, year = {2024}
}"""
METHOD = Method(
    "DFedPGP",
    CITATION,
    searches=False,
    sends_models=False,
    sends="body",
    ignores=OWN_GRAPH,
    look="#000000 :",
)


@dataclass(frozen=True)
class Options:
    head_epochs: int = option(1, "epochs of tau_train that train the head, not the body", low=0)


def init(fed: Federation) -> State:
    epochs, limit = fed.options["head_epochs"], fed.run.tau_train
    if epochs > limit:
        allowed = f"allowed is 0 to {limit}, all of tau_train"
        raise UserError(f"--options.head_epochs is {epochs}; {allowed}")
    return local.init(fed, mu=np.ones(len(fed.ids)))


def round(fed: Federation, state: State, t: int) -> State:
    u, mu = state["client"]["w"], state["client"]["mu"]
    head, epochs = fed.columns("head"), fed.options["head_epochs"]
    mu_K1 = fed.column(mu).float()
    z = (u / mu_K1).where(~head, u)
    z = fed.local_opt(z, epochs=epochs, trained=head, momentum="head")
    u = z.where(head, u)
    at_z = partial(debiased_gradient, fed, mu_K1, head)
    body_epochs = fed.run.tau_train - epochs
    u = fed.local_opt(u, epochs=body_epochs, trained=~head, gradient=at_z)
    fed.evaluate((u / mu_K1).where(~head, u))
    chosen = sharing(fed, random_graph(fed))
    u, mu = push(fed, u, mu, chosen, head)
    fed.evaluate((u / fed.column(mu).float()).where(~head, u), "mixed")
    return {"client": {"w": u, "mu": mu}, "shared": {"chosen": chosen}}


def debiased_gradient(fed: Federation, mu_K1: Tensor, head: Tensor, block, batch) -> Tensor:
    """Compute the gradient at (u_i / mu_i, v_i) for a step of (u_i, v_i); return the losses."""
    u = block.w.clone()
    block.w.copy_((u / mu_K1[block.rows]).where(~head, u))
    loss = fed.gradient(block, batch)
    block.w.copy_(u)
    return loss


def sharing(fed: Federation, graph: CollaborationGraph) -> CollaborationGraph:
    """Return the graph without edges from clients that do not learn or receive nothing in it."""
    while True:
        shares = fed.learners & (graph.degrees() > 0)
        edges = shares[graph.senders]
        if edges.all():
            return graph
        graph = graph.only(edges)  # of which other clients may receive nothing


def push(
    fed: Federation, u: Tensor, mu: np.ndarray, graph: CollaborationGraph, head: Tensor
) -> tuple[Tensor, np.ndarray]:
    """Return the bodies and mu after each client shared its own evenly; heads stay. Collective."""
    share = 1 / (1 + np.bincount(graph.senders, minlength=fed.n))  # to each receiver and itself
    weights = np.zeros((len(u), fed.n))
    for i, k in enumerate(fed.ids):
        sources = [k, *graph.of(k)]
        weights[i, sources] = share[sources]
    mean = fed.average(u, graph, weights=weights)
    total = (mean.double() * fed.column(weights.sum(1))).float()
    mu_N = fed.tell(mu, graph)
    new_mu = np.array([row[row > 0] @ mu_N[row > 0] for row in weights])
    # A client that is absent keeps both. Otherwise its mu would shrink to nothing.
    learners = fed.learners[fed.ids]
    moves = ~head & (fed.column(learners) > 0)
    return total.where(moves, u), np.where(learners, new_mu, mu)
