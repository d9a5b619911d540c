"""What lies under the name of a result before it is computed: nothing, this Run's own finished result, or what may not be overwritten."""

import contextlib
import os
from pathlib import Path

from dpfl_mpi.engine.session import Session
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import check_ours, torn
from dpfl_mpi.settings import NUMERICS, Resolved
from dpfl_mpi.storage.foreign import Hdf5
from dpfl_mpi.survival.checkpoint import Checkpoints

KEPT = {"save_models": "model/best", "mixed": "mixed/test_acc"}  # what flags of a Job add to a result


def already_done(session: Session, checkpoints: Checkpoints) -> bool:
    """Return whether there is nothing to compute, and say so; with --fresh forget what was computed. Collective; errors on every rank."""
    job, world = session.job, session.world
    # a requeued job has the same command line, and goes on from what it kept; not every launcher tells all ranks
    requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0) > 0
    if job.fresh and world.decide(lambda: not (requeued and checkpoints.exist())):
        world.decide(lambda: check_ours(session.path))
        checkpoints.clear(sure=True)
        return False
    done_at = world.decide(lambda: finished_at(session, checkpoints))
    if done_at and world.root and not job.quiet:
        print(f"found, not computed (since {done_at}); --fresh runs anew", flush=True)
    return bool(done_at)


def finished_at(session: Session, checkpoints: Checkpoints) -> str:
    """Return when this Run's finished result was computed, "" where it is to be computed; refuse to overwrite any other file. On root."""
    path, run = session.path, session.run
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
        if not result.finished:
            return ""
        lacks = [f"--{flag}" for flag, name in KEPT.items() if getattr(session.job, flag) and name not in result]
        if lacks:
            raise UserError(
                f"{path} is finished and was computed without {' and '.join(lacks)}; --fresh computes it anew, with it"
            )
        check_current(result, run)
        time = str(result.starts()[-1].get("time", "")) if result.starts() else ""
    return time[:16].replace("T", " ") or "a time that it does not say"


def check_current(result: Result, run: Resolved) -> None:
    """Raise `UserError` where a finished result has this Run's key, and yet computing it now gives other numbers.

    The key has neither the version of the numbers nor the content of a shipped data set: the data may have been prepared from another source.
    Where the data are gone, the result stands.
    """
    numerics = result.hdf5.attribute("numerics", int, "meta")
    if numerics != NUMERICS:
        raise UserError(
            f"{result.path} is finished and was computed under version {numerics} of the numbers; it is {NUMERICS} now "
            "(see CHANGELOG.md): choose another --out, or compute it anew with --fresh"
        )
    now = ""
    if run.data and not hasattr(run.found.dataset, "load"):
        with contextlib.suppress(UserError), Hdf5(Path(run.data), "a prepared file") as file:
            now = str(file.attribute("sha256", str, default=""))
    then = result.hdf5.attribute("data_sha256", str, "meta", now)
    if now and then != now:
        raise UserError(
            f"{result.path} is finished and was computed from other data: {run.data} has the sha256 {now[:12]} now, and had {then[:12]} then; "
            "bring back those data, choose another --out, or compute it anew with --fresh"
        )
