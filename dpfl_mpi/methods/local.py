"""Local: every client trains alone, w_k <- LocalOpt(w_k, tau_train).

Shared: nothing.
Personal: w_i.
Scored: w_i after training.
"""

from typing import Any

from dpfl_mpi.methods import Federation, Method, State

METHOD = Method(title="Local", topology="none", elementwise=True, look="#D55E00")


def init(fed: Federation, **own: Any) -> State:
    """Return the common initial row of every client, scored, and more of each client's `own`."""
    w = fed.common_row()
    fed.evaluate(w)
    return {"client": {"w": w, **own}, "shared": {}}


def round(fed: Federation, state: State, t: int) -> State:
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {}}
