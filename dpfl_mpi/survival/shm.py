"""Shared memory of a killed run.

MPI frees its segments in /dev/shm at its end; after `kill -9` nobody does.
"""

import contextlib
import os
import re
import stat
import time
from pathlib import Path

from dpfl_mpi.storage.files import system

SHM = Path("/dev/shm")
MPI_NAMES = ("mpich_sh*", "sm_segment.*", "osc_sm.*", "vader_segment.*")  # MPICH, Open MPI
ABANDONED_S = 5  # a rank maps what it makes within milliseconds


def mapped(pid: str) -> set[str]:
    """Return the files in /dev/shm that a process maps, as far as this user may see them."""
    return set(re.findall(rf"{SHM}/\S+", system(f"/proc/{pid}/maps")))


def abandoned(path: Path) -> bool:
    """Return whether it is a regular file of this user that was not written to lately."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        own_file = found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode)
        return own_file and time.time() - found.st_mtime > ABANDONED_S
    return False


def remove_left() -> None:
    """Remove what killed runs of this user left on this node: MPI's files that no process maps."""
    left = [path for name in MPI_NAMES for path in SHM.glob(name) if abandoned(path)]
    processes = Path("/proc").glob("[0-9]*") if left else ()
    in_use = {name for process in processes for name in mapped(process.name)}
    for path in left:
        if str(path) not in in_use:
            with contextlib.suppress(OSError):  # another start may have removed it
                path.unlink()
