"""Morph: senders of the most unlike models (in the way of Cox et al., arXiv 2602.03383).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Client i keeps B_c - 1 senders. Every `refresh` rounds it drops one of them, drawn with
probabilities proportional to exp(beta s_ij), and takes another, by exp(-beta s_ij). s_ij is the
cosine of the models w_i and w_j. If i never received w_j, it is the mean of s_ik s_kj over the
senders k that know j, and if none does, the mean of what i knows.

Paper: only its abstract and its authors' code (bacox/Morph) could be read. From that code are the
    exchange of one sender every 5 rounds, the products, and beta = 500.
Paper: s_ij is the mean of the cosines of all layers, with the w_j that came last; here the cosine
    of whole models, of the round in which w_j came.
Paper: the mean is over the last five reports of a client; here over those of the last round that
    brought any.
Paper: clients hear of others by gossip; here a client knows all in its reach, and starts from
    random senders. A sender that is absent is replaced in the same way.
Paper: averages weigh all models alike; here by p_i, as in every other method.
Paper: its code scores models after averaging, and never drops a client's only sender.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, dac, local
from dpfl_mpi.methods._senders import highest
from dpfl_mpi.settings import option

CITATION = """@misc{cox2026morph,
  title = {Dynamic Topology Optimization for Non-{IID} Data in Decentralized Learning},
  author = {Cox, Bart and Ioannou, Antreas and Decouchant, J{\\'e}r{\\'e}mie}, year = {2026},
  note = {arXiv:2602.03383}
}"""
METHOD = Method(
    "Morph", CITATION, searches=False, sends_models=False, ignores=OWN_GRAPH, look="#882255 :"
)


@dataclass(frozen=True)
class Options:
    beta: float = option(500.0, "beta, how much an unlike model is preferred; 0: not", low=0)
    refresh: int = option(5, "rounds from one exchange of a sender to the next", low=1)


def init(fed: Federation) -> State:
    shape = len(fed.ids), fed.n
    s, met, kept = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool)
    return local.init(fed, s=s, met=met, kept=kept)


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t.

    `s` are the similarities, 0 where unknown; `met` says from whom a client has received before,
    `kept` who its senders are.
    """
    w, s, met, kept = (state["client"][name] for name in ("w", "s", "met", "kept"))
    w = fed.local_opt(w, epochs=fed.run.tau_train)
    fed.evaluate(w)
    wanted = [senders(fed, k, s[i], kept[i], t) for i, k in enumerate(fed.ids)]
    chosen = fed.collect(wanted)
    received = fed.exchange(w, chosen)
    s_of_senders = fed.tell(s, chosen)
    for i, j, w_mW in received.models():
        s[i, j] = dac.cosines(w[i], w_mW)
    for i, k in enumerate(fed.ids):
        if fed.learners[k]:
            kept[i] = False
            kept[i, wanted[i]] = met[i, wanted[i]] = True
            unknown = ~met[i] & (np.arange(fed.n) != k)
            estimate(s[i], unknown, s_of_senders[wanted[i]], s[i, wanted[i]])
    w = fed.average(w, chosen, received)
    fed.evaluate(w, "mixed")
    client = {"w": w, "s": s, "met": met, "kept": kept}
    return {"client": client, "shared": {"chosen": chosen}}


def senders(fed: Federation, k: int, s_N: np.ndarray, kept_N: np.ndarray, t: int) -> np.ndarray:
    """Return the senders of client k in round t; `kept_N`, bool `[N]`, are those it has so far.

    The clients with the largest sums of log weight and Gumbel noise are a draw by the weights.
    """
    reachable, most = fed.reachable(k), int(fed.most_senders[k])
    drop, take = streams.stream(fed.run.seed, streams.PEERS, int(k), t).gumbel(size=(2, fed.n))
    s_N = np.where(s_N == 0, s_N.sum() / max(np.count_nonzero(s_N), 1), s_N)
    log_weight = fed.options["beta"] * s_N
    kept, new = reachable[kept_N[reachable]], reachable[~kept_N[reachable]]
    if t % fed.options["refresh"] == 0 and len(new):
        kept = highest(kept, -(log_weight + drop), min(len(kept), most - 1))
    return np.concatenate([kept, highest(new, take - log_weight, most - len(kept))])


def estimate(
    s_N: np.ndarray, unknown: np.ndarray, s_of_senders: np.ndarray, s_n: np.ndarray
) -> None:
    """Fill in the similarities `s_N` of the `unknown` clients, bool `[N]`, in place.

    n senders of similarity `s_n` `[n]` have sent theirs, `s_of_senders` `[n, N]`, 0 if unknown.
    """
    told = (s_of_senders != 0).sum(0)
    clients = np.flatnonzero(unknown & (told > 0))
    for j in clients:
        s_N[j] = sum(s * s_of for s, s_of in zip(s_n, s_of_senders[:, j], strict=True)) / told[j]
