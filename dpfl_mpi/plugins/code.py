"""Source code of one's own as a value: a file, what it imports from its own folder, and the hash of all of it; and its execution, from those very bytes.
Executed, each code is a package of its own in `sys.modules`, whose name has the hash: an edited file is executed anew, and two folders may both have
a `helper.py`. Neither `sys.path` nor the bytecode beside a file, which is told from an older one by whole seconds, plays a part.
"""

import ast
import builtins
import contextlib
import hashlib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dpfl_mpi.errors import LONGEST, UserError

PACKAGE = "dpfl_mpi"  # never part of somebody's code, although it may lie in the same folder
INSTALLED = ("site-packages", "dist-packages")  # folders of many packages that do not belong together


class Source(NamedTuple):
    """A module: its file and the bytes of that, or a folder without an `__init__.py`, which has none."""

    path: Path
    data: bytes | None

    @property
    def is_package(self) -> bool:
        return self.data is None or self.path.name == "__init__.py"


class Code(NamedTuple):
    """A module, what it imports from its folder, by name from there on ("mine", "helper", "package.part"), what of it is meant, the files it reads."""

    start: str
    modules: dict[str, Source]
    attribute: str  # the object that MODULE:OBJECT names, or ""
    files: dict[str, str]  # SHA-256 by name

    @property
    def sha256(self) -> str:
        """The hash of all modules and files by their names; that of the first module does not count, so it may be renamed."""
        hashes = {n: hashlib.sha256(m.data or b"").hexdigest() for n, m in self.modules.items()}
        parts = [["" if n == self.start else n, sha] for n, sha in hashes.items()]
        parts += [[f"file {name}", sha] for name, sha in self.files.items()]
        return hashlib.sha256(json.dumps([self.attribute, *sorted(parts)]).encode()).hexdigest()


def top(name: str) -> str:
    """Return the outermost package of a module, or the module."""
    return name.partition(".")[0]


