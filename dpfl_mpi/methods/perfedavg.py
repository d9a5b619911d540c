"""Per-FedAvg: a model that one step adapts, first order (Fallah et al., NeurIPS 2020).

Shared: w.
Personal: nothing.
Scored: w plus one inner step on a training batch.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Method, State, Tensor
from dpfl_mpi.settings import option

CITATION = """@inproceedings{fallah2020perfedavg,
  title = {Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach},
  author = {Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)}, year = {2020}
}"""
METHOD = Method("PerFedAvg", CITATION, topology="server", elementwise=True, colour="#56B4E9", marker="^")


@dataclass(frozen=True)
class Options:
    alpha: float = option(0.01, "alpha, the rate of the inner step, which is plain gradient descent", low=0)
    score_trained: bool = option(False, "score the locally trained w_i before aggregation instead")


def init(fed: Federation) -> State:
    w = fed.initial_row()
    fed.evaluate(fed.copies(w) if fed.options["score_trained"] else adapted(fed, fed.copies(w)))
    return {"client": {}, "shared": {"w": w}}


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t. A step takes two batches, the second right after the first; a last one without a second is not used."""
    # w' = w_i - alpha grad f(w_i; B1), then w_i <- w_i - eta grad f(w'; B2)
    w_i = fed.ahead_opt(fed.copies(state["shared"]["w"]), fed.run.tau_train, fed.options["alpha"])
    if fed.options["score_trained"]:
        fed.evaluate(w_i)
    w_next = fed.mean(w_i)
    if not fed.options["score_trained"]:
        fed.evaluate(adapted(fed, fed.copies(w_next)))
    return {"client": {}, "shared": {"w": w_next}}


def adapted(fed: Federation, w_i: Tensor) -> Tensor:
    """Return w_i - alpha grad f(w_i; B), B the first training batch of each client's next epoch: the model a user would get."""
    for batch, w in fed.batches(1, {"w": w_i}, advance=False, most=1):
        fed.gradient(w, batch)
        fed.descend(w, fed.options["alpha"])
    return w_i
