"""The user's own code, a data set, method or model: which files it is, their hashes, its execution.

A user names a file NAME.py, or MODULE:OBJECT of an installed module. If the file is in a package (a
folder with an `__init__.py`), the whole outermost package is the code. `plugins.admit` reads it as
a `Code` without executing it, and `plugins.find` calls `execute`.
A Run's key has the hash `Code.sha256`. It covers each module's syntax tree without docstrings, so a
changed comment leaves it the same; of a module that declares a `VERSION`, it covers only that. A
file is imported under a module name made of its content and place. So an edited file is executed
again, and two files may have the same name.
"""

import ast
import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dpfl_mpi.errors import LONGEST, UserError

PACKAGE = "dpfl_mpi"  # never the user's code
OWN = "dpfl_mpi_own_"  # begins the module names of files, a hash follows
# `text_sha256` and `root` of the installed code that was imported, by its outermost package
IMPORTED: dict[str, tuple[str, Path]] = {}
ROOTS: dict[str, Path] = {}  # file or folder of code that is not installed, by its module name


class Code(NamedTuple):
    """A module, and all files that count as its code."""

    path: Path  # of the module
    root: Path  # the same file, or the folder of its outermost package
    module: str  # its name, from the outermost package on
    attribute: str  # the object that MODULE:OBJECT names, or ""
    installed: bool  # Python finds it by its name
    files: tuple[str, ...]  # data files that the module reads and lists in FILES
    sha256: str  # of what it computes
    text_sha256: str  # of all bytes

    @property
    def name(self) -> str:
        """The name under which it is imported, another one for each content and place."""
        if self.installed:
            return self.module
        _, dot, inner = self.module.partition(".")
        unique = hashlib.sha256(f"{self.text_sha256} {self.root}".encode()).hexdigest()
        return f"{OWN}{unique[:16]}{dot}{inner}"


def outermost(name: str) -> str:
    """Return the outermost package of a module, or the module if it is in none."""
    return name.partition(".")[0]


def code_named(flag: str, name: str) -> Code:
    """Return the code of a file NAME.py, or of MODULE:OBJECT; a `UserError` begins with `flag`."""
    by_path = name.endswith(".py")
    return code_in_file(flag, Path(name)) if by_path else code_in_module(flag, name)


def code_in_file(flag: str, path: Path) -> Code:
    """Return the code of a file; `flag` is what was typed, such as "--method is a.py"."""
    if not path.is_file():
        raise UserError(f"{flag}; there is no such file")
    path = path.resolve()
    root, parts = path, [] if path.stem == "__init__" else [path.stem]
    while (root.parent / "__init__.py").is_file():
        root = root.parent
        parts.insert(0, root.name)
    code = code_of(flag, path, root, ".".join(parts))
    if root == path:
        refuse_neighbours(flag, path)
    return code


