"""Files that are there whole or not at all, and the errors of a disk in words."""

import contextlib
import csv
import errno
import hashlib
import io
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

ABANDONED_S = 86400.0  # a temporary file of an unknown process is abandoned after this time


def system(path: str) -> str:
    """Return the text of a file in /proc, "" where it is not there, or not ours to read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="surrogateescape")
    return ""


def place() -> str:
    """Return eight digits for the machine since its start and the container that has our /proc."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    boot = system("/proc/sys/kernel/random/boot_id").strip()
    text = f"{socket.gethostname()} {space} {boot}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def temporary(path: Path) -> Path:
    """Return a fresh name under which this process makes `path`: hidden, in the same folder.

    Nobody can foresee it, and have a link wait there. A long name is cut.
    """
    token = secrets.token_hex(6)
    return path.with_name(f".{path.name[:40]}.{place()}.{os.getpid()}.{token}.part")


def time_at(path: Path) -> float:
    """Return the time by the clock that stamps a file, by this host's where none can be written."""
    now, probe = time.time(), temporary(path)
    with contextlib.suppress(OSError):
        probe.touch(exist_ok=False)
        now = probe.lstat().st_mtime
        probe.unlink()
    return now


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the temporary name of a new file to write to; afterwards it replaces `path`, whole.

    The folder is made if it is missing. Only a regular file is replaced.
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
        os.fsync(folder)  # the new name
    except OSError as error:  # some shared file systems sync no folders; the file is whole
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def write(path: Path, data: bytes | memoryview) -> None:
    with replacing(path) as part, open(part, "wb") as file:  # an error keeps no view of the data
        file.write(data)


def checkpoints_of(results: Path) -> Path:
    """Return the folder of a results file's checkpoints."""
    return results.with_name(f"{results.name}.checkpoint")


def manifests(folder: Path) -> list[Path]:
    """Return the manifests in such a folder, the newest first. A generation without one is none."""

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
    """Remove temporary files of `path` that killed processes left.

    Those of another host, or of before this machine was started, go once they are a day old.
    """
    ending = r"([0-9a-f]{8})\.(\d{1,10})\.[0-9a-f]{12}\.part"
    name = re.compile(re.escape(f".{path.name[:40]}.") + ending)
    this_place = place()
    for part in path.parent.iterdir() if path.parent.is_dir() else ():
        found = name.fullmatch(part.name)
        if not found:
            continue
        with contextlib.suppress(OSError):  # another user's
            if found[1] == this_place:
                abandoned = not Path("/proc", found[2]).exists()
            else:
                abandoned = time_at(part) - part.lstat().st_mtime > ABANDONED_S
            if abandoned and part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            elif abandoned:
                part.unlink(missing_ok=True)


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
