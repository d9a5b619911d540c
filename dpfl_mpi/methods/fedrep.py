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
METHOD = Method("FedRep", CITATION, topology="server", elementwise=True, look="#009E73 -- >")


@dataclass(frozen=True)
class Options:
    base_epochs: int = option(1, "epochs of tau_train that train the base, not the head", low=0)
    head: str = option(
        "head", "personal layers: head (the last one), none, all, or names with commas"
    )


def init(fed: Federation) -> State:
    has_head = bool(fed.columns(fed.options["head"]).any())
    base, limit = fed.options["base_epochs"], fed.run.tau_train - has_head
    if base > limit:
        allowed = f"allowed is 0 to {limit}: the rest of tau_train is the head's"
        raise UserError(f"--options.base_epochs is {base}; {allowed}")
    return fedavg.personal(fed, "h", "phi")


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t. Frozen columns have no momentum, decay or clipping."""
    head, base_epochs = fed.columns(fed.options["head"]), fed.options["base_epochs"]
    head_epochs = fed.run.tau_train - base_epochs
    w_i = state["client"]["h"].where(head, state["shared"]["phi"])  # (phi, h_i)
    w_i = fed.local_opt(w_i, epochs=head_epochs, trained=head)  # h_i <- GRD(f(phi, h_i))
    momentum = "w" if fed.run.optimizer == "sgd" else "base"  # Adam counts each half's steps
    w_i = fed.local_opt(  # phi_i <- GRD(f(phi, h_i))
        w_i, epochs=base_epochs, trained=~head, momentum=momentum
    )
    fed.evaluate(w_i)
    return {"client": {"h": w_i}, "shared": {"phi": fed.mean(w_i)}}


def newcomer(fed: Federation, state: State) -> Newcomer:
    """Return the shared base with the initial head, which alone is trained."""
    head = fed.columns(fed.options["head"])
    return Newcomer(fed.common_row().where(head, state["shared"]["phi"]), trained=head)
