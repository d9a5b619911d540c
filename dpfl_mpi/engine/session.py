"""`Session`: one Run, resolved alike on all ranks, how it is computed, and the file of its result."""

import re
from dataclasses import dataclass
from pathlib import Path

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import admit, codes, find
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.fields import as_dict, check


@dataclass(frozen=True)
class Session:
    """What all of the engine works on: which numbers, where and how they are computed, the ranks, the results file."""

    run: Resolved
    job: Job
    world: World
    path: Path


def agreed(run: Run, job: Job, world: World) -> Session:
    """Return the session of a Run and Job; where they are wrong, or not the same on every rank, all have the `UserError`. Collective."""
    found: list[Resolved] = []  # once: the files that a Run names are read here

    def look() -> None:
        found.append(run.resolve())
        check(found[0])  # a resolved Run may have been made by hand
        check(job)

    world.each_rank(look)
    resolved = found[0]
    mine = {name: f"{value} {resolved.contents.get(name, '')}" for name, value in as_dict(resolved).items()}
    if unlike := world.unlike(mine | as_dict(job)):
        names = ", ".join(f"--{name}" for name in unlike)
        raise UserError(f"the ranks were given different settings ({names}); every rank needs the same Run and Job")
    if codes(resolved.contents):
        world.each_rank(lambda: load_code(resolved))
    path = Path(job.out) if job.out else resolved.path(job.results)
    of_sweep = re.search(r"-s\d+-[0-9a-f]{8}$", path.stem)  # begun, it may be, before an edit
    if of_sweep and path.stem != resolved.slug():
        raise UserError(
            f"--out is {path}, the name of another Run; this is {resolved.slug()} (a file that it names was edited)"
        )
    return Session(resolved, job, world, path)


def load_code(run: Resolved) -> None:
    """Execute the code of one's own that a Run names: the very same as root resolved, or a `UserError`."""
    for kind, held in codes(run.contents).items():
        if admit(kind, name := getattr(run, kind)) != held:
            raise UserError(f"--{kind} is {name}, of which this is another version than the one that root read")
        find(kind, name)
