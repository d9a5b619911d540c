"""Shared memory of a killed run: MPI frees its segments in /dev/shm at the end, but nobody does after `kill -9`.

Each rank notes the names of the segments it maps beside the checkpoints; the next start of the same run, which holds the lock and so
knows the one before to be gone, removes them on each node. A rank killed inside MPI's own start has noted nothing: what MPI made, no
process maps and is some seconds old goes as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path

SHM = "/dev/shm/"
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
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text("\n".join(sorted(now | self.noted)))
                self.noted |= now

    def forget(self) -> None:
        """Remove the note, and the folder where nothing else is in it: the run never began."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()


def unnoted() -> set[str]:
    """Return MPICH's and Open MPI's segments of this user that are older than any rank takes to map what it made."""
    names = set()
    for path in [*Path(SHM).glob("mpich_sh*"), *Path(SHM).glob("sm_segment.*")]:
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > ABANDONED_S:
                names.add(str(path))
    return names


def remove_left(folder: Path) -> None:
    """Remove what an earlier, dead start left on this node; what any process maps is somebody's and stays."""
    notes = list(folder.glob(f"shm.{socket.gethostname()}.*"))
    names = unnoted()
    for note in notes:
        with contextlib.suppress(OSError):
            names |= {n for n in note.read_text().split() if n.startswith(SHM) and Path(n).exists()}
    if names:
        for process in Path("/proc").glob("[0-9]*"):
            names -= mapped(process.name)
    for name in names:
        with contextlib.suppress(OSError):
            Path(name).unlink()
    for note in notes:
        note.unlink(missing_ok=True)
