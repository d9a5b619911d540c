"""A function or class of a notebook's cell or of a script as the text of a file, with what it uses: own functions and classes, imports, constants."""

import ast
import builtins
import inspect
import linecache
import math
import symtable
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins.code import INSTALLED, PACKAGE, top


def text_of(flag: str, given: Any) -> str:
    """Return a file that defines a function or class by its name.

    `UserError`, whose sentence begins with `flag`: the source is not known, or it uses what a file cannot say, such as an array of another cell.
    """
    parts: dict[str, tuple[Any, str]] = {}
    add(flag, given.__name__, given, parts)
    return "\n\n".join(text for _, text in parts.values())


def add(flag: str, name: str, value: Any, parts: dict[str, tuple[Any, str]]) -> None:
    """Add to `parts` a value by its name, and the text that defines it, after what that needs."""
    text = imported(name, value) or constant(name, value)
    if name in parts:
        held, known_text = parts[name]
        if held is not value and text != known_text:
            raise UserError(f"{flag}, which uses two things that are called {name}; rename one of them")
        return
    parts[name] = value, ""  # a function may call itself
    if not text:
        value = inspect.unwrap(value)  # of a decorated function
        text, closed = source(flag, value), getattr(getattr(value, "__code__", None), "co_freevars", ())
        known = value.__globals__ if hasattr(value, "__globals__") else vars(sys.modules[value.__module__])
        for used in dict.fromkeys(names(symtable.symtable(text, name, "exec"))):
            if used in known and used not in closed and not used.startswith("__"):
                add(flag, used, known[used], parts)
            elif used in closed or (not hasattr(builtins, used) and used not in parts):
                raise UserError(f"{flag}, which uses {used}; that is not defined where {name} is")
        text += f"\n\n{name} = {value.__name__}" * (name != value.__name__)
    parts[name] = parts.pop(name)[0], text  # behind what it needs


def imported(name: str, value: Any) -> str:
    """Return the import of a module, or of a function or class of one, that is installed; else ""."""
    module: str = (value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")) or ""
    first = sys.modules.get(top(module))
    place = Path(getattr(first, "__file__", None) or "").parts
    known = top(module) in {PACKAGE, *sys.stdlib_module_names} or {*INSTALLED} & {*place}
    installed = first and known and module != "__main__"  # which may say that it is the launcher of a notebook's kernel
    if not installed or isinstance(value, ModuleType):
        return f"import {module} as {name}" if installed else ""
    its = getattr(value, "__qualname__", "")
    return f"from {module} import {its} as {name}" if its.isidentifier() else ""


def constant(name: str, value: Any) -> str:
    """Return the assignment of numbers, texts, and lists and the like of them; else ""."""
    if isinstance(value, float):  # NumPy's, too
        return f"{name} = {float(value)!r}" if math.isfinite(value) else f'{name} = float("{value}")'
    try:
        plain = isinstance(value, type(ast.literal_eval(repr(value))))
    except (ValueError, SyntaxError):
        plain = False
    if not plain:
        return ""
    tree = ast.parse(repr(value), mode="eval")
    for node in (sets := [node for node in ast.walk(tree) if isinstance(node, ast.Set)]):
        node.elts.sort(key=ast.unparse)  # a set of texts is in another order in each process
    return f"{name} = {ast.unparse(tree) if sets else repr(value)}"


def source(flag: str, value: Any) -> str:
    """Return the lines of a function or class, decorators included, out of the cell or file that Python compiled it from."""
    name = getattr(value, "__name__", "")
    for made in (value, *(vars(value).values() if isinstance(value, type) else ())):
        if (code := getattr(made, "__code__", None)) is None:
            continue
        lines = linecache.getlines(code.co_filename)
        for node in reversed([*ast.walk(ast.parse("".join(lines)))]):  # the innermost of a name
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if start <= code.co_firstlineno <= (node.end_lineno or 0):
                    return textwrap.dedent("".join(lines[start - 1 : node.end_lineno])).rstrip()
    what = f"the {type(value).__name__} {name}".strip()
    allowed = "functions and classes of a cell or a file, what is installed, numbers and texts"
    raise UserError(f"{flag}, which uses {what}; allowed are {allowed}: write a file otherwise (%%writefile)")


def names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that a source reads, in all of its scopes."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and symbol.is_global():
            yield symbol.get_name()
    for child in table.get_children():
        yield from names(child)
