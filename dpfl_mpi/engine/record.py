"""What a run writes: at its start, after each round, after tuning, at its end. Gathered from all ranks by name, written by root.

Axes: N clients in all, K on this rank, T rounds, E epochs of tuning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.attack import backdoor_success
from dpfl_mpi.federation.log import SCORES
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Run


def open_recorder(path: Path, run: Run, parts: Parts, start: dict[str, Any], snapshot: Path | None) -> Recorder | None:
    """Return the Recorder on root, None elsewhere. Collective.

    Args:
        start: what computes from now on: hosts, CPU, versions.
        snapshot: the results file as a checkpoint left it, to go on with; None: a new file.

    Raises:
        UserError: on every rank; the file cannot be written.
    """
    opened: list[Recorder] = []

    def create() -> None:
        recorder = Recorder(path, run, parts.about, start, snapshot)
        opened.append(recorder)
        if snapshot:
            return
        of_data = parts.partition.of_data
        recorder.write(
            {
                "client/p": parts.members.p,
                **({} if of_data is None else {"client/of_data": of_data}),
                "client/budget": parts.members.most_senders + run.budget_counts_self,
                "client/flipped": parts.members.flipped,
                **controls(parts),
                "client/class_counts": parts.partition.class_counts,
                **{f"client/n_{part}": parts.partition.sizes(part) for part in ("train", "val", "test")},
            }
        )
        if (reach := parts.members.reach) is not None:
            recorder.write({"graph/reach/indptr": reach.indptr, "graph/reach/senders": reach.senders})

    parts.world.decide(create)
    return opened[0] if opened else None


def controls(parts: Parts) -> dict[str, np.ndarray]:
    """Return what the controls of the run draw, by name in the file: who lies, drifts, comes later. Nothing where the run has none."""
    out: dict[str, np.ndarray] = {}
    if parts.run.attack:
        out["client/liars"] = parts.members.limits.liars
    if parts.run.newcomers:
        out["client/newcomers"] = parts.members.limits.newcomers
    if parts.run.drift:
        out |= {"client/drifted": parts.drift.drifted, "client/drift_classes": parts.drift.classes}
    return out


def gather(parts: Parts, mine: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return on root all clients' arrays `[N, ...]` by the names of this rank's `[K, ...]`, in one gather; elsewhere none. Collective.

    Numbers travel as float64: whole ones are exact up to 2^53.
    """
    widths = [int(np.prod(values.shape[1:], dtype=np.int64)) for values in mine.values()]
    columns = [values.reshape(len(parts.ids), width) for values, width in zip(mine.values(), widths, strict=True)]
    table = parts.members.to_root(np.concatenate(columns, 1, dtype=np.float64))
    if table is None:
        return {}
    pieces = np.split(table, np.cumsum(widths)[:-1], 1)
    return {
        name: piece.reshape(parts.n, *values.shape[1:]).astype(values.dtype)
        for (name, values), piece in zip(mine.items(), pieces, strict=True)
    }


def best_so_far(parts: Parts) -> dict[str, np.ndarray]:
    """Return this rank's best and last scores and epochs, `[K]` each, by their names in the file."""
    return {
        "best/round": parts.scoring.best_round.astype(np.int32),
        "best/val_acc": parts.scoring.best_val,
        "best/test_acc": parts.scoring.best_test,
        "last/test_acc": parts.scoring.last_test,
        "client/epochs": parts.training.epochs,
    }


def write_best(recorder: Recorder, parts: Parts, everyone: Mapping[str, np.ndarray]) -> None:
    """Write the gathered `best_so_far`, and make all that was written durable. On root."""
    recorder.write(
        {name: everyone[name] for name in best_so_far(parts)} | {"client/diverged_round": parts.members.diverged_round}
    )
    if parts.run.patience:
        recorder.write({"client/stopped_round": parts.members.stopped_round})
    benign = everyone["best/test_acc"][parts.members.benign]
    recorder.flush(parts.round, float(np.nanmean(benign)) if np.isfinite(benign).any() else float("nan"))


