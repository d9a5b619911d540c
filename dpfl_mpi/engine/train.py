"""The loop of every method: init, rounds, record, finish."""

from pathlib import Path

from dpfl_mpi.engine import after, record
from dpfl_mpi.engine.build import build
from dpfl_mpi.engine.checks import check_own, check_state, global_generators
from dpfl_mpi.engine.follow import Followers
from dpfl_mpi.engine.machine import describe_start, warn_of_change
from dpfl_mpi.engine.start import agreed, finished_at, forgotten
from dpfl_mpi.errors import REQUEUE, STALLED, Leave, Nobody, UserError
from dpfl_mpi.federation import Parts
from dpfl_mpi.methods import Method, State
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import short
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.storage.lock import Lock
from dpfl_mpi.survival.checkpoint import Checkpoints
from dpfl_mpi.survival.shm import remove_left
from dpfl_mpi.survival.signals import Heard, Watch, again_text


def train(run: Run, job: Job, world: World) -> Path:
    """Compute a Run on all ranks, from its checkpoint where there is one; return its results file. `Leave` on every rank: stopped, a checkpoint was kept."""
    resolved, path = agreed(run, job, world)
    lock = Lock(path, lambda text: world.abort(1, f"error: {text}"))
    world.decide(lock.acquire)
    try:
        checkpoints = Checkpoints(path, resolved, job, world, lock.check)
        done_at = ""
        if not forgotten(path, job, world, checkpoints):
            done_at = world.decide(lambda: finished_at(path, resolved, job, checkpoints.folder))
        if not done_at:
            with (
                Followers(path, job, world) as followers,
                Watch(job, world, lock.release, checkpoints.count_hang) as watch,
            ):
                if world.local_rank == 0:
                    remove_left()
                parts = build(resolved, job, world)
                rounds(path, parts, job, checkpoints, watch, followers)
        elif world.root and not job.quiet:
            print(f"found, not computed (since {done_at}); --fresh runs anew", flush=True)
        checkpoints.clear()
    finally:
        lock.release()
    return path


def rounds(path: Path, parts: Parts, job: Job, checkpoints: Checkpoints, watch: Watch, followers: Followers) -> None:
    """Compute and record what is missing of a Run: preprocessing, rounds, and what is known at the end. Collective."""
    state, recorder = begin(path, parts, checkpoints, watch)
    run, method = parts.run, parts.run.found("method")
    total = run.rounds
    try:
        first = parts.round + 1 if state else 0
        tuned = run.finetune_epochs and not (state or run.newcomers or run.churn)
        if tuned and after.from_base(job, parts, recorder):
            first = total + 1  # the base Run has computed the rounds
        progress = record.Progress(parts, job.quiet)
        for t in range(first, total + 1):
            watch.begin(t)
            parts.begin_round(t)
            if parts.members.all_stopped:
                break
            state = state_after(parts, method, state)
            record.write_round(recorder, parts, state)
            progress.line(t)
            followers.tell(t)
            due, stop = checkpoints.due(t, watch.stop(t < total, checkpoints.seconds))
            if due:
                checkpoints.save(parts, state, recorder)
                watch.code = REQUEUE
            if stop and t < total:
                parts.close()
                why, again = Heard.name or "a signal", again_text(job)
                raise Leave(REQUEUE, f"stopped after round {t} of {total} ({why}); {again} goes on from there")
        if run.finetune_epochs:
            for t in after.tune(recorder, parts, method):
                watch.begin(t)
                progress.line(t)
        if run.newcomers:
            assert state is not None
            for t in after.arrive(recorder, parts, state, method):
                watch.begin(t)
        record.finish(recorder, parts, job)
    except UserError:
        if parts.world.all_stop():  # met by every rank: MPI warns of a window that is open at its end
            parts.close()
        raise
    finally:
        if recorder:
            recorder.abandon()
    parts.close()


def begin(path: Path, parts: Parts, checkpoints: Checkpoints, watch: Watch) -> tuple[State | None, Recorder | None]:
    """Return what this start goes on with: the method's state (None before round 0), and on root the Recorder. Collective."""
    hosts = parts.world.hosts()
    start = describe_start(hosts, parts) if parts.world.root else {}
    state = checkpoints.restore(parts)
    job = checkpoints.job
    if parts.world.root and not job.quiet:
        if state:
            print(f"goes on after round {parts.round}", flush=True)
        elif path.exists() and not job.fresh:
            print(f"starts over: no checkpoint was kept (--checkpoint_every {job.checkpoint_every})", flush=True)
    if checkpoints.note_start():
        watch.code = STALLED  # unless this start keeps a checkpoint
    recorder = record.open_recorder(path, parts, start, checkpoints.results, checkpoints.still_ours)
    if recorder and checkpoints.results:
        warn_of_change(recorder.starts[-1], start)
    return state, recorder


def state_after(parts: Parts, method: Method, before: State | None) -> State:
    """Return the method's state after the round that `parts` is in, checked; `before` is that of the round before, None for round 0."""
    if before is not None and method.topology == "server" and not parts.members.present.any():
        return before  # there is no mean of nobody
    given = before and {part: dict.fromkeys(before[part]) for part in before}  # names now: a round may change `before`
    drawn = global_generators() if parts.own else ()
    try:
        state = method.init(parts.fed) if before is None else method.round(parts.fed, before, parts.round)
    except Nobody:
        if before is None or not parts.members.participants.any():
            raise
        return before  # all that take part have diverged, others have not
    parts.meet(f"the end of {'round' if parts.round else 'init'}")
    check_state(short(parts.run.method), state, parts, given, method.topology == "graph")
    if parts.own:
        check_own(parts, state, drawn)
    return state
