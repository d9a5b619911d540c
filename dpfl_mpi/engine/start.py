"""Before a Run is computed: it is checked on all ranks, and what lies under the name of its result is found, or may be overwritten."""

import os
from pathlib import Path

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import admit, codes, find
from dpfl_mpi.results.result import check_current, check_ours, result_of, torn
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.fields import check
from dpfl_mpi.storage.files import check_apart
from dpfl_mpi.storage.foreign import Unreadable
from dpfl_mpi.survival.checkpoint import Checkpoints


def agreed(run: Run, job: Job, world: World) -> tuple[Resolved, Path]:
    """Return the resolved Run and the path of its result; errors on every rank. Collective."""

    def look() -> Resolved:  # once: the files that a Run names are read here
        resolved = run.resolve()
        check(resolved)  # it may have been made by hand
        check(job)
        check_apart(job.out, resolved.graphs)  # else a result that --fresh would overwrite
        return resolved

    resolved = world.each_rank(look)
    if codes(resolved.contents):
        world.each_rank(lambda: load_code(resolved))
    path = Path(job.out) if job.out else resolved.path(job.results)
    slug = resolved.slug()
    if path.stem != slug and path.stem[:-8] == slug[:-8]:  # begun, it may be, before an edit
        now = f"this is {slug} (a file that it names was edited)"
        raise UserError(f"--out is {path}, the name of another Run; {now}")
    return resolved, path


def load_code(run: Resolved) -> None:
    """Execute the code of one's own that a Run names: the very same as root resolved, or a `UserError`."""
    for kind, held in codes(run.contents).items():
        if admit(kind, name := getattr(run, kind)) != held:
            raise UserError(f"--{kind} is {name}, of which this is another version than the one that root read")
        find(kind, name)


def forgotten(path: Path, job: Job, world: World, checkpoints: Checkpoints) -> bool:
    """Return whether all is computed anew (--fresh), and forget what was computed. Collective; errors on every rank."""
    # a requeued job has the same command line, and goes on from what it kept; not every launcher tells all ranks
    requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0) > 0
    if not job.fresh or world.decide(lambda: requeued and checkpoints.exist()):
        return False
    world.decide(lambda: check_ours(path))
    checkpoints.clear(sure=True)
    return True


def finished_at(path: Path, run: Resolved, job: Job, folder: Path) -> str:
    """Return when this Run's finished result was computed, "" where it is to be computed; refuse to overwrite any other file. On root."""
    if not os.path.lexists(path):
        return ""
    try:
        result = result_of(run, path)
    except UserError as error:
        # ours, torn: a checkpoint has a copy of what was recorded
        if isinstance(error, Unreadable) and folder.is_dir() and torn(path):
            return ""
        raise UserError(f"{error}; move it away, and the same command computes it anew") from None
    with result:
        if not result.finished:
            return ""
        check_current(result, run, job)
        starts = result.starts()
    time = str(starts[-1].get("time", ""))[:16] if starts else ""
    return time.replace("T", " ") or "a time that it does not say"
