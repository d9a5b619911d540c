"""Data sets, methods and models by the name that a Run has for them: the package's or the user's.

A Run names one of this package, such as "dpfl", or the user's own code: a file NAME.py or
MODULE:OBJECT. `admit` reads such code and computes its hash; `find` imports it, if it was admitted.
Resolving a Run admits what it names. The Run that a result or a checkpoint stores is never
resolved, so that opening a result executes no code. See docs/extend-methods.md.
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
from dpfl_mpi.plugins.code import PACKAGE, Code, code_named, execute, failure, outermost, parts_of

KINDS = {"dataset": "datasets", "method": "methods", "model": "models"}
CODE = "code:"  # begins the hash of the user's code in the key of a Run
FORMS = "your own NAME.py or MODULE:OBJECT"
ADMITTED: dict[tuple[str, str], Code] = {}  # by kind, such as "method", and name
LISTED = 5  # parts of code that `changes` names at most
LOADED: dict[tuple[str, str, str], Any] = {}  # what `find` returned, by kind, name and hash


def shipped(kind: str) -> list[str]:
    """Return the names of this package's own datasets, methods or models."""
    package = importlib.import_module(f"dpfl_mpi.{KINDS[kind]}")
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(name for name in modules if not name.startswith("_"))


def is_path(name: str) -> bool:
    """Return whether a name is that of a file."""
    return name.endswith(".py")


def short(name: Any) -> str:
    """Return a name for tables, files and messages: the stem of a path, OBJECT of MODULE:OBJECT."""
    text = str(name)
    text = Path(text).stem if is_path(text) else text.rpartition(":")[2]
    return re.sub(r"[^\w.+-]", "_", text)


def admit(kind: str, name: str) -> str:
    """Allow `find` to execute a data set, method or model, after reading it and its files.

    Returns "" for one of this package, else `code:` and the SHA-256 of its code, which the key of a
    Run has. A `UserError` if it is not there or does not compile.
    """
    flag = f"--{kind} is {name}"
    if not isinstance(name, str):
        raise UserError(f"{flag}; allowed is a text")
    if name in shipped(kind):
        return ""
    if not {".", ":"} & {*name}:
        raise UserError(f"{flag}; allowed are {', '.join(shipped(kind))}, or {FORMS}")
    try:
        code = code_named(flag, name)
    except OSError as error:
        why = f"{error.filename} cannot be read: {error.strerror}"
        raise UserError(f"{flag}, of which {why}") from None
    if outermost(code.module) == PACKAGE:
        how = f"call it by its name, --{kind} {short(name)}"
        raise UserError(f"{flag}, a file of dpfl_mpi itself; {how}")
    ADMITTED[kind, name] = code
    return admitted(kind, name)


def find(kind: str, name: str) -> Any:
    """Return the module of a data set or a model, or a `methods.Method`."""
    # The module of a model imports torch. The user's own code must have been admitted.
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
            if code.attribute:  # MODULE:OBJECT; an object may not take further attributes
                names = [name for name in dir(found) if not name.startswith("__")]
                found = SimpleNamespace(**{name: getattr(found, name) for name in names})
            # OWN_DATA: a Run's key has the content of the data, as the name says nothing of it
            found.OWN_DATA = getattr(found, "OWN_DATA", True)
            for function in ("load", "read"):
                if callable(getattr(found, function, None)):
                    # used as a decorator: each call then runs inside `failing_as`
                    guard = failing_as(f"{function} of the data set {short(name)}", code)
                    setattr(found, function, guard(getattr(found, function)))
        LOADED[key] = package.load(short(name), found)
    return LOADED[key]


@contextlib.contextmanager
def failing_as(what: str, code: Code) -> Iterator[None]:
    """Turn an error of the user's code into a `UserError` with the file and the line."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} fails: {failure(error, code.path, code.root)}") from None


def admitted(kind: str, name: str) -> str:
    """Return what `admit` returned for this code, "" if it was not admitted."""
    return CODE + ADMITTED[kind, name].sha256 if (kind, name) in ADMITTED else ""


def codes(contents: Mapping[str, str]) -> dict[str, str]:
    """Return the hashes of the user's code among the hashes in a Run's key, by kind."""
    return {kind: contents[kind] for kind in KINDS if contents.get(kind, "").startswith(CODE)}


def parts(kind: str, name: str) -> dict[str, str]:
    """Return a hash of each thing that admitted code defines, by names like "pacs.py: load()"."""
    return parts_of(ADMITTED[kind, name])


def changes(now: Mapping[str, str], then: Mapping[str, str]) -> str:
    """Return which `parts` of code differ, as half a sentence."""
    names = sorted(part for part in {*now, *then} if now.get(part) != then.get(part))
    verb = "differs" if len(names) == 1 else "differ"
    return f"{', '.join(names[:LISTED]) or 'its order'} {verb} from the stored one"