def code_in_module(flag: str, target: str) -> Code:
    """Return the code of `MODULE` or `MODULE:OBJECT`."""
    name, _, attribute = target.partition(":")
    # where Python would import the outermost package from now, even if it was imported before
    specs = (finder.find_spec(outermost(name), None) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    root = Path(places[0] or "") if places else Path()
    base = root.parent.joinpath(*name.split("."))  # the module's path without its ending
    endings = ["/__init__.py", ".py", *EXTENSION_SUFFIXES]
    path = next((p for end in endings if (p := Path(f"{base}{end}")).is_file()), None)
    if not places or path is None:
        raise UserError(f"{flag}; Python finds no module {name}")
    return code_of(flag, path, root, name, attribute, installed=True)


def code_of(
    flag: str, path: Path, root: Path, module: str, attribute: str = "", installed: bool = False
) -> Code:
    """Return the code of a module."""
    # The hashes cover no absolute path, and the name of a single file only if it declares a
    # VERSION, which other files may declare, too.
    modules = [root]
    if root.is_dir():
        endings = (".py", *EXTENSION_SUFFIXES)
        modules = sorted(p for p in root.rglob("*") if p.name.endswith(endings) and p.is_file())
    data_files = files_of(flag, path) if path.suffix == ".py" else ()
    named = {"" if p == path else str(p.relative_to(root)): p for p in modules}
    named |= {f"file {name}": path.parent / name for name in data_files}

    def hash_all(hash_file: Callable[[Path], str]) -> str:
        return hash_json([attribute, *sorted([name, hash_file(p)] for name, p in named.items())])

    hashes = hash_all(hash_meaning), hash_all(hash_bytes)
    return Code(path, root, module, attribute, installed, data_files, *hashes)


def hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def hash_bytes(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_meaning(path: Path) -> str:
    """Return the hash of the `VERSION` that a module declares, or of its syntax tree."""
    # a file that is not Python or does not compile has the hash of its bytes
    nodes = statements(path)
    if not nodes:
        return hash_bytes(path)
    values = [node.get("value", {}) for name, node in nodes if name == "VERSION"]
    version = [value for value in values if value.get("is") == "Constant"]
    return hash_json([path.name, version] if version else nodes)


def statements(path: Path) -> list[tuple[str, Any]]:
    """Return the outermost statements of a module: the name that each defines, and its tree.

    Comments, docstrings and layout do not count. Empty where it is not Python or does not compile.
    """
    out: list[tuple[str, Any]] = []
    if path.suffix == ".py":
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in plain_tree(ast.parse(path.read_bytes())).get("body", ()):
                target = node.get("targets", [node.get("target", {})])[0]
                name = node.get("name") or target.get("id") or "what it executes"
                out.append((name.strip("'") + "()" * ("FunctionDef" in node["is"]), node))
    return out


def plain_tree(node: Any) -> Any:
    """Return a syntax tree without docstrings as dicts, lists and texts."""
    # these are the same under all versions of Python, unlike the text of `ast.dump`
    if isinstance(node, list):
        return [plain_tree(element) for element in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    present = {name: value for name, value in fields.items() if value not in (None, [])}
    return {"is": type(node).__name__} | {n: plain_tree(value) for n, value in present.items()}


def parts_of(code: Code) -> dict[str, str]:
    """Return a hash of each thing that code defines, by a name such as "pacs.py: load()"."""
    # they tell the user what differs between two versions
    files = [code.root, *(code.path.parent / name for name in code.files)]
    if code.root.is_dir():
        files[:1] = sorted(code.root.rglob("*.py"))
    out: dict[str, str] = {}
    for path in files:
        for name, node in statements(path) or [("", hash_bytes(path))]:
            part = f"{path.name}: {name}" if name else path.name
            out[part] = hash_json([out.get(part), node])[:8]  # several statements may share a name
    return out


def files_of(flag: str, path: Path) -> tuple[str, ...]:
    """Return the names in the list FILES of a module, read without executing it."""
    for node in parsed(flag, path).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if "FILES" not in (getattr(target, "id", "") for target in targets):
            continue
        names: Any = None  # anything but a literal stays None
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


def refuse_neighbours(flag: str, path: Path) -> None:
    """Raise `UserError` where a single file imports a file beside it, which its hash leaves out."""
    for node in ast.walk(parsed(flag, path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else ["."]
        for name in {outermost(name) for name in names} - {*sys.stdlib_module_names, PACKAGE}:
            beside = [path.with_name(f"{name}.py"), path.parent / name / "__init__.py"]
            if not name or any(file.is_file() for file in beside):
                how = "put both into a folder with an `__init__.py` and write `from . import ...`"
                line = f"({path}, line {node.lineno})"  # type: ignore[attr-defined]
                neighbour = name or "a module"
                raise UserError(f"{flag}, which imports {neighbour} beside it {line}; {how}")


# execution ----------------------------------------------------------------------------------------
class SourceLoader(SourceFileLoader):
    """Executes the source, never stored bytecode.

    Python takes bytecode for new if the file was edited within the same second.
    """

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


class OwnCodeFinder(MetaPathFinder):
    """Finds the files and packages in `ROOTS`, and the modules of these packages, for `import`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in ROOTS:
            root = ROOTS[name]
            places = [str(root)] if root.is_dir() else None
            file = root / "__init__.py" if places else root
            spec = spec_from_file_location(name, file, submodule_search_locations=places)
        else:
            spec = PathFinder.find_spec(name, path) if outermost(name) in ROOTS else None
        if spec and isinstance(spec.loader, SourceFileLoader) and spec.origin:
            spec.loader = SourceLoader(name, spec.origin)
        return spec


sys.meta_path.insert(0, OwnCodeFinder())


@contextlib.contextmanager
def folder_kept() -> Iterator[None]:
    """Come back to the current folder after a block of code that may change it."""
    here = os.open(".", os.O_RDONLY)  # works where the folder is deleted meanwhile, unlike its name
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def execute(flag: str, code: Code) -> tuple[ModuleType, Any]:
    """Return the module and the object that MODULE:OBJECT names, both the same without :OBJECT."""
    # The module is executed once per content. A `UserError` begins with `flag`.
    package = outermost(code.name)
    version = code.text_sha256, code.root
    if code.installed and IMPORTED.get(package, version) != version:
        forget_modules(package)
    importlib.invalidate_caches()  # Python may list a folder as it was before a file came
    try:
        if not code.installed:
            ROOTS[package] = code.root
        with folder_kept():
            module = importlib.import_module(code.name)
    except (Exception, SystemExit) as error:
        forget_modules(package)  # half executed
        raise UserError(f"{flag}, which fails: {failure(error, code.path, code.root)}") from None
    if code_of(flag, *code[:5]).text_sha256 != code.text_sha256:
        forget_modules(package)
        raise UserError(f"{flag}, which was edited while it was read; start again")
    if code.installed:
        IMPORTED[package] = version
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
    """Forget the imported modules of a package, or of all the user's own code."""
    packages = {package} if package else {*IMPORTED, *ROOTS}
    for name in [name for name in sys.modules if outermost(name) in packages]:
        del sys.modules[name]
    for name in packages:
        IMPORTED.pop(name, None)


def failure(error: BaseException, path: Path, root: Path) -> str:
    """Return an error's type and message, and its innermost line in the user's code, in one line.

    Without a line in `root`, it names the file `path`.
    """
    message = re.sub(rf"{OWN}[0-9a-f]{{16}}\.?", "", str(error))  # names that the user did not give
    message = " ".join(message.split())[:LONGEST] or "no message"
    where = str(path)
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(root):
            where = f"{frame.filename}, line {frame.lineno}"
    return f"{type(error).__name__}: {message} ({where})"
