"""FedALA: a learned mixture of the global and the local model as start (Zhang et al., AAAI 2023).

Shared: Theta, the mean of the clients' models.
Personal: Theta_i, and the mixture's weights W_i of the higher layers, from 0 to 1.
Scored: Theta_i after training.

A client starts a round from Theta_i + (Theta - Theta_i) * W_i in the higher layers, and from
Theta in the lower ones (Algorithm 1).

Paper: learns W_i on a random s % of the client's samples; here on the first s % of the
    mini-batches of its next epoch, whose order is random.
Paper: learns until convergence the first time; as in its code, that is a standard deviation below
    0.1 of the last ten losses, each of a pass's last batch. No record counts these steps.
Paper: PFLlib, by the same authors, scores the mixture before training.
"""

import math
import statistics
from dataclasses import dataclass

import numpy as np

from dpfl_mpi.methods import Federation, Method, State, Tensor, fedavg
from dpfl_mpi.settings import option

LOSSES = 10  # W_i has converged when these last losses hardly differ
CITATION = """@inproceedings{zhang2023fedala,
  title = {{FedALA}: Adaptive Local Aggregation for Personalized Federated Learning},
  author = {Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and
            Ma, Ruhui and Guan, Haibing},
  booktitle = {AAAI Conference on Artificial Intelligence}, year = {2023}
}"""
METHOD = Method("FedALA", CITATION, topology="server", elementwise=True, look="#009E73 -.")


@dataclass(frozen=True)
class Options:
    # eta, share and layers are the paper's, the threshold is that of its code
    eta: float = option(1.0, "eta, the rate of the weights W_i", above=0)
    share: float = option(0.8, "s, the share of mini-batches that W_i learns from", above=0, high=1)
    layers: str = option(
        "head", "the p layers with weights: head (p = 1), all, or names with commas"
    )
    threshold: float = option(0.1, "W_i stops below this standard deviation of losses", above=0)
    passes: int = option(100, "most passes over the sample until W_i has converged", low=1)


def init(fed: Federation) -> State:
    """Return the common initial row, as Theta and as every Theta_i; every weight is 1."""
    fed.columns(fed.options["layers"], option="layers")  # refuses a layer that the model lacks
    state = fedavg.personal(fed, "w")
    weight = state["client"]["w"] * 0 + 1
    state["client"] |= {"W": weight, "learned": np.zeros(len(fed.ids), bool)}
    return state


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t. An absent client keeps its Theta_i and W_i."""
    w = state["shared"]["w"]
    w_i, weight, learned = (state["client"][name] for name in ("w", "W", "learned"))
    if t > 1:  # in round 1 Theta is every Theta_i
        learn(fed, w, w_i, weight, learned)  # lines 6-16 of Algorithm 1 are ALA
        active = fed.active[fed.ids]
        start = mixture(fed.columns(fed.options["layers"]), w, w_i, weight)
        w_i = start.where(fed.column(active) > 0, w_i)
        learned = learned | active
    w_i = fed.local_opt(w_i, epochs=fed.run.tau_train)
    fed.evaluate(w_i)
    client = {"w": w_i, "W": weight, "learned": learned}
    return {"client": client, "shared": {"w": fed.mean(w_i)}}


def mixture(columns: Tensor, w: Tensor, w_i: Tensor, weight: Tensor) -> Tensor:
    """Return Theta_i + (Theta - Theta_i) * W_i in `columns`, bool `[W]`, and Theta elsewhere."""
    return (w_i + (w - w_i) * weight).where(columns, w)


def learn(fed: Federation, w: Tensor, w_i: Tensor, weight: Tensor, learned: np.ndarray) -> None:
    """Learn the weights W_i, `weight` `[K, W]`, in place, by gradients at the mixture.

    A client makes one pass over its sample, but passes until convergence the first time, while it
    is not yet in `learned`, bool `[K]`.
    """
    columns = fed.columns(fed.options["layers"])
    batches = -(-fed.n_train // fed.run.batch_size)  # of an epoch
    sample = np.ceil(np.round(fed.options["share"] * batches, 9))  # 0.7 of 10 is 7
    going_on = fed.active[fed.ids]
    losses: list[list[float]] = [[] for _ in fed.ids]  # of each pass's last batch
    for _ in range(fed.options["passes"]):
        last = np.zeros(len(fed.ids))
        for batch, mixed in fed.batches(1, {"w": w_i.clone()}, advance=False):
            rows = mixed.rows
            learns = going_on[rows] & (batch.step < sample[rows])
            if not learns.any():
                continue
            mixed.w.copy_(mixture(columns, w, w_i[rows], weight[rows]))
            loss = fed.gradient(mixed, batch).cpu().numpy()
            last[rows] = np.where(learns, loss, last[rows])
            slope = (w - w_i[rows]) * mixed.g  # of the loss, by W_i
            moved = (weight[rows] - fed.options["eta"] * slope).clamp(0, 1)
            weight[rows] = moved.where(columns & (fed.column(learns) > 0), weight[rows])
        for i in np.flatnonzero(going_on):
            losses[i].append(float(last[i]))
        spread = np.array([deviation(values) for values in losses])
        going_on = going_on & ~learned & ~(spread < fed.options["threshold"])
        if not going_on.any():
            break


def deviation(losses: list[float]) -> float:
    """Return the standard deviation of the last losses, infinite if they are too few."""
    settled = len(losses) > LOSSES and all(map(math.isfinite, losses[-LOSSES:]))
    return statistics.pstdev(losses[-LOSSES:]) if settled else math.inf
