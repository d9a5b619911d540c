"""kNN-Per: a global model and each client's memory (Marfoq et al., ICML 2022, Algorithm 1).

Shared: w, trained as in FedAvg.
Personal: the representations of the client's own training images.
Scored: lambda p_knn(y | x) + (1 - lambda) p_w(y | x).

p_knn weighs the k nearest neighbours by exp(-||z - z_i||^2 / s), normalised.

Paper: leaves s open; the authors' code has s = F, the length of a representation. Here it is 1.
"""

import math
from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Method, Newcomer, Predict, State, Tensor, fedavg
from dpfl_mpi.settings import option

AT_ONCE = 64  # images whose differences to the memory are held at once: 107 MB of 5,000 representations of 84
CITATION = """@inproceedings{marfoq2022knnper,
  title = {Personalized Federated Learning through Local Memorization},
  author = {Marfoq, Othmane and Neglia, Giovanni and Vidal, Richard and Kameni, Laetitia},
  booktitle = {International Conference on Machine Learning (ICML)}, year = {2022}
}"""
# finetunes: more than the row is scored
METHOD = Method("kNN-Per", CITATION, topology="server", finetunes=False, colour="#E69F00", line="--", marker="p")


@dataclass(frozen=True)
class Options:
    k: int = option(10, "neighbours (fewer where a client has fewer training images)", low=1)
    interpolation: float = option(0.5, "lambda, the weight of the neighbours' vote, from 0 to 1", low=0, high=1)
    scale: float = option(1.0, "s, by which the squared distance is divided before neighbours are weighed", above=0)
    memory: int = option(5000, "most training images a client remembers", low=1)
    score_trained: bool = option(False, "score with the locally trained w_i instead of the global w")


def init(fed: Federation) -> State:
    return fedavg.init(fed, predict=mixture(fed))


def round(fed: Federation, state: State, t: int) -> State:
    w_i = fed.local_opt(fed.copies(state["shared"]["w"]), epochs=fed.run.tau_train)
    w = fed.mean(w_i)
    fed.evaluate(w_i if fed.options["score_trained"] else fed.copies(w), predict=mixture(fed))
    return {"client": {}, "shared": {"w": w}}


def newcomer(fed: Federation, state: State) -> Newcomer:
    return Newcomer(fed.copies(state["shared"]["w"]), predict=mixture(fed))


def mixture(fed: Federation) -> Predict:
    """Return the function from a block's rows and images to the logarithm of the mixed probabilities, `[k, S, C]`."""
    k, share, scale, most = (fed.options[name] for name in ("k", "interpolation", "scale", "memory"))
    own, votes_own = (math.log(x) if x > 0 else -math.inf for x in (1 - share, share))
    memories: list[tuple[Tensor, Tensor]] = []  # of the scored block's clients: representations [M, F] and labels [M]
    of: tuple[slice, Tensor] | None = None  # its rows, and a copy of their models: newcomers train theirs on

    def predict(rows, w_kW, images):
        nonlocal of
        logits, z_kSF = fed.outputs(w_kW, images)
        log_p = logits.log_softmax(2)
        if of is None or of[0] != rows or not of[1].equal(w_kW):
            of = rows, w_kW.clone()
            memories[:] = [fed.memory(rows.start + i, w_kW[i : i + 1], most) for i in range(len(w_kW))]
        votes, one_hot = log_p.new_zeros(log_p.shape), log_p.new_ones(log_p.shape[2]).diag().float()
        for vote, z, (remembered, labels) in zip(votes, z_kSF, memories, strict=True):
            d2, index = neighbours(z, remembered, k)
            weight = (-d2 / scale).softmax(1)  # exp(-d^2 / s), normalised: far neighbours must not underflow
            vote += (one_hot[labels[index]] * weight[:, :, None]).sum(1)
        return (log_p + own).logaddexp(votes.log() + votes_own)

    return predict


def neighbours(z: Tensor, remembered: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return squared distance and number of the k nearest remembered representations `[M, F]` of each of z `[S, F]`, `[S, k]` both."""
    # not by |z|^2 - 2 z z' + |z'|^2, which cancels where it matters
    d2 = z.new_empty(len(z), len(remembered))
    for out, part in zip(d2.split(AT_ONCE), z.split(AT_ONCE), strict=True):
        out.copy_((part[:, None] - remembered[None]).square_().sum(2))
    return d2.topk(min(k, len(remembered)), 1, largest=False)
