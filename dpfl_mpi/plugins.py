"""Data sets, methods and models by their names: one file each."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from dpfl_mpi.errors import UserError

KINDS = {"dataset": "datasets", "method": "methods", "model": "models"}


def names(kind: str) -> list[str]:
    """Return the names of all datasets, methods or models: one file each, found by its name."""
    package = importlib.import_module(f"dpfl_mpi.{KINDS[kind]}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def check(kind: str, name: str) -> None:
    """Raise `UserError` where there is no data set, method or model of this name; nothing is imported."""
    known = names(kind)
    if name not in known:
        raise UserError(f"--{kind} is {name}; allowed are {', '.join(known)}")


def find(kind: str, name: str) -> ModuleType:
    """Return the module of a data set, method or model by its name; a model's imports torch.

    Raises:
        UserError: there is none.
    """
    check(kind, name)
    return importlib.import_module(f"dpfl_mpi.{KINDS[kind]}.{name}")
