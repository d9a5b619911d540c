"""The loop of every method: init, rounds, record, finish."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.config import Job, Run
from dpfl_mpi.engine import finetune
from dpfl_mpi.engine.machine import describe_start, warn_of_change
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import PHASES, Federation
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Recorder, Result
from dpfl_mpi.survival.checkpoint import Checkpoints
from dpfl_mpi.survival.lock import Lock
from dpfl_mpi.survival.shm import Segments, remove_left
from dpfl_mpi.survival.signals import REQUEUE, STALLED, Heard, Leave, Watch


def train(run: Run, job: Job, world: World) -> Path:
    """Compute a resolved Run on all ranks and return the path of its results file.

    Goes on from the checkpoint of this Run, if there is one.

    Raises:
        UserError: on every rank, for what only the user can mend.
        Leave: on every rank, after a signal or near the end of the allocation; a checkpoint was kept.
    """
    path = Path(job.out) if job.out else run.path(job.results)
    lock = Lock(path)
    at_root(world, lock.acquire)
    try:
        checkpoints = Checkpoints(path, run, job, world)
        # a requeued job has the same command line, and goes on from what it kept
        if job.fresh and (not requeued() or world.agree(world.root and not checkpoints.exist())):
            checkpoints.clear(sure=True)
        elif already_done(path, run, checkpoints, world):
            checkpoints.clear()
            return path
        with Watch(job, world, lock.release) as watch:
            rounds(path, run, job, world, checkpoints, watch)
        checkpoints.clear()
    finally:
        lock.release()
    return path


def rounds(path: Path, run: Run, job: Job, world: World, checkpoints: Checkpoints, watch: Watch) -> None:
    """Compute and record what is missing of a Run: preprocessing, rounds, and what is known at the end."""
    method = find("method", run.method)
    if world.local_rank == 0:
        remove_left(checkpoints.folder)
    world.agree(False)  # nobody notes before the old notes are gone
    segments = Segments(checkpoints.folder, world.rank)
    segments.note()
    try:
        fed = Federation(run, job, world)
    except UserError:
        segments.forget()
        raise
    fed.on_window = segments.note
    state = checkpoints.restore(fed)
    if checkpoints.stalled():
        watch.code = STALLED  # unless this start keeps a checkpoint
    recorder = open_recorder(path, run, fed, checkpoints)
    total = int(run.rounds or 0)
    try:
        first = fed.round + 1 if state else 0
        if run.finetune_epochs and not state and finetune.from_base(run, job, fed, recorder):
            first = total + 1  # the base Run has computed the rounds
        with Progress(run, job, world, first) as progress:
            for t in range(first, total + 1):
                watch.begin(t)
                fed.begin_round(t)
                state = method.init(fed) if state is None else method.round(fed, state, t)
                record(recorder, fed, state)
                progress.line(fed, t)
                due, stop = checkpoints.due(t, watch.stop(t < total, checkpoints.seconds))
                if due:
                    checkpoints.save(fed, state, recorder)
                    watch.code = REQUEUE
                if stop and t < total:
                    fed.close()
                    raise Leave(
                        REQUEUE,
                        f"stopped after round {t} of {total} ({Heard.name or 'a signal'}); the same command goes on from there",
                    )
            if run.finetune_epochs:
                for t in finetune.tune(recorder, fed, method):
                    watch.begin(t)
                    progress.line(fed, t)
        finish(recorder, fed)
        at_root(world, lambda: recorder and recorder.close("finished"))
    except UserError:
        if world.all_stop():  # met by every rank: MPI warns of a window that is open at its end
            fed.close()
        raise
    finally:
        if recorder:
            recorder.abandon()
    fed.close()


def requeued() -> bool:
    """Return whether Slurm started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0) > 0


def at_root(world: World, act: Callable[[], object]) -> None:
    """Let root act; a `UserError` of root's is raised on every rank. Collective."""

    def quietly() -> list[np.ndarray]:
        act()
        return []

    world.from_root(quietly)


