"""Computes a Run on all ranks: the loop over its rounds, whatever the method.

`python -m dpfl_mpi` calls `train`. Every rank calls each of these functions. A Run is the settings
that decide the numbers, a Job those that say where and how it is computed. The state is what a
method keeps from round to round. A checkpoint has all that a later start needs to go on. A run that
is told to stop keeps one, and raises `Leave` on every rank.
"""

from pathlib import Path

from dpfl_mpi import batch
from dpfl_mpi.engine import after
from dpfl_mpi.engine.build import build
from dpfl_mpi.engine.checks import check_own, check_state
from dpfl_mpi.engine.follow import Followers
from dpfl_mpi.engine.record import begin_record
from dpfl_mpi.errors import REQUEUE, STALLED, Damaged, Leave, Nobody, UserError
from dpfl_mpi.federation import Parts
from dpfl_mpi.methods import Method, State
from dpfl_mpi.mpi.node import remove_left
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.model_check import global_generators
from dpfl_mpi.plugins import admit, codes, find, short
from dpfl_mpi.plugins.code import folder_kept
from dpfl_mpi.results.result import check_replaceable, date_started
from dpfl_mpi.results.summary import found
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.fields import check
from dpfl_mpi.settings.run import HEX
from dpfl_mpi.storage.files import check_apart
from dpfl_mpi.storage.lock import Lock
from dpfl_mpi.survival.checkpoint import Checkpoints
from dpfl_mpi.survival.signals import GOES_ON, Heard, Watch, again_text


def train(run: Run, job: Job, world: World) -> Path:
    """Compute a Run, from its checkpoint if there is one; return the path of its results file."""
    # a result that is already finished is not computed again, unless with --fresh
    resolved, path = agree(run, job, world)
    # the lock refuses a second process that would compute the same result
    lock = Lock(path, lambda text: world.abort(1, f"error: {text}"))
    world.decide(lock.acquire)
    try:
        checkpoints = Checkpoints(path, resolved.key(), job, world, lock.check)
        date = None  # when the result was finished; None: it is to be computed
        requeued = batch.restarts() > 0  # on root, at least
        # a requeued job has the same command line, --fresh included, and goes on
        if job.fresh and not world.decide(lambda: requeued and checkpoints.exist()):
            world.decide(lambda: check_replaceable(path))
            checkpoints.clear(sure=True)
        else:
            key, folder = checkpoints.key, checkpoints.folder
            date = world.decide(lambda: date_started(resolved, key, path, job, folder.is_dir()))
        if date is None:
            compute(path, resolved, job, checkpoints, lock)
        elif world.root and not job.quiet:
            print(found(date), flush=True)
        checkpoints.clear()
    finally:
        lock.release()
    return path


def agree(run: Run, job: Job, world: World) -> tuple[Resolved, Path]:
    """Return the resolved Run and the path of its result, checked on every rank."""

    def resolve_here() -> tuple[Resolved, Path]:
        resolved = run.resolve()
        check(resolved)  # a Run may have been made by hand
        check(job)
        path = Path(job.out) if job.out else resolved.path(job.results)
        slug = resolved.slug()
        if path.stem != slug and path.stem[:-HEX] == slug[:-HEX]:
            now = f"this is {slug} (a file that it names was edited)"
            raise UserError(f"--out is {path}, the name of another Run; {now}")
        check_apart(job.out, resolved.graphs)  # else --fresh would overwrite what it reads
        # import the user's own code, if this rank sees the version that root has read
        for kind, sha256 in codes(resolved.contents).items():
            name = getattr(resolved, kind)
            if admit(kind, name) != sha256:
                other = "and differs from the version that root read"
                raise UserError(f"--{kind} is {name}, {other}")
            find(kind, name)
        return resolved, path

    return world.each_rank(resolve_here)


def compute(path: Path, run: Resolved, job: Job, checkpoints: Checkpoints, lock: Lock) -> None:
    """Compute and record a Run's rounds, then fine-tuning and newcomers.

    `Followers` report rounds to --log and --callback; `Watch` hears signals and ends a run that
    hangs. `world.code` is the exit code after an error of MPI: it says whether another start would
    go on from a checkpoint.
    """
    world = checkpoints.world
    with (
        Followers(path, job, world) as followers,
        Watch(job, world, lock.release, checkpoints.count_hang) as watch,
    ):
        if world.local_rank == 0:
            remove_left()  # shared memory of runs that were killed
        parts = build(run, job, world)
        state, record = begin_record(path, parts, job, checkpoints)
        method = run.found("method")
        try:
            # until this start saves a checkpoint: if the last start began at this round, too, stop
            # restarting
            world.code = STALLED if checkpoints.note_start() else REQUEUE
            first = parts.round + 1 if state else 0
            # the base has the same rounds without fine-tuning: they may be copied from its result
            may_copy = run.finetune_epochs and not (state or run.newcomers or run.churn)
            base = run.untuned()
            if may_copy and after.from_base(base.path(job.results), base.key(), job, parts, record):
                first = run.rounds + 1
            record.print_heads()
            for t in range(first, run.rounds + 1):
                watch.begin(t)
                parts.begin_round(t)
                if parts.members.all_stopped:
                    break
                state = state_after(parts, method, state)
                record.round(state)
                record.print_round()
                followers.tell(t)
                # a checkpoint is due periodically, and before a requested stop
                more = t < run.rounds
                stop = watch.stop(more, checkpoints.seconds)
                saved, stop = checkpoints.save(parts, state, record.recorder, stop)
                if saved:
                    world.code = REQUEUE
                if stop and more:
                    parts.close()
                    done = f"stopped after round {t} of {run.rounds} ({Heard.name or 'a signal'})"
                    raise Leave(REQUEUE, f"{done}; {again_text(job)} {GOES_ON}")
            if run.finetune_epochs:
                for t in after.tune(record, parts, method):
                    watch.begin(t)
                    if t > run.rounds or first > run.rounds:  # else round T has its line
                        record.print_round()
            if run.newcomers:
                assert state is not None
                for t in after.add_newcomers(record, parts, state, method):
                    watch.begin(t)
            record.finish(job)
        except Damaged as error:  # a model arrived with a wrong checksum
            parts.close()
            again = f"{again_text(job)} goes on from the last checkpoint"
            raise Leave(world.code, f"error: round {parts.round}: {error}; {again}") from None
        except UserError:
            if world.all_stop():  # closing takes all ranks; MPI warns of a window left open
                parts.close()
            raise
        finally:
            if record.recorder:
                record.recorder.abandon()
        parts.close()


def state_after(parts: Parts, method: Method, before: State | None) -> State:
    """Call the method for this round; return its state, checked. `before` is None in round 0."""
    if before is not None and method.topology == "server" and not parts.members.present.any():
        return before  # a server has nobody whose models it could average
    # the names that the state must keep: copied now, because a round may change `before`
    names = before and {group: dict.fromkeys(before[group]) for group in before}
    generators = global_generators() if parts.mail.mailroom.own_code else ()
    try:
        with folder_kept():
            if before is None:
                state = method.init(parts.fed)
            else:
                state = method.round(parts.fed, before, parts.round)
    except Nobody:  # no client is left to train or average
        if before is None or not parts.members.participants.any():
            raise
        return before  # all that take part have diverged, others have not
    parts.mail.mailroom.meet(f"the end of {'round' if parts.round else 'init'}")
    check_state(short(parts.run.method), state, parts, names, method.topology == "graph")
    if parts.mail.mailroom.own_code:
        check_own(parts, state, generators)
    return state