def in_path(flag: str, path: Path) -> Code:
    """Return the code of a file; `UserError`, beginning with `flag`, where there is none, or a module does not compile."""
    if not path.is_file():
        raise UserError(f"{flag}; there is no such file")
    path = path.resolve()
    folder, parts = path.parent, [] if path.stem == "__init__" else [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if (found := locate(folder, name := ".".join(parts))) is None or found.path != path:
        instead = f"takes {found.path} in its place" if found else "cannot import it"
        raise UserError(f"{flag}, which is {path}; by the name {name} Python {instead}: rename it")
    return collect(flag, folder, name)


def in_module(flag: str, target: str) -> Code:
    """Return the code of `MODULE` or `MODULE:OBJECT`, as `in_path` does; of an installed package only what lies in that package."""
    name, _, attribute = target.partition(":")
    try:
        spec = find_spec(top(name))
    except (ImportError, ValueError):
        spec = None
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    if not places or not places[0] or locate(Path(places[0]).parent, name) is None:
        raise UserError(f"{flag}; Python finds no module {name}")
    return collect(flag, Path(places[0]).parent, name, attribute)


def collect(flag: str, folder: Path, start: str, attribute: str = "") -> Code:
    """Return a module of a folder with all that it imports from there."""
    todo, modules, files = [start], dict[str, Source](), dict[str, str]()
    while todo:
        name = todo.pop()
        foreign = top(name) != top(start) and (top(name) == PACKAGE or folder.name in INSTALLED)
        source = None if foreign or name in modules else locate(folder, name)
        if source is not None:
            modules[name] = source
            tree = parsed(flag, source)
            todo += [*above(name), *imported(name, source, tree)]
            files |= listed(flag, source, tree) if name == start else {}
    for name in [*modules]:
        for package in above(name):
            modules.setdefault(package, Source(folder.joinpath(*package.split(".")), None))
    return Code(start, dict(sorted(modules.items())), attribute, files)


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


def parsed(flag: str, source: Source) -> ast.Module:
    try:
        return ast.parse(source.data or b"" if source.path.suffix == ".py" else b"", source.path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: of what nests too deep
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{flag}, which does not compile: {what} ({source.path}{line})") from None


def listed(flag: str, source: Source, tree: ast.Module) -> dict[str, str]:
    """Return the SHA-256 of each file that a module lists in `FILES`, by name; the bytes are not kept: they may be many."""
    out = {}
    for node in (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if "FILES" not in (getattr(target, "id", "") for target in targets):
            continue
        names: Any = None
        with contextlib.suppress(ValueError, TypeError):
            names = ast.literal_eval(node.value)  # type: ignore[arg-type]
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise UserError(f'{flag}; FILES must be a list of names as it stands, such as ["base.pt"] ({source.path})')
        for name in names:
            path = source.path.parent / name
            if not path.is_file():
                raise UserError(f"{flag}, whose FILES name {name}; there is no such file ({path})")
            with path.open("rb") as file:
                out[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return out


def imported(name: str, source: Source, tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module's import statements might mean; an object of a module looks like a module, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # one dot is the package that the module is in, which is the module itself where it is a package
            parts = name.split(".")
            base = parts[: len(parts) - node.level + source.is_package] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, *last]) for last in ([], *([alias.name] for alias in node.names)))


# execution --------------------------------------------------------------------------------------------------------------
class Own(MetaPathFinder, Loader):
    """Finds the modules of a code below a package whose name has its hash, and executes them from the bytes that were read."""

    def __init__(self, code: Code):
        # a file of the same content under another name is executed under that name
        self.package = f"dpfl_mpi_own_{hashlib.sha256(f'{code.sha256} {code.start}'.encode()).hexdigest()[:16]}"
        self.modules = {f"{self.package}.{name}": source for name, source in code.modules.items()}
        self.builtins = vars(builtins) | {"__import__": self.import_}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        source = self.modules.get(name)
        if name == self.package or (source and source.data is None):
            return ModuleSpec(name, None, is_package=True)
        if source is None or source.path.suffix != ".py":
            return source and spec_from_file_location(name, source.path)
        places = [str(source.path.parent)] if source.is_package else None
        return spec_from_file_location(name, source.path, loader=self, submodule_search_locations=places)

    def exec_module(self, module: ModuleType) -> None:
        source = self.modules[module.__name__]
        vars(module)["__builtins__"] = self.builtins
        exec(compile(source.data or b"", source.path, "exec", dont_inherit=True), vars(module))

    def import_(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        """Import as Python does, but `import helper` in these modules means the helper of this code."""
        first = f"{self.package}.{top(name)}"
        if level or first not in self.modules:
            return __import__(name, globals, locals, fromlist, level)
        found = __import__(f"{self.package}.{name}", globals, locals, fromlist)
        return found if fromlist else sys.modules[first]  # `import a.b` names a


def execute(flag: str, code: Code) -> tuple[ModuleType, Any]:
    """Return the module, and the object of it that is meant or the module again; it is executed at most once per content."""
    own = Own(code)
    if own.package not in sys.modules:
        sys.meta_path.insert(0, own)  # Python's own finder would take a package's modules from the disk
    try:
        module = importlib.import_module(f"{own.package}.{code.start}")
    except (Exception, SystemExit) as error:
        forget_modules(own.package)  # half executed
        raise UserError(f"{flag}, which fails: {failure(error, code)}") from None
    if {*getattr(module, "FILES", ())} - {*code.files}:
        raise UserError(f'{flag}; FILES must be a list of names as it stands, such as ["base.pt"] ({module.__file__})')
    found = getattr(module, code.attribute, None) if code.attribute else module
    if found is None:
        raise UserError(f"{flag}; the module {code.start} has no {code.attribute} ({module.__file__})")
    return module, found


def forget_modules(package: str = "") -> None:
    """Forget what was executed of a code, whose package this is, or of all."""
    gone = {finder.package for finder in sys.meta_path if isinstance(finder, Own) and package in ("", finder.package)}
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "package", "") not in gone]
    for name in [n for n in sys.modules if top(n) in gone]:
        del sys.modules[name]


def failure(error: BaseException, code: Code) -> str:
    """Return the type and the message of an error as one line, and the innermost file and line of the code that raised it."""
    text = re.sub(r"dpfl_mpi_own_[0-9a-f]{16}\.?", "", str(error))
    words = " ".join(text.split())[:LONGEST] or "no message"
    files = {str(source.path) for source in code.modules.values()}
    lines = [f"{f.filename}, line {f.lineno}" for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f"{type(error).__name__}: {words} ({lines[-1] if lines else code.modules[code.start].path})"
