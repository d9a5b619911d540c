"""Before a Run is computed: check it on all ranks, and look for its finished result."""

import os
from collections.abc import Callable
from pathlib import Path

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import admit, codes, find
from dpfl_mpi.results.result import check_current, check_replaceable, is_torn, result_of
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.fields import check
from dpfl_mpi.storage.files import check_apart
from dpfl_mpi.storage.foreign import Unreadable
from dpfl_mpi.survival.checkpoint import Checkpoints

HEX = 8  # digits at the end of a result's name, which change with an edited file


def agree(run: Run, job: Job, world: World) -> tuple[Resolved, Path]:
    """Return the resolved Run and the path of its result, checked on every rank. Collective."""

    def resolved_here() -> Resolved:
        resolved = run.resolve()
        check(resolved)  # a Run may have been made by hand
        check(job)
        check_apart(job.out, resolved.graphs)  # else --fresh would overwrite what it reads
        for kind, sha256 in codes(resolved.contents).items():  # the user's own code is executed
            name = getattr(resolved, kind)
            if admit(kind, name) != sha256:
                other = "of which this is another version than the one that root read"
                raise UserError(f"--{kind} is {name}, {other}")
            find(kind, name)
        return resolved

    resolved = world.each_rank(resolved_here)
    path = Path(job.out) if job.out else resolved.path(job.results)
    slug = resolved.slug()
    if path.stem != slug and path.stem[:-HEX] == slug[:-HEX]:
        now = f"this is {slug} (a file that it names was edited)"
        raise UserError(f"--out is {path}, the name of another Run; {now}")
    return resolved, path


def find_finished(
    path: Path, run: Resolved, job: Job, world: World, still_ours: Callable[[], object]
) -> tuple[str | None, Checkpoints]:
    """Return when the result was computed ("": unknown, None: not yet), and its checkpoints.

    With --fresh these are deleted; but a requeued job, of the same command line, goes on from them.
    Raises `UserError` where another file is in the way. Collective.
    """
    checkpoints = Checkpoints(path, run.key(), job, world, still_ours)

    def date() -> str | None:
        if not os.path.lexists(path):
            return None
        try:
            result = result_of(run, path)
        except UserError as error:
            # a checkpoint has a copy of what a torn result recorded
            if isinstance(error, Unreadable) and checkpoints.folder.is_dir() and is_torn(path):
                return None
            again = "move it away, and the same command computes it anew"
            raise UserError(f"{error}; {again}") from None
        with result:
            if not result.finished:
                return None
            check_current(result, run, job)
            starts = result.starts()
        return str(starts[-1].get("time", ""))[:16].replace("T", " ") if starts else ""

    requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0) > 0  # on root, at least
    if job.fresh and not world.decide(lambda: requeued and checkpoints.exist()):
        world.decide(lambda: check_replaceable(path))
        checkpoints.clear(sure=True)
        return None, checkpoints
    return world.decide(date), checkpoints
