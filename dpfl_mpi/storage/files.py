"""Files that are there whole or not at all, their hashes, and the errors of a disk in words."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpfl_mpi.errors import UserError

DAMAGE = (OSError, KeyError, ValueError, RuntimeError)  # what h5py raises for a file that is not what it should be


# one atomic replacement ------------------------------------------------------------------------------------------------
def temporary(path: Path) -> Path:
    """Return the name under which this process makes `path`: hidden, in the same folder, ending in `.part`."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to; afterwards the file is on disk under its own, whole, or not at all.

    The folder is made if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = temporary(path)
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
    finally:
        os.close(folder)


def remove_leftovers(path: Path) -> None:
    """Remove what processes of this host that were killed outright left of `path` under their temporary names."""
    prefix, suffix = f".{path.name}.{socket.gethostname()}.", ".part"
    for left in path.parent.iterdir() if path.parent.is_dir() else ():
        pid = left.name[len(prefix) : -len(suffix)]
        if left.name == f"{prefix}{pid}{suffix}" and pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


# one hash --------------------------------------------------------------------------------------------------------------
def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


# errors in words -------------------------------------------------------------------------------------------------------
def error_number(error: BaseException) -> int:
    """Return the system's number of an error; HDF5 has it in its message only. 0 where there is none."""
    found = re.search(r"errno = (\d+)", str(error))
    return getattr(error, "errno", None) or (int(found.group(1)) if found else 0)


def reason(error: BaseException) -> str:
    """Return the system's words for an error of a disk; HDF5's own message is long."""
    number = error_number(error)
    return os.strerror(number) if number else str(error)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise `UserError` "`what`: reason" where the disk or HDF5 fails inside."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"{what}: {reason(error)}") from None
