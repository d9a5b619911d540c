"""Files that are there whole or not at all, and the errors of a disk in words."""

import contextlib
import csv
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpfl_mpi.errors import UserError

ABANDONED_S = 86400.0  # untouched for so long, a temporary file is nobody's, though its process cannot be asked about


def pid_space() -> str:
    """Return which processes a pid counts, "" where the system does not say: two containers of one host name have pids of their own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def system(path: str) -> str:
    """Return the text of a file in /proc, "" where it is not there, or not ours to read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="surrogateescape")
    return ""


def boot() -> str:
    """Return what names this start of this machine, "" where the system does not say: two machines may have one host name."""
    return system("/proc/sys/kernel/random/boot_id").strip()


def place() -> str:
    """Return eight digits for the host name, the start of the machine and the container: where /proc knows the processes of a temporary name."""
    return hashlib.sha256(f"{socket.gethostname()} {pid_space()} {boot()}".encode()).hexdigest()[:8]


def temporary(path: Path) -> Path:
    """Return a fresh name under which this process makes `path`: hidden, in the same folder, ending in `.part`; a long name is cut.

    Nobody can foresee it: in a folder that a group writes to, a link may wait under a name that can be foreseen.
    """
    return path.with_name(f".{path.name[:40]}.{place()}.{os.getpid()}.{secrets.token_hex(6)}.part")


def time_at(path: Path) -> float:
    """Return the time by the clock that stamps a file, or this host's where nothing can be written."""
    now, probe = time.time(), temporary(path)
    with contextlib.suppress(OSError):
        probe.touch(exist_ok=False)
        now = probe.lstat().st_mtime
        probe.unlink()
    return now


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the temporary name of an empty new file to write to; afterwards the file is on disk under its own, whole, or not at all.

    The folder is made if it is missing. Only a regular file is replaced, nothing else: root could replace a device.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("a link, a folder, a pipe or a device is there")
    part = temporary(path)
    part.touch(exist_ok=False)  # nor is a link followed
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    except OSError as error:  # some shared file systems sync no folders, and the file is whole
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def write(path: Path, data: bytes | memoryview) -> None:
    # not write_bytes: after an error its frame would hold a view of a `memoryview`
    with replacing(path) as part, open(part, "wb") as file:
        file.write(data)


def checkpoints_of(results: Path) -> Path:
    """Return the folder of a results file's checkpoints."""
    return results.with_name(f"{results.name}.checkpoint")


def manifests(folder: Path) -> list[Path]:
    """Return the manifests in such a folder, the newest first: only a generation that has one counts."""
    found = folder.glob("*.manifest.h5") if folder.is_dir() else ()
    return sorted(found, key=lambda p: (p.name.partition(".")[0].zfill(12), p.lstat().st_mtime_ns), reverse=True)


def write_csv(out: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table for --out."""
    said = explained(f"--out is {out}; it cannot be written")
    with said, replacing(out) as part, open(part, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)


def check_apart(out: str | Path | None, *read: str | Path | None, flag: str = "--out") -> None:
    """Raise `UserError` where --out, or another `flag`, is a file that the command reads: it would be replaced by what is made of it."""
    for path in read:
        if out and path and os.path.exists(out) and os.path.exists(path) and os.path.samefile(out, path):
            raise UserError(f"{flag} is {out}, which is read here and would be lost; name another file")


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed outright left of `path` under their temporary names.

    Another host's processes cannot be asked about, nor can those before this machine was started: what they left goes once it is a day old.
    """
    left = re.compile(re.escape(f".{path.name[:40]}.") + r"([0-9a-f]{8})\.(\d{1,10})\.[0-9a-f]{12}\.part")
    here = place() if boot() else ""
    for part in path.parent.iterdir() if path.parent.is_dir() else ():
        if found := left.fullmatch(part.name):
            with contextlib.suppress(OSError):  # another user's
                if found[1] == here:
                    abandoned = not Path("/proc", found[2]).exists()
                else:
                    abandoned = time_at(part) - part.lstat().st_mtime > ABANDONED_S
                if abandoned:
                    shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink(missing_ok=True)


def reason(error: BaseException) -> str:
    """Return the system's words for an error of a disk, in one line."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else " ".join(str(error).split())


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise `UserError` "`what`: reason" where the disk fails inside."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {reason(error)}") from None
