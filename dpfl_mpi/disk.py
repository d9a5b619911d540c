"""HDF5 files for writing on a disk that may become full.

HDF5 does not survive a write of its own that fails: objects that it cannot flush stay open, and the process dies of a segmentation
fault when it ends. So it is not told: `Disk` keeps in memory what the disk did not take, and `File` raises the disk's error where
the caller can handle it, on `flush` and on `close`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import weakref
from pathlib import Path
from typing import Any

import h5py


class Disk(io.FileIO):
    """A file that after its first error changes nothing on disk any more, and reads as if it had."""

    def __init__(self, path: Path, mode: str):
        super().__init__(path, mode)
        self.error: OSError | None = None
        self.held: list[tuple[int, bytes]] = []  # (position, what the disk did not take), in the order of writing

    def write(self, data: Any) -> int:
        """Write all of it; after an error, to memory. Return the number of bytes."""
        at, data, done = self.tell(), memoryview(data).cast("B"), 0
        try:
            while not self.error and done < len(data):
                done += super().write(data[done:]) or 0
        except OSError as error:
            self.error = error
        if self.error:
            self.held.append((at + done, bytes(data[done:])))
            self.seek(at + len(data))
        return len(data)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; what is beyond the end is zero, as HDF5 expects. Return its length."""
        view, at = memoryview(buffer).cast("B"), self.tell()
        got = super().readinto(view) or 0
        view[got:] = bytes(len(view) - got)
        for begin, data in self.held:
            low, high = max(begin, at), min(begin + len(data), at + len(view))
            if low < high:
                view[low - at : high - at] = data[low - begin : high - begin]
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; the end is that of what was written, to disk or to memory. Return the position."""
        if whence == os.SEEK_END:
            ends = [at + len(data) for at, data in self.held]
            return super().seek(max([super().seek(0, whence), *ends]) + offset)
        return super().seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's length. Return it."""
        try:
            return self.tell() if self.error else super().truncate(size)
        except OSError as error:
            self.error = error
            return self.tell()


OPEN: weakref.WeakSet[File] = weakref.WeakSet()


class File(h5py.File):
    """An HDF5 file open for writing, mode "w" or "r+". `flush` and `close` raise the disk's `OSError`."""

    def __init__(self, path: Path, mode: str, **options: Any):
        self.disk = Disk(path, mode + "+" if mode == "w" else mode)
        super().__init__(self.disk, mode, **options)
        OPEN.add(self)

    def flush(self) -> None:
        """Give everything to the system."""
        super().flush()
        self._check()

    def close(self) -> None:
        """Close the file and everything of it that is open."""
        super().close()
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
