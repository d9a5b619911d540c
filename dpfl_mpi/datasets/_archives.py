"""Reads what a publisher ships, a folder or an archive; nothing is unpacked to disk.

The `read` of a data set loops over `entries(source)`: each entry is the path of a file inside the
source, and a function that returns its bytes. `source` is the path that the user named.
"""

import functools
import lzma
import os
import stat
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

# errors of a damaged archive
BROKEN = (*UNREADABLE, tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile, lzma.LZMAError)
Entry = tuple[PurePosixPath, Callable[[], bytes]]  # path inside the source, and what reads it
Member = tuple[str, Callable[[], bytes]]  # name in an archive, and what reads it


def entries(source: Path, inside: bytes | None = None) -> Iterator[Entry]:
    """Yield every regular file of a folder, tar (gz, bz2, xz) or zip archive that is not hidden.

    A tar's file must be read before the next one is asked for. A `UserError` names what is wrong.
    An archive that lies in another one is given as its bytes `inside`, and `source` is its name.
    """
    if source.is_dir():
        for file_path in files_in(source):
            path = PurePosixPath(file_path.relative_to(source).as_posix())
            if not is_hidden(path):
                yield path, functools.partial(read_bytes, file_path)
        return
    with refuse_broken(source), open_regular(source) if inside is None else BytesIO(inside) as file:
        members = in_zip if zipfile.is_zipfile(file) else in_tar
        file.seek(0)
        for name, read in members(source, file):
            if not is_hidden(path := PurePosixPath(name)):
                yield path, functools.partial(unpacked, source, read)


def files_in(
    source: Path, folder: Path | None = None, above: tuple[Path, ...] = ()
) -> Iterator[Path]:
    """Yield the files of a folder in the order of their paths; links to folders are followed."""
    # `above` are the folders around it, to which a link would lead in a circle
    folder = folder or source
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"{source} holds {folder.name}, a folder that may not be read; allow it")
    resolved = folder.resolve()
    if any(resolved == path or resolved in path.parents for path in above):
        raise UserError(f"{source} holds {folder.name}, a link to a folder above it; remove it")
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from files_in(source, path, (*above, resolved))
        elif path.is_file():
            yield path
        elif path.is_symlink():
            raise UserError(f"{source} holds {path.name}, a link to nothing; copy it there")


def unpacked(source: Path, read: Callable[[], bytes]) -> bytes:
    with refuse_broken(source):
        return read()


def refuse_broken(source: Path) -> AbstractContextManager[None]:
    """Raise `UserError` if an archive that is read inside the block is cut off, or is none."""
    again = "download or make it again"
    return refused_as(f"{source} is truncated or not a tar or zip archive; {again}", BROKEN)


def in_tar(source: Path, file: BinaryIO) -> Iterator[Member]:
    """Yield the files of a tar archive in its own order, in one pass."""
    with tarfile.open(fileobj=file, mode="r:*") as archive:
        while member := archive.next():
            if member.islnk() or member.issym():
                mend = "pack it with tar --dereference --hard-dereference"
                link = f"{member.name}, a link, which is not followed"
                raise UserError(f"{source} holds {link}; {mend}")
            if opened := archive.extractfile(member):
                yield member.name, opened.read
            # otherwise a million headers would stay in memory
            archive.members = []  # type: ignore[attr-defined]
        # A tar that was cut between two files looks whole to `tarfile`. Its end is an empty block.
        end: Any = archive.fileobj
        end.seek(archive.offset)
        if end.read(512) != bytes(512):
            raise tarfile.ReadError


def in_zip(source: Path, file: BinaryIO) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if stat.S_ISLNK(info.external_attr >> 16):
                link = f"{info.filename}, a link, which is not followed"
                raise UserError(f"{source} holds {link}; pack it without zip's -y")
            if info.flag_bits & 1:
                raise UserError(f"{source}: {info.filename} is encrypted; pack it without password")
            if not info.is_dir():
                yield info.filename, functools.partial(archive.read, info)


def is_hidden(path: PurePosixPath) -> bool:
    """Return whether a file was left by an operating system, such as .DS_Store or ._image.png."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts if part != ".")


def warn_of_unread(source: Path, unread: Counter[str], read_are: str) -> None:
    """Warn of files that are left out; `unread` has how many, by folder."""
    folders = [f"{folder} ({count})" for folder, count in sorted(unread.items())]
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