def write_round(recorder: Recorder | None, parts: Parts, state: dict[str, Any]) -> None:
    """Write the records of the round that `parts` is in. Collective; one gather of 18 numbers per client."""
    with parts.log.clock("write"):
        everyone = gather(parts, parts.log.notes | best_so_far(parts))
        totals = parts.world.sum_int64(
            np.array([parts.training.steps.sum(), parts.mail.bytes_put, parts.world.bytes_collective])
        )
    seconds = parts.world.spread(np.array([parts.log.seconds[name] for name in PHASES]))

    def write() -> None:
        assert recorder is not None
        start = time.perf_counter()
        omega = state["shared"].get("omega", CollaborationGraph.empty(parts.n))
        if parts.round == 0:
            recorder.write({"graph/omega/indptr": omega.indptr, "graph/omega/senders": omega.senders.astype(np.int32)})
        recorder.append_graph(parts.members.among_active(state["shared"].get("chosen", omega)))
        recorder.append(
            {
                "round/number": np.int64(parts.round),
                "round/epochs": everyone["client/epochs"].max(),
                "round/gradient_steps": totals[0],
                **{f"round/{name}": everyone[name] for name in SCORES},
                **({} if recorder.lacks("round/best_test_acc") else {"round/best_test_acc": everyone["best/test_acc"]}),
                **(
                    {f"mixed/{n}": everyone[f"mixed_{n}"] for n in ("val_acc", "test_acc")}
                    if parts.scoring.mixed
                    else {}
                ),
                "graph/cases": everyone["cases"].astype(np.int32),
                "graph/evaluations": everyone["evaluations"].astype(np.int32),
                "traffic/models_received": everyone["models_received"].astype(np.int32),
                "traffic/bytes_rma": totals[1],
                "traffic/bytes_collective": totals[2],
            }
        )
        seconds[PHASES.index("write"), 1:] += time.perf_counter() - start  # root writes while the others go on
        recorder.append({f"seconds/{name}": row for name, row in zip(PHASES, seconds, strict=True)})
        write_best(recorder, parts, everyone)

    parts.world.decide(write)


def write_tuning(
    recorder: Recorder | None, parts: Parts, first: int, val_acc: np.ndarray, test_acc: np.ndarray, steps: np.ndarray
) -> None:
    """Write what tuning did: scores `[K, E+1]` after each epoch, and all ranks' gradient steps `[E+1]` up to it. Collective.

    `first`: the local epochs before it, those of the client with most. They are not told from the end: it may have diverged, and not be tuned.
    """
    everyone = gather(parts, {"finetune/val_acc": val_acc, "finetune/test_acc": test_acc} | best_so_far(parts))

    def write() -> None:
        assert recorder is not None
        recorder.write(
            {
                "finetune/val_acc": everyone["finetune/val_acc"].T,
                "finetune/test_acc": everyone["finetune/test_acc"].T,
                "finetune/epochs": first + np.arange(parts.run.finetune_epochs + 1),
                "finetune/gradient_steps": steps,
            }
        )
        write_best(recorder, parts, everyone)

    parts.world.decide(write)


def write_newcomers(
    recorder: Recorder | None, parts: Parts, epochs: np.ndarray, mine: Mapping[str, np.ndarray]
) -> None:
    """Write what newcomers came to: arrays `[K, E]` by name, after each of E numbers of epochs. Collective."""
    everyone = gather(parts, mine)

    def write() -> None:
        assert recorder is not None
        counts = ("models_received", "evaluations")
        recorder.write({"newcomers/epochs": epochs})
        for name, values in everyone.items():
            recorder.write({f"newcomers/{name}": values.T.astype(np.int32) if name in counts else values.T})

    parts.world.decide(write)


def finish(recorder: Recorder | None, parts: Parts, save_models: bool) -> None:
    """Write what is known at the end, confusion matrices and, where asked, the best models, and close the file. Collective."""
    confusion = parts.members.to_root(parts.scoring.best_confusion)
    best = parts.scoring.best[:, : parts.backend.ensemble.size]
    models = parts.members.to_root(best.cpu().numpy()) if save_models else None
    backdoor = parts.training.attack.kind == "backdoor"
    success = parts.members.to_root(backdoor_success(parts.scoring)) if backdoor else None

    def write() -> None:
        assert recorder is not None and confusion is not None
        recorder.write({"best/confusion": confusion.astype(np.int32)})
        if parts.run.patience:
            # once more: the last may have stopped after the last record
            recorder.write({"client/stopped_round": parts.members.stopped_round})
        if success is not None:
            recorder.write({"attack/success": success})
        if models is not None:
            recorder.write({"model/best": models})
            shapes = [list(parts.backend.ensemble.shapes[n]) for n in parts.backend.ensemble.names]
            recorder.set_attributes("model", names=json.dumps(parts.backend.ensemble.names), shapes=json.dumps(shapes))
        recorder.close("finished")

    parts.world.decide(write)
