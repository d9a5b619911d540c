"""Executing code of one's own: from the very bytes that were hashed, and apart from any other code.

Each code is a package of its own in `sys.modules`, whose name has the hash: an edited file is executed anew, and two folders may both have a
`helper.py`. Neither `sys.path` nor the bytecode beside a file, which is told from an older one by whole seconds, plays a part.
"""

import ast
import hashlib
import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins.code import Code, top


class Renamed(ast.NodeTransformer):
    """Has `import helper` mean the helper of this code: the absolute imports of its own modules get its package in front."""

    def __init__(self, package: str, tops: set[str]):
        self.package, self.tops = package, tops

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if not node.level and top(node.module or "") in self.tops:
            node.module = f"{self.package}.{node.module}"
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.AST]:
        out: list[ast.AST] = []
        for alias in node.names:
            first = top(alias.name)
            if first in self.tops:
                out.append(ast.Import([ast.alias(f"{self.package}.{alias.name}", alias.asname or first)]))
                if not alias.asname:  # `import a.b` names a
                    out.append(ast.ImportFrom(self.package, [ast.alias(first)], 0))
            else:
                out.append(ast.Import([alias]))
        return [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in out]


class Own(MetaPathFinder, SourceLoader):
    """Finds the modules of a code below a package whose name has its hash, and executes them from the bytes that were read."""

    def __init__(self, code: Code):
        # a file of the same content under another name is executed under that name
        self.package = f"dpfl_mpi_own_{hashlib.sha256(f'{code.sha256} {code.start}'.encode()).hexdigest()[:16]}"
        self.modules = {f"{self.package}.{name}": source for name, source in code.modules.items()}
        self.renamed = Renamed(self.package, {top(name) for name in code.modules})

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        source = self.modules.get(name)
        if name == self.package or (source and source.data is None):
            return ModuleSpec(name, None, is_package=True)
        if source is None or source.path.suffix != ".py":
            return source and spec_from_file_location(name, source.path)
        places = [str(source.path.parent)] if source.is_package else None
        return spec_from_file_location(name, source.path, loader=self, submodule_search_locations=places)

    def get_filename(self, name: str) -> str:
        return str(self.modules[name].path)

    def get_data(self, path: Any) -> bytes:
        return next(source.data or b"" for source in self.modules.values() if str(source.path) == path)

    def source_to_code(self, data: Any, path: Any = "") -> Any:  # type: ignore[override]
        return compile(self.renamed.visit(ast.parse(data)), path, "exec", dont_inherit=True)


def execute(flag: str, code: Code) -> tuple[ModuleType, Any]:
    """Return the module, and the object of it that is meant or the module again; it is executed at most once per content.

    Raises:
        UserError: it raises, or there is no such object; the sentence names the file and the line.
    """
    own = Own(code)
    if own.package not in sys.modules:
        sys.meta_path.insert(0, own)  # Python's own finder would take a package's modules from the disk
    try:
        module = importlib.import_module(f"{own.package}.{code.start}")
    except (Exception, SystemExit) as error:
        for name in [n for n in sys.modules if top(n) == own.package]:
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
    """Return the type and the message of an error as one line, and the innermost file and line of the code that raised it."""
    words = " ".join(re.sub(r"dpfl_mpi_own_[0-9a-f]{16}\.?", "", str(error)).split()) or "no message"
    files = {str(source.path) for source in code.modules.values()}
    lines = [f"{f.filename}, line {f.lineno}" for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f"{type(error).__name__}: {words} ({lines[-1] if lines else code.modules[code.start].path})"
