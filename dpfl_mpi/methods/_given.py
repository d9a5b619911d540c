"""DPFL's rounds along a graph that is not searched: a method's own `choose` returns it."""

from collections.abc import Callable
from typing import Any

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Candidates, Federation, Method, State, Tensor, dpfl

Choose = Callable[[Tensor], CollaborationGraph]  # from the trained rows [K, W]
ChooseAmong = Callable[[Tensor, Candidates], CollaborationGraph]
# from the trained rows and a graph: the averaged rows, and whom each client averaged with
Average = Callable[[Tensor, CollaborationGraph], tuple[Tensor, CollaborationGraph]]


def method(title: str, ignores: tuple[str, ...], **more: Any) -> Method:
    """Return the declaration of such a method, which preprocesses as DPFL does."""
    citation = dpfl.METHOD.citation
    return Method(title, citation, searches=False, preprocesses=True, ignores=ignores, **more)


def init(fed: Federation, choose: Choose) -> State:
    """Return the state after preprocessing: rows averaged along Omega, which `choose` returns."""
    w = fed.local_opt(fed.common_row(), epochs=fed.run.tau_init)
    fed.evaluate(w)
    with fed.clock("graph"):
        omega = choose(w)
    w = fed.average(w, omega)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": omega}}


def round(
    fed: Federation,
    state: State,
    choose: Choose,
    choose_among: ChooseAmong | None = None,
    average: Average | None = None,
) -> State:
    """Return the state after a round along the graph that `choose` returns, its Omega.

    `choose_among` chooses for clients whose senders changed under --churn. Without `average` a
    client averages with all its senders in Omega.
    """
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)  # trained, not yet averaged, as DPFL
    with fed.clock("graph"):
        omega = choose(w)
    if choose_among:
        omega = fed.repaired(omega, lambda candidates: choose_among(w, candidates))
    w, chosen = average(w, omega) if average else (fed.average(w, omega), omega)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": chosen}}
