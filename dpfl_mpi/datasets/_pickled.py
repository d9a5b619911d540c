"""What a pickle holds, read without executing anything: numbers, texts, lists, dicts and NumPy arrays; whatever else is refused.

Python's own `pickle` calls whatever a file names. Here the file is a list of opcodes (`pickletools.genops` splits it and runs none), and the few
that describe data are carried out on plain lists and dicts. A name is never imported: of four names of NumPy it is known what they stand for.
"""

from __future__ import annotations

import math
import pickletools
import re
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dpfl_mpi.errors import UserError

MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
NAMES = {
    **{(module, "_reconstruct"): "array" for module in MULTIARRAY},
    **{(module, "scalar"): "scalar" for module in MULTIARRAY},
    **{(module, "_frombuffer"): "buffer" for module in NUMERIC},
    ("numpy", "ndarray"): "type",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",  # bytes, in protocols before 3
}
PUSHED = {  # opcodes whose argument is the value
    "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "STRING", "BINSTRING", "SHORT_BINSTRING",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
DTYPE = re.compile(r"[biuf][1248]|[US]\d{1,6}|O8?")  # plain numbers, texts, and lists of objects


class Name(NamedTuple):
    """A function or type that a pickle names, by what it stands for; it is not there itself."""

    stands_for: str


class Dtype:
    """A NumPy type that a pickle describes."""

    def __init__(self, code: str):
        self.code, self.order = code, "<"

    def real(self) -> np.dtype[Any]:
        """Return the type, one of `DTYPE`."""
        if not DTYPE.fullmatch(self.code) or self.order not in ("<", ">", "|", "="):
            raise Refused(f"an array of the type {self.code}")
        return np.dtype(self.order.replace("|", "") + self.code)


class Array:
    """A NumPy array that a pickle describes: shape, type, order, and bytes or a list of objects."""

    def __init__(self) -> None:
        self.state: Any = None

    def real(self) -> Any:
        """Return the array."""
        if not (isinstance(self.state, tuple) and len(self.state) == 5 and isinstance(self.state[2], Dtype)):
            raise Refused("an array without its state")
        _, shape, dtype, columns, data = self.state
        return array(shape, dtype, "F" if columns is True else "C", data)


class Refused(Exception):
    """Something in a pickle that is not data."""


def unpickled(file: BinaryIO, where: str) -> Any:
    """Return what the pickle holds that starts here in a file.

    Raises:
        UserError: it is damaged, or holds anything but data; nothing of it was executed.
    """
    try:
        return finished(value_of(file))
    except Refused as refused:
        raise UserError(
            f"{where} holds a pickle with {refused}; of pickles only numbers, texts, lists, dicts and NumPy arrays are read (nothing was executed)"
        ) from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError):
        raise UserError(f"{where} holds a damaged pickle (nothing of it was executed)") from None


