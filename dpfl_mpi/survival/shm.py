"""Shared memory of a killed run: MPI frees its segments in /dev/shm at the end, but nobody does after `kill -9`.

Each rank notes the segments it maps beside the checkpoints. The next start of the same run, which holds the lock and so knows the one
before to be gone, removes them on each node. A rank killed inside MPI's own start has noted nothing: what MPI made, no process maps and
is some seconds old goes as well.

A note is a list of files to delete, in a folder that others may be able to write to. So only a note of this user's counts, and only
what it names directly in /dev/shm that belongs to this user as well.
"""

import contextlib
import os
import re
import socket
import stat
import time
from pathlib import Path

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.files import replacing
from dpfl_mpi.storage.foreign import SMALL, read_text

SHM = "/dev/shm/"
MADE_BY_MPI = ("mpich_sh*", "sm_segment.*")  # MPICH, Open MPI
ABANDONED_S = 5  # a rank maps what it makes within milliseconds


def mapped(pid: str) -> set[str]:
    """Return the files in /dev/shm that a process maps, none where it is gone or another user's."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(rf"{SHM}\S+", text))


class Segments:
    """What one rank of this start has in /dev/shm, written to a file of its own whenever it changes."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"shm.{socket.gethostname()}.{rank}"
        self.noted: set[str] = set()

    def note(self) -> None:
        """Write the names down if they changed; a full disk is not worth ending a run for."""
        now = mapped("self")
        if now != self.noted:
            with contextlib.suppress(OSError):
                with replacing(self.path) as part:
                    part.write_text("\n".join(sorted(now | self.noted)))
                self.noted |= now

    def forget(self) -> None:
        """Remove the note, and the folder where nothing else is in it: the run never began."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()


def age(path: Path) -> float:
    """Return the seconds since a regular file of this user's was written to, -1 where it is anything else."""
    with contextlib.suppress(OSError, ValueError):
        found = path.lstat()
        if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode):
            return max(0.0, time.time() - found.st_mtime)
    return -1.0


def named(note: Path) -> set[Path]:
    """Return what a note of this user's names directly in /dev/shm."""
    with contextlib.suppress(UserError):
        names = read_text(note, SMALL, follow=False).split() if age(note) >= 0 else []
        return {Path(name) for name in names if re.fullmatch(rf"{SHM}[^/\0]+", name)}
    return set()


def remove_left(folder: Path) -> None:
    """Remove what an earlier, dead start left on this node; what any process maps is somebody's and stays."""
    notes = list(folder.glob(f"shm.{socket.gethostname()}.*"))
    left = {path for note in notes for path in named(note) if age(path) >= 0}
    left |= {path for names in MADE_BY_MPI for path in Path(SHM).glob(names) if age(path) > ABANDONED_S}
    in_use = {name for process in Path("/proc").glob("[0-9]*") for name in mapped(process.name)} if left else set()
    for path in [*(p for p in left if str(p) not in in_use), *notes]:
        with contextlib.suppress(OSError):  # another user's, or a folder
            path.unlink()
