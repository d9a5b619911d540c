"""Data sets, methods and models by what a Run calls them, as docs/extend-methods.md says.

`find` executes only what was admitted. Resolving a Run admits what it names. The Run of a result or
a checkpoint is never resolved.
"""

import contextlib
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins.code import (
    PACKAGE,
    Code,
    execute,
    failure,
    in_module,
    in_path,
    parts_of,
    top,
)

KINDS = {"dataset": "datasets", "method": "methods", "model": "models"}
CODE = "code:"  # before the hash of code, as `admit` returns it
FORMS = "a file NAME.py or MODULE:OBJECT of your own"
ADMITTED: dict[tuple[str, str], Code] = {}  # by kind and by what the Run calls it
LISTED = 5  # parts of code that differ; more are not named
LOADED: dict[tuple[str, str, str], Any] = {}  # what `find` returned, by kind, name and hash


def shipped(kind: str) -> list[str]:
    """Return the names of this package's own datasets, methods or models."""
    package = importlib.import_module(f"dpfl_mpi.{KINDS[kind]}")
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(name for name in modules if not name.startswith("_"))


def is_path(name: str) -> bool:
    """Return whether a Run names a file by this."""
    return name.endswith(".py")


def short(name: Any) -> str:
    """Return a name for tables, files and messages: the stem of a path, OBJECT of MODULE:OBJECT."""
    text = str(name)
    text = Path(text).stem if is_path(text) else text.rpartition(":")[2]
    return re.sub(r"[^\w.+-]", "_", text)


def admit(kind: str, name: str) -> str:
    """Check a data set, method or model, and allow `find` to execute it. Nothing is executed here.

    Returns "" for a shipped one, else `code:` and the SHA-256 of its code, as the key of a Run has
    it. A `UserError` where there is none, or it does not compile (with the file and the line).
    """
    flag = f"--{kind} is {name}"
    if not isinstance(name, str):
        raise UserError(f"{flag}; allowed is a text")
    if name in shipped(kind):
        return ""
    if not {".", ":"} & {*name}:
        raise UserError(f"{flag}; allowed are {', '.join(shipped(kind))}, or {FORMS}")
    try:
        code = in_path(flag, Path(name)) if is_path(name) else in_module(flag, name)
    except OSError as error:
        why = f"{error.filename} cannot be read: {error.strerror}"
        raise UserError(f"{flag}, of which {why}") from None
    if top(code.module) == PACKAGE:
        how = f"call it by its name, --{kind} {short(name)}"
        raise UserError(f"{flag}, a file of dpfl_mpi itself; {how}")
    ADMITTED[kind, name] = code
    return admitted(kind, name)


def find(kind: str, name: str) -> Any:
    """Return the module of a data set or a model (which imports torch), or a `methods.Method`.

    Code that is not shipped must have been admitted.
    """
    package = importlib.import_module(f"dpfl_mpi.{KINDS[kind]}")
    code = ADMITTED.get((kind, name))
    if code is None:
        if name in shipped(kind):
            return package.load(name, importlib.import_module(f"{package.__name__}.{name}"))
        where = "executed only where a command line or a Run names it"
        raise UserError(f"the {kind} {name} is own code, {where}")
    key = kind, name, code.text_sha256
    if key not in LOADED:
        module, found = execute(f"--{kind} is {name}", code)
        if kind == "model" and callable(found) and not hasattr(found, "build"):
            found = SimpleNamespace(**vars(module) | {"build": found})  # MODULE:FUNCTION
        if kind == "dataset":
            found.OWN_DATA = getattr(found, "OWN_DATA", True)  # its name says not what is in it
            for function in ("load", "read"):
                if callable(getattr(found, function, None)):
                    sentence = failing_as(f"{function} of the data set {short(name)}", code)
                    setattr(found, function, sentence(getattr(found, function)))
        LOADED[key] = package.load(short(name), found)
    return LOADED[key]


@contextlib.contextmanager
def failing_as(what: str, code: Code) -> Iterator[None]:
    """Turn an error inside into a sentence with the file and the line; not too little memory."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} fails: {failure(error, code.path, code.root)}") from None


def admitted(kind: str, name: str) -> str:
    """Return the hash of the code that `find` would execute, as `admit` does; "" for none."""
    return CODE + ADMITTED[kind, name].sha256 if (kind, name) in ADMITTED else ""


def codes(contents: Mapping[str, str]) -> dict[str, str]:
    """Return those of a Run's contents that are code, by kind."""
    return {kind: contents[kind] for kind in KINDS if contents.get(kind, "").startswith(CODE)}


def parts(kind: str, name: str) -> dict[str, str]:
    """Return the hashes of all that admitted code defines, by names such as "pacs.py: load()"."""
    return parts_of(ADMITTED[kind, name])


def changes(now: Mapping[str, str], then: Mapping[str, str]) -> str:
    """Return which `parts` differ, as half a sentence."""
    names = sorted(part for part in {*now, *then} if now.get(part) != then.get(part))
    verb = "differs" if len(names) == 1 else "differ"
    return f"{', '.join(names[:LISTED]) or 'its order'} {verb} from the stored one"
