"""Source code of one's own as a value: a file, what it imports from its own folder, and the hash of all of it. Nothing is executed.

The **folder** of a file is the one it lies in; of a file in a package (folders with an `__init__.py`) the one that the outermost package lies in.
Import statements are read from file to file, those inside functions too. Not part of the hash: modules that are imported by a text
(`importlib.import_module(name)`), other installed packages, and files that the code reads.
"""

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

from dpfl_mpi.errors import UserError

PACKAGE = "dpfl_mpi"  # never part of somebody's code, although it may lie in the same folder
INSTALLED = ("site-packages", "dist-packages")  # folders of many packages that do not belong together


class Source(NamedTuple):
    """A module: its file and the bytes of that, or a folder without an `__init__.py`, which has none."""

    path: Path
    data: bytes | None

    @property
    def is_package(self) -> bool:
        """Whether modules may lie below it."""
        return self.data is None or self.path.name == "__init__.py"


class Code(NamedTuple):
    """A module, what it imports from its folder, by name from there on ("mine", "helper", "package.part"), and what of it is meant."""

    start: str
    modules: dict[str, Source]
    attribute: str  # the object that MODULE:OBJECT names, or ""

    @property
    def sha256(self) -> str:
        """The hash of all modules by their names; that of the first module does not count, so a file may be renamed."""
        parts = [
            ["" if n == self.start else n, hashlib.sha256(m.data or b"").hexdigest()] for n, m in self.modules.items()
        ]
        return hashlib.sha256(json.dumps([self.attribute, *sorted(parts)]).encode()).hexdigest()


def top(name: str) -> str:
    """Return the outermost package of a module, or the module."""
    return name.partition(".")[0]


def in_path(flag: str, path: Path) -> Code:
    """Return the code of a file; `flag` begins the sentence of an error.

    Raises:
        UserError: there is no such file, or a module does not compile.
    """
    if not path.is_file():
        raise UserError(f"{flag}; there is no such file")
    path = path.resolve()
    folder, parts = path.parent, [] if path.stem == "__init__" else [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return collect(flag, folder, ".".join(parts))


def in_module(flag: str, target: str) -> Code:
    """Return the code of `MODULE` or `MODULE:OBJECT`; of an installed package only what lies in that package.

    Raises:
        UserError: Python finds no such module, or one does not compile.
    """
    name, _, attribute = target.partition(":")
    try:
        spec = importlib.util.find_spec(top(name))
    except (ImportError, ValueError):
        spec = None
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    if not places or not places[0] or locate(Path(places[0]).parent, name) is None:
        raise UserError(f"{flag}; Python finds no module {name}")
    return collect(flag, Path(places[0]).parent, name, attribute)


def collect(flag: str, folder: Path, start: str, attribute: str = "") -> Code:
    """Return a module of a folder with all that it imports from there."""
    todo, modules = [start], dict[str, Source]()
    while todo:
        name = todo.pop()
        foreign = top(name) != top(start) and (top(name) == PACKAGE or folder.name in INSTALLED)
        source = None if foreign or name in modules else locate(folder, name)
        if source is not None:
            modules[name] = source
            todo += [*above(name), *imported(flag, name, source)]
    for name in [*modules]:
        for package in above(name):
            modules.setdefault(package, Source(folder.joinpath(*package.split(".")), None))
    return Code(start, dict(sorted(modules.items())), attribute)


def above(name: str) -> list[str]:
    """Return the packages that a module lies in: Python executes them before it."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def locate(folder: Path, name: str) -> Source | None:
    """Return a module by its name from a folder on, in Python's order: a package, a compiled module, a file."""
    base = folder.joinpath(*name.split("."))
    for path in (base / "__init__.py", *(base.with_name(base.name + end) for end in (*EXTENSION_SUFFIXES, ".py"))):
        if path.is_file():
            return Source(path, path.read_bytes())
    return None


def imported(flag: str, name: str, source: Source) -> Iterator[str]:
    """Yield the names that a module's import statements might mean; an object of a module looks like a module, too.

    Raises:
        UserError: the module does not compile.
    """
    if source.path.suffix != ".py":
        return
    try:
        tree = ast.parse(source.data or b"", source.path)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{flag}, which does not compile: {what} ({source.path}{line})") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # one dot is the package that the module is in, which is the module itself where it is a package
            parts = name.split(".")
            base = parts[: len(parts) - node.level + source.is_package] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, *last]) for last in ([], *([alias.name] for alias in node.names)))
