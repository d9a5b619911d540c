"""How tests draw a figure of results."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dpfl_mpi.results import Result


def module(name: str) -> ModuleType:
    """Return a figure's module."""
    return importlib.import_module(f"dpfl_mpi.figures.{name}")


def draw(name: str, results: Sequence[Result], *options: Any, **more: Any) -> Any:
    """Return what a figure draws of these results."""
    return module(name).draw(module("frames").of_results(results), *options, **more)
