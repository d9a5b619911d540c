"""FedProx: FedAvg with a proximal term (Li et al., MLSys 2020, Algorithm 2).

Shared: w.
Personal: nothing.
Scored: w after aggregation.

Client i minimises h_i(w_i; w) = f_i(w_i) + (mu / 2) ||w_i - w||^2.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Gradient, Method, State, Tensor, fedavg
from dpfl_mpi.settings import option

CITATION = """@inproceedings{li2020fedprox,
  title = {Federated Optimization in Heterogeneous Networks},
  author = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and
            Talwalkar, Ameet and Smith, Virginia},
  booktitle = {Conference on Machine Learning and Systems (MLSys)}, year = {2020}
}"""
METHOD = Method("FedProx", CITATION, topology="server", elementwise=True, look="#CC79A7 D")


@dataclass(frozen=True)
class Options:
    mu: float = option(0.1, "weight of the proximal term (the paper's lambda)", low=0)
    finetune_prox: bool = option(True, "+FT: keep the proximal term", tuning=True)


init = fedavg.init


def round(fed: Federation, state: State, t: int) -> State:
    return fedavg.round(fed, state, t, fed.proximal(state["shared"]["w"], fed.options["mu"]))


def finetune_gradient(fed: Federation, start: Tensor) -> Gradient | None:
    """Return the gradient of +FT, which pulls to the rows `[K, W]` that tuning starts from."""
    # Paper: FedProx+FT lies below Local on Patho(3), which suggests that its term was kept.
    return fed.proximal(start, fed.options["mu"]) if fed.options["finetune_prox"] else None
