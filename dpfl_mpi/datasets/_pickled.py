"""What a pickle holds: numbers, texts, lists, dicts and NumPy arrays. Nothing that it names is called but the six names below."""

import math
import pickle
import pickletools
import re
from io import BytesIO
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import UNREADABLE

DTYPE = re.compile(r"[biuf][1248]|[US][1-9]\d{0,5}|O8?")  # plain numbers, texts, and lists of objects
ONLY = "of pickles only numbers, texts, lists, dicts and NumPy arrays are read (nothing was executed)"


class Refused(Exception):
    """Something in a pickle that is not data."""


class Type:
    """A NumPy type as a pickle describes it. NumPy's own believes what it is told of sizes and fields."""

    def __init__(self, code: str, *_: object):
        if not DTYPE.fullmatch(code):
            raise Refused(f"an array of the type {code}")
        self.real = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.real = self.real.newbyteorder(state[1])


class Array(np.ndarray):
    """An array as a pickle describes it. NumPy's own reads as many objects as the shape says, however many there are."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns, data = state
        if min(shape, default=0) < 0 or (kind.real.hasobject and len(data) != math.prod(shape)):
            raise ValueError
        super().__setstate__((1, shape, kind.real, columns, data))  # type: ignore[misc]


KNOWN = {
    "_reconstruct": lambda *_: Array(0),  # its state follows
    "_frombuffer": lambda data, kind, shape, order: np.frombuffer(data, kind.real).reshape(shape, order=order),
    "scalar": lambda kind, data: np.frombuffer(data, kind.real).reshape(())[()],
    "dtype": Type,
    "ndarray": None,
}


class Plain(pickle.Unpickler):
    """Python's reader of pickles, to which all names but those of NumPy's arrays are unknown."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        if (module, name) == ("_codecs", "encode"):  # bytes, in protocols before 3
            return str.encode
        if name in KNOWN and re.fullmatch(r"numpy(\._?core\.(multiarray|numeric))?", module):
            return KNOWN[name]
        raise Refused(f"the name {module}.{name}")


def unpickled(data: bytes, where: str) -> Any:
    """Return what a pickle holds.

    Raises:
        UserError: it is damaged, or holds anything but data; nothing of it was executed.
    """
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):  # sizes fit, and no row of a table is beyond the file
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument) > len(data):
                raise ValueError
        value = Plain(BytesIO(data)).load()
        if callable(value) or isinstance(value, Type):
            raise Refused("a name that is no data")
    except Refused as refused:
        raise UserError(f"{where} holds a pickle with {refused}; {ONLY}") from None
    except (*UNREADABLE, pickle.UnpicklingError):
        raise UserError(f"{where} holds a damaged pickle (nothing of it was executed)") from None
    return value
