"""--newcomers: clients that come after the last round, when the models of all others are frozen.

A newcomer trains E = 0, 1 and 5 epochs of its own, and is scored after each. With a graph it does lines 1 to 4 of Algorithm 1 with E in
place of tau_init: it trains the common initial row, runs BGGC over the best models of the others, and averages with those that it chose. With
a server it starts from what the server has, in the method's own way (`newcomer` of its file). Alone it starts from the initial row.

Axes: N clients in all, K on this rank, W row width.
"""

from typing import Any

import numpy as np
import torch

from dpfl_mpi.engine.record import write_series
from dpfl_mpi.federation import Parts
from dpfl_mpi.methods import Method, Newcomer
from dpfl_mpi.results.recorder import Recorder

EPOCHS = (0, 1, 5)  # of its own, in all
NOTES = ("val_acc", "test_acc", "models_received", "evaluations")


def arrive(recorder: Recorder | None, parts: Parts, state: dict[str, Any], method: Method) -> None:
    """Let the newcomers in, score them, and record it. Collective."""
    members = parts.members
    frozen = parts.scoring.best.clone()
    members.round = parts.run.rounds + parts.run.finetune_epochs + 1
    members.begin_tuning()
    parts.training.attack.begin()
    how = method.newcomer(parts.fed, state) if method.newcomer else usual(parts, state, method, frozen)
    parts.meet("the end of newcomer")
    members.begin_arrival()
    mine = torch.from_numpy(members.limits.newcomers[parts.ids]).to(parts.backend.ensemble.device)[:, None]
    w, done, notes = how.start, 0, []
    for epochs in EPOCHS:
        parts.log.begin()
        parts.fed.local_opt(w, epochs - done, how.gradient, momentum="newcomer", trained=how.trained)
        done = epochs
        rows = w
        if method.topology == "graph":
            rows = torch.where(mine, w, frozen)
            with parts.log.clock("graph"):
                omega = parts.fed.bggc(rows)
            rows = parts.fed.average(rows, omega)
        parts.fed.evaluate(rows, predict=how.predict)
        notes.append({name: parts.log.notes[name].copy() for name in NOTES})
    write_series(recorder, parts, "newcomers", np.array(EPOCHS), notes)


def usual(parts: Parts, state: dict[str, Any], method: Method, frozen_KW: Any) -> Newcomer:
    """Return how a newcomer starts where the method says nothing of it."""
    if method.topology != "server":
        return Newcomer(parts.fed.common_row())
    shared = state["shared"].get("w")
    start = parts.fed.copies(parts.fed.mean(frozen_KW) if shared is None else shared)
    return Newcomer(start, method.finetune_gradient(parts.fed, start.clone()) if method.finetune_gradient else None)
