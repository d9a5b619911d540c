"""The loop of every method: init, rounds, record, finish."""

from __future__ import annotations

import os
from pathlib import Path

from dpfl_mpi.config import Job, Run
from dpfl_mpi.engine import finetune, record
from dpfl_mpi.engine.bar import Progress
from dpfl_mpi.engine.build import build
from dpfl_mpi.engine.machine import describe_start, warn_of_change
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import Federation
from dpfl_mpi.methods import check_state
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
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
    world.decide(lock.acquire)
    try:
        checkpoints = Checkpoints(path, run, job, world)
        # a requeued job has the same command line, and goes on from what it kept
        if job.fresh and (not requeued() or world.decide(lambda: not checkpoints.exist())):
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
        parts = build(run, job, world, on_window=segments.note)
    except UserError:
        segments.forget()
        raise
    fed = Federation(parts)
    state = checkpoints.restore(fed)
    if checkpoints.note_start():
        watch.code = STALLED  # unless this start keeps a checkpoint
    hosts = world.hosts()
    start = describe_start(hosts, fed) if world.root else {}
    recorder = record.open_recorder(path, run, fed, start, checkpoints.results)
    if recorder and checkpoints.results:
        warn_of_change(recorder.starts[-1], start)
    total = run.rounds
    try:
        first = fed.round + 1 if state else 0
        if run.finetune_epochs and not state and finetune.from_base(run, job, fed, recorder):
            first = total + 1  # the base Run has computed the rounds
        with Progress(run, job, world, first) as progress:
            for t in range(first, total + 1):
                watch.begin(t)
                fed.begin_round(t)
                state = method.init(fed) if state is None else method.round(fed, state, t)
                check_state(run.method, state, fed)
                record.write_round(recorder, fed, state)
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
        record.finish(recorder, fed, job.save_models)
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


def already_done(path: Path, run: Run, checkpoints: Checkpoints, world: World) -> bool:
    """Return whether the file holds this Run's finished result; refuse to overwrite any other file."""

    def look() -> bool:
        if not path.exists():
            return False
        try:
            result = Result(path)
        except UserError:
            if checkpoints.folder.is_dir():  # ours, torn: a checkpoint has a copy of what was recorded
                return False
            raise
        with result:
            mine, theirs = run.key(), result.key
            if mine != theirs:
                fields = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
                raise UserError(
                    f"{path} holds another Run (different: {', '.join(fields)}); choose another --out, or overwrite it with --fresh"
                )
            return result.finished

    return bool(world.decide(look))
