"""DPFL's schedule along graphs that are given, not searched: what `random_graph`, `oracle`, `pairwise` and `replay` have in common."""

from collections.abc import Callable
from typing import Any

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Candidates, Federation, Method, State, Tensor, dpfl

Choose = Callable[[Tensor], CollaborationGraph]
ChooseAmong = Callable[[Tensor, Candidates], CollaborationGraph]


def method(title: str, ignores: tuple[str, ...], **more: Any) -> Method:
    """Return what such a method declares: it preprocesses as DPFL does."""
    return Method(title, dpfl.METHOD.citation, searches=False, preprocesses=True, ignores=ignores, **more)


def init(fed: Federation, choose: Choose) -> State:
    """Return the state after preprocessing: the rows mixed along Omega, which `choose` returns from the trained rows `[K, W]`."""
    w = fed.local_opt(fed.common_row(), epochs=fed.run.tau_init)
    fed.evaluate(w)
    omega = choose(w)
    w = fed.average(w, omega)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": omega}}


def round(fed: Federation, state: State, choose: Choose, anew: ChooseAmong | None = None) -> State:
    """Return the state after a round whose graph `choose` returns from the trained rows `[K, W]`; `anew` chooses where --churn asks for it."""
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)  # trained, not yet mixed, as DPFL
    chosen = choose(w)
    if anew:
        chosen = fed.repaired(chosen, lambda candidates: anew(w, candidates))
    w = fed.average(w, chosen)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": state["shared"]["omega"], "chosen": chosen}}
