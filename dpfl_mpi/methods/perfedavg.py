"""Per-FedAvg: a model that one step adapts, first order (Fallah et al., NeurIPS 2020).

Shared: w.
Personal: nothing.
Scored: w plus one inner step on a training batch.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Method, State, Tensor
from dpfl_mpi.settings import option

CITATION = """@inproceedings{fallah2020perfedavg,
  title = {Personalized Federated Learning with Theoretical Guarantees:
    A Model-Agnostic Meta-Learning Approach},
  author = {Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)}, year = {2020}
}"""
METHOD = Method("PerFedAvg", CITATION, topology="server", elementwise=True, look="#56B4E9 ^")


@dataclass(frozen=True)
class Options:
    alpha: float = option(0.01, "alpha, the rate of the inner step of gradient descent", low=0)
    score_trained: bool = option(False, "score the locally trained w_i before aggregation")


def init(fed: Federation) -> State:
    w = fed.initial_row()
    w_i = fed.copies(w)
    fed.evaluate(w_i if fed.options["score_trained"] else adapted(fed, w_i))
    return {"client": {}, "shared": {"w": w}}


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t.

    A step takes two batches: w' = w_i - alpha grad f(w_i; B1), then
    w_i <- w_i - eta grad f(w'; B2). A last batch without a second is not used.
    """
    w_i = fed.copies(state["shared"]["w"])
    w_i = fed.ahead_opt(w_i, fed.run.tau_train, fed.options["alpha"])
    if fed.options["score_trained"]:
        fed.evaluate(w_i)
    w = fed.mean(w_i)
    if not fed.options["score_trained"]:
        fed.evaluate(adapted(fed, fed.copies(w)))
    return {"client": {}, "shared": {"w": w}}


def adapted(fed: Federation, w_i: Tensor) -> Tensor:
    """Return w_i - alpha grad f(w_i; B), B the first batch of each client's next epoch."""
    for batch, w in fed.batches(1, {"w": w_i}, advance=False, most=1):
        fed.gradient(w, batch)
        fed.descend(w, fed.options["alpha"])
    return w_i
