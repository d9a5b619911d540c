"""Reads files that somebody else may have written, damaged or replaced: all of them, and only here.

Whatever is wrong is an `Unreadable`: one sentence that names the file and, in HDF5, the array. Only
regular files are read, as a pipe or a device may never end. An `Hdf5` file gives arrays only with
the type, shape and range that the caller asks for, and only if they lie in the file itself.
"""

import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.files import reason

if TYPE_CHECKING:
    import h5py

# what Python's and HDF5's readers raise on damaged input
UNREADABLE = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError),
    *(AssertionError, RuntimeError, MemoryError, struct.error, zlib.error),
)
Size = int | None | range  # of an axis: exactly this, any (None), or one in the range
Shape = Sequence[Size] | None  # the sizes of all axes; None: any shape


class Unreadable(UserError):
    """A file that cannot be read, or is damaged, in a sentence that others may quote."""


@contextmanager
def refused_as(sentence: str, errors: tuple[type[Exception], ...] = UNREADABLE) -> Iterator[None]:
    """Raise `Unreadable` with this sentence if the block raises one of the errors."""
    try:
        yield
    except errors:
        raise Unreadable(sentence) from None


def encodable(text: str) -> bool:
    """Return whether a text can be stored as UTF-8; a file name of other bytes cannot."""
    return text.encode(errors="ignore").decode() == text


def memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def open_regular(path: Path) -> io.BufferedReader:
    """Return a regular file open for reading; a pipe, a device or a folder is refused at once."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise Unreadable(f"{path} is not a regular file, but a folder, a pipe or a device")
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise Unreadable(f"{path} cannot be read: {reason(error)}") from None


def read_bytes(path: Path, last: int | None = None) -> bytes:
    """Return a file's bytes, or at most so many `last` ones."""
    with open_regular(path) as file, refused_as(f"{path} cannot be read to its end"):
        if last is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last))
        return file.read(last)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open_regular(path) as file, refused_as(f"{path} cannot be read to its end"):
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path) -> str:
    """Return a file's text, which must be UTF-8."""
    data = read_bytes(path)
    with refused_as(f"{path} is not a text file in UTF-8"):
        return data.decode()


def read_json(path: Path) -> Any:
    data = read_bytes(path)
    with refused_as(f"{path} is not a JSON file, or it is damaged"):
        return json.loads(data)


class Hdf5(AbstractContextManager["Hdf5"]):
    """An HDF5 file open for reading. Each method checks what it reads."""

    def __init__(self, path: Path, what: str):
        """Open the file. Errors say `what` it should be, such as "a result of dpfl_mpi"."""
        import h5py

        # soft and external links lead out of the file; `visit` stops at the first name returned
        def not_hard(name: bytes, link: Any) -> bytes | None:
            return None if link.type == h5py.h5l.TYPE_HARD else name

        self.path = path
        open_regular(path).close()
        with refused_as(f"{path} is not {what}, or it is damaged"):
            try:
                self.file: h5py.File = h5py.File(path, "r", locking=False)
            except OSError as error:  # open already in this process, as in a notebook
                if "locking flag" not in str(error):
                    raise
                self.file = h5py.File(path, "r")
            linked = self.file.id.links.visit(not_hard, info=True)
        if linked:
            self.file.close()
            raise Unreadable(f"{path} is damaged: {linked.decode()} leads to another place")

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def damaged(self, name: str, why: str = "cannot be read") -> UserError:
        """Return the error for a damaged array or attribute, or one read from a closed file."""
        if not self.file:
            return UserError(f"{self.path} is closed, so nothing is read from it; open it again")
        return Unreadable(f"{self.path} is damaged: {name} {why}")

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Raise the error `damaged` if the block fails to read this array or attribute."""
        try:
            yield
        except UNREADABLE:
            raise self.damaged(name) from None

    def __contains__(self, name: str) -> bool:
        with self.reading(name):
            return name in self.file

    def names(self) -> list[str]:
        """Return the names of all arrays."""
        found: list[str] = []
        with self.reading("its list of arrays"):
            self.file.visit(found.append)
            return [name for name in found if hasattr(self.file[name], "shape")]

    def dataset(self, name: str, kinds: str, shape: Shape = None) -> "h5py.Dataset":
        """Return an array that is not read yet, to be read in a block `reading`.

        `kinds` are NumPy's letters of the types that are allowed, of which "O" is any text.
        """
        import h5py

        with self.reading(name):
            item = self.file.get(name)
            if not isinstance(item, h5py.Dataset) or item.is_virtual or item.external:
                raise self.damaged(name, "is missing, or no array of this file")
            text = h5py.check_string_dtype(item.dtype) is not None
            if item.dtype.kind not in kinds or (item.dtype.kind == "O" and not text):
                raise self.damaged(name, f"is of type {item.dtype}")
            if shape is not None and not fits(item.shape, shape):
                sizes = [f"{n[0]} to {n[-1]}" if isinstance(n, range) else str(n) for n in shape]
                wanted = ", ".join(sizes).replace("None", "any")
                raise self.damaged(name, f"has the shape {item.shape}, not ({wanted})")
            return item

    def array(
        self,
        name: str,
        kinds: str,
        shape: Shape = None,
        low: float = -inf,
        high: float = inf,
        rows: slice | None = None,
    ) -> np.ndarray:
        """Return an array, or some rows of it, whose numbers are nan or from `low` to `high`."""
        item = self.dataset(name, kinds, shape)
        with self.reading(name):
            values = np.asarray(item[rows or ()])
            if item.dtype.kind in "OS":
                values = np.asarray(item.asstr()[rows or ()], str)
        if values.dtype.kind in "iuf" and ((values < low) | (values > high)).any():
            raise self.damaged(name, f"has values beyond {low:g} to {high:g}")
        return values

    def attribute(self, name: str, kind: type, group: str = "/", default: Any = None) -> Any:
        """Return an attribute as `kind`: str, int, float or bool."""
        with self.reading(f"the attribute {name}"):
            attributes = self.file[group].attrs if group in self.file else {}
            if default is not None and name not in attributes:
                return default
            value = attributes[name]
            value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
            # the types that are stored for a `kind`; a bool is an int to Python alone
            allowed: Any = (int, float) if kind is float else kind
            if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
                raise self.damaged(f"the attribute {name}", f"is a {type(value).__name__}")
            return kind(value)

    def json(self, name: str, kind: type, group: str = "/") -> Any:
        """Return what an attribute holds as JSON text, a list or a dict (`kind`)."""
        with self.reading(f"the attribute {name}"):
            value = json.loads(self.attribute(name, str, group))
            if not isinstance(value, kind):
                raise TypeError
            return value


def fits(shape: Sequence[int], wanted: Sequence[Size]) -> bool:
    """Return whether each axis has a size that is wanted."""
    if len(shape) != len(wanted):
        return False
    pairs = zip(shape, wanted, strict=True)
    return all(n in size if isinstance(size, range) else size in (None, n) for n, size in pairs)
