"""FedPAC: aligned features and mixed heads (Xu et al., ICLR 2023, Algorithm 1).

Shared: the base phi, all layers but the head; c, the mean feature of each class.
Personal: the head h_i.
Scored: (phi_i, h_i) after training.

A feature z is what the head reads. A client trains its head, then its base, on its loss plus lambda
times the mean square of z - c_y. The server mixes the heads for each client by weights that are to
minimise bias and variance of its head.

Paper: its code trains the head for an epoch before the tau_train epochs of the base, at 10 times
    the base's rate; here of tau_train epochs the first `head_epochs` train the head, at one rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation, Method, State, Tensor, fedavg, fedrep
from dpfl_mpi.settings import option

CITATION = """@inproceedings{xu2023fedpac,
  title = {Personalized Federated Learning with Feature Alignment and Classifier Collaboration},
  author = {Xu, Jian and Tong, Xinyi and Huang, Shao-Lun},
  booktitle = {International Conference on Learning Representations (ICLR)}, year = {2023}
}"""
METHOD = Method(
    "FedPAC", CITATION, topology="server", sends_models=False, every_row=1, look="#999933 :"
)
LEAST = 1e-3  # a smaller weight counts as 0, as in the published code


@dataclass(frozen=True)
class Options:
    lam: float = option(1.0, "lambda, the weight of the features' alignment", low=0)
    head_epochs: int = option(1, "epochs of tau_train that train the head, not the base", low=0)
    head: str = option(
        "head", "personal layers: head (the last one), none, all, or names with commas"
    )


def init(fed: Federation) -> State:
    if fed.options["head_epochs"] > fed.run.tau_train:
        allowed = f"allowed is 0 to tau_train, {fed.run.tau_train}"
        raise UserError(f"--options.head_epochs is {fed.options['head_epochs']}; {allowed}")
    nnls()  # a missing SciPy is named before the rounds
    state = fedavg.personal(fed, "h", "phi")
    c = centroids(fed, *statistics(fed, state["client"]["h"])[:2])
    state["shared"]["c"] = c * np.nan  # not known before round 1
    return state


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t. Frozen columns have no momentum, decay or clipping."""
    head, head_epochs = fed.columns(fed.options["head"]), fed.options["head_epochs"]
    base_epochs = fed.run.tau_train - head_epochs
    w_i = state["client"]["h"].where(head, state["shared"]["phi"])  # (phi, h_i)
    a = head_weights(fed, *statistics(fed, w_i))
    w_i = fed.local_opt(w_i, epochs=head_epochs, trained=head)
    aligned = fed.gradient_of(partial(objective, fed.options["lam"], state["shared"]["c"]))
    # SGD's two halves share a momentum, as their columns differ; of Adam each half counts its steps
    momentum = "w" if fed.run.optimizer == "sgd" else "base"
    w_i = fed.local_opt(w_i, epochs=base_epochs, gradient=aligned, trained=~head, momentum=momentum)
    fed.evaluate(w_i)
    c = centroids(fed, *statistics(fed, w_i)[:2])
    h, phi = aggregate(fed, w_i, a, state["shared"]["phi"])
    fed.note_received(2)  # one up, one down
    return {"client": {"h": h}, "shared": {"phi": phi, "c": c}}


newcomer = fedrep.newcomer


