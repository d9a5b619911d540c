"""kNN-Per: a global model and each client's memory (Marfoq et al., ICML 2022, Algorithm 1).

Shared: w, trained as in FedAvg.
Personal: the representations of the client's own training images.
Scored: lambda p_knn(y | x) + (1 - lambda) p_w(y | x).

p_knn weighs the k nearest neighbours by exp(-||z - z_i||^2 / s), normalised. With `tune` each
client takes, whenever it is scored, the lambda of 0, 0.01, ..., 1 that is most accurate on its
validation images, of equal ones that of the smallest loss there.

Paper: leaves s open; the authors' code has s = F, the length of a representation. Here it is 1.
Paper: tunes each client's lambda by validation. The authors' code scores 0, 0.01, ..., 1, on test
    images. Here `tune` is off by default, and lambda 0.5.
"""

import math
from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Method, Newcomer, Predict, State, Tensor, fedavg
from dpfl_mpi.settings import option

GRID = [n / 100 for n in range(101)]  # of lambda, where it is tuned
CHUNK = 64  # images compared with the memory at once: 107 MB for 5,000 representations of 84
CITATION = """@inproceedings{marfoq2022knnper,
  title = {Personalized Federated Learning through Local Memorization},
  author = {Marfoq, Othmane and Neglia, Giovanni and Vidal, Richard and Kameni, Laetitia},
  booktitle = {International Conference on Machine Learning (ICML)}, year = {2022}
}"""
METHOD = Method(
    "kNN-Per",
    CITATION,
    topology="server",
    finetunes=False,  # more than the row is scored
    look="#E69F00 -- p",
)


@dataclass(frozen=True)
class Options:
    k: int = option(10, "neighbours (fewer where a client has fewer training images)", low=1)
    interpolation: float = option(0.5, "lambda, the weight of the neighbours' vote", low=0, high=1)
    scale: float = option(1.0, "s, by which squared distances are divided", above=0)
    memory: int = option(5000, "most training images a client remembers", low=1)
    tune: bool = option(False, "each client takes the best lambda by validation", added=True)
    score_trained: bool = option(False, "score the locally trained w_i, not the global w")


def init(fed: Federation) -> State:
    return fedavg.init(fed, predict=mixture(fed))


def round(fed: Federation, state: State, t: int) -> State:
    w_i = fed.local_opt(fed.copies(state["shared"]["w"]), epochs=fed.run.tau_train)
    w = fed.mean(w_i)
    scored = w_i if fed.options["score_trained"] else fed.copies(w)
    fed.evaluate(scored, predict=mixture(fed))
    return {"client": {}, "shared": {"w": w}}


def newcomer(fed: Federation, state: State) -> Newcomer:
    return Newcomer(fed.copies(state["shared"]["w"]), predict=mixture(fed))


def mixture(fed: Federation) -> Predict:
    """Return a function from a block's rows and images to log probabilities `[k, S, C]`."""
    # of the block scored last, a memory of each client; and its rows with their values, as
    # newcomers train theirs
    memories: list[tuple[Tensor, Tensor, float]] = []
    scored: tuple[slice, Tensor] | None = None

    def predict(rows, w_kW, images):
        nonlocal scored
        logits, z_kSF = fed.outputs(w_kW, images)
        log_p = logits.log_softmax(2)
        if scored is None or scored[0] != rows or not scored[1].equal(w_kW):
            scored = rows, w_kW.clone()
            memories.clear()
            for i in range(len(w_kW)):
                memories.append(remember(fed, rows.start + i, w_kW[i : i + 1]))
        for row, z, (memory, labels, share) in zip(log_p, z_kSF, memories, strict=True):
            row.copy_(mixed(row, votes(fed, row, z, memory, labels), share))
        return log_p

    return predict


def remember(fed: Federation, i: int, w_1W: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return representations `[M, F]` and labels `[M]` of local client i, and its lambda."""
    memory, labels = fed.memory(i, w_1W, fed.options["memory"])
    share = fed.options["interpolation"]
    if fed.options["tune"]:
        logits, z, y = fed.validation_outputs(i, w_1W)
        log_p = logits.log_softmax(1)
        share = best_share(log_p, votes(fed, log_p, z, memory, labels), y.long())
    return memory, labels, share


def votes(fed: Federation, log_p: Tensor, z: Tensor, memory: Tensor, labels: Tensor) -> Tensor:
    """Return p_knn of images with representations `z` `[S, F]`, of the shape of `log_p`."""
    one_hot = log_p.new_ones(log_p.shape[1]).diag().float()
    d2, index = neighbours(z, memory, fed.options["k"])
    # normalised: far neighbours must not underflow
    weight = (-d2 / fed.options["scale"]).softmax(1)
    return (one_hot[labels[index]] * weight[:, :, None]).sum(1)


def mixed(log_p: Tensor, votes: Tensor, share: float) -> Tensor:
    """Return ln(share votes + (1 - share) p), `[S, C]`."""
    log_model, log_votes = (math.log(x) if x > 0 else -math.inf for x in (1 - share, share))
    both = log_p.new_empty(2, *log_p.shape)
    both[0], both[1] = log_p + log_model, votes.log() + log_votes
    return both.logsumexp(0)  # logaddexp has other bits in the last elements of a tensor


def best_share(log_p: Tensor, votes: Tensor, labels: Tensor) -> float:
    """Return the lambda of GRID that is best for images with these labels, int64 `[S]`."""
    scores = []
    for share in GRID:
        log_q = mixed(log_p, votes, share)
        right = int((log_q.argmax(1) == labels).sum())
        loss = -float(log_q.gather(1, labels[:, None]).double().sum())
        scores.append((-right, loss, share))
    return min(scores)[2]


def neighbours(z: Tensor, memory: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return squared distance and number, `[S, k]` both, of the k nearest of `memory` `[M, F]`."""
    # not by |z|^2 - 2 z z' + |z'|^2, which cancels where it matters
    d2 = z.new_empty(len(z), len(memory))
    for out, part in zip(d2.split(CHUNK), z.split(CHUNK), strict=True):
        out.copy_((part[:, None] - memory[None]).square_().sum(2))
    return d2.topk(min(k, len(memory)), 1, largest=False)
