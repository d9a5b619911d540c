"""pFedGraph: weights by the similarity of updates (Ye et al., ICML 2023).

Shared: nothing; a server weighs models.
Personal: w_i.
Scored: the better by validation of the mean received and the model trained from it.

The server infers for each client the weights x of all models from their cosine similarity, and
sends it their weighted mean.

Paper: the term lambda has the sign of the published code, which pushes w_i away from the mean
    that it received.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from dpfl_mpi.methods import Federation, Method, State, Tensor, local
from dpfl_mpi.settings import option

CITATION = """@inproceedings{ye2023pfedgraph,
  title = {Personalized Federated Learning with Inferred Collaboration Graphs},
  author = {Ye, Rui and Ni, Zhenyang and Wu, Fangzhao and Chen, Siheng and Wang, Yanfeng},
  booktitle = {International Conference on Machine Learning (ICML)}, year = {2023}
}"""
METHOD = Method("pFedGraph", CITATION, topology="server", every_row=2, look="#CC79A7 -- P")
ALIKE = -0.9  # a distance below this counts as -1, as in the published code


@dataclass(frozen=True)
class Options:
    # the defaults are those of its cosine variant
    alpha: float = option(0.8, "alpha, the weight of ||x||^2 and of the pull of x to p", low=1e-9)
    lam: float = option(0.01, "lambda, the weight of the local term", low=0)


def init(fed: Federation) -> State:
    return local.init(fed, u=fed.common_row() * 0)


def round(fed: Federation, state: State, t: int) -> State:
    w, u = state["client"]["w"], state["client"]["u"]
    if t > 1:
        fed.evaluate(w)  # the mean that was received
    w = fed.local_opt(w, epochs=fed.run.tau_train, gradient=partial(local_objective, fed, u))
    fed.evaluate(w)
    x = infer(fed, w)
    w, u = aggregate(fed, w, u, x)
    fed.note_received(2)  # one up, one down
    senders = [np.setdiff1d(np.flatnonzero(x_i), [k]) for k, x_i in zip(fed.ids, x, strict=True)]
    return {"client": {"w": w, "u": u}, "shared": {"chosen": fed.collect(senders)}}


def local_objective(fed: Federation, u: Tensor, block, batch) -> Tensor:
    """Compute the gradient of f_i(w) + lambda <u_i, w> / ||w||; u_i is 0 in the first round."""
    loss = fed.gradient(block, batch)
    w, u_i = block.w, u[block.rows]
    norm = w.square().sum(1, keepdim=True).sqrt()
    along = (u_i * w).sum(1, keepdim=True) / norm.square()
    block.g.add_((u_i - along * w) / norm, alpha=fed.options["lam"])
    return loss


def infer(fed: Federation, w: Tensor) -> np.ndarray:
    """Return the weights x of all models for each local client, `[K, N]`. Collective.

    An absent client's weights are 0, and so are the others' weights of it.
    """
    w_0 = fed.initial_row()
    update = (w - w_0).double()
    norm = [row.dot(row).sqrt() for row in update]
    cosine = update.new_zeros(len(w), fed.n)
    for j, row in fed.every_row(w):
        other = (row - w_0).double()
        other_norm = other.dot(other).sqrt()
        for i in range(len(w)):  # one product at a time: the same bits for any number of ranks
            cosine[i, j] = update[i].dot(other) / (norm[i] * other_norm).clamp(min=1e-12)
    d = -cosine.cpu().numpy()  # the distances
    d[d < ALIKE] = -1
    d[np.arange(len(w)), fed.ids] = -1
    x = np.zeros((len(w), fed.n))
    active = np.flatnonzero(fed.active)
    p = fed.p[active] / fed.p[active].sum()
    for i in np.flatnonzero(fed.active[fed.ids]).tolist():
        x[i, active] = weights(d[i, active], p, fed.options["alpha"])
    return x


def aggregate(fed: Federation, w: Tensor, u: Tensor, x: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return w_i <- sum_j x_ij w_j and u_i <- sum_j x_ij w_j / ||w_j||, `[K, W]`.

    An absent client keeps its own. Collective.
    """
    total, directions = w.double() * 0, w.double() * 0
    for j, row in fed.every_row(w):
        model = row.double()
        direction = model / model.dot(model).sqrt()
        for i in np.flatnonzero(x[:, j]):
            total[i] += x[i, j] * model
            directions[i] += x[i, j] * direction
    absent = x.sum(1) == 0
    total[absent], directions[absent] = w[absent].double(), u[absent].double()
    return total.float(), directions.float()


def weights(d: np.ndarray, p: np.ndarray, alpha: float) -> np.ndarray:
    """Return argmin_x alpha ||x||^2 + (d - 2 alpha p) x over {x >= 0, sum x = 1}, `[N]`.

    That is p - d / (2 alpha), projected on the simplex (Duchi et al., ICML 2008, figure 1).
    """
    v = p - d / (2 * alpha)
    descending = np.sort(v)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(v) + 1)
    rho = np.flatnonzero(descending > excess)[-1]
    return np.maximum(v - excess[rho], 0)
