"""PENS: neighbours by the loss of their models (Onoszko et al., arXiv 2107.08517).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

First step: a client receives the models of n random others, averages its own with the m of the
lowest loss on its training images, and counts how often each was among them. Second step: it
averages with n random ones of those that it took more often than chance would have.

Paper: gossip at random moments; here rounds, as in the published code. n is B_c - 1 (10 in the
    paper, 20 in that code).
Paper: averages weigh all models alike; here by p_i, as in every other method.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, local
from dpfl_mpi.settings import option
from dpfl_mpi.settings.values import nearest

CITATION = """@inproceedings{onoszko2021pens,
  title = {Decentralized federated learning of deep neural networks on non-iid data},
  author = {Onoszko, Noa and Karlsson, Gustav and Mogren, Olof and Listo Zec, Edvin},
  booktitle = {Workshop on Federated Learning for User Privacy and
            Data Confidentiality at ICML}, year = {2021},
  note = {arXiv:2107.08517}
}"""
METHOD = Method(
    "PENS", CITATION, searches=False, ignores=OWN_GRAPH, elementwise=True, look="#CC79A7 -."
)


@dataclass(frozen=True)
class Options:
    m: int = option(2, "m, how many received models are averaged with one's own", low=1)
    first_step: float = option(0.2, "share of the rounds that search", low=0, high=1)


def init(fed: Federation) -> State:
    shape = len(fed.ids), fed.n
    return local.init(fed, taken=np.zeros(shape, np.int32), by_chance=np.zeros(shape))


def round(fed: Federation, state: State, t: int) -> State:
    w, taken, by_chance = (state["client"][name] for name in ("w", "taken", "by_chance"))
    w = fed.local_opt(w, epochs=fed.run.tau_train)
    fed.evaluate(w)
    if t <= nearest(fed.options["first_step"], fed.run.rounds):
        sample = [fed.shuffle(k, fed.reachable(k))[: fed.most_senders[k]] for k in fed.ids]
        received = fed.exchange(w, fed.collect(sample))
        loss = np.full(by_chance.shape, np.nan)
        with fed.clock("graph"):
            for i, j, w_mW in received.models():
                loss[i, j] = fed.training_losses(i, w_mW)
        top = []
        for i, k in enumerate(fed.ids):
            best = sample[i][np.argsort(loss[i, sample[i]], kind="stable")[: fed.options["m"]]]
            taken[i, best] += 1
            reachable = fed.reachable(k)
            by_chance[i, reachable] += len(best) / max(len(reachable), 1)
            top.append(best)
        chosen = fed.collect(top)
    else:
        liked = taken > by_chance
        chosen = fed.collect([neighbours(fed, k, liked[i]) for i, k in enumerate(fed.ids)])
        received = fed.exchange(w, chosen)
    w = fed.average(w, chosen, received)
    fed.evaluate(w, "mixed")
    client = {"w": w, "taken": taken, "by_chance": by_chance}
    return {"client": client, "shared": {"chosen": chosen}}


def neighbours(fed: Federation, k: int, liked: np.ndarray) -> np.ndarray:
    """Return at most B_c - 1 random clients in reach of k: `liked` `[N]` ones, if there are any."""
    reachable = fed.reachable(k)
    if liked[reachable].any():
        reachable = reachable[liked[reachable]]
    return fed.shuffle(k, reachable)[: fed.most_senders[k]]
