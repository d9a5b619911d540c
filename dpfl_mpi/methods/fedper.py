"""FedPer: a shared base and personal layers (Arivazhagan et al., arXiv 1912.00818).

Shared: the base W_B, all layers but the head.
Personal: the head W_P_i.
Scored: (W_B_i, W_P_i) after training.

Unlike FedRep it trains base and head together, in all tau_train epochs (Algorithms 1 and 2).
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Method, State, fedavg
from dpfl_mpi.settings import option

CITATION = """@article{arivazhagan2019fedper,
  title = {Federated Learning with Personalization Layers},
  author = {Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and
            Choudhary, Sunav},
  journal = {arXiv:1912.00818}, year = {2019}
}"""
METHOD = Method("FedPer", CITATION, topology="server", elementwise=True, look="#56B4E9 --")


@dataclass(frozen=True)
class Options:
    head: str = option(
        "head", "personal layers: head (the last one), none, all, or names with commas"
    )


def init(fed: Federation) -> State:
    return fedavg.personal(fed, "w", "base")


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t: Algorithm 2 is the client, Algorithm 1 the server."""
    personal = fed.columns(fed.options["head"])
    w_i = state["client"]["w"].where(personal, state["shared"]["base"])  # client: (W_B, W_P_i)
    w_i = fed.local_opt(w_i, epochs=fed.run.tau_train)  # client: SGD on both
    fed.evaluate(w_i)
    return {"client": {"w": w_i}, "shared": {"base": fed.mean(w_i)}}  # server: mean of the bases
