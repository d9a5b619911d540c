"""Code of one's own: its files, their hash, and its execution.

The code of a file is that file, or all of its outermost package, a folder with an `__init__.py`. A
module counts by its syntax tree without docstrings, or by the `VERSION` that it declares. Each text
is imported under a name of its own. So an edited file is executed again, and there can be two files
or packages of one name.
"""

import ast
import contextlib
import hashlib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dpfl_mpi.errors import LONGEST, UserError

PACKAGE = "dpfl_mpi"  # never the user's code
OWN = "dpfl_mpi_own_"  # before the hash, in the names of modules
# hash and place of an installed MODULE when it was imported, by its outermost package
IMPORTED: dict[str, tuple[str, Path]] = {}
ROOTS: dict[str, Path] = {}  # the file or the folder of what is not installed, by `top(Code.name)`


class Code(NamedTuple):
    """A module, and all files that count as its code."""

    path: Path  # of the module
    root: Path  # the same file, or the folder of its outermost package
    module: str  # its name, from the outermost package on
    attribute: str  # the object that MODULE:OBJECT names, or ""
    installed: bool  # Python finds it by its name
    files: tuple[str, ...]  # that the module lists in FILES
    sha256: str  # of what counts
    text_sha256: str  # of all bytes: what is imported

    @property
    def name(self) -> str:
        """The name under which it is imported, one for each content and place."""
        if self.installed:
            return self.module
        _, dot, inner = self.module.partition(".")
        own = hashlib.sha256(f"{self.text_sha256} {self.root}".encode()).hexdigest()
        return f"{OWN}{own[:16]}{dot}{inner}"


def top(name: str) -> str:
    """Return the outermost package of a module, or the module."""
    return name.partition(".")[0]


def in_path(flag: str, path: Path) -> Code:
    """Return the code of a file; a `UserError` begins with `flag`."""
    if not path.is_file():
        raise UserError(f"{flag}; there is no such file")
    path = path.resolve()
    root, parts = path, [] if path.stem == "__init__" else [path.stem]
    while (root.parent / "__init__.py").is_file():
        root = root.parent
        parts.insert(0, root.name)
    code = code_of(flag, path, root, ".".join(parts))
    if root == path:
        refuse_beside(flag, path)
    return code


def in_module(flag: str, target: str) -> Code:
    """Return the code of `MODULE` or `MODULE:OBJECT`, as `in_path` does. Nothing is executed."""
    name, _, attribute = target.partition(":")
    specs = (finder.find_spec(top(name), None) for finder in sys.meta_path)  # as on disk now
    spec = next(filter(None, specs), None)
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    root = Path(places[0] or "") if places else Path()
    base = root.parent.joinpath(*name.split("."))
    endings = ["/__init__.py", ".py", *EXTENSION_SUFFIXES]
    path = next((p for end in endings if (p := Path(f"{base}{end}")).is_file()), None)
    if not places or path is None:
        raise UserError(f"{flag}; Python finds no module {name}")
    return code_of(flag, path, root, name, attribute, installed=True)


def code_of(
    flag: str, path: Path, root: Path, module: str, attribute: str = "", installed: bool = False
) -> Code:
    """Return the code of a module; its hashes have no absolute path, and no name of one file."""
    modules = [root]
    if root.is_dir():
        endings = (".py", *EXTENSION_SUFFIXES)
        modules = sorted(p for p in root.rglob("*") if p.name.endswith(endings) and p.is_file())
    files = files_of(flag, path) if path.suffix == ".py" else ()
    named = {"" if p == path else str(p.relative_to(root)): p for p in modules}
    named |= {f"file {name}": path.parent / name for name in files}

    def of(digest: Callable[[Path], str]) -> str:
        return hashed([attribute, *sorted([name, digest(p)] for name, p in named.items())])

    return Code(path, root, module, attribute, installed, files, of(meaning), of(text))


def hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def text(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def meaning(path: Path) -> str:
    """Return the hash of what a file computes: of its tree, its `VERSION`, or else of its bytes."""
    nodes = statements(path)
    values = [node.get("value", {}) for name, node in nodes if name == "VERSION"]
    declared = [value for value in values if value.get("is") == "Constant"]
    return hashed([path.name, declared] if declared else nodes) if nodes else text(path)


def statements(path: Path) -> list[tuple[str, Any]]:
    """Return the outermost statements of a module: what each defines, and its syntax tree.

    Comments, docstrings and layout do not count. Empty where it is not Python or does not compile.
    """
    out: list[tuple[str, Any]] = []
    if path.suffix == ".py":
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in bare(ast.parse(path.read_bytes())).get("body", ()):
                target = node.get("targets", [node.get("target", {})])[0]
                name = node.get("name") or target.get("id") or "what it executes"
                out.append((name.strip("'") + "()" * ("FunctionDef" in node["is"]), node))
    return out


def bare(node: Any) -> Any:
    """Return a syntax tree as dicts, lists and texts, which no version of Python writes otherwise.

    Docstrings are left out.
    """
    if isinstance(node, list):
        return [bare(each) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    kept = {name: bare(value) for name, value in fields.items() if value not in (None, [])}
    return {"is": type(node).__name__} | kept


def parts_of(code: Code) -> dict[str, str]:
    """Return the hashes of all that code defines, by names such as "pacs.py: load()"."""
    files = [code.root, *(code.path.parent / name for name in code.files)]
    if code.root.is_dir():
        files[:1] = sorted(code.root.rglob("*.py"))
    out: dict[str, str] = {}
    for path in files:
        for name, node in statements(path) or [("", text(path))]:
            part = f"{path.name}: {name}" if name else path.name
            out[part] = hashed([out.get(part), node])[:8]
    return out


def files_of(flag: str, path: Path) -> tuple[str, ...]:
    for node in parsed(flag, path).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if "FILES" not in (getattr(target, "id", "") for target in targets):
            continue
        names: Any = None
        with contextlib.suppress(ValueError, TypeError):
            names = ast.literal_eval(node.value)  # type: ignore[arg-type]
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise not_listed(flag, path)
        for name in names:
            if not (path.parent / name).is_file():
                why = f"there is no such file ({path.parent / name})"
                raise UserError(f"{flag}, whose FILES name {name}; {why}")
        return tuple(names)
    return ()


def not_listed(flag: str, path: Path) -> UserError:
    what = 'FILES must be a list of names as it stands, such as ["base.pt"]'
    return UserError(f"{flag}; {what} ({path})")


def parsed(flag: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # nested too deep
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{flag}, which does not compile: {what} ({path}{line})") from None


def refuse_beside(flag: str, path: Path) -> None:
    """Raise `UserError` where a single file imports what lies beside it: the hash has it not."""
    for node in ast.walk(parsed(flag, path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else ["."]
        for name in {top(name) for name in names} - {*sys.stdlib_module_names, PACKAGE}:
            beside = [path.with_name(f"{name}.py"), path.parent / name / "__init__.py"]
            if not name or any(file.is_file() for file in beside):
                how = "put both into a folder with an `__init__.py` and write `from . import ...`"
                line = f"({path}, line {node.lineno})"  # type: ignore[attr-defined]
                raise UserError(
                    f"{flag}, which imports {name or 'a module'} beside it {line}; {how}"
                )


# execution ----------------------------------------------------------------------------------------
class FromSource(SourceFileLoader):
    """Executes the source: Python tells old bytecode from an edited file by whole seconds."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


class Own(MetaPathFinder):
    """Finds the files and packages in `ROOTS`, and the modules of these packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in ROOTS:
            root = ROOTS[name]
            places = [str(root)] if root.is_dir() else None
            file = root / "__init__.py" if places else root
            spec = spec_from_file_location(name, file, submodule_search_locations=places)
        else:
            spec = PathFinder.find_spec(name, path) if top(name) in ROOTS else None
        if spec and isinstance(spec.loader, SourceFileLoader) and spec.origin:
            spec.loader = FromSource(name, spec.origin)
        return spec


sys.meta_path.insert(0, Own())


def execute(flag: str, code: Code) -> tuple[ModuleType, Any]:
    """Return the module, executed once per content, and the object that is meant (or it again)."""
    first = top(code.name)
    version = code.text_sha256, code.root
    if code.installed and IMPORTED.get(first, version) != version:
        forget_modules(first)
    importlib.invalidate_caches()  # a file may be younger than the list of its folder
    try:
        if not code.installed:
            ROOTS[first] = code.root
        module = importlib.import_module(code.name)
    except (Exception, SystemExit) as error:
        forget_modules(first)  # half executed
        raise UserError(f"{flag}, which fails: {failure(error, code.path, code.root)}") from None
    if code_of(flag, *code[:5]).text_sha256 != code.text_sha256:
        forget_modules(first)
        raise UserError(f"{flag}, which was edited while it was read; start again")
    if code.installed:
        IMPORTED[first] = version
    if module.__file__ and not code.path.samefile(module.__file__):
        raise UserError(f"{flag}, for which Python takes {module.__file__}: rename it")
    if {*getattr(module, "FILES", ())} - {*code.files}:
        raise not_listed(flag, code.path)
    found = getattr(module, code.attribute, None) if code.attribute else module
    if found is None:
        what = f"the module {code.module} has no {code.attribute}"
        raise UserError(f"{flag}; {what} ({module.__file__})")
    return module, found


def forget_modules(package: str = "") -> None:
    """Forget what was executed of a package, or of all code of one's own."""
    gone = {package} if package else {*IMPORTED, *ROOTS}
    for name in [name for name in sys.modules if top(name) in gone]:
        del sys.modules[name]
    for name in gone:
        IMPORTED.pop(name, None)


def failure(error: BaseException, path: Path, root: Path) -> str:
    """Return type and message of an error as one line, and its innermost line below `root`."""
    text = re.sub(rf"{OWN}[0-9a-f]{{16}}\.?", "", str(error))
    words = " ".join(text.split())[:LONGEST] or "no message"
    place = str(path)
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(root):
            place = f"{frame.filename}, line {frame.lineno}"
    return f"{type(error).__name__}: {words} ({place})"
