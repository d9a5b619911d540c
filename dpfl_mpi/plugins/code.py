"""Source code of one's own as a value: a file, what it imports from its own folder, and the hash of all of it. Nothing is executed.

The **folder** of a file is the one it lies in; of a file in a package (folders with an `__init__.py`) the one that the outermost package lies in.
What belongs to the code is found by reading the import statements, from file to file, wherever they stand: an import inside a function
counts although it has not happened yet, which `sys.modules` would not show. Not seen, and so not part of the hash: modules that are imported
by a text (`importlib.import_module(name)`), installed packages, and files that the code reads.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from dpfl_mpi.errors import UserError

PACKAGE = "dpfl_mpi"  # never part of somebody's code, although it may lie in the same folder
INSTALLED = ("site-packages", "dist-packages")  # folders of many packages that do not belong together


@dataclass(frozen=True)
class Source:
    """A module of the code. `data` is None for a folder that is a package without an `__init__.py`."""

    path: Path
    data: bytes | None
    is_package: bool


@dataclass(frozen=True)
class Code:
    """A module, what it imports from its folder, by name from there on ("mine", "helper", "package.part"), and what of it is meant."""

    start: str
    modules: dict[str, Source]
    attribute: str = ""  # the object that MODULE:OBJECT names

    @property
    def package(self) -> str:
        """The outermost package of the module, or the module."""
        return self.start.partition(".")[0]

    @property
    def sha256(self) -> str:
        """The hash of all modules by their names; that of the first module does not count, so a file may be renamed."""
        parts = [
            ["" if n == self.start else n, hashlib.sha256(m.data or b"").hexdigest()] for n, m in self.modules.items()
        ]
        return hashlib.sha256(json.dumps([self.attribute, *sorted(parts)]).encode()).hexdigest()


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
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or []) if spec else []
    origin = Path(places[0]) if places else Path(spec.origin) if spec and spec.origin else None
    if origin is None or locate(origin.parent, name) is None:
        raise UserError(f"{flag}; Python finds no module {name}")
    return collect(flag, origin.parent, name, attribute)


def collect(flag: str, folder: Path, start: str, attribute: str = "") -> Code:
    """Return a module of a folder with all that it imports from there."""
    todo, modules = [start], dict[str, Source]()
    alone = start.partition(".")[0] if folder.name in INSTALLED else ""
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if name in modules or top == PACKAGE != start.partition(".")[0] or (alone and top != alone):
            continue
        source = locate(folder, name)
        if source is None:
            continue
        modules[name] = source
        if "." in name:
            todo.append(name.rpartition(".")[0])  # Python executes a package before its modules
        if source.data is not None and source.path.suffix == ".py":
            todo += imported(flag, name, source)
    return Code(start, dict(sorted(modules.items())), attribute)


def locate(folder: Path, name: str) -> Source | None:
    """Return a module by its name from a folder on, in Python's order: a package, a compiled module, a file, a bare folder."""
    base = folder.joinpath(*name.split("."))
    init = base / "__init__.py"
    if init.is_file():
        return Source(init, init.read_bytes(), True)
    for suffix in (*EXTENSION_SUFFIXES, ".py"):
        path = base.with_name(base.name + suffix)
        if path.is_file():
            return Source(path, path.read_bytes(), False)
    return Source(base, None, True) if base.is_dir() and not elsewhere(name) else None


def elsewhere(name: str) -> bool:
    """Return whether Python finds a file for a top-level name: that goes before a bare folder, such as the `wandb/` that wandb makes."""
    try:
        spec = importlib.util.find_spec(name) if "." not in name else None
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def imported(flag: str, name: str, source: Source) -> Iterator[str]:
    """Yield the names that a module's import statements might mean; an object of a module looks like a module, too.

    Raises:
        UserError: the module does not compile.
    """
    assert source.data is not None
    try:
        tree = ast.parse(source.data, source.path)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{flag}, which does not compile: {what} ({source.path}{line})") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # one dot is the package that the module is in, which is the module itself where it is a package
            above = name.split(".")[: len(name.split(".")) - node.level + source.is_package] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (b for b in [base] if b)
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)
