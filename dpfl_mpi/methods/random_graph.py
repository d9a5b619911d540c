"""The random graph baseline: DPFL whose collaborators are drawn, not chosen (Kharrat, Canini and Horvath, AISTATS 2025, section 4).

Omega_k is B_c - 1 of the reachable clients, drawn uniformly, and C_k = Omega_k in every round: the schedule of DPFL without its rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpfl_mpi.config import option
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Method, State, dpfl

if TYPE_CHECKING:
    from dpfl_mpi.federation import Federation

METHOD = Method(
    title="Random graph", topology="graph", searches=False, preprocesses=True, citation=dpfl.METHOD.citation
)


@dataclass(frozen=True)
class Options:
    """Options of the random graph."""

    redraw: bool = option(False, "draw the graph anew each round")  # Paper: does not say; once is DPFL's frozen Omega


def init(fed: Federation) -> State:
    """Return the state after preprocessing: the mixed rows and the random graph."""
    w = fed.local_opt(fed.common_row(), epochs=fed.run.tau_init)
    fed.evaluate(w)
    omega = draw(fed)
    w = fed.average(w, omega)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": omega}}


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t."""
    w, omega, chosen = state["client"]["w"], state["shared"]["omega"], state["shared"]["chosen"]
    w = fed.local_opt(w, epochs=fed.run.tau_train)
    fed.evaluate(w)  # trained, not yet mixed, as DPFL
    chosen = draw(fed) if fed.options["redraw"] else chosen
    w = fed.average(w, chosen)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": chosen}}


def draw(fed: Federation) -> CollaborationGraph:
    """Return the graph of this round: for each client the first B_c - 1 of its reachable clients in its keyed order."""
    return fed.collect([fed.shuffle(k, fed.reachable(k), 0)[: fed.others[k]] for k in fed.ids])
