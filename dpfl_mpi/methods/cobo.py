"""CoBo: collaborators by the agreement of gradients (Hashemi et al., NeurIPS 2024, Algorithm 1).

Shared: the weights w_ij, from 0 to 1.
Personal: x_i, which minimises f_i(x_i) + (rho / 2) sum_k w_ik ||x_i - x_k||^2.
Scored: x_i after training.

All models pass through a server, which also sends a pair's midpoint to both.

Paper: a round is one step; here it is tau_train epochs, with the x_k of the round's start. So a
    pair is compared about once in 50 rounds, not in each of 40,000 steps, and gamma is 1, not
    0.01 as in the code. With rho 0.05 a hundred clients then become one model.
Paper: gradients of single steps; here one mini-batch of each client serves all its midpoints.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.methods import Federation, Method, State, Tensor
from dpfl_mpi.settings import option

CITATION = """@inproceedings{hashemi2024cobo,
  title = {{CoBo}: Collaborative Learning via Bilevel Optimization},
  author = {Hashemi, Diba and He, Lie and Jaggi, Martin},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)}, year = {2024},
  note = {arXiv:2409.05539}
}"""
METHOD = Method(
    "CoBo", CITATION, topology="server", sends_models=False, every_row=12, colour="#E69F00", line="-."
)


@dataclass(frozen=True)
class Options:
    rho: float = option(0.05, "rho, the weight of the pull to the collaborators' models", low=0)
    gamma: float = option(1.0, "gamma, the step of the weights w_ij", low=0)


def init(fed: Federation) -> State:
    x = fed.common_row()
    fed.evaluate(x)
    return {"client": {"x": x, "w": np.ones((len(fed.ids), fed.n))}, "shared": {}}


def round(fed: Federation, state: State, t: int) -> State:
    x, w = state["client"]["x"], state["client"]["w"]
    select(fed, x, w)  # Client-Selection
    fed.note_received(2)  # x_i up, sum_k w_ik x_k down
    total, degree = x.double() * 0, np.zeros(len(x))
    for k, row in fed.every_row(x):
        for i in np.flatnonzero((w[:, k] > 0) & (fed.ids != k)):
            total[i] += w[i, k] * row.double()
            degree[i] += w[i, k]
    pull = partial(pulled, fed, total.float(), fed.column(degree).float())
    x = fed.local_opt(x, epochs=fed.run.tau_train, gradient=pull)
    fed.evaluate(x)
    near = [np.flatnonzero((w[i] > 0) & fed.active & (np.arange(fed.n) != k)) for i, k in enumerate(fed.ids)]
    return {"client": {"x": x, "w": w}, "shared": {"chosen": fed.collect(near)}}


def pulled(fed: Federation, total: Tensor, degree: Tensor, block, batch) -> Tensor:
    """The gradient g_i + rho sum_k w_ik (x_i - x_k), of which `total` `[K, W]` is sum_k w_ik x_k and `degree` `[K, 1]` sum_k w_ik."""
    loss = fed.gradient(block, batch)
    block.g.add_(fed.options["rho"] * (degree[block.rows] * block.w - total[block.rows]))
    return loss


def select(fed: Federation, x: Tensor, w: np.ndarray) -> None:
    """Update the weights w `[K, N]` of the pairs that are drawn in this round, in place (Client-Selection). Collective."""
    partners = pairs(fed)
    mine = [partners[k] for k in fed.ids]
    rows: dict[tuple[int, int], Tensor] = {}
    for j, row in fed.every_row(x):
        rows |= {(i, j): row.clone() for i, with_i in enumerate(mine) if j in with_i}
    gradients = []  # at the midpoints with every client's first partner, second partner, ...
    for turn in range(max(map(len, partners))):
        z = x * 0
        for i, with_i in enumerate(mine):
            if turn < len(with_i):
                z[i] = (x[i] + rows[i, with_i[turn]]) / 2  # z_ij
        g = z * 0
        for batch, block in fed.batches(1, {"w": z}, advance=False, most=1):
            fed.gradient(block, batch)  # g_i at z_ij
            g[block.rows] = block.g
        gradients.append(g)
    for turn, g in enumerate(gradients):
        for j, g_j in fed.every_row(g):
            for i, with_i in enumerate(mine):
                if partners[j][turn : turn + 1] == [fed.ids[i]]:
                    g_i = gradients[with_i.index(j)][i]
                    along = float(g_i.double().dot(g_j.double()))  # one at a time: the same bits on any ranks
                    w[i, j] = np.clip(w[i, j] + fed.options["gamma"] * along, 0, 1)  # Proj
    fed.notes["models_received"] += 2 * np.array([len(with_i) for with_i in mine])  # z_ij down, its gradient up


def pairs(fed: Federation) -> list[list[int]]:
    """Return the partners of every client in this round, ascending: each ordered pair of those that take part with probability 1 / N."""
    drawn = np.zeros((fed.n, fed.n), bool)
    for i in np.flatnonzero(fed.active):
        coins = streams.stream(fed.run.seed, streams.PAIRS, int(i), fed.round).random(fed.n)
        drawn[i] = (coins < 1 / fed.n) & fed.active
        drawn[i, i] = False
    return [np.flatnonzero(row).tolist() for row in drawn | drawn.T]
