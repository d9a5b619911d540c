"""The loop of every method: init, rounds, record, finish."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfl_mpi.engine import finetune, newcomers, record
from dpfl_mpi.engine.bar import Progress
from dpfl_mpi.engine.build import build
from dpfl_mpi.engine.machine import describe_start, warn_of_change
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import Parts
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Method, State, check_state
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import admit, codes, find, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.results.schema import check_ours, torn
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.fields import as_dict, check
from dpfl_mpi.storage.foreign import Hdf5
from dpfl_mpi.survival.checkpoint import Checkpoints
from dpfl_mpi.survival.lock import Lock
from dpfl_mpi.survival.shm import Segments, remove_left
from dpfl_mpi.survival.signals import REQUEUE, STALLED, Heard, Leave, Watch, again_text

KEPT = {"save_models": "model/best", "mixed": "mixed/test_acc"}  # what flags of a Job add to a result


def train(run: Run, job: Job, world: World) -> Path:
    """Compute a Run on all ranks and return the path of its results file.

    Goes on from the checkpoint of this Run, if there is one.

    Raises:
        UserError: on every rank, for what only the user can mend; also where the ranks were not given the same Run and Job.
        Leave: on every rank, after a signal or near the end of the allocation; a checkpoint was kept.
    """
    run = agreed(run, job, world)
    same_code(run, world)
    path = Path(job.out) if job.out else run.path(job.results)
    if re.search(r"-s\d+-[0-9a-f]{8}$", path.stem) and path.stem != run.slug():  # of a sweep that began before the edit
        raise UserError(
            f"--out is {path}, the name of another Run; this is {run.slug()} (a file that it names was edited)"
        )
    lock = Lock(path, lambda text: world.abort(1, f"error: {text}"))
    world.decide(lock.acquire)
    try:
        checkpoints = Checkpoints(path, run, job, world, lock.check)
        # a requeued job has the same command line, and goes on from what it kept
        if job.fresh and world.decide(lambda: not (requeued() and checkpoints.exist())):
            world.decide(lambda: check_ours(path))
            checkpoints.clear(sure=True)
        elif found := already_done(path, run, job, checkpoints, world):
            checkpoints.clear()
            if world.root and not job.quiet:
                print(f"found, not computed (since {found}); --fresh runs anew", flush=True)
            return path
        with Watch(job, world, lock.release) as watch:
            rounds(path, run, job, world, checkpoints, watch)
        checkpoints.clear()
    finally:
        lock.release()
    return path


def agreed(run: Run, job: Job, world: World) -> Resolved:
    """Return the Run, resolved, where every rank was given the same usable Run and Job. Collective.

    Raises:
        UserError: on every rank, where one was given a wrong setting, or another one than the rest.
    """
    mistake, mine = "", {}
    try:
        run = run.resolve()
        check(run)  # a resolved Run may have been made by hand
        check(job)
        held = {name: f"{value} {run.contents.get(name, '')}" for name, value in as_dict(run).items()}
        mine = held | as_dict(job)
    except UserError as error:
        mistake = str(error)
    if said := world.first(mistake):
        raise UserError(said)
    if unlike := world.unlike(mine):
        names = ", ".join(f"--{name}" for name in unlike)
        raise UserError(f"the ranks were given different settings ({names}); every rank needs the same Run and Job")
    assert isinstance(run, Resolved)
    return run


def rounds(path: Path, run: Run, job: Job, world: World, checkpoints: Checkpoints, watch: Watch) -> None:
    """Compute and record what is missing of a Run: preprocessing, rounds, and what is known at the end."""
    method = find("method", run.method)
    parts, state, recorder = begin(path, run, job, world, checkpoints, watch)
    total = run.rounds
    try:
        first = parts.round + 1 if state else 0
        if run.finetune_epochs and not state and not run.newcomers and finetune.from_base(run, job, parts, recorder):
            first = total + 1  # the base Run has computed the rounds
        with Progress(run, job, world, first) as progress:
            for t in range(first, total + 1):
                watch.begin(t)
                parts.begin_round(t)
                if parts.members.all_stopped:
                    break
                state = state_after(t, parts, method, state)
                record.write_round(recorder, parts, state)
                progress.line(parts, t)
                due, stop = checkpoints.due(t, watch.stop(t < total, checkpoints.seconds))
                if due:
                    checkpoints.save(parts, state, recorder)
                    watch.code = REQUEUE
                if stop and t < total:
                    parts.close()
                    raise Leave(
                        REQUEUE,
                        f"stopped after round {t} of {total} ({Heard.name or 'a signal'}); {again_text(job)} goes on from there",
                    )
            if run.finetune_epochs:
                for t in finetune.tune(recorder, parts, method):
                    watch.begin(t)
                    progress.line(parts, t)
        if run.newcomers:
            assert state is not None
            newcomers.arrive(recorder, parts, state, method)
        record.finish(recorder, parts, job.save_models)
    except UserError:
        if world.all_stop():  # met by every rank: MPI warns of a window that is open at its end
            parts.close()
        raise
    finally:
        if recorder:
            recorder.abandon()
    parts.close()


def begin(
    path: Path, run: Run, job: Job, world: World, checkpoints: Checkpoints, watch: Watch
) -> tuple[Parts, State | None, Recorder | None]:
    """Return what this start goes on with: the Federation, the method's state (None before round 0), and on root the Recorder. Collective."""
    if world.local_rank == 0:
        remove_left(checkpoints.folder)
    world.agree(False)  # a barrier: no rank notes its segments before the old notes are gone
    segments = Segments(checkpoints.folder, world.rank)
    segments.note()
    try:
        parts = build(run, job, world, on_window=segments.note)
    except UserError:
        segments.forget()
        raise
    state = checkpoints.restore(parts)
    if checkpoints.note_start():
        watch.code = STALLED  # unless this start keeps a checkpoint
    hosts = world.hosts()
    start = describe_start(hosts, parts) if world.root else {}
    recorder = record.open_recorder(path, run, parts, start, checkpoints.results)
    if recorder and checkpoints.results:
        warn_of_change(recorder.starts[-1], start)
    return parts, state, recorder


