"""Shared memory of a killed run: MPI frees its segments in /dev/shm at the end, but nobody does after `kill -9`."""

import contextlib
import os
import re
import stat
import time
from pathlib import Path

from dpfl_mpi.storage.files import system

SHM = Path("/dev/shm")
MADE_BY_MPI = ("mpich_sh*", "sm_segment.*", "osc_sm.*", "vader_segment.*")  # MPICH, Open MPI
ABANDONED_S = 5  # a rank maps what it makes within milliseconds


def mapped(pid: str) -> set[str]:
    """Return the files in /dev/shm that a process maps, none where it is gone or another user's."""
    return set(re.findall(rf"{SHM}/\S+", system(f"/proc/{pid}/maps")))


def abandoned(path: Path) -> bool:
    """Return whether it is a regular file of this user that was not written to lately."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        mine = found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode)
        return mine and time.time() - found.st_mtime > ABANDONED_S
    return False


def remove_left() -> None:
    """Remove what dead runs of this user left on this node: files named and made as MPI does, and mapped by no process."""
    left = [path for name in MADE_BY_MPI for path in SHM.glob(name) if abandoned(path)]
    in_use = {name for process in Path("/proc").glob("[0-9]*") for name in mapped(process.name)} if left else set()
    for path in left:
        if str(path) not in in_use:
            with contextlib.suppress(OSError):  # another run's start was quicker
                path.unlink()
