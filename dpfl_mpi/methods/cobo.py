"""CoBo: collaborators by the agreement of gradients (Hashemi et al., NeurIPS 2024, Algorithm 1).

Shared: the weights w_ij, from 0 to 1.
Personal: x_i, which minimises f_i(x_i) + (rho / 2) sum_k w_ik ||x_i - x_k||^2.
Scored: x_i after training.

All models pass through a server, which also sends a pair's midpoint to both. Bytes count each x_i
twice a round, for midpoints and for the sum, and the gradients of every client as often as the
client with the most pairs sends one.

Paper: a round is one step; here it is tau_train epochs, with the x_k of the round's start. A pair
    of 100 clients is compared about once in 50 rounds; in the code, one of 8 clients is some 540
    times in 40,000 steps. So gamma is 1, not 0.01. With rho 0.05 a hundred clients become one.
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
    "CoBo", CITATION, topology="server", sends_models=False, every_row=12, look="#E69F00 -."
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
    total, degree = x.double() * 0, np.zeros(len(x))  # as in `pulled_gradient`
    for k, row in fed.every_row(x):
        for i in np.flatnonzero((w[:, k] > 0) & (fed.ids != k)).tolist():
            total[i] += w[i, k] * row.double()
            degree[i] += w[i, k]
    gradient = partial(pulled_gradient, fed, total.float(), fed.column(degree).float())
    x = fed.local_opt(x, epochs=fed.run.tau_train, gradient=gradient)
    fed.evaluate(x)
    linked = (w > 0) & fed.active & (np.arange(fed.n) != fed.ids[:, None])
    collaborators = [np.flatnonzero(row) for row in linked]
    return {"client": {"x": x, "w": w}, "shared": {"chosen": fed.collect(collaborators)}}


def pulled_gradient(fed: Federation, total: Tensor, degree: Tensor, block, batch) -> Tensor:
    """Compute g_i + rho sum_k w_ik (x_i - x_k) and return the losses.

    `total` `[K, W]` is sum_k w_ik x_k, and `degree` `[K, 1]` is sum_k w_ik.
    """
    loss = fed.gradient(block, batch)
    block.g.add_(fed.options["rho"] * (degree[block.rows] * block.w - total[block.rows]))
    return loss


def select(fed: Federation, x: Tensor, w: np.ndarray) -> None:
    """Update the weights `w` `[K, N]` of this round's pairs in place. Collective.

    A weight grows where both clients' gradients at their midpoint agree. `gradients[t]` are every
    client's at the midpoint with its partner number t.
    """
    partners = draw_pairs(fed)
    local = [partners[k] for k in fed.ids]
    gradients = midpoint_gradients(fed, x, local, turns=max(map(len, partners)))
    for turn, g in enumerate(gradients):
        for j, g_j in fed.every_row(g):
            for i, partners_i in enumerate(local):
                if partners[j][turn : turn + 1] == [fed.ids[i]]:  # g_j is at i's midpoint with j
                    g_i = gradients[partners_i.index(j)][i]
                    # one product at a time: the same bits on any number of ranks
                    product = float(g_i.double().dot(g_j.double()))
                    w[i, j] = np.clip(w[i, j] + fed.options["gamma"] * product, 0, 1)  # Proj
    pairs = np.array([len(partners_i) for partners_i in local])
    fed.notes["models_received"] += 2 * pairs  # z_ij down, its gradient up


def midpoint_gradients(
    fed: Federation, x: Tensor, partners: list[list[int]], turns: int
) -> list[Tensor]:
    """Return, for each turn, the gradients `[K, W]` at the midpoint with that turn's partner.

    One mini-batch of a client serves all its midpoints. Collective.
    """
    rows: dict[tuple[int, int], Tensor] = {}  # the models of the partners j of local clients i
    for j, row in fed.every_row(x):
        for i, partners_i in enumerate(partners):
            if j in partners_i:
                rows[i, j] = row.clone()
    gradients = []
    for turn in range(turns):
        z = x * 0
        for i, partners_i in enumerate(partners):
            if turn < len(partners_i):
                z[i] = (x[i] + rows[i, partners_i[turn]]) / 2  # z_ij
        g = z * 0
        for batch, block in fed.batches(1, {"w": z}, advance=False, most=1):
            fed.gradient(block, batch)  # g_i at z_ij
            g[block.rows] = block.g
        gradients.append(g)
    return gradients


def draw_pairs(fed: Federation) -> list[list[int]]:
    """Return the partners of every client in this round, ascending.

    Each ordered pair of clients that take part is drawn with probability 1 / N.
    """
    drawn = np.zeros((fed.n, fed.n), bool)
    for i in np.flatnonzero(fed.active):
        coins = streams.stream(fed.run.seed, streams.PAIRS, int(i), fed.round).random(fed.n)
        drawn[i] = (coins < 1 / fed.n) & fed.active
        drawn[i, i] = False
    return [np.flatnonzero(row).tolist() for row in drawn | drawn.T]
