"""Writes files that are there whole or not at all, and says in words what a disk refused.

A file is written under a temporary name, then renamed (`replacing`). foreign.py reads files.
"""

import contextlib
import csv
import errno
import hashlib
import io
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpfl_mpi.errors import UserError

ABANDONED_S = 86400.0  # a temporary file of an unknown process is abandoned after this time


def proc_text(path: str) -> str:
    """Return the text of a file in /proc; "" if there is none that this user may read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="surrogateescape")
    return ""


def place() -> str:
    """Return eight hexadecimal digits of this machine, its start and the container we are in."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    boot = proc_text("/proc/sys/kernel/random/boot_id").strip()
    text = f"{socket.gethostname()} {space} {boot}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def temporary(path: Path) -> Path:
    """Return a hidden name next to `path`; it is random, so that nobody can foresee it."""
    token = secrets.token_hex(6)
    return path.with_name(f".{path.name[:40]}.{place()}.{os.getpid()}.{token}.part")


def time_at(path: Path) -> float:
    """Return the time by the clock that stamps files there; this host's if none can be made."""
    now, probe = time.time(), temporary(path)
    with contextlib.suppress(OSError):
        probe.touch(exist_ok=False)
        now = probe.lstat().st_mtime
        probe.unlink()
    return now


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a temporary file to write to; after the block it replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("a link, a folder, a pipe or a device is there")
    part = temporary(path)
    part.touch(exist_ok=False)  # fails where there is a link, instead of following it
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
        os.fsync(folder)  # so that the new name survives, too
    except OSError as error:  # some shared file systems sync no folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a file with these bytes, whole."""
    # not Path.write_bytes: at an error the traceback would keep a view of `data`, which its owner
    # could then not release
    with replacing(path) as part, open(part, "wb") as file:
        file.write(data)


def checkpoints_of(results: Path) -> Path:
    """Return the folder of a results file's checkpoints."""
    return results.with_name(f"{results.name}.checkpoint")


def manifests(folder: Path) -> list[Path]:
    """Return the manifests in such a folder, one for each whole checkpoint, the newest first."""

    def age(path: Path) -> tuple[str, int]:
        return path.name.partition(".")[0].zfill(12), path.lstat().st_mtime_ns

    return sorted(folder.glob("*.manifest.h5"), key=age, reverse=True)


def write_csv(out: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table for --out."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(rows)
    with explained(f"--out is {out}; it cannot be written"):
        write(out, text.getvalue().encode("utf-8", "surrogateescape"))


def check_apart(out: str | Path | None, *read: str | Path | None, flag: str = "--out") -> None:
    """Raise `UserError` where --out, or another `flag`, is a file that the command reads."""
    for path in read:
        there = out and path and os.path.exists(out) and os.path.exists(path)
        if there and os.path.samefile(str(out), str(path)):
            why = "which is read here and would be lost; name another file"
            raise UserError(f"{flag} is {out}, {why}")


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of `path` that are abandoned.

    Their process has ended, or they are of another host (or container) and older than a day.
    """
    ending = r"([0-9a-f]{8})\.(\d{1,10})\.[0-9a-f]{12}\.part"
    name = re.compile(re.escape(f".{path.name[:40]}.") + ending)
    this_place = place()
    for part in path.parent.iterdir() if path.parent.is_dir() else ():
        found = name.fullmatch(part.name)
        if not found:
            continue
        with contextlib.suppress(OSError):  # it may be another user's
            if found[1] == this_place:
                abandoned = not Path("/proc", found[2]).exists()
            else:
                abandoned = time_at(part) - part.lstat().st_mtime > ABANDONED_S
            if abandoned:
                part.unlink(missing_ok=True)


def reason(error: BaseException) -> str:
    """Return the operating system's words for an error of a disk, in one line."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else " ".join(str(error).split())


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise `UserError` "`what`: reason" if the block fails by an error of the disk."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {reason(error)}") from None
