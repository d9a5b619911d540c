"""What comes after the rounds: --finetune_epochs (docs/methods.md) and --newcomers (docs/controls.md).

The tuned models come from the base Run's file (the same without tuning) where that has them, else the rounds are computed first.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dpfl_mpi.engine.record import BEST, write_series, write_tuned
from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.methods import Method, Newcomer, State
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job

# what the base Run recorded of its rounds is this Run's record of them
COPIED = ("round/", "mixed/", "graph/", "traffic/", "seconds/", "network/")
# what its clients came to, which tuning goes on from: names in `Parts.state` -> datasets
REACHED = BEST | {"best_confusion": "best/confusion"}
BLOCK = 2**26  # bytes of the base's models that a rank holds beside those of its own clients
EPOCHS = (0, 1, 5)  # of a newcomer, in all; with a graph it then does lines 1 to 4 of Algorithm 1
SCORES = ("val_acc", "test_acc")


def from_base(job: Job, parts: Parts, recorder: Recorder | None) -> bool:
    """Take models and records from the base Run's file and return True; False where it is not there, unfinished, or without models. Collective."""
    path, size = parts.run.untuned().path(job.results), parts.backend.ensemble.size
    rows = max(1, BLOCK // (4 * size))
    blocks = [slice(first, first + rows) for first in range(0, parts.n, rows)]
    base = parts.world.share(lambda: copy_base(path, blocks, job, parts, recorder))
    if not base:
        return False
    if "client/stopped_round" in base:
        parts.members.stopped_round[:] = base["client/stopped_round"]
    best = np.empty((len(parts.ids), size), np.float32)
    for block in blocks:
        sent = parts.world.share(functools.partial(models, path, block))["rows"]
        here = (parts.ids >= block.start) & (parts.ids < block.stop)
        best[here] = sent[parts.ids[here] - block.start]
    reached = {name: base[stored] for name, stored in REACHED.items()}
    parts.adopt(best, reached, base["client/diverged_round"], int(base["steps"][0]))
    return True


def models(path: Path, block: slice) -> dict[str, np.ndarray]:
    with Result(path) as base:  # anew: whoever computes it, a Run has the same models
        return {"rows": base.part("model/best", block)}


def copy_base(path: Path, blocks: list[slice], job: Job, parts: Parts, to: Recorder | None) -> dict[str, np.ndarray]:
    """Copy the base Run's record of its rounds; return what its clients came to. Where that cannot be had nothing, and a warning says why. On root."""
    assert to is not None
    why = ""
    try:
        with Result(path) as base:
            if base.key != parts.run.untuned().key():
                why = "is of another Run"
            elif not base.finished or any(base.fact(n) != parts.about[n] for n in ("data_sha256", "partition_sha256")):
                why = "is not finished, or of other data or another partition"
            elif "model/best" not in base:
                why = "holds no models (--save_models)"
            elif job.mixed and "mixed/test_acc" not in base:
                why = "holds no scores after mixing (--mixed)"
            else:
                copied = {name: base[name] for name in base.names() if name.startswith(COPIED)}
                stopped = ["client/stopped_round"] if parts.run.patience else []
                reached = {name: base[name] for name in (*REACHED.values(), "client/diverged_round", *stopped)}
                for block in blocks:
                    base.part("model/best", block)
    except UserError:
        why = "cannot be read" if path.exists() else "is not there"
    if why:
        if path.exists() or not job.quiet:
            complain(f"the base of the tuning, {path}, {why}: its rounds are computed here")
        return {}
    to.write(copied | {"client/diverged_round": reached["client/diverged_round"].astype(np.int64)})
    return reached | {"steps": copied["round/gradient_steps"][-1:]}


def best_rows(parts: Parts) -> torch.Tensor:
    """Return the clients' best rows `[K, W]`, in place of the zeros of who was never scored the initial row."""
    best = parts.scoring.best
    return torch.where(best.any(1, keepdim=True), best, parts.fed.initial_row())


def tune(recorder: Recorder | None, parts: Parts, method: Method) -> Iterator[int]:
    """Train every client on from its best row and record it; yield after each epoch the round's number, which counts on. Collective."""
    members, start = parts.members, best_rows(parts)
    members.begin_after()  # everyone takes part but newcomers
    parts.training.momentum.clear()  # it starts anew
    w = start.clone()
    gradient = method.finetune_gradient(parts.fed, start) if method.finetune_gradient else None
    # local epochs that the client with most has trained: not told from the end, where it may have diverged and not be tuned
    most = parts.world.spread(np.array([parts.training.epochs.max(initial=0)], np.float64))[0, 2]
    notes, steps = [], []
    for epoch in range(parts.run.finetune_epochs + 1):
        members.round = parts.run.rounds + epoch  # counts on from the rounds
        parts.log.begin()  # no score of the epoch before stays for a client that diverges in this one
        if epoch:
            parts.fed.local_opt(w, 1, gradient, momentum="finetune")
        # before the best is forgotten: who has diverged keeps its last finite one, who has left its own
        members.exclude_diverged(w)
        if epoch < 2:  # that of the rounds, then that of the start, which epoch 0 scores
            parts.scoring.forget_best(members.awake)
        parts.fed.evaluate(w)
        notes.append({name: parts.log.notes[name].copy() for name in SCORES})
        steps.append(parts.world.sum_int64(np.array([parts.training.steps.sum()]))[0])
        yield parts.round
    write_series(recorder, parts, "finetune", int(most) + np.arange(len(notes)), notes)
    write_tuned(recorder, parts, np.array(steps))


def arrive(recorder: Recorder | None, parts: Parts, state: State, method: Method) -> Iterator[int]:
    """Train and score who comes after the rounds, and record it; yield the number of the last round before each score. Collective."""
    members = parts.members
    frozen = best_rows(parts)
    members.round = parts.run.rounds + parts.run.finetune_epochs + 1
    members.begin_after()
    parts.training.attack.begin()
    how = method.newcomer(parts.fed, state) if method.newcomer else usual(parts, state, method, frozen)
    parts.meet("the end of newcomer")
    members.begin_after(members.limits.newcomers)
    mine = torch.from_numpy(members.limits.newcomers[parts.ids]).to(parts.backend.ensemble.device)[:, None]
    w, done, notes = how.start, 0, []
    for epochs in EPOCHS:
        yield members.round
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
        notes.append({name: parts.log.notes[name].copy() for name in (*SCORES, "models_received", "evaluations")})
    write_series(recorder, parts, "newcomers", np.array(EPOCHS), notes)


def usual(parts: Parts, state: State, method: Method, frozen_KW: torch.Tensor) -> Newcomer:
    """Return how a newcomer starts where the method says nothing of it."""
    if method.topology != "server":
        return Newcomer(parts.fed.common_row())
    shared = state["shared"].get("w")
    start = parts.fed.copies(parts.fed.mean(frozen_KW) if shared is None else shared)
    return Newcomer(start, method.finetune_gradient(parts.fed, start.clone()) if method.finetune_gradient else None)