def already_done(path: Path, run: Run, checkpoints: Checkpoints, world: World) -> bool:
    """Return whether the file holds this Run's finished result; refuse to overwrite any other file."""

    def look() -> list[np.ndarray]:
        if not path.exists():
            return [np.zeros(1, np.int64)]
        try:
            result = Result(path)
        except UserError:
            if checkpoints.folder.is_dir():  # ours, torn: a checkpoint has a copy of what was recorded
                return [np.zeros(1, np.int64)]
            raise
        with result:
            if result.run.key() != run.key():
                mine, theirs = run.key(), result.run.key()
                fields = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
                raise UserError(
                    f"{path} holds another Run (different: {', '.join(fields)}); choose another --out, or overwrite it with --fresh"
                )
            return [np.array([result.finished], np.int64)]

    return bool(world.from_root(look)[0][0])


def open_recorder(path: Path, run: Run, fed: Federation, checkpoints: Checkpoints) -> Recorder | None:
    """Return the Recorder on root, None elsewhere; an error of root's is raised on every rank."""
    hosts = fed.world.hosts()
    opened: list[Recorder] = []

    def create() -> list[np.ndarray]:
        meta = {
            "data_sha256": fed.data_sha256,
            "data_note": fed.data_note,
            "partition_sha256": fed.partition.sha256(),
            "partition_note": fed.partition.note(),
            "parameters": fed.ensemble.size,
        }
        start = describe_start(hosts, fed)
        recorder = Recorder(path, run, meta, start, checkpoints.results)
        opened.append(recorder)
        if checkpoints.results:
            warn_of_change(recorder.starts[-1], start)
            return []
        recorder.once(
            {
                "client/p": fed.p,
                "client/budget": fed.budget + 1 if run.budget_counts_self else fed.budget,
                "client/flipped": fed.flipped,
                "client/class_counts": fed.partition.class_counts,
                **{f"client/n_{part}": fed.partition.sizes(part) for part in ("train", "val", "test")},
            }
        )
        if fed.reach is not None:
            recorder.once({"graph/reach/indptr": fed.reach.indptr, "graph/reach/senders": fed.reach.senders})
        return []

    fed.world.from_root(create)
    return opened[0] if opened else None


def record(recorder: Recorder | None, fed: Federation, state: dict[str, Any]) -> None:
    """Gather a round's records to root and write them. Collective; one gather of 13 numbers a client."""
    with fed.clock("write"):
        names = [n for n in fed.notes if n != "cases"]
        rows = np.column_stack(
            [
                *(fed.notes[n] for n in names),
                fed.notes["cases"],
                fed.best_round,
                fed.best_val,
                fed.best_test,
                fed.last_test,
                fed.epochs,
            ]
        )
        table = fed.to_clients(rows)
        totals = fed.world.sum_int64(
            np.array([fed.steps.sum(), fed.inbox.bytes_put if fed.inbox else 0, fed.world.bytes_collective])
        )
    seconds = fed.world.spread(np.array([fed.seconds[name] for name in PHASES]))
    if recorder and table is not None:
        at_root(fed.world, lambda: write_round(recorder, fed, state, names, table, totals, seconds))
    else:
        at_root(fed.world, lambda: None)