def state_after(t: int, parts: Parts, method: Method, before: State | None) -> State:
    """Return the method's state after round t, checked; `before` is that of the round before, None for round 0.

    A round in which no client can take part changes nothing where the method has a server: there is no mean of nobody.

    Raises:
        UserError: the state breaks the contract of a method.
    """
    if before is not None and method.topology == "server" and not parts.members.present.any():
        return before
    name = short(parts.run.method)
    given = before and {part: dict.fromkeys(before[part]) for part in before}  # names now: a round may change `before`
    drawn = global_generators()
    state = method.init(parts.fed) if before is None else method.round(parts.fed, before, t)
    parts.meet(f"the end of {'init' if before is None else 'round'}")
    check_state(name, state, parts, given, method.topology == "graph")
    if parts.own:
        check_own(name, state, t, drawn, parts.world)
        if (
            t == 1
            and parts.world.root
            and parts.log.every_row
            and len(parts.ids)
            and not parts.log.notes["models_received"].any()
        ):
            print(
                f"warning: round of the method {name} calls fed.every_row and counts no models received; say how many by fed.note_received",
                file=sys.stderr,
                flush=True,
            )
    return state


def global_generators() -> tuple[Any, ...]:
    """Return the states of the generators that are not keyed: those of `torch`, `numpy.random` and `random`."""
    _, keys, position, *rest = np.random.get_state()  # noqa: NPY002  # read, not drawn from
    return torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), position, *rest, random.getstate()


def check_own(name: str, state: dict[str, dict[str, Any]], t: int, drawn: tuple[Any, ...], world: World) -> None:
    """Check a round of a method that is not shipped for what would give other numbers on other ranks. Collective in rounds 0 and 1.

    Args:
        drawn: `global_generators` before the round.

    Raises:
        UserError: it drew from a global generator, or `state["shared"]` is not the same on every rank.
    """
    who = f"{'round' if t else 'init'} of the method {name}"
    if global_generators() != drawn:
        raise UserError(
            f"{who} draws from the global generator of torch, numpy or random, which differs with the number of ranks; draw by fed.shuffle "
            "or dpfl_mpi.streams.stream(seed, purpose, client, round)"
        )
    if t > 1:
        return
    if world.unlike({"names": sorted(state["shared"])}):
        raise UserError(f'state["shared"] after {who} has other names on some ranks; it must be the same on every rank')
    if unlike := world.unlike({key: as_text(state["shared"][key]) for key in sorted(state["shared"])}):
        raise UserError(
            f'state["shared"]["{unlike[0]}"] after {who} is not the same on every rank; what belongs to clients is in state["client"], '
            "and fed.collect makes one graph of what each rank chose"
        )


