"""Data sets, methods and models by what a Run calls them, as docs/own-code.md says.

`find` executes only what was admitted. A resolved Run has admitted what it names; results and checkpoints are never resolved.
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
    forget_modules,
    in_module,
    in_path,
    top,
)

KINDS = {"dataset": "datasets", "method": "methods", "model": "models"}
CODE = "code:"  # before the hash of code, as `admit` returns it
FORMS = "a file NAME.py or MODULE:OBJECT of your own"
ADMITTED: dict[tuple[str, str], Code] = {}  # by kind and by what the Run calls it
LOADED: dict[tuple[str, str, str], Any] = {}  # what `find` returned, by kind, name and hash


def shipped(kind: str) -> list[str]:
    """Return the names of this package's own datasets, methods or models."""
    package = importlib.import_module(f"dpfl_mpi.{KINDS[kind]}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def names(kind: str) -> list[str]:
    """Return all names: the shipped ones, then those that installed packages announce. No file is executed."""
    own = shipped(kind)
    return own + sorted({point.name for point in announced(kind)} - {*own})


def announced(kind: str) -> list[Any]:
    from importlib.metadata import entry_points  # 20 ms that most ranks do not need

    return list(entry_points(group=f"dpfl_mpi.{KINDS[kind]}"))


def is_path(name: str) -> bool:
    """Return whether a Run names a file by this."""
    return name.endswith(".py")


def short(name: Any) -> str:
    """Return a name for tables, file names and messages: of a path its stem, of MODULE:OBJECT the object."""
    text = str(name)
    text = Path(text).stem if is_path(text) else text.rpartition(":")[2]
    return re.sub(r"[^\w.+-]", "_", text)


def admit(kind: str, name: str) -> str:
    """Check that there is such a data set, method or model, and allow `find` to execute it. Nothing is executed here.

    Returns "" for a shipped one, else `code:` and the SHA-256 of its source (see `code`): what stands for it in the key of a Run. Where there is
    none, or its source does not compile, the sentence of the `UserError` names the file and the line.
    """
    flag = f"--{kind} is {name}"
    if not isinstance(name, str):
        raise UserError(f"{flag}; allowed is a text")
    if not is_path(name) and ":" not in name and name in shipped(kind):
        return ""
    try:
        code = in_path(flag, Path(name)) if is_path(name) else in_module(flag, target(kind, name, flag))
    except OSError as error:
        raise UserError(f"{flag}, of which {error.filename} cannot be read: {error.strerror}") from None
    if top(code.start) == PACKAGE:
        raise UserError(f"{flag}, a file of dpfl_mpi itself; call it by its name, --{kind} {short(name)}")
    ADMITTED[kind, name] = code
    return admitted(kind, name)


def target(kind: str, name: str, flag: str) -> str:
    """Return what a name stands for, as `MODULE` or `MODULE:OBJECT`."""
    if ":" in name:
        return name
    if not (found := {point.value: point for point in announced(kind) if point.name == name}):
        raise UserError(f"{flag}; allowed are {', '.join(names(kind))}, or {FORMS}")
    if len(found) > 1:
        who = " and ".join(sorted(f"{p.dist.name if p.dist else 'a package'} ({v})" for v, p in found.items()))
        raise UserError(f"{flag}, a name that {who} announce; write --{kind} MODULE:OBJECT")
    return str(next(iter(found)))


def find(kind: str, name: str) -> Any:
    """Return a data set's or model's module, or a `methods.Method`; a model's imports torch. Not shipped: only what was admitted."""
    package = importlib.import_module(f"dpfl_mpi.{KINDS[kind]}")
    if (code := ADMITTED.get((kind, name))) is None:
        if name not in shipped(kind):
            if not is_path(name):
                target(kind, name, f"--{kind} is {name}")
            raise UserError(f"the {kind} {name} is own code, executed only where a command line or a Run names it")
        return package.load(name, importlib.import_module(f"{package.__name__}.{name}"))
    key = kind, name, code.sha256
    if key not in LOADED:
        inside, found = execute(f"--{kind} is {name}", code)
        if kind == "model" and callable(found) and not hasattr(found, "build"):  # MODULE:FUNCTION is a model's build
            found = SimpleNamespace(**vars(inside) | {"build": found})
        if kind == "dataset":
            found.OWN_DATA = getattr(found, "OWN_DATA", True)  # its name says nothing about the content
            for made_by in (f for f in ("load", "read") if callable(getattr(found, f, None))):
                sentence = failing_as(f"{made_by} of the data set {short(name)}", code)
                setattr(found, made_by, sentence(getattr(found, made_by)))
        LOADED[key] = package.load(short(name), found)
    return LOADED[key]


def forget() -> None:
    """Let `find` execute the code of one's own anew."""
    LOADED.clear()
    forget_modules()


@contextlib.contextmanager
def failing_as(what: str, code: Code) -> Iterator[None]:
    """Turn an error inside, but for too little memory, into one sentence that begins with `what` and names file and line of this code."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} fails: {failure(error, code)}") from None


def admitted(kind: str, name: str) -> str:
    """Return the hash of the code that `find` would execute, as `admit` returned it; "": none."""
    return CODE + ADMITTED[kind, name].sha256 if (kind, name) in ADMITTED else ""


def codes(contents: Mapping[str, str]) -> dict[str, str]:
    """Return those of a Run's contents that are code, by kind."""
    return {kind: contents[kind] for kind in KINDS if kind in contents}
