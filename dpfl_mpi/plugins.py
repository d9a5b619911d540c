"""Data sets, methods and models by their names: one file each."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

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


def find(kind: str, name: str) -> Any:
    """Return a data set's or model's module, or a `methods.Method`, by its name; a model's imports torch.

    Raises:
        UserError: there is none of this name, or it breaks the contract of its kind (the package's `load`, where it has one).
    """
    check(kind, name)
    package = importlib.import_module(f"dpfl_mpi.{KINDS[kind]}")
    module = importlib.import_module(f"{package.__name__}.{name}")
    return package.load(name, module) if hasattr(package, "load") else module
