"""DFedPGP: a body by directed push-sum, a head of one's own (Liu et al., CVPR 2024).

Shared: the body u_i and a scalar mu_i, along a graph of random senders.
Personal: the head v_i.
Scored: (u_i / mu_i, v_i) after training.

v_i trains at the body z_i = u_i / mu_i, then u_i by the gradients at z_i. Then each client shares
its body and mu evenly among its receivers and itself: u_i = sum_j u_j / (1 + out_j), and mu_i
alike.

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
from dpfl_mpi.settings import option

CITATION = """@inproceedings{liu2024dfedpgp,
  title = {Decentralized Directed Collaboration for Personalized Federated Learning},
  author = {Liu, Yingqi and Shi, Yifan and Li, Qinglun and Wu, Baoyuan and Wang, Xueqian and Shen, Li},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)}, year = {2024}
}"""
METHOD = Method(
    "DFedPGP", CITATION, searches=False, sends_models=False, sends="body", ignores=OWN_GRAPH, colour="#000000", line=":"
)


@dataclass(frozen=True)
class Options:
    head_epochs: int = option(1, "epochs of a round that train the head; the other of tau_train train the body", low=0)


def init(fed: Federation) -> State:
    epochs, most = fed.options["head_epochs"], fed.run.tau_train
    if epochs > most:
        raise UserError(f"--options.head_epochs is {epochs}; allowed is 0 to {most}, all of tau_train")
    return local.init(fed, mu=np.ones(len(fed.ids)))


def round(fed: Federation, state: State, t: int) -> State:
    u, mu = state["client"]["w"], state["client"]["mu"]
    head, epochs = fed.columns("head"), fed.options["head_epochs"]
    share = fed.column(mu).float()
    z = fed.local_opt((u / share).where(~head, u), epochs=epochs, trained=head, momentum="head")
    u = z.where(head, u)
    at_z = partial(debiased, fed, share, head)
    u = fed.local_opt(u, epochs=fed.run.tau_train - epochs, trained=~head, gradient=at_z)
    fed.evaluate((u / share).where(~head, u))
    chosen = fed.collect([fed.shuffle(k, fed.reachable(k))[: fed.most_senders[k]] for k in fed.ids])
    u, mu = push(fed, u, mu, chosen, head)
    return {"client": {"w": u, "mu": mu}, "shared": {"chosen": chosen}}


def debiased(fed: Federation, share: Tensor, head: Tensor, block, batch) -> Tensor:
    """The gradient at (u_i / mu_i, v_i) for a step of (u_i, v_i); `share` `[K, 1]` is mu."""
    u = block.w.clone()
    block.w.copy_((u / share[block.rows]).where(~head, u))
    loss = fed.gradient(block, batch)
    block.w.copy_(u)
    return loss


def push(
    fed: Federation, u: Tensor, mu: np.ndarray, graph: CollaborationGraph, head: Tensor
) -> tuple[Tensor, np.ndarray]:
    """Return the bodies and mu after each client has shared its own evenly; heads stay. Collective."""
    part = 1 / (1 + np.bincount(graph.senders, minlength=fed.n))  # of what a client has, to each receiver and itself
    weights = np.zeros((len(u), fed.n))
    for i, k in enumerate(fed.ids):
        weights[i, [k, *graph.of(k)]] = part[[k, *graph.of(k)]]
    mean = fed.average(u, graph, weights=weights)
    told = fed.tell(mu, graph)
    new = np.array([weights[i, j] @ told[j] for i, j in enumerate(map(np.flatnonzero, weights))])
    # who takes no part keeps both: shared on and on, and never sent back, they would come to nothing
    here = fed.learners[fed.ids]
    moves = ~head & (fed.column(here) > 0)
    return (mean.double() * fed.column(weights.sum(1))).float().where(moves, u), np.where(here, new, mu)
