"""DAC: neighbours drawn by similarity (Listo Zec et al., arXiv 2206.08839).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

In each round client i averages with n others, drawn without replacement with probabilities
softmax(tau_t s_i). s_ij is 1 / (loss of w_j on i's training images). If i never received w_j,
s_ij is s_kj of the most similar sender k that knows j, else 0.

Paper: read from the published code: the `loss` similarity, the second hop, and tau_t = 2 a / (1 +
    exp(-0.2 t)) - a + 1 with a = 30 (--options.tau).
Paper: the code visits one client after the other; here all send at one moment. n is B_c - 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor, local
from dpfl_mpi.methods._senders import highest
from dpfl_mpi.settings import option

CITATION = """@inproceedings{listozec2022dac,
  title = {Decentralized adaptive clustering of deep nets is beneficial for client collaboration},
  author = {Listo Zec, Edvin and Ekblom, Ebba and Willbo, Martin and Mogren, Olof and
            Girdzijauskas, Sarunas},
  booktitle = {International Workshop on Trustworthy Federated Learning at IJCAI}, year = {2022},
  note = {arXiv:2206.08839}
}"""
METHOD = Method(
    "DAC", CITATION, searches=False, sends_models=False, ignores=OWN_GRAPH, look="#E69F00 :"
)
GROWTH = 0.2  # of tau, per round
LEAST = 1e-12  # stands for a loss or a distance of 0


@dataclass(frozen=True)
class Options:
    tau: float = option(30.0, "a: the temperature goes from 1 to 1 + a", low=0)
    similarity: Literal["loss", "cosine", "update", "l2"] = option(
        "loss", "1 / loss; cosine of the weights, or of their changes; 1 / distance"
    )


def init(fed: Federation) -> State:
    shape = len(fed.ids), fed.n
    return local.init(fed, s=np.zeros(shape), met=np.zeros(shape, bool))


def round(fed: Federation, state: State, t: int, weigh: Any = None) -> State:
    """Return the state after round t; `s` are similarities, `met` from whom a client received.

    With `weigh(fed, w, s, chosen)` (FedSim), the averages have the weights `[K, N]` it returns.
    """
    w, s, met = state["client"]["w"], state["client"]["s"].copy(), state["client"]["met"]
    w = fed.local_opt(w, epochs=fed.run.tau_train)
    fed.evaluate(w)
    tau = temperature(fed.options["tau"], t)
    chosen = fed.collect([draw_senders(fed, k, tau * s[i]) for i, k in enumerate(fed.ids)])
    received = fed.exchange(w, chosen)
    s_of_senders = fed.tell(s, chosen)
    for i, j, w_mW in received.models():
        s[i, j] = similarity(fed, i, w[i], w_mW)
    for i, k in enumerate(fed.ids):
        senders = chosen.of(k)
        met[i, senders] = True
        unknown = ~met[i] & (np.arange(fed.n) != k)
        second_hop(s[i], unknown, s_of_senders[senders], s[i, senders])
    w = fed.average(w, chosen, received, weights=weigh and weigh(fed, w, s, chosen))
    fed.evaluate(w, "mixed")
    return {"client": {"w": w, "s": s, "met": met}, "shared": {"chosen": chosen}}


def temperature(a: float, t: int) -> float:
    """Return tau_t: 0 in round 1, where all clients are equally likely, then from 1 towards 1 + a.

    The code's t is 0 in our round 2.
    """
    return 2 * a / (1 + np.exp(-GROWTH * (t - 2))) - a + 1 if t > 1 else 0


def draw_senders(fed: Federation, k: int, log_weight: np.ndarray) -> np.ndarray:
    """Return B_c - 1 reachable clients, drawn without replacement by exp(log_weight `[N]`).

    These are the largest log weights after Gumbel noise was added (Gumbel top-k sampling).
    """
    stream = streams.stream(fed.run.seed, streams.PEERS, int(k), fed.round)
    noise = stream.gumbel(size=fed.n)
    return highest(fed.reachable(k), log_weight + noise, fed.most_senders[k])


def similarity(fed: Federation, i: int, w_W: Tensor, w_mW: Tensor) -> np.ndarray:
    """Return the similarity of m models to local client i's, float64 `[m]`."""
    kind = fed.options["similarity"]
    if kind == "loss":
        return 1 / np.maximum(fed.training_losses(i, w_mW), LEAST)
    start = fed.initial_row() if kind == "update" else w_W * 0
    if kind != "l2":
        return cosines(w_W - start, [row - start for row in w_mW])
    own, out = w_W.double(), []
    for row in w_mW:
        out.append(1 / max(float((own - row.double()).square().sum().sqrt()), LEAST))
    return np.array(out)


def cosines(w_W: Tensor, w_mW: Iterable[Tensor]) -> np.ndarray:
    """Return the cosine of each of m rows with the first one, float64 `[m]`."""
    own, out = w_W.double(), []
    for row in w_mW:  # one at a time: the same bits for any number of ranks
        other = row.double()
        norms = float(own.dot(own).sqrt() * other.dot(other).sqrt())
        out.append(float(own.dot(other)) / max(norms, LEAST))
    return np.array(out)


def second_hop(
    s_N: np.ndarray, unknown: np.ndarray, s_of_senders: np.ndarray, s_n: np.ndarray
) -> None:
    """Fill in the similarities `s_N` of the `unknown` clients, bool `[N]`, in place.

    Of the n senders that know such a client, the most similar one (`s_n` `[n]`) says how similar
    it is: `s_of_senders` `[n, N]` are the similarities that the senders sent.
    """
    if not len(s_n):
        return
    knows = s_of_senders > 0
    best = np.where(knows, s_n[:, None], -np.inf).argmax(0)
    clients = np.flatnonzero(unknown & knows.any(0))
    s_N[clients] = s_of_senders[best[clients], clients]
