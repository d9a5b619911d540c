"""FedRep: a shared representation and personal heads (Collins et al., ICML 2021, Algorithm 1).

Shared: the base phi, all layers but the head.
Personal: the head h_i.
Scored: (phi_i, h_i) after training.

Paper: does not give the epochs; of tau_train epochs the last `base_epochs` train the base, the
    others the head (4 + 1, as in its repository).
"""

from dataclasses import dataclass

from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import Federation, Method, Newcomer, State, fedavg
from dpfl_mpi.settings import option

CITATION = """@inproceedings{collins2021fedrep,
  title = {Exploiting Shared Representations for Personalized Federated Learning},
  author = {Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
  booktitle = {International Conference on Machine Learning (ICML)}, year = {2021}
}"""
METHOD = Method("FedRep", CITATION, topology="server", elementwise=True, colour="#009E73", line="--", marker=">")


@dataclass(frozen=True)
class Options:
    base_epochs: int = option(1, "epochs of a round that train the base; the other of tau_train train the head", low=0)
    head: str = option("head", "what stays personal: head (the model's last layer), none, all, or names with commas")


def init(fed: Federation) -> State:
    base, most = fed.options["base_epochs"], fed.run.tau_train - bool(fed.columns(fed.options["head"]).any())
    if base > most:
        raise UserError(f"--options.base_epochs is {base}; allowed is 0 to {most}: the rest of tau_train is the head's")
    return fedavg.personal(fed, "h", "phi")


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t; freezing masks weights, momentum, decay and the clipped norm alike."""
    head, base_epochs = fed.columns(fed.options["head"]), fed.options["base_epochs"]
    w_i = state["client"]["h"].where(head, state["shared"]["phi"])  # (phi, h_i)
    w_i = fed.local_opt(w_i, epochs=fed.run.tau_train - base_epochs, trained=head)  # h_i <- GRD(f(phi, h_i))
    base = "w" if fed.run.optimizer == "sgd" else "base"  # Adam counts the steps of each half by itself
    w_i = fed.local_opt(w_i, epochs=base_epochs, trained=~head, momentum=base)  # phi_i <- GRD(f(phi, h_i))
    fed.evaluate(w_i)
    return {"client": {"h": w_i}, "shared": {"phi": fed.mean(w_i)}}


def newcomer(fed: Federation, state: State) -> Newcomer:
    """Return the shared base with the initial head, which alone is trained."""
    head = fed.columns(fed.options["head"])
    return Newcomer(fed.common_row().where(head, state["shared"]["phi"]), trained=head)
