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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpfl_mpi.graph import Senders
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, Received, State, local
from dpfl_mpi.settings import option
from dpfl_mpi.settings.values import nearest

CITATION = """@inproceedings{onoszko2021pens,
  title = {Decentralized federated learning of deep neural networks on non-iid data},
  author = {Onoszko, Noa and Karlsson, Gustav and Mogren, Olof and Listo Zec, Edvin},
  booktitle = {Workshop on Federated Learning for User Privacy and Data Confidentiality at ICML}, year = {2021},
  note = {arXiv:2107.08517}
}"""
METHOD = Method("PENS", CITATION, searches=False, ignores=OWN_GRAPH, elementwise=True, colour="#CC79A7", line="-.")


@dataclass(frozen=True)
class Options:
    m: int = option(2, "m, how many of the models received are averaged with one's own", low=1)
    first_step: float = option(0.2, "share of the rounds that search, 20 of 100 as in its code", low=0, high=1)


def init(fed: Federation) -> State:
    k, n = len(fed.ids), fed.n
    return local.init(fed, taken=np.zeros((k, n), np.int32), by_chance=np.zeros((k, n)))


def round(fed: Federation, state: State, t: int) -> State:
    w, taken, by_chance = (state["client"][name] for name in ("w", "taken", "by_chance"))
    w = fed.local_opt(w, epochs=fed.run.tau_train)
    fed.evaluate(w)
    if t <= nearest(fed.options["first_step"], fed.run.rounds):
        sampled = [fed.shuffle(k, fed.reachable(k))[: fed.most_senders[k]] for k in fed.ids]
        received = fed.exchange(w, fed.collect(sampled))
        with fed.clock("graph"):
            found = zip(sampled, losses(fed, received, sampled), strict=True)
            top = [now[np.argsort(of, kind="stable")][: fed.options["m"]] for now, of in found]
        for i, k in enumerate(fed.ids):
            near = fed.reachable(k)
            taken[i, top[i]] += 1
            by_chance[i, near] += len(top[i]) / max(len(near), 1)
        chosen = fed.collect(top)
    else:
        chosen = fed.collect([neighbours(fed, k, taken[i] > by_chance[i]) for i, k in enumerate(fed.ids)])
        received = fed.exchange(w, chosen)
    w = fed.average(w, chosen, received)
    return {"client": {"w": w, "taken": taken, "by_chance": by_chance}, "shared": {"chosen": chosen}}


def losses(fed: Federation, received: Received, sampled: Sequence[Senders]) -> list[np.ndarray]:
    """Return the loss of every model that a client has sampled on its training images, in the order of the sample. Collective."""
    found: list[list[float]] = [[] for _ in sampled]
    for here, now in received.passes(sampled):
        for i, senders in enumerate(now):
            if len(senders):
                found[i].extend(fed.training_losses(i, here.rows(senders, i)))
    return [np.array(of) for of in found]


def neighbours(fed: Federation, k: int, liked: np.ndarray) -> np.ndarray:
    """Return client k's neighbours in its random order of this round, B_c - 1 at most: of `liked` `[N]`, or of all it can reach where it likes none."""
    near = fed.reachable(k)
    return fed.shuffle(k, near[liked[near]] if liked[near].any() else near)[: fed.most_senders[k]]
