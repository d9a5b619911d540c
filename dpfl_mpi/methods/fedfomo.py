"""FedFomo: models weighed by how much they lower one's loss (Zhang et al., ICLR 2021).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Let v_i be client i's model before training and L_i its validation loss. The gain of a trained
model, its own included, is g_ij = (L_i(v_i) - L_i(w_j)) / ||w_j - v_i||. Client i goes on from the
mean of the models weighed by max(g_ij, 0), and sums g_ij over the rounds. It asks for the models of
the largest sums, or with chance `epsilon` for random ones.

Paper: a server sends the models; here clients send them along a graph. Its M, how many models a
    client asks for, is B_c - 1.
Paper: does not say how fast epsilon falls, its code's commands say by 0.05 a round (`decay`); the
    code draws for each sender, here one draw is for all.
Paper: its code scores models after averaging.
Paper: stays at v_i where no model helps; here at its own w_i, as a client without weights does.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor, local
from dpfl_mpi.methods._senders import highest
from dpfl_mpi.settings import option

CITATION = """@inproceedings{zhang2021fedfomo,
  title = {Personalized federated learning with first order model optimization},
  author = {Zhang, Michael and Sapra, Karan and Fidler, Sanja and Yeung, Serena and
            Alvarez, Jose M.},
  booktitle = {International Conference on Learning Representations}, year = {2021}
}"""
METHOD = Method("FedFomo", CITATION, searches=False, ignores=OWN_GRAPH, look="#332288 --")
LEAST = 1e-12  # stands for a distance of 0


@dataclass(frozen=True)
class Options:
    epsilon: float = option(0.3, "chance that a client asks for random models", low=0, high=1)
    decay: float = option(
        0.0, "what epsilon falls by in each round after the first", low=0, high=1, added=True
    )


def init(fed: Federation) -> State:
    return local.init(fed, g=np.zeros((len(fed.ids), fed.n)))


def round(fed: Federation, state: State, t: int) -> State:
    v, g = state["client"]["w"], state["client"]["g"]
    w = fed.local_opt(v.clone(), epochs=fed.run.tau_train)
    fed.evaluate(w)
    chosen = fed.collect([senders(fed, k, g[i], t) for i, k in enumerate(fed.ids)])
    received = fed.exchange(w, chosen)
    now, before = np.zeros(g.shape), np.zeros(len(g))
    for i, k in enumerate(fed.ids):
        if fed.learners[k]:
            before[i] = fed.validation_losses(i, v[i : i + 1])[0]
            now[i, k] = gains(fed, i, v[i], before[i], w[i : i + 1])[0]
    for i, j, w_mW in received.models():  # of senders j of local client i
        now[i, j] = gains(fed, i, v[i], before[i], w_mW)
    w = fed.average(w, chosen, received, weights=np.maximum(now, 0))
    fed.evaluate(w, "mixed")
    return {"client": {"w": w, "g": g + now}, "shared": {"chosen": chosen}}


def senders(fed: Federation, k: int, g_N: np.ndarray, t: int) -> np.ndarray:
    """Return whose models client k asks for; equal sums are ordered by a shuffle."""
    order = fed.shuffle(k, fed.reachable(k))
    explores = streams.stream(fed.run.seed, streams.PEERS, int(k), t).random()
    if explores < fed.options["epsilon"] - fed.options["decay"] * (t - 1):
        return order[: fed.most_senders[k]]
    return highest(order, g_N, fed.most_senders[k])


def gains(fed: Federation, i: int, v_W: Tensor, loss: float, w_mW: Tensor) -> np.ndarray:
    """Return the gains of m models for local client i, whose model of before has this loss."""
    far = [float((row - v_W).double().square().sum().sqrt()) for row in w_mW]
    return (loss - fed.validation_losses(i, w_mW)) / np.maximum(far, LEAST)
