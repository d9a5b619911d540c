"""Local: every client trains alone, w_k <- LocalOpt(w_k, tau_train)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfl_mpi.federation import Federation

FIXED = {  # no graph, no preprocessing
    "budget": 1,
    "budget_counts_self": True,
    "tau_init": 0,
    "ggc_period": 1,
    "ggc_off_rounds": "reuse",
    "ggc_repeats": 1,
    "reach": None,
    "flipped_run_ggc": True,
}


def init(fed: Federation) -> dict[str, Any]:
    """Return the common initial row, untrained."""
    w = fed.common_row()
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {}}


def round(fed: Federation, state: dict[str, Any], t: int) -> dict[str, Any]:
    """Return the rows after tau_train more epochs."""
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {}}