def write_round(
    recorder: Recorder,
    fed: Federation,
    state: dict[str, Any],
    names: list[str],
    table: np.ndarray,
    totals: np.ndarray,
    seconds: np.ndarray,
) -> None:
    """Write a round's records, on root."""
    column = {name: table[:, i] for i, name in enumerate(names)}
    cases, (best_round, best_val, best_test, last_test, epochs) = (
        table[:, len(names) : len(names) + 4],
        table[:, len(names) + 4 :].T,
    )
    start = time.perf_counter()
    omega = state["shared"].get("omega", CollaborationGraph.empty(fed.n))
    if fed.round == 0:
        recorder.once({"graph/omega/indptr": omega.indptr, "graph/omega/senders": omega.senders.astype(np.int32)})
    recorder.append(
        {
            "round/number": np.int64(fed.round),
            "round/epochs": np.int64(epochs.max()),
            "round/gradient_steps": np.int64(totals[0]),
        }
    )
    recorder.append({f"round/{n}": column[n] for n in ("train_loss", "val_loss", "val_acc", "test_loss", "test_acc")})
    if fed.job.mixed:
        recorder.append({f"mixed/{n}": column[f"mixed_{n}"] for n in ("val_acc", "test_acc")})
    recorder.append_graph(fed.among_active(state["shared"].get("chosen", omega)))
    recorder.append(
        {"graph/cases": cases.astype(np.int32), "graph/evaluations": column["evaluations"].astype(np.int32)}
    )
    recorder.append(
        {
            "traffic/models_received": column["models_received"].astype(np.int32),
            "traffic/bytes_rma": totals[1],
            "traffic/bytes_collective": totals[2],
        }
    )
    recorder.once(
        {
            "best/round": best_round.astype(np.int32),
            "best/val_acc": best_val,
            "best/test_acc": best_test,
            "last/test_acc": last_test,
            "client/diverged_round": fed.diverged_round,
            "client/epochs": epochs.astype(np.int64),
        }
    )
    seconds[PHASES.index("write"), 1:] += time.perf_counter() - start  # root writes while the others go on
    recorder.append({f"seconds/{name}": row for name, row in zip(PHASES, seconds, strict=True)})
    benign = best_test[~fed.flipped]
    recorder.flush(fed.round, float(np.nanmean(benign)) if np.isfinite(benign).any() else float("nan"))


def finish(recorder: Recorder | None, fed: Federation) -> None:
    """Write what is known at the end: confusion matrices and, where asked, the best models. Collective."""
    confusion = fed.to_clients(fed.best_confusion)
    models = fed.to_clients(fed.best[:, : fed.ensemble.size].cpu().numpy()) if fed.job.save_models else None

    def write() -> None:
        if recorder and confusion is not None:
            recorder.once({"best/confusion": confusion.astype(np.int32)})
        if recorder and models is not None:
            recorder.once({"model/best": models})
            shapes = [list(fed.ensemble.shapes[n]) for n in fed.ensemble.names]
            recorder.describe("model", names=json.dumps(fed.ensemble.names), shapes=json.dumps(shapes))

    at_root(fed.world, write)


class Progress:
    """A progress bar on a terminal, one plain line a round in a log; root only. Collective: the means are over all clients."""

    def __init__(self, run: Run, job: Job, world: World, first: int = 0):
        self.run, self.job, self.world, self.first = run, job, world, first
        self.bar: Any = None

    def __enter__(self) -> Progress:
        terminal = sys.stderr.isatty() or bool(os.environ.get("DPFL_MPI_TERMINAL"))
        if self.world.root and not self.job.quiet and terminal:
            from tqdm import tqdm

            self.bar = tqdm(
                total=int(self.run.rounds or 0) + 1 + self.run.finetune_epochs,
                initial=self.first,
                desc=self.run.method,
                unit="round",
                file=sys.stderr,
            )
        self.start = time.perf_counter()
        return self

    def line(self, fed: Federation, t: int) -> None:
        """Show a round."""
        benign = ~fed.flipped[fed.ids]  # averages are over clients with true labels
        means = []
        for values in (fed.notes["val_acc"], fed.notes["test_acc"], fed.best_test):
            ok = np.isfinite(values) & benign
            means += [values[ok].sum(), ok.sum()]
        sums = self.world.spread(np.array([*means, fed.notes["models_received"].sum()], np.float64))[:, 1]
        if not self.world.root or self.job.quiet:
            return
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        val, test, best = 100 * sums[0:6:2] / np.maximum(sums[1:6:2], 1e-9)
        received = sums[6] * self.world.size
        if self.bar is not None:
            self.bar.set_postfix_str(f"val {val:.1f} % test {best:.1f} %")
            self.bar.update()
        else:
            print(
                f"round {t:4d}  val {val:6.2f} %  test {test:6.2f} %  best {best:6.2f} %  "
                f"received {received / fed.n:5.1f}  {seconds:6.2f} s",
                flush=True,
            )

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
