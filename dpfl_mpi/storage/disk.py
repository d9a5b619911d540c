"""HDF5 files for writing, which survive what may happen to a disk and to the process.

HDF5 does not survive a write of its own that fails: objects that it cannot flush stay open, and the process dies of a segmentation
fault when it ends. So it is not told: `Disk` keeps in memory what the disk did not take, and `File` raises the disk's error where
the caller can handle it, on `flush`, `sync` and `close`.

A kill may come between two writes. HDF5 puts new data behind the old and then changes in place what refers to them, so `Disk` holds all
back until the file is flushed, and then writes from the end of the file to its beginning: what refers comes last.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from pathlib import Path
from typing import Any

import h5py

AT_MOST = 2**26  # bytes that wait for a flush
LARGE = 2**17  # bytes of a write that does not wait: models, whose copy would cost as much as writing them
Piece = tuple[int, bytes]  # position in the file, what is there


class Disk:
    """A file, open for reading and writing, that after its first error changes nothing on disk any more, and reads as if it had."""

    def __init__(self, path: Path, new: bool):
        how = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW  # a link may lead to a file of somebody's
        self.fd = os.open(path, how | (os.O_CREAT | os.O_TRUNC if new else 0), 0o666)
        self.at, self.end = 0, os.fstat(self.fd).st_size
        self.waiting: list[Piece] = []  # in the order of writing
        self.size = 0  # bytes that came since the last flush
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the beginning or the end. Return the position."""
        self.at = offset + (self.end if whence == os.SEEK_END else 0)
        return self.at

    def tell(self) -> int:
        """Return the position."""
        return self.at

    def write(self, data: Any) -> int:
        """Take all of it. Return the number of bytes."""
        at, self.at = self.at, self.at + len(data)
        if len(data) < LARGE:
            self.waiting.append((at, bytes(data)))
            self.size += len(data)
            if self.size > AT_MOST:
                self.flush()
        else:
            if any(begin < self.at and at < begin + len(piece) for begin, piece in self.waiting):
                self.flush()  # what waits is older
            if not self._put(at, memoryview(data)):
                self.waiting.append((at, bytes(data)))
        self.end = max(self.end, self.at)
        return len(data)

    def flush(self) -> None:
        """Give the system what waits, from the end of the file to its beginning."""
        self.size = 0
        if not self.error:
            left = merged(self.waiting)
            while left and self._put(left[-1][0], memoryview(left[-1][1])):
                left.pop()
            self.waiting = left

    def _put(self, at: int, data: memoryview) -> bool:
        """Write all of it to disk; return whether that was possible."""
        try:
            while len(data) and not self.error:
                done = os.pwrite(self.fd, data, at)
                at, data = at + done, data[done:]
        except OSError as error:
            self.error = error
        return not self.error

    def sync(self) -> None:
        """Wait until the disk has everything."""
        self.flush()
        try:
            os.fsync(self.fd)
        except OSError as error:
            self.error = self.error or error

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; what was never written is zero, as HDF5 expects. Return its length."""
        view, got = memoryview(buffer).cast("B"), 0
        while more := os.preadv(self.fd, [view[got:]], self.at + got) if got < len(view) else 0:
            got += more
        view[got:] = bytes(len(view) - got)
        for begin, data in self.waiting:
            low, high = max(begin, self.at), min(begin + len(data), self.at + len(view))
            if low < high:
                view[low - self.at : high - self.at] = data[low - begin : high - begin]
        self.at += len(view)
        return len(view)

    def read(self, size: int) -> bytes:
        """Return so many bytes."""
        out = bytearray(size)
        self.readinto(out)
        return bytes(out)

    def truncate(self, size: int) -> int:
        """Set the file's length. Return it."""
        self.flush()
        try:
            if not self.error:
                os.ftruncate(self.fd, size)
        except OSError as error:
            self.error = error
        self.end = size
        return size

    def close(self) -> None:
        """Close the file, with everything on disk. A second time does nothing."""
        if self.fd >= 0:
            self.sync()
            fd, self.fd = self.fd, -1
            try:
                os.close(fd)
            except OSError as error:  # a disk of the network may refuse only now
                self.error = self.error or error


def merged(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces, later ones over earlier ones, as one a stretch of the file, positions ascending."""
    stretches: list[tuple[int, int, list[int]]] = []  # begin, end, numbers of the pieces
    for i in sorted(range(len(pieces)), key=lambda i: pieces[i][0]):
        begin, data = pieces[i]
        if stretches and begin <= stretches[-1][1]:
            first, end, members = stretches.pop()
            members.append(i)
            stretches.append((first, max(end, begin + len(data)), members))
        else:
            stretches.append((begin, begin + len(data), [i]))
    out = []
    for first, end, members in stretches:
        if len(members) == 1:
            out.append(pieces[members[0]])
            continue
        stretch = bytearray(end - first)
        for i in sorted(members):
            begin, data = pieces[i]
            stretch[begin - first : begin - first + len(data)] = data
        out.append((first, bytes(stretch)))
    return out


OPEN: weakref.WeakSet[File] = weakref.WeakSet()


class File(h5py.File):
    """An HDF5 file open for writing, mode "w" or "r+". `flush`, `sync` and `close` raise the disk's `OSError`."""

    def __init__(self, path: Path, mode: str, **options: Any):
        self.disk = Disk(path, new=mode == "w")
        super().__init__(self.disk, mode, **options)
        OPEN.add(self)

    def flush(self) -> None:
        """Give everything to the system: it survives the end of this process."""
        super().flush()
        self.disk.flush()
        self._check()

    def sync(self) -> None:
        """Give everything to the disk: it survives the end of this machine."""
        super().flush()
        self.disk.sync()
        self._check()

    def close(self) -> None:
        """Close the file, on disk to the last byte, and everything of it that is open."""
        try:
            super().close()
        finally:
            self.disk.close()
        self._check()

    def _check(self) -> None:
        if self.disk.error:
            raise OSError(self.disk.error.errno, os.strerror(self.disk.error.errno or 0)) from None


@atexit.register
def close_all() -> None:
    """Close what an error left open: HDF5 itself would, after the interpreter that `Disk` needs is gone."""
    for file in list(OPEN):
        with contextlib.suppress(OSError):
            file.close()
