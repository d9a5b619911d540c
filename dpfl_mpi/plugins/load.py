"""Executing code of one's own: from the very bytes that were hashed, and apart from any other code.

Each code is a package of its own in `sys.modules`, whose name has the hash: an edited file is executed anew, two folders may both have a
`helper.py`, and neither `sys.path` nor the bytecode that lies beside a file (which is told from an older one by whole seconds) plays a part.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from types import ModuleType
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins.code import Code, Source


class Bytes(SourceLoader):
    """Executes a module from the bytes that were read; `import helper` in it means the helper beside it."""

    def __init__(self, source: Source, importer: Callable[..., Any]):
        self.source, self.importer = source, importer

    def get_filename(self, name: str) -> str:
        return str(self.source.path)

    def get_data(self, path: Any) -> bytes:
        if str(path) != str(self.source.path) or self.source.data is None:
            raise OSError(f"{path}: only the source that was read")
        return self.source.data

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": self.importer}
        super().exec_module(module)


class Own(MetaPathFinder):
    """Finds the modules of a code below a package whose name has its hash."""

    def __init__(self, code: Code):
        # a file of the same content under another name is executed under that name
        digest = hashlib.sha256(f"{code.sha256} {code.start}".encode()).hexdigest()
        self.code, self.package = code, f"dpfl_mpi_own_{digest[:16]}"
        self.tops = {name.partition(".")[0] for name in code.modules}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return how to load a module of this code, None for any other."""
        if name == self.package:
            return spec_from_loader(name, None, is_package=True)
        source = self.code.modules.get(name.removeprefix(f"{self.package}."))
        if source is None or not name.startswith(f"{self.package}."):
            return None
        if source.data is None:  # a folder
            return spec_from_loader(name, None, is_package=True)
        if source.path.suffix != ".py":
            return spec_from_file_location(name, source.path)
        places = [str(source.path.parent)] if source.is_package else None
        loader = Bytes(source, self.import_here)
        return spec_from_file_location(name, source.path, loader=loader, submodule_search_locations=places)

    def import_here(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        """Import as Python does (`__import__`), a module of this code before any other of the same name."""
        top = name.partition(".")[0]
        if level or top not in self.tops:
            return builtins.__import__(name, globals, locals, fromlist, level)
        own = f"{self.package}.{name}"
        if fromlist:
            return builtins.__import__(own, globals, locals, fromlist, 0)
        importlib.import_module(own)
        return sys.modules[f"{self.package}.{top}"]


def execute(flag: str, code: Code) -> tuple[ModuleType, Any]:
    """Return the module, and the object of it that is meant or the module again; it is executed at most once per content.

    Raises:
        UserError: it raises, or there is no such object; the sentence names the file and the line.
    """
    own = Own(code)
    if own.package not in sys.modules:
        sys.meta_path.insert(0, own)
    try:
        module = importlib.import_module(f"{own.package}.{code.start}")
    except (Exception, SystemExit) as error:
        for name in [n for n in sys.modules if f"{n}.".startswith(f"{own.package}.")]:
            del sys.modules[name]  # half executed
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "package", "") != own.package]
        raise UserError(f"{flag}, which fails: {failure(error, code)}") from None
    if not code.attribute:
        return module, module
    found = getattr(module, code.attribute, None)
    if found is None:
        raise UserError(f"{flag}; the module {code.start} has no {code.attribute} ({module.__file__})")
    return module, found


def failure(error: BaseException, code: Code) -> str:
    """Return the type and the message of an error as one line, and where in the code it was raised."""
    return f"{type(error).__name__}: {words(error)} ({place(error, code)})"


def words(error: BaseException) -> str:
    """Return the message of an error as one line."""
    return " ".join(re.sub(r"dpfl_mpi_own_[0-9a-f]{16}\.?", "", str(error)).split()) or "no message"


def place(error: BaseException, code: Code) -> str:
    """Return the file and the line of the code that raised, the innermost."""
    files = {str(source.path) for source in code.modules.values()}
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f"{lines[-1].filename}, line {lines[-1].lineno}" if lines else str(code.modules[code.start].path)
