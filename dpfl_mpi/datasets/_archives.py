"""Read what a publisher ships, a folder or an archive, without unpacking anything.

Nothing is written to disk, and every size is bounded before it is read.
"""

import functools
import lzma
import os
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.storage.foreign import UNREADABLE, open_regular, read_bytes, refused_as

IMAGE_BYTES = 16 * 2**20  # most of one image
MEMBERS = 4_000_000  # most files of an archive; NIST's special database 19 has 1.7 million
ARCHIVE_BYTES = 64 * 2**30  # most of an archive, unpacked
BROKEN = (*UNREADABLE, tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile, lzma.LZMAError)

Entry = tuple[PurePosixPath, Callable[[], bytes]]  # path inside the source, and what reads it
# name in an archive, bytes, and what reads it: None of a folder
Member = tuple[str, int, Callable[[], bytes] | None]


def entries(
    source: Path, largest: int = IMAGE_BYTES, inside: bytes | None = None
) -> Iterator[Entry]:
    """Yield every regular file of a folder, tar (gz, bz2, xz) or zip archive.

    A tar's file must be read before the next one is asked for. A `UserError` names what is wrong.

    Args:
        largest: most bytes of one file.
        inside: the archive itself, where it lies in another one; `source` is then its name.
    """
    if source.is_dir():
        yield from in_folder(source, largest)
        return
    total = 0
    with whole(source), open_regular(source) if inside is None else BytesIO(inside) as file:
        members = in_zip if zipfile.is_zipfile(file) else in_tar
        file.seek(0)
        for count, (name, size, read) in enumerate(members(source, file), 1):
            check_name(source, name)
            total += size
            if count > MEMBERS or total > ARCHIVE_BYTES or size < 0:
                limit = f"{MEMBERS} files or {ARCHIVE_BYTES >> 30} GiB"
                raise UserError(f"{source} holds more than {limit}; allowed are fewer")
            if read:
                bounded = functools.partial(read_bounded, source, name, size, largest, read)
                yield PurePosixPath(name), bounded


def in_folder(source: Path, largest: int) -> Iterator[Entry]:
    for path in sorted(source.rglob("*")):
        if path.is_file():
            inside = PurePosixPath(path.relative_to(source).as_posix())
            yield inside, functools.partial(read_bytes, path, largest)
        elif path.is_symlink():
            target = "a folder" if path.is_dir() else "nothing"
            link = f"{path.name}, a link to {target}, which is not followed"
            raise UserError(f"{source} holds {link}; copy it there")
        elif path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise UserError(f"{source} holds {path.name}, a folder that may not be read; allow it")


def check_name(source: Path, name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    drive = path.parts and path.parts[0].endswith(":")
    if path.is_absolute() or ".." in path.parts or drive:
        leads = f"{name!r}, which leads out of the archive"
        raise UserError(f"{source} holds {leads}: nothing was read")


def read_bounded(
    source: Path, name: str, size: int, largest: int, read: Callable[[], bytes]
) -> bytes:
    if size > largest:
        raise UserError(f"{source}: {name} has {size} bytes; allowed are {largest}")
    with whole(source):
        return read()


def whole(source: Path) -> AbstractContextManager[None]:
    """Raise `UserError` if an archive that is read inside ends too early, or is none."""
    again = "download or make it again"
    return refused_as(f"{source} is truncated or not a tar or zip archive; {again}", BROKEN)


def in_tar(source: Path, file: BinaryIO) -> Iterator[Member]:
    """Yield the files of a tar archive in its own order, in one pass."""
    with tarfile.open(fileobj=file, mode="r:*") as archive:
        while member := archive.next():
            if member.issparse():  # a kilobyte of it can claim gigabytes
                raise UserError(f"{source} holds a sparse file; pack it with tar without --sparse")
            if member.islnk() or member.issym():
                how = "pack it with tar --dereference --hard-dereference"
                link = f"{member.name}, a link, which is not followed"
                raise UserError(f"{source} holds {link}; {how}")
            opened = archive.extractfile(member) if member.isfile() else None
            yield member.name, member.size if opened else 0, opened.read if opened else None
            archive.members = []  # type: ignore[attr-defined]  # or a million headers stay in memory
        # A tar that was cut between two files looks whole to `tarfile`. Its end is an empty block.
        end: Any = archive.fileobj
        end.seek(archive.offset)
        if end.read(512) != bytes(512):
            raise tarfile.ReadError


def in_zip(source: Path, file: BinaryIO) -> Iterator[Member]:
    """Yield the files of a zip archive in its own order."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.flag_bits & 1:
                encrypted = f"{info.filename} is encrypted"
                raise UserError(f"{source}: {encrypted}; pack it without a password")
            read = None if info.is_dir() else functools.partial(archive.read, info)
            yield info.filename, info.file_size, read


def is_hidden(path: PurePosixPath) -> bool:
    """Return whether a file is none of the publisher's, such as .DS_Store or ._image.png."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts if part != ".")


def warn_of_unread(source: Path, unread: Counter[str], read_are: str) -> None:
    """Warn of the files that are left out, by folder."""
    folders = [f"{folder} ({count})" for folder, count in sorted(unread.items()) if count]
    if folders:
        left_out = f"files of {first_five(folders)} are not read"
        complain(f"warning: {source}: {left_out}; read are {read_are}")


def check_one(source: Path, folders: Iterable[PurePosixPath]) -> None:
    """Raise `UserError` if there are several folders: each is a data set of its own."""
    names = sorted(map(str, set(folders)))
    if len(names) > 1:
        raise UserError(
            f"{source} holds several data sets, in {first_five(names)}; name one of them"
        )


def first_five(names: Sequence[str]) -> str:
    """Return the first five names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
