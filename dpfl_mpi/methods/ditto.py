"""Ditto: a personal model near the global one (Li et al., ICML 2021, Algorithm 1).

Shared: w, trained as in FedAvg.
Personal: v_i, which minimises f_i(v_i) + (lambda / 2) ||v_i - w||^2.
Scored: v_i after training.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Method, Newcomer, State, fedavg
from dpfl_mpi.settings import option

CITATION = """@inproceedings{li2021ditto,
  title = {Ditto: Fair and Robust Federated Learning Through Personalization},
  author = {Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle = {International Conference on Machine Learning (ICML)}, year = {2021}
}"""
METHOD = Method("Ditto", CITATION, topology="server", models=2, elementwise=True, look="#E69F00 <")


@dataclass(frozen=True)
class Options:
    lam: float = option(0.75, "lambda, the weight of the pull of v_i to the global model", low=0)


def init(fed: Federation) -> State:
    return fedavg.personal(fed, "v")


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t; both models see the same batches."""
    v, w = state["client"]["v"], state["shared"]["w"]
    pull = fed.proximal(w, fed.options["lam"])
    v = fed.local_opt(v, epochs=fed.run.tau_train, gradient=pull, momentum="v", advance=False)
    fed.evaluate(v)
    return {"client": {"v": v}, "shared": {"w": fedavg.update(fed, w)}}


def newcomer(fed: Federation, state: State) -> Newcomer:
    w = state["shared"]["w"]
    return Newcomer(fed.copies(w), gradient=fed.proximal(w, fed.options["lam"]))
