"""SCAFFOLD: FedAvg with control variates (Karimireddy et al., ICML 2020, Algorithm 1).

Shared: the model x and the server's control c.
Personal: the control c_i.
Scored: x after aggregation.

Paper: line 12, option II, is the mean of the K gradients on the way from x to y_i if a step is
    plain SGD. Here it is that mean, so it also holds with momentum, decay, clipping and Adam.
Paper: weighs all clients alike; here by p_i, in x and in c, as in every other method.
"""

from dataclasses import dataclass
from functools import partial

from dpfl_mpi.methods import Federation, Method, State, Tensor, fedavg
from dpfl_mpi.settings import option

CITATION = """@inproceedings{karimireddy2020scaffold,
  title = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and
            Reddi, Sashank J. and Stich, Sebastian U. and Suresh, Ananda Theertha},
  booktitle = {International Conference on Machine Learning (ICML)}, year = {2020}
}"""
METHOD = Method(
    "SCAFFOLD", CITATION, topology="server", sends_models=False, elementwise=True, look="#000000 --"
)


@dataclass(frozen=True)
class Options:
    global_lr: float = option(1.0, "eta_g, the server's step; 1: the mean of the models", above=0)


def init(fed: Federation) -> State:
    x = fedavg.init(fed)["shared"]["w"]
    return {"client": {"c": fed.copies(x * 0)}, "shared": {"w": x, "c": x * 0}}


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t; lines of Algorithm 1. An absent client keeps its c_i."""
    x, c, c_i = state["shared"]["w"], state["shared"]["c"], state["client"]["c"]
    rate = fed.options["global_lr"]
    total = c_i * 0  # sum of a client's gradients
    steps = c_i[:, :1] * 0  # K of each client
    y_i = fed.copies(x)  # lines 5, 7
    gradient = partial(corrected_gradient, fed, c, c_i, total, steps)
    y_i = fed.local_opt(y_i, fed.run.tau_train, gradient)  # lines 8-11
    c_next = (total / steps.clamp(min=1)).where(steps > 0, c_i)  # line 12, option II
    y = fed.mean(y_i)  # lines 13, 16
    present = float(fed.p[fed.active].sum() / fed.p[fed.participants].sum())  # |S| / N
    c = present * fed.mean(c_next - c_i) + c  # lines 13, 16, 17
    x = y if rate == 1 else rate * (y - x) + x  # line 17
    fed.evaluate(fed.copies(x))
    return {"client": {"c": c_next}, "shared": {"w": x, "c": c}}


def corrected_gradient(
    fed: Federation, c: Tensor, c_i: Tensor, total: Tensor, steps: Tensor, block, batch
) -> Tensor:
    """Compute g_i(y_i) - c_i + c of line 10 and return the losses.

    g_i is added to `total` `[K, W]`, and 1 to `steps` `[K, 1]`.
    """
    loss = fed.gradient(block, batch)  # line 9
    total[block.rows] += block.g
    steps[block.rows] += 1
    block.g.add_(c - c_i[block.rows])  # line 10
    return loss
