"""APFL: a mixture of a personal and the shared model (Deng et al., arXiv 2003.13461, Algorithm 1).

Shared: w, trained as in FedAvg.
Personal: v_i and its weight alpha_i.
Scored: alpha_i v_i + (1 - alpha_i) w_i after local training.

Paper: does not give alpha; 0.5 is fixed here, as in later comparisons.
Paper: takes v_i's gradient at the mixture with the old w_i, here the new w_i. A learned alpha
    moves freely; here, as in the authors' code, it is pulled to 0, and moves once a round.
Paper: alpha's slope is <v_i - w_i, gradient at the mixture>, as here; the code weighs the
    gradients of its two steps by alpha and 1 - alpha.
"""

from dataclasses import dataclass
from functools import partial

from dpfl_mpi.methods import Federation, Method, State, Tensor, fedavg
from dpfl_mpi.settings import option

CITATION = """@article{deng2020apfl,
  title = {Adaptive Personalized Federated Learning},
  author = {Deng, Yuyang and Kamani, Mohammad Mahdi and Mahdavi, Mehrdad},
  journal = {arXiv:2003.13461}, year = {2020}
}"""
METHOD = Method("APFL", CITATION, topology="server", models=2, look="#D55E00 -- v")
PULL = 0.02  # of a learned alpha to 0


@dataclass(frozen=True)
class Options:
    alpha: float = option(
        0.5, "alpha, the weight of the personal model, from 0 to 1", low=0, high=1
    )
    adaptive: bool = option(False, "each client learns its alpha, one step a round")


def init(fed: Federation) -> State:
    state = fedavg.personal(fed, "v")
    alpha = state["client"]["v"].new_full((len(fed.ids), 1), fed.options["alpha"])
    state["client"]["alpha"] = alpha
    return state


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t.

    Each batch moves w_i by grad f(w_i), then v_i by alpha grad f(mixture).
    """
    v_i, alpha_i = state["client"]["v"], state["client"]["alpha"]
    w_i = fed.copies(state["shared"]["w"])
    learn = partial(learn_alpha, fed, alpha_i) if fed.options["adaptive"] else None
    w_i, v_i = fed.mixed_opt(w_i, v_i, alpha_i, fed.run.tau_train, learn)
    fed.evaluate(alpha_i * v_i + (1 - alpha_i) * w_i)
    return {"client": {"v": v_i, "alpha": alpha_i}, "shared": {"w": fed.mean(w_i)}}


def learn_alpha(fed: Federation, alpha_i: Tensor, w, v, mixed) -> None:
    """Move alpha in place against the slope of f(mixture), with a small pull to 0.

    Only a round's first batch moves it; later ones change nothing.
    """
    if w.steps[0] > 1:
        return
    alpha = alpha_i[w.rows]
    slope = ((v.w - w.w) * mixed.g).sum(1, keepdim=True) + PULL * alpha
    alpha_i[w.rows] = (alpha - fed.lr * slope).clamp(0, 1)
