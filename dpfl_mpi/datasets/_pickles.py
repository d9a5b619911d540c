"""Read NumPy's files and pickles that hold data alone. Nothing that a pickle names is executed."""

import pickle
import re
import tokenize
from io import BytesIO
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import UNREADABLE, refused_as

# what makes arrays and their numbers, by the names in a pickle
MAKERS: Any = (np.ones(1).__reduce__(), np.ones(1).__reduce_ex__(5), np.float64(1).__reduce__())
ALLOWED: dict[str, Any] = {"dtype": np.dtype, "ndarray": np.ndarray}
ALLOWED |= {maker.__name__: maker for maker, *_ in MAKERS}
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
        value = Plain(BytesIO(data)).load()
        if callable(value):
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


class Plain(pickle.Unpickler):
    """Python's reader of pickles, which knows no names but those of NumPy's arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # bytes, in protocols before 3
            return str.encode
        if name in ALLOWED and re.fullmatch(r"numpy(\._?core\.(multiarray|numeric))?", module):
            return ALLOWED[name]
        raise Refused(f"the name {module}.{name}")
