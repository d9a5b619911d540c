"""Python objects as settings: a function, a class or arrays become a file that all ranks read.

`dpfl_mpi.run(method=my_round, data=(x, y))` calls `as_files`, which returns settings with paths.
The source of a function or class is written as the file of a method or a model, in a folder named
by a hash of the content: so settings with other contents are another Run.
"""

import ast
import builtins
import hashlib
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.datasets.arrays import COLUMNS
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins.code import outermost
from dpfl_mpi.prepare import packed
from dpfl_mpi.settings.command_line import run_and_job
from dpfl_mpi.storage.files import explained, write
from dpfl_mpi.storage.foreign import read_bytes, refused_as

INSTALLED = {"site-packages", "dist-packages"}  # folders of installed modules
# the file of a function round(fed, state, t); a method that declares more is written as a file
METHOD = """{imports}
from dpfl_mpi.methods import Method

METHOD = Method(title={name!r}, searches=False)


def init(fed):
    w = fed.common_row()
    fed.evaluate(w)
    return {{"client": {{"w": w}}, "shared": {{}}}}


{source}


round = {name}
"""
# the file of a model
MODEL = """{imports}

{source}


HEAD = {head!r}
build = {name}
"""
KINDS = {
    "method": "a function of fed, state and t",
    "model": "a class, or a function of shape and classes",
}
ARRAYS = "a path, (x, y), (x, y, client) and (x, y, client, group), arrays with a row per sample"


def as_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with paths in place of objects, as files in `given/` of the results."""
    # of the settings just this one: others may be objects, which `run_and_job` refuses
    results = {name: plain(value) for name, value in settings.items() if name == "results"}
    folder = Path(run_and_job(results)[1].results) / "given"
    out = dict(settings)
    for kind in KINDS:
        value = settings.get(kind)
        if isinstance(value, ModuleType):
            out[kind] = getattr(value, "__file__", None) or value.__name__
        elif inspect.isfunction(value) or inspect.isclass(value):
            out[kind] = put(folder, f"{value.__name__}.py", file_of(kind, value).encode())
        elif callable(value):
            raise UserError(f"{kind} is an object of {type(value).__name__}; give {KINDS[kind]}")
    data = settings.get("data")
    if isinstance(data, list | tuple | np.ndarray):
        sentence = f"data is a {type(data).__name__}; allowed are {ARRAYS}"
        if not isinstance(data, tuple) or len(data) > len(COLUMNS):
            raise UserError(sentence)
        with refused_as(sentence, (TypeError, ValueError)):
            arrays = arrays_of(**dict(zip(COLUMNS, data, strict=False)))
        out["data"] = put(folder, "arrays.h5", packed(arrays, "arrays", {}, own=True))
        out.setdefault("dataset", "arrays")
    return out


def plain(value: Any) -> Any:
    """Return settings, or a value of one, with paths as texts and NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def put(folder: Path, name: str, content: bytes) -> Path:
    """Return the path of the file with this content; write it if it is not there."""
    path = folder / hashlib.sha256(content).hexdigest()[:12] / name
    if not path.exists():
        with explained(f"{path} cannot be written"):
            write(path, content)
    elif read_bytes(path) != content:
        raise UserError(f"{path} was changed; remove it")
    return path


def file_of(kind: str, given: Any) -> str:
    """Return the text of a method's or model's file (`kind`), from a given function or class."""
    name = given.__name__
    if name == "<lambda>":
        raise UserError(f"{kind} is a lambda; write it as a function by def")
    source = source_of(kind, given)
    imports = "\n".join(imports_of(kind, given, source))
    form = METHOD if kind == "method" else MODEL
    return form.format(name=name, source=source, imports=imports, head=getattr(given, "HEAD", ""))


def source_of(kind: str, given: Any) -> str:
    """Return the lines of a function or class, from the cell or file that it was compiled from.

    `inspect.getsource` does not find a class of a notebook's cell; one of its methods leads to it.
    """
    for value in (given, *(vars(given).values() if inspect.isclass(given) else ())):
        code = getattr(value, "__code__", None)
        if code is None:
            continue
        lines = linecache.getlines(code.co_filename)
        for node in reversed([*ast.walk(ast.parse("".join(lines)))]):  # the innermost first
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name != given.__name__:
                continue
            # it is the definition around this code, if decorators count as part of it
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first <= code.co_firstlineno <= node.end_lineno:
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
    raise UserError(f"{kind} is {given.__name__}, whose source is not known; write a file")


def imports_of(kind: str, given: Any, source: str) -> Iterator[str]:
    """Yield imports of the installed modules that a source uses; `UserError` for other names."""
    name = given.__name__
    outside = getattr(given, "__globals__", None) or vars(sys.modules[given.__module__])
    enclosing = getattr(getattr(given, "__code__", None), "co_freevars", ())
    for used in dict.fromkeys(global_names(symtable.symtable(source, name, "exec"))):
        value = None if used in enclosing else outside.get(used)
        if isinstance(value, ModuleType) and installed(value):
            yield f"import {value.__name__} as {used}"
        elif used != name and (used in enclosing or used in outside or not hasattr(builtins, used)):
            inside = "define or import it inside, or write a file"
            raise UserError(f"{kind} is {name}, which uses {used} from outside; {inside}")


def installed(module: ModuleType) -> bool:
    """Return whether a module is installed, so that every rank can import it."""
    package = outermost(module.__name__)
    if package == "dpfl_mpi" or package in {*sys.stdlib_module_names} - {"__main__"}:
        return True
    return bool(INSTALLED & {*Path(getattr(sys.modules[package], "__file__", None) or "").parts})


def global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that a piece of source code reads, in all of its scopes."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and symbol.is_global():
            yield symbol.get_name()
    for child in table.get_children():
        yield from global_names(child)
