"""`Session`: one Run, resolved alike on all ranks, how it is computed, and the file of its result."""

from __future__ import annotations

import platform
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
    """Return the session of a Run and Job that every rank was given alike. Collective.

    Raises:
        UserError: on every rank, where one was given a wrong setting, another one than the rest, or another file of code.
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
    same_code(run, world)
    path = Path(job.out) if job.out else run.path(job.results)
    if re.search(r"-s\d+-[0-9a-f]{8}$", path.stem) and path.stem != run.slug():  # of a sweep that began before the edit
        raise UserError(
            f"--out is {path}, the name of another Run; this is {run.slug()} (a file that it names was edited)"
        )
    return Session(run, job, world, path)


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