def as_text(value: Any) -> str:
    """Return what tells two values of `state["shared"]` apart, bit by bit."""
    if isinstance(value, CollaborationGraph):
        return as_text(value.indptr) + as_text(value.senders)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return value.tobytes().hex() if isinstance(value, np.ndarray) else repr(value)


def requeued() -> bool:
    """Return whether Slurm started this job before. On root: not every launcher hands this variable on to all ranks."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0) > 0


def same_code(run: Resolved, world: World) -> None:
    """Execute the code of one's own that a Run names, on every rank the very same as root resolved. Collective.

    Raises:
        UserError: on every rank; some rank has another file or none, or it fails there.
    """
    mistake = ""
    for kind, held in codes(run.contents).items():
        name = getattr(run, kind)
        try:
            if admit(kind, name) != held:
                raise UserError(f"--{kind} is {name}, of which this is another version than the one that root read")
            find(kind, name)
        except UserError as error:
            where = "" if world.root else f"rank {world.rank} on {platform.node()}: "
            mistake = mistake or f"{where}{error}"
    if codes(run.contents) and (said := world.first(mistake)):
        raise UserError(said)


def since(result: Result) -> str:
    """Return when a result was last computed on, such as "2025-05-03 12:00"."""
    time = str((result.starts() or [{}])[-1].get("time", ""))
    return time[:16].replace("T", " ") or "a time that it does not say"


def already_done(path: Path, run: Run, job: Job, checkpoints: Checkpoints, world: World) -> str:
    """Return since when the file holds this Run's finished result, "" where it does not; refuse to overwrite any other file.

    Raises:
        UserError: on every rank; it holds another Run, or a finished result of other data, of an older version of the numbers, or without
            what the Job asks for.
    """

    def look() -> str:
        if not os.path.lexists(path):
            return ""
        try:
            result = Result(path)
        except UserError as error:
            if checkpoints.folder.is_dir() and torn(path):  # ours, torn: a checkpoint has a copy of what was recorded
                return ""
            raise UserError(f"{error}; move it away, and the same command computes it anew") from None
        with result:
            mine, theirs = run.key(), result.key
            if mine != theirs:
                fields = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
                raise UserError(
                    f"{path} holds another Run (different: {', '.join(fields)}); choose another --out, or overwrite it with --fresh"
                )
            lacks = [f"--{flag}" for flag, name in KEPT.items() if getattr(job, flag) and name not in result]
            if result.finished and lacks:
                raise UserError(
                    f"{path} is finished and was computed without {' and '.join(lacks)}; --fresh computes it anew, with it"
                )
            if result.finished:
                check_current(result, run)
            return since(result) if result.finished else ""

    return str(world.decide(look))


def check_current(result: Result, run: Run) -> None:
    """Raise `UserError` where a finished result has this Run's key, and yet computing it now gives other numbers.

    The key has neither the version of the numbers nor the content of a shipped data set: the data may have been prepared from another source.
    Where the data are gone, the result stands.
    """
    numerics = result.hdf5.attribute("numerics", int, "meta", run.numerics)
    if numerics != run.numerics:
        raise UserError(
            f"{result.path} is finished and was computed under version {numerics} of the numbers; that of this Run is {run.numerics} now "
            "(see CHANGELOG.md): choose another --out, or compute it anew with --fresh"
        )
    now = data_now(run)
    then = result.hdf5.attribute("data_sha256", str, "meta", now)
    if now and then != now:
        raise UserError(
            f"{result.path} is finished and was computed from other data: {run.data} has the sha256 {now[:12]} now, and had {then[:12]} then; "
            "bring back those data, choose another --out, or compute it anew with --fresh"
        )


def data_now(run: Run) -> str:
    """Return the SHA-256 that a Run's prepared data file says it has now, "" where there is no such file, or none is needed."""
    if run.data and not hasattr(find("dataset", run.dataset), "load"):
        with contextlib.suppress(UserError), Hdf5(Path(run.data), "a prepared file") as file:
            return str(file.attribute("sha256", str, default=""))
    return ""
