"""Facade: one core, and a head for each cluster (Biswas et al., IEEE SaTML 2025).

Shared: w_i and the number of its head, along a graph of random senders.
Personal: w_i, a core with one of k heads.
Scored: w_i after training, before averaging; with `final` also after the final all-reduce.

A client trains its core with the head of the smallest loss on its training images. Cores are
averaged with all that arrive, heads with those of the same number.

With `final`, all clients send to all once more after the last round: the core becomes the mean of
all clients, a head the mean of those that chose its number. No training follows.

Paper: read from its published code, whose means are plain. Its heads start differently at each
    client; here at each number, and alike for all clients.
Paper: its graph is regular, with as many receivers as senders; here a client draws B_c - 1
    senders.
Paper: the code always ends with the all-reduce; here `final` is off by default. The code scores
    models after averaging, with the head of the smallest test loss.
Paper: the code chooses a head on 10 mini-batches, and first averages whole models, without heads,
    for 10 of 1,200 rounds on CIFAR-10.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor
from dpfl_mpi.methods._senders import least, random_graph
from dpfl_mpi.settings import option

CITATION = """@inproceedings{biswas2025facade,
  title = {Fair Decentralized Learning},
  author = {Biswas, Sayan and Kermarrec, Anne-Marie and Sharma, Rishi and Trinca, Thibaud and
            de Vos, Martijn},
  booktitle = {IEEE Conference on Secure and Trustworthy Machine Learning (SaTML)}, year = {2025},
  note = {arXiv:2410.02541}
}"""
METHOD = Method(
    "Facade", CITATION, searches=False, sends_models=False, ignores=OWN_GRAPH, look="#0072B2 -."
)


@dataclass(frozen=True)
class Options:
    heads: int = option(2, "k, the number of heads and of clusters", low=1, high=100)
    final: bool = option(False, "after the last round all average with all, once", added=True)


def init(fed: Federation) -> State:
    for flag in ("reach", "send", "patience"):
        if fed.options["final"] and getattr(fed.run, flag):
            whole = "it averages whole models of all clients after the last round"
            raise UserError(f"--options.final is true; {whole}: leave out --{flag}")
    head = fed.columns("head")
    w, k = fed.common_row(), fed.options["heads"]
    heads = w[:, None, head].repeat(1, k, 1)
    for number in range(1, k):
        heads[:, number] = fed.initial_row(number)[head]
    fed.evaluate(w)
    cluster = np.zeros(len(w), np.int32)
    return {"client": {"w": w, "heads": heads, "cluster": cluster}, "shared": {}}


def round(fed: Federation, state: State, t: int) -> State:
    w, heads, head = state["client"]["w"], state["client"]["heads"], fed.columns("head")
    cluster = state["client"]["cluster"].copy()
    choose_heads(fed, w, heads, cluster)
    w = fed.local_opt(w, epochs=fed.run.tau_train)
    fed.evaluate(w)
    heads[np.arange(len(w)), cluster] = w[:, head]
    chosen = random_graph(fed)
    received = fed.exchange(w, chosen)
    cluster_N = fed.tell(cluster, chosen)
    core = fed.average(w, chosen, received, weights=np.ones((len(w), fed.n)))
    # average each head with those of the senders that trained the head of the same number
    for number in range(heads.shape[1]):
        own = w.clone()
        own[:, head] = heads[:, number]
        weights = np.tile(cluster_N == number, (len(w), 1)).astype(float)
        weights[np.arange(len(w)), fed.ids] = 1
        heads[:, number] = fed.average(own, chosen, received, weights=weights)[:, head]
    core[:, head] = heads[np.arange(len(w)), cluster]
    fed.evaluate(core, "mixed")
    if fed.options["final"] and t == fed.run.rounds:
        all_reduce(fed, core, heads, cluster)
        fed.evaluate(core)
    client = {"w": core, "heads": heads, "cluster": cluster}
    return {"client": client, "shared": {"chosen": chosen}}


def choose_heads(fed: Federation, w: Tensor, heads: Tensor, cluster: np.ndarray) -> None:
    """Give each learner's row `w` `[K, W]` its best of k `heads`; note its number in `cluster`."""
    head = fed.columns("head")
    for i in np.flatnonzero(fed.learners[fed.ids]).tolist():
        models = w[i].repeat(heads.shape[1], 1)  # its core with each of the heads
        models[:, head] = heads[i]
        cluster[i] = least(fed.training_losses(i, models))
        w[i, head] = heads[i, cluster[i]]


def all_reduce(fed: Federation, w: Tensor, heads: Tensor, cluster: np.ndarray) -> None:
    """Average each learner's core with all, its heads by number; then choose anew. Collective."""
    head, k = fed.columns("head"), heads.shape[1]
    choose_heads(fed, w, heads, cluster)
    cluster_N = fed.tell(cluster)
    total, count = w.new_zeros(k, w.shape[1]).double(), np.zeros(k)  # of the rows with each head
    for j, row in fed.every_row(w):
        total[cluster_N[j]] += row.double()
        count[cluster_N[j]] += 1
    fed.note_received(int(count.sum()) - 1)
    for i in np.flatnonzero(fed.learners[fed.ids]).tolist():
        w[i] = sum(total) / count.sum()
        for number in range(k):
            # it sent its chosen head alone: the means of its other heads also count its own copies
            kept = int(number != cluster[i])
            mean = (total[number, head] + kept * heads[i, number]) / (count[number] + kept)
            heads[i, number] = mean
    choose_heads(fed, w, heads, cluster)
