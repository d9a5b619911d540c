"""Decentralized Personalized Federated Learning over MPI: every client picks, under a budget, whose models to average with.

The way in is `python -m dpfl_mpi` (see `__main__.py`), or in Python `dpfl_mpi.run` and `dpfl_mpi.Result` (see `api.py`); the way down is
`__main__` -> `train` -> `federation` -> `methods/dpfl.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpfl_mpi.version import VERSION

if TYPE_CHECKING:
    from dpfl_mpi.api import Result, run

__version__ = VERSION
__all__ = ["Result", "__version__", "run"]


def __getattr__(name: str) -> Any:
    """Return `run`, `Result` or `api`: what stands behind them is imported with their first use."""
    if name not in {*__all__, "api"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module("dpfl_mpi.api")
    return api if name == "api" else getattr(api, name)