def objective(lam: float, c: np.ndarray, i: int, logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy plus lambda times the mean square of z - c_y."""
    loss = -logits.log_softmax(1).gather(1, y[:, None]).mean()
    c_y = z.new_tensor(c)[y]
    return loss + lam * (z - c_y.where(c_y == c_y, z)).square().mean()  # an unknown c_y is NaN


def statistics(fed: Federation, w: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of local clients' features: images and mean by class, and the mean of ||z||^2.

    They are float64 `[K, C]`, `[K, C, F]`, 0 where a client lacks the class, and `[K]`.
    """
    counts, means, squares = [], [], []
    for i in range(len(fed.ids)):
        z, y = fed.memory(i, w[i : i + 1], int(fed.n_train[i]))
        features, labels = z.cpu().double().numpy(), y.cpu().numpy()
        of_class = np.arange(fed.class_counts.shape[1])[:, None] == labels
        counts.append(of_class.sum(1))
        sums = [features[which].sum(0) for which in of_class]
        means.append(np.array(sums) / np.maximum(counts[-1], 1)[:, None])
        squares.append((features**2).sum(1).mean())
    return np.array(counts, float), np.array(means), np.array(squares)


def centroids(fed: Federation, counts: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return c `[C, F]`, the mean feature over active clients' images; NaN of an unknown class.

    Collective.
    """
    counts_NC, means_NCF = of_active(fed, counts), of_active(fed, means)
    total = counts_NC.sum(0)[:, None]
    c = (counts_NC[:, :, None] * means_NCF).sum(0) / np.maximum(total, 1)
    return np.where(total > 0, c, np.nan)


def head_weights(
    fed: Federation, counts: np.ndarray, means: np.ndarray, squares: np.ndarray
) -> np.ndarray:
    """Return how much each local client's head takes of each active client's, `[K, N]`.

    Collective. `mixture` says how. Here h_i is no head: it is client i's mean features by class,
    times the class's share p_i(y). v_i is the variance of its features divided by its images.
    """
    h, v = means, squares
    if len(fed.ids):  # a rank without clients has no shapes; `of_active` takes the others'
        n = np.maximum(counts.sum(1), 1)
        h = (counts / n[:, None])[:, :, None] * means
        v = (squares - (h**2).sum((1, 2))) / n
    h_N, v_N = of_active(fed, h).reshape(fed.n, -1), of_active(fed, v)
    a, active = np.zeros((len(fed.ids), fed.n)), np.flatnonzero(fed.active)
    for i, k in enumerate(fed.ids):
        if fed.active[k]:
            a[i, active] = mixture(h_N[active] - h_N[k], v_N[active])
    return a


def aggregate(fed: Federation, w: Tensor, a: np.ndarray, phi: Tensor) -> tuple[Tensor, Tensor]:
    """Return each client's row sum_j a_ij w_j `[K, W]`, and the p-weighted mean `[W]`.

    Both are over active clients. One that diverged since `a` was computed is left out, and the
    other weights are scaled up. An absent client keeps its row. Collective.
    """
    if not fed.active.any():
        return w, phi
    p = fed.p * fed.active / fed.p[fed.active].sum()
    lacking = a[:, ~fed.active].any(1)
    a = a * fed.active * fed.active[fed.ids][:, None]
    a[lacking] /= np.maximum(a[lacking].sum(1, keepdims=True), 1e-6)  # a row of zeros stays
    rows, mean = w.double() * 0, phi.double() * 0
    for j, row in fed.every_row(w):
        model = row.double()
        mean += p[j] * model
        for i in np.flatnonzero(a[:, j]):
            rows[i] += a[i, j] * model
    absent = a.sum(1) == 0
    rows[absent] = w[absent].double()
    return rows.float(), mean.float()


def of_active(fed: Federation, values: np.ndarray) -> np.ndarray:
    """Return the values of all clients, `[N, ...]`, of absent ones 0.

    They go to the server, so along no edge: on a network they cost nothing.
    """
    values_N = fed.tell(values, CollaborationGraph.empty(fed.n))
    return np.where(fed.active.reshape(-1, *[1] * (values_N.ndim - 1)), values_N, 0)


def nnls() -> Callable[..., tuple[np.ndarray, float]]:
    """Return SciPy's least squares with x >= 0; `UserError` where SciPy is missing."""
    try:
        from scipy.optimize import nnls
    except ModuleNotFoundError:
        needs = "--method fedpac needs SciPy"
        raise UserError(f"{needs}: pip install 'dpfl_mpi[analysis]'") from None
    return nnls


def mixture(away: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return argmin_x ||sum_j x_j away_j||^2 + sum_j v_j x_j^2 over {x >= 0, sum x = 1}.

    `nnls` cannot hold the sum at 1. A last row adds (sum x - 1)^2 to what it minimises; as the rest
    is quadratic, its x is then the x sought times a factor, which dividing by sum x takes away.
    """
    size = np.sqrt(max((away**2).sum(1).max(), v.max()) or 1.0)
    rows = np.concatenate([away.T / size, np.diag(np.sqrt(np.maximum(v, 0))) / size])
    x, _ = nnls()(np.concatenate([rows, np.ones((1, len(v)))]), np.append(np.zeros(len(rows)), 1.0))
    x /= x.sum()
    if x.max() >= LEAST:
        x[x < LEAST] = 0
    return np.round(x, 6) / np.round(x, 6).sum()
