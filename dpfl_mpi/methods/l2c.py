"""L2C: weights of updates, learned on validation images (in the way of Li et al., CVPR 2022).

Shared: nothing; updates move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Let v_i be client i's model before training, and u_i what training adds to it. Client i receives
updates u_j and goes on from v_i + sum_j a_ij u_j, with weights a_i = softmax(alpha_i) over its
senders and itself. Then alpha_i takes a step of gradient descent on the validation loss of that
model. Senders are random at first, and later those of the largest alpha_ij.

Paper: only its abstract and others' code could be read.
Paper: all send to all for T_0 rounds, and then K_0 senders of each client are dropped for good;
    here a client receives B_c - 1 updates in every round, after T_0 those of the largest alpha
    among the clients that take part. Equal ones are ordered by a shuffle.
Paper: others' code steps alpha by Adam, whose first steps all have one size; here by plain descent,
    since under a budget two clients meet only a few times before T_0. The rate is decided here.
Paper: the gradient is by backpropagation; here it is a central difference, two evaluations for
    each update.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor, local
from dpfl_mpi.methods._senders import highest
from dpfl_mpi.settings import option
from dpfl_mpi.settings.values import nearest

CITATION = """@inproceedings{li2022l2c,
  title = {Learning to Collaborate in Decentralized Learning of Personalized Models},
  author = {Li, Shuangtong and Zhou, Tianyi and Tian, Xinmei and Tao, Dacheng},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year = {2022}, pages = {9766--9775}
}"""
METHOD = Method(
    "L2C", CITATION, searches=False, sends_models=False, ignores=OWN_GRAPH, look="#882255 -."
)
STEP = 0.003  # of a difference, as a share of the way from the mean of updates to one of them


@dataclass(frozen=True)
class Options:
    eta: float = option(1.0, "the rate of alpha", low=0)
    first_step: float = option(0.2, "T_0, as a share of the rounds: random senders", low=0, high=1)


def init(fed: Federation) -> State:
    if fed.run.codec:
        why = "l2c sends changes of models, which no receiver keeps: allowed is none"
        raise UserError(f"--codec is {fed.run.codec}; {why}")
    return local.init(fed, alpha=np.zeros((len(fed.ids), fed.n)))


def round(fed: Federation, state: State, t: int) -> State:
    v, alpha = state["client"]["w"], state["client"]["alpha"]
    w = fed.local_opt(v.clone(), epochs=fed.run.tau_train)
    fed.evaluate(w)
    u = w - v
    chosen = fed.collect([senders(fed, k, alpha[i], t) for i, k in enumerate(fed.ids)])
    received = fed.exchange(u, chosen)
    a = softmax(fed, alpha, chosen)
    mean = fed.average(u, chosen, received, weights=a)
    w = v + mean
    fed.evaluate(w, "mixed")
    slope = np.zeros(a.shape)  # of the loss, on the way from the mean to each update
    with fed.clock("graph"):
        for i, k in enumerate(fed.ids):
            if len(chosen.of(k)):
                slope[i, k] = slopes(fed, i, w[i], u[i : i + 1] - mean[i])[0]
        for i, j, u_mW in received.models():
            slope[i, j] = slopes(fed, i, w[i], u_mW - mean[i])
    alpha = alpha - fed.options["eta"] * a * slope
    return {"client": {"w": w, "alpha": alpha}, "shared": {"chosen": chosen}}


def senders(fed: Federation, k: int, alpha_N: np.ndarray, t: int) -> np.ndarray:
    """Return whose updates client k asks for in round t."""
    order = fed.shuffle(k, fed.reachable(k))
    if t <= nearest(fed.options["first_step"], fed.run.rounds):
        return order[: fed.most_senders[k]]
    return highest(order, alpha_N, fed.most_senders[k])


def softmax(fed: Federation, alpha: np.ndarray, chosen: CollaborationGraph) -> np.ndarray:
    """Return the weights a_ij of local clients' own updates and their senders', `[K, N]`."""
    a = np.zeros(alpha.shape)
    for i, k in enumerate(fed.ids):
        members = np.array([k, *chosen.of(k)])
        weights = np.exp(alpha[i, members] - alpha[i, members].max())
        a[i, members] = weights / weights.sum()
    return a


def slopes(fed: Federation, i: int, w_W: Tensor, ways_mW: Tensor) -> np.ndarray:
    """Return the slope of local client i's validation loss at w along each way, float64 `[m]`.

    The slope along u_j - mean, times a_ij, is the derivative of the loss by alpha_ij.
    """
    ahead, behind = w_W + STEP * ways_mW, w_W - STEP * ways_mW
    return (fed.validation_losses(i, ahead) - fed.validation_losses(i, behind)) / (2 * STEP)
