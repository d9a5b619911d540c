"""What follows the rounds: fine-tuning (--finetune_epochs), and newcomers (--newcomers).

The loop in `engine.train` calls these functions on every rank. The base of a fine-tuned Run is the
same Run without fine-tuning. If its result holds the models, fine-tuning starts from these;
otherwise the rounds are computed first. A row is the weights of a model. Axes: N clients in all, K
on this rank, W row width.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfl_mpi.engine.checks import kind
from dpfl_mpi.engine.record import BEST, Record
from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.methods import Method, Newcomer, State
from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job

# arrays of the base's result that are this Run's, too: the records of its rounds
COPIED = ("round/", "mixed/", "graph/", "traffic/", "seconds/", "network/")
# arrays of the base's result that fine-tuning starts from, by the names that `Parts.adopt` takes
CLIENTS = BEST | {"best_confusion": "best/confusion"}
BLOCK = 2**26  # bytes of the base's models that are sent to all ranks at once
# local epochs after which a newcomer is scored; under a method with a graph it first chooses its
# collaborators, as in lines 1 to 4 of Algorithm 1
EPOCHS = (0, 1, 5)
SCORES = ("val_acc", "test_acc")


def from_base(path: Path, key: dict[str, Any], job: Job, parts: Parts, record: Record) -> bool:
    """Take models and records from the base's result; return whether that was possible."""
    size = parts.backend.ensemble.size
    rows = max(1, BLOCK // (4 * size))
    blocks = [slice(first, first + rows) for first in range(0, parts.n, rows)]

    def models(block: slice) -> dict[str, np.ndarray]:
        with Result(path) as result:  # opened again: if it was replaced, it has the same models
            return {"rows": result.rows("model/best", block)}

    base = parts.world.share(lambda: copy_base(path, key, blocks, job, parts, record))
    if not base:
        return False
    if "client/stopped_round" in base:
        parts.members.stopped_round[:] = base["client/stopped_round"]
    best = np.empty((len(parts.ids), size), np.float32)
    for block in blocks:
        of_block = parts.world.share(partial(models, block))["rows"]
        in_block = (parts.ids >= block.start) & (parts.ids < block.stop)
        best[in_block] = of_block[parts.ids[in_block] - block.start]
    state = {name: base[dataset] for name, dataset in CLIENTS.items()}
    parts.adopt(best, state, base["client/diverged_round"], int(base["steps"][0]))
    return True


def copy_base(
    path: Path, key: dict[str, Any], blocks: list[slice], job: Job, parts: Parts, record: Record
) -> dict[str, np.ndarray]:
    """Copy the base's records and return its clients' arrays; {}, with a warning, if it cannot."""
    # it is called on rank 0 alone
    problem = ""
    try:
        with Result(path) as base:
            hashes = ("data_sha256", "partition_sha256")
            if base.key != key:
                problem = "is of another Run"
            elif not base.finished or any(base.fact(n) != parts.provenance[n] for n in hashes):
                problem = "is not finished, or of other data or another partition"
            elif "model/best" not in base:
                problem = "holds no models (--save_models)"
            elif job.mixed and "mixed/test_acc" not in base:
                problem = "holds no scores after mixing (--mixed)"
            else:
                copied = {name: base[name] for name in base.arrays() if name.startswith(COPIED)}
                names = [*CLIENTS.values(), "client/diverged_round"]
                names += ["client/stopped_round"] if parts.run.patience else []
                clients = {name: base[name] for name in names}
                for block in blocks:  # now, so that a damaged file is found before all ranks read
                    base.rows("model/best", block)
    except UserError:
        problem = "cannot be read" if path.exists() else "is not there"
    if problem:
        if path.exists() or not job.quiet:
            complain(f"the result to fine-tune, {path}, {problem}: its rounds are computed here")
        return {}
    diverged = {"client/diverged_round": clients["client/diverged_round"].astype(np.int64)}
    record.recorder.write(copied | diverged)
    return clients | {"steps": copied["round/gradient_steps"][-1:]}


def best_rows(parts: Parts) -> torch.Tensor:
    """Return each client's best model so far `[K, W]`; the initial one if it was never scored."""
    best = parts.scoring.best
    return torch.where(best.any(1, keepdim=True), best, parts.fed.initial_row())


def tune(record: Record, parts: Parts, method: Method) -> Iterator[int]:
    """Train all clients on from their best models; yield the round's number after each epoch."""
    members, scoring, training = parts.members, parts.scoring, parts.training
    start = best_rows(parts)
    members.begin_after()  # everyone takes part but newcomers
    training.momentum.clear()
    training.attack.before.clear()
    w = start.clone()  # `w` are the models in training [K, W]
    gradient = method.finetune_gradient(parts.fed, start) if method.finetune_gradient else None
    # most local epochs of a client; counted here, before one may diverge and not be tuned
    trained = np.array([training.epochs.max(initial=0)], np.float64)
    most_epochs = int(parts.world.spread(trained)[0, 2])
    notes, steps = [], []
    for epoch in range(parts.run.finetune_epochs + 1):
        members.round = parts.run.rounds + epoch
        parts.log.begin()  # a client that diverges in this epoch keeps no score of the last
        if epoch:
            parts.fed.local_opt(w, 1, gradient, momentum="finetune")
        # excluded before the best is forgotten: a client that diverged keeps its last finite model
        members.exclude_diverged(w)
        # the best model is that of fine-tuning: neither of the rounds nor of epoch 0, its start
        if epoch < 2:
            scoring.forget_best(members.learners)
        parts.fed.evaluate(w)
        notes.append({name: parts.log.notes[name].copy() for name in SCORES})
        steps.append(parts.world.sum_int64(np.array([training.steps.sum()]))[0])
        yield parts.round
    epochs = most_epochs + np.arange(len(notes))
    record.series("finetune", epochs, notes, gradient_steps=np.array(steps))
    record.tuned()


def add_newcomers(record: Record, parts: Parts, state: State, method: Method) -> Iterator[int]:
    """Train and score the clients that join after the rounds; yield before they train on."""
    members, newcomers = parts.members, parts.members.limits.newcomers
    frozen = best_rows(parts)
    members.round = parts.run.rounds + parts.run.finetune_epochs + 1
    members.begin_after()
    parts.training.attack.before.clear()
    parts.log.begin()
    # where newcomers start: as the method says, from the server's model, or from the initial row
    if method.newcomer:
        plan = method.newcomer(parts.fed, state)
        if not isinstance(plan, Newcomer):
            must = "it must return a dpfl_mpi.methods.Newcomer"
            name = short(parts.run.method)
            raise UserError(f"newcomer of the method {name} returned {kind(plan)}; {must}")
        parts.members.check_rows(plan.start, parts.backend.ensemble.width, "Newcomer")
    elif method.topology == "server":
        w_W = state["shared"].get("w")
        start = parts.fed.copies(parts.fed.mean(frozen) if w_W is None else w_W)
        make_gradient = method.finetune_gradient
        plan = Newcomer(start, make_gradient(parts.fed, start.clone()) if make_gradient else None)
    else:
        plan = Newcomer(parts.fed.common_row())
    parts.mail.mailroom.meet("the end of newcomer")
    members.begin_after(newcomers)
    device = parts.backend.ensemble.device
    joins = torch.from_numpy(newcomers[parts.ids]).to(device)[:, None]
    w, done, notes = plan.start, 0, []
    to_start = parts.log.notes["evaluations"].copy()  # made to choose where to start
    for epochs in EPOCHS:
        yield members.round
        parts.log.begin()
        more = epochs - done
        parts.fed.local_opt(w, more, plan.gradient, momentum="newcomer", trained=plan.trained)
        done = epochs
        rows = w
        if method.topology == "graph":  # newcomers choose among all; the others do not change
            rows = torch.where(joins, w, frozen)
            with parts.log.clock("graph"):
                omega = parts.fed.bggc(rows)
            rows = parts.fed.average(rows, omega)
        parts.fed.evaluate(rows, predict=plan.predict)
        names = (*SCORES, "models_received", "evaluations")
        notes.append({name: parts.log.notes[name].copy() for name in names})
    notes[0]["evaluations"] += to_start
    record.series("newcomers", np.array(EPOCHS), notes)
    # the best models are of the rounds, in which newcomers took no part
    parts.scoring.forget_best(newcomers)
    parts.scoring.best[joins[:, 0]] = 0
