"""+FT: every client trains on from its own best-validation model, with fresh momentum (the paper's FedAvg+FT and FedProx+FT, 2 tau_train epochs).

The models come from the base Run's file (the same Run with --finetune_epochs 0) where that is there with its models, else the rounds are
computed first: the numbers are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpfl_mpi.config import Job, Run
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Recorder, Result
from dpfl_mpi.survival.checkpoint import DAMAGE

if TYPE_CHECKING:
    from dpfl_mpi.federation import Federation

COPIED = (
    "round/",
    "mixed/",
    "graph/",
    "traffic/",
    "seconds/",
)  # what the base Run recorded is this Run's record of its rounds


def from_base(run: Run, job: Job, fed: Federation, recorder: Recorder | None) -> bool:
    """Take models and records from the base Run's file and return True; False where it is not there, unfinished, or without models. Collective."""
    path = run.untuned().path(job.results)
    arrays = fed.world.from_root(lambda: read(path, recorder, fed.partition.sha256(), job.quiet))
    if not arrays:
        return False
    best, epochs, diverged, steps, *scores = arrays
    fed.best[:, : fed.ensemble.size] = torch.from_numpy(best.view(np.float32)[fed.ids]).to(fed.device)
    for mine, stored in zip(
        (fed.best_round, fed.best_val, fed.best_test, fed.last_test, fed.best_confusion), scores, strict=True
    ):
        mine[:] = stored[fed.ids]  # a diverged client keeps them
    fed.epochs[:] = epochs[fed.ids]
    fed.diverged_round[:] = diverged
    fed.alive[:] = diverged < 0
    fed.steps[:] = 0
    if fed.k:
        fed.steps[0] = steps[0] if fed.world.root else 0  # only the sum over all ranks is recorded
    return True


def read(path: Path, recorder: Recorder | None, partition: str, quiet: bool) -> list[np.ndarray]:
    """Return best models, epochs, diverged rounds, gradient steps and scores of the base Run, on root; [] where they cannot be had."""
    why = ""
    try:
        with Result(path) as base:
            if not base.finished or base.file["meta"].attrs["partition_sha256"] != partition:
                why = "is not finished, or of another partition"
            elif "model/best" not in base:
                why = "holds no models (--save_models)"
            else:
                copied = {name: base[name] for name in base.names() if name.startswith(COPIED)}
                best = np.ascontiguousarray(base["model/best"], np.float32)
                steps = base["round/gradient_steps"][-1:].astype(np.int64)
                scores = [base["best/round"].astype(np.int64), base["best/val_acc"], base["best/test_acc"]]
                scores += [base["last/test_acc"], base["best/confusion"].astype(np.int64)]
                epochs, diverged = base["client/epochs"], base["client/diverged_round"].astype(np.int64)
    except (UserError, *DAMAGE):
        why = "cannot be read" if path.exists() else "is not there"
    if why and not (quiet and not path.exists()):
        print(f"the base of the tuning, {path}, {why}: its rounds are computed here", file=sys.stderr, flush=True)
    if why:
        return []
    if recorder:
        recorder.once(copied | {"client/diverged_round": diverged})
    return [best.view(np.uint8), epochs, diverged, steps, *scores]


def tune(recorder: Recorder | None, fed: Federation, method: Any) -> Iterator[int]:
    """Train every client on from its best row and record it; yield the round's number, which counts on, after an epoch. Collective.

    /finetune row 0 scores the start; the best by validation is over the tuning epochs alone, and the end model is /last.
    """
    start = fed.best.clone()
    w = start.clone()
    fed.present[:] = True
    fed.momentum.clear()
    gradient = method.finetune_gradient(fed, start) if hasattr(method, "finetune_gradient") else None
    before = fed.round = fed.run.rounds
    scores, counts = [], []
    for epoch in range(fed.run.finetune_epochs + 1):
        fed.round = before + epoch
        if epoch:
            fed.local_opt(w, 1, gradient, momentum="finetune")
        fed.check_finite(w)
        if epoch < 2:
            mine = fed.alive[fed.ids]  # a diverged client keeps its last finite best
            fed.best_val[mine], fed.best_round[mine] = np.nan, -1
        fed.evaluate(w)
        scores.append(np.stack([fed.notes["val_acc"], fed.notes["test_acc"]], 1))
        counts.append(fed.world.sum_int64(np.array([fed.steps.sum()]))[0])
        fed.notes["models_received"][:] = 0
        yield fed.round
    table = fed.to_clients(np.stack(scores, 1))
    last = fed.to_clients(np.column_stack([fed.best_round, fed.best_val, fed.best_test, fed.last_test, fed.epochs]))

    def write() -> list[np.ndarray]:
        if recorder is None or table is None or last is None:
            return []
        done = last[:, 4].max() - fed.run.finetune_epochs
        recorder.once(
            {
                "finetune/val_acc": table[:, :, 0].T,
                "finetune/test_acc": table[:, :, 1].T,
                "finetune/epochs": (done + np.arange(fed.run.finetune_epochs + 1)).astype(np.int64),
                "finetune/gradient_steps": np.array(counts, np.int64),
                "best/round": last[:, 0].astype(np.int32),
                "best/val_acc": last[:, 1],
                "best/test_acc": last[:, 2],
                "last/test_acc": last[:, 3],
                "client/diverged_round": fed.diverged_round,
                "client/epochs": last[:, 4].astype(np.int64),
            }
        )
        recorder.flush(fed.round, float(np.nanmean(last[~fed.flipped, 2])))
        return []

    fed.world.from_root(write)
