"""FedAMP: a pull to a mean in which closer models weigh more (Huang et al., AAAI 2021).

Shared: nothing; a server weighs models.
Personal: w_i, which minimises f_i(w_i) + (lambda / (2 alpha)) ||w_i - u_i||^2.
Scored: w_i after training.

In each round the server sends client i the message u_i = sum_j xi_ij w_j. The weight of another
client's model is xi_ij = alpha A'(||w_i - w_j||^2), where A(x) = 1 - exp(-x / sigma). That of the
client's own model is 1 minus these, which is never negative if alpha is at most sigma / (N - 1).

Paper: read from its abstract, others' notes and PFLlib's code, whose defaults these are. In that
    code the pull has no gradient, so they were never at work there; here it is the paper's.
Paper: alpha_k depends on the round k; here, as in that code, it is constant.
Paper: w_i is a minimum; here tau_train epochs that start from the last w_i, as in that code.
"""

import math
from dataclasses import dataclass

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import Federation, Method, State, Tensor, local
from dpfl_mpi.settings import option

CITATION = """@inproceedings{huang2021fedamp,
  title = {Personalized Cross-Silo Federated Learning on Non-{IID} Data},
  author = {Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and
            Pei, Jian and Zhang, Yong},
  booktitle = {AAAI Conference on Artificial Intelligence}, year = {2021}
}"""
METHOD = Method("FedAMP", CITATION, topology="server", every_row=1, look="#999933 --")


@dataclass(frozen=True)
class Options:
    sigma: float = option(1.0, "sigma: a larger one gives weight to models further away", above=0)
    alpha: float = option(1.0, "alpha_k, the server's step towards the others' models", above=0)
    lam: float = option(1.0, "lambda; the pull of w_i to u_i has the weight lambda / alpha", low=0)


def init(fed: Federation) -> State:
    if (attack := fed.run.attack) and attack.kind in ("sign_flip", "scale"):
        why = "fedamp sends models before it trains them, so there is no change to falsify"
        raise UserError(f"--attack is {attack}; {why}")
    return local.init(fed)


def round(fed: Federation, state: State, t: int) -> State:
    w = state["client"]["w"]
    u = messages(fed, w)
    fed.note_received(2)  # w_i up, u_i down
    pull = fed.proximal(u, fed.options["lam"] / fed.options["alpha"])
    w = fed.local_opt(w, epochs=fed.run.tau_train, gradient=pull)
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {}}


def messages(fed: Federation, w: Tensor) -> Tensor:
    """Return u_i = w_i + sum_j xi_ij (w_j - w_i) over the clients that take part, `[K, W]`."""
    sigma, alpha = fed.options["sigma"], fed.options["alpha"]
    own, active = w.double(), fed.active[fed.ids]
    u = own.clone()
    for j, row in fed.every_row(w):
        other = row.double()
        for i in np.flatnonzero(active & (fed.ids != j)):
            away = other - own[i]
            # one product at a time: the same bits for any number of ranks
            xi = alpha * math.exp(-float(away.dot(away)) / sigma) / sigma
            u[i] += xi * away
    return u.float()