def value_of(file: BinaryIO) -> Any:
    """Return the value that the opcodes describe; arrays and types are still descriptions."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def top() -> list[Any]:
        """Return what was pushed since the last mark, taken off the stack."""
        start = marks.pop()
        out = stack[start:]
        del stack[start:]
        return out

    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        op = opcode.name
        if op in ("PROTO", "FRAME"):
            continue
        if op == "STOP":
            return stack.pop()
        if op in PUSHED:
            stack.append(argument)
        elif op in CONSTANTS:
            stack.append(CONSTANTS[op])
        elif op in EMPTY:
            stack.append(EMPTY[op]())
        elif op == "MARK":
            marks.append(len(stack))
        elif op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            top()
        elif op in ("TUPLE", "LIST"):
            stack.append((tuple if op == "TUPLE" else list)(top()))
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack[-int(op[-1]) :] = [tuple(stack[-int(op[-1]) :])]
        elif op == "DICT":
            pairs = top()
            stack.append(dict(zip(map(plain_key, pairs[::2]), pairs[1::2], strict=True)))
        elif op in ("APPEND", "APPENDS"):
            values = top() if op == "APPENDS" else [stack.pop()]
            of_kind(stack[-1], list).extend(values)
        elif op in ("SETITEM", "SETITEMS"):
            pairs = top() if op == "SETITEMS" else [stack.pop(-2), stack.pop()]
            of_kind(stack[-1], dict).update(zip(map(plain_key, pairs[::2]), pairs[1::2], strict=True))
        elif op in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument)] = stack[-1]
        elif op == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif op in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument)])
        elif op == "GLOBAL":
            stack.append(named(*argument.split(" ", 1)))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(named(module, name))
        elif op == "REDUCE":
            arguments, name = stack.pop(), stack.pop()
            stack.append(called(name, arguments))
        elif op == "BUILD":
            state = stack.pop()
            built(stack[-1], state)
        else:
            raise Refused(f"the instruction {op}")
    raise ValueError


def of_kind(value: Any, kind: type) -> Any:
    """Return a value that must be of this very type."""
    if type(value) is not kind:
        raise ValueError
    return value


def plain_key(key: Any) -> Any:
    """Return a key of a dict, which must be a number or a text."""
    return key if isinstance(key, str | bytes | int | float | np.generic) else of_kind(key, str)


def named(module: Any, name: Any) -> Name:
    """Return what a name stands for."""
    if (module, name) not in NAMES:
        raise Refused(f"the name {module}.{name}")
    return Name(NAMES[module, name])


def called(name: Any, arguments: Any) -> Any:
    """Return what a call describes."""
    kind, given = of_kind(name, Name).stands_for, of_kind(arguments, tuple)
    if kind == "array":
        return Array()
    if kind == "dtype":
        return Dtype(of_kind(given[0], str))
    if kind == "encode" and given[1] == "latin1":
        return of_kind(given[0], str).encode("latin1")
    if kind == "scalar":
        return array((), given[0], "C", given[1])[()]
    if kind == "buffer":
        data, dtype, shape, order = given
        return array(shape, dtype, order, bytes(data))
    raise Refused(f"a call of {kind}")


def built(what: Any, state: Any) -> None:
    """Give a description its state: the byte order of a type, all of an array."""
    if isinstance(what, Array):
        what.state = state
    elif isinstance(what, Dtype):
        what.order = of_kind(of_kind(state, tuple)[1], str)
        if state[2] is not None or state[3] is not None:
            raise Refused("an array of records")
    else:
        raise Refused(f"a state of a {type(what).__name__}")


def array(shape: Any, dtype: Any, order: Any, data: Any) -> Any:
    """Return an array of bytes; of objects a list of lists, with the array's axes, each object still as described."""
    sizes = [of_kind(n, int) for n in of_kind(shape, tuple)]
    real = of_kind(dtype, Dtype).real()
    if min(sizes, default=0) < 0 or order not in ("C", "F"):
        raise ValueError
    if real.kind == "O":
        objects = of_kind(data, list)
        if len(objects) != math.prod(sizes) or (order == "F" and len(sizes) > 1):
            raise ValueError
        for n in reversed(sizes[1:]):
            objects = [objects[i : i + n] for i in range(0, len(objects), n)]
        return objects if sizes else objects[0]
    if isinstance(data, str):
        data = data.encode("latin1")
    if len(data) != math.prod(sizes) * real.itemsize:
        raise ValueError
    return np.frombuffer(data, real).reshape(sizes, order=order)


def finished(value: Any, done: dict[int, Any] | None = None) -> Any:
    """Return a value with all descriptions inside it made real; what is there twice is made once (`done`, by identity)."""
    done = {} if done is None else done
    if isinstance(value, Name | Dtype):
        raise Refused("a name that is no data")
    if not isinstance(value, Array | list | tuple | dict):
        return value
    if id(value) not in done:
        if isinstance(value, Array):
            out = finished(value.real(), done)
        elif isinstance(value, dict):
            out = {k: finished(v, done) for k, v in value.items()}
        else:
            out = type(value)(finished(v, done) for v in value)
        done[id(value)] = value, out  # value too: an id is given anew where its object is gone
    return done[id(value)][1]
