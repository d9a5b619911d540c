"""Read NumPy's files and pickles that hold data alone. Nothing that a pickle names is executed."""

import math
import pickle
import pickletools
import re
import tokenize
from io import BytesIO
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import UNREADABLE, refused_as

DTYPE = re.compile(r"[biuf][1248]|[US][1-9]\d{0,5}|O8?")  # numbers, texts, lists of objects
PLAIN = "of pickles only numbers, texts, lists, dicts and NumPy arrays are read"
DAMAGED = (*UNREADABLE, SyntaxError, tokenize.TokenError)


def read_npy(where: str, data: bytes, objects: bool = False) -> Any:
    """Return the array of an npy file; with `objects` also plain data that `np.save` pickled."""
    file = BytesIO(data)
    with refused_as(f"{where} is truncated, or no array of NumPy's", DAMAGED):
        version = np.lib.format.read_magic(file)
        first = version == (1, 0)
        header = (
            np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        )
        if not header(file)[2].hasobject:
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)
    if not objects:
        raise UserError(f"{where} holds pickled objects, which are never read")
    return unpickle(file.read(), where)


def unpickle(data: bytes, where: str) -> Any:
    """Return the data of a pickle; a `UserError` if it is damaged or holds anything else."""
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):
            # an entry of the memo beyond the file's length would take gigabytes
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument) > len(data):
                raise ValueError
        value = Plain(BytesIO(data)).load()
        if callable(value) or isinstance(value, Type):
            raise Refused("a name that is no data")
    except Refused as refused:
        raise UserError(
            f"{where} holds a pickle with {refused}; {PLAIN} (nothing was executed)"
        ) from None
    except (*UNREADABLE, pickle.UnpicklingError):
        raise UserError(f"{where} holds a damaged pickle (nothing of it was executed)") from None
    return value


class Refused(Exception):
    """Something in a pickle that is not data."""


class Type:
    """A NumPy type as a pickle describes it; NumPy's own trusts any size and field."""

    def __init__(self, code: str, *_: object):
        if not DTYPE.fullmatch(code):
            raise Refused(f"an array of the type {code}")
        self.real = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.real = self.real.newbyteorder(state[1])


class Array(np.ndarray):
    """An array as a pickle describes it; NumPy's own trusts any number of objects."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns, data = state
        too_few = kind.real.hasobject and len(data) != math.prod(shape)
        if min(shape, default=0) < 0 or too_few:
            raise ValueError
        super().__setstate__((1, shape, kind.real, columns, data))  # type: ignore[misc]


def from_buffer(data: Any, kind: Type, shape: Any, order: Any) -> np.ndarray:
    return np.frombuffer(data, kind.real).reshape(shape, order=order)


def scalar(kind: Type, data: Any) -> Any:
    return np.frombuffer(data, kind.real).reshape(())[()]


ALLOWED = {
    "_reconstruct": lambda *_: Array(0),  # its state follows
    "_frombuffer": from_buffer,
    "scalar": scalar,
    "dtype": Type,
    "ndarray": None,
}


class Plain(pickle.Unpickler):
    """Python's reader of pickles, which knows no names but those of NumPy's arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # bytes, in protocols before 3
            return str.encode
        if name in ALLOWED and re.fullmatch(r"numpy(\._?core\.(multiarray|numeric))?", module):
            return ALLOWED[name]
        raise Refused(f"the name {module}.{name}")
