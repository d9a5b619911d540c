"""Decentralized Personalized Federated Learning over MPI.

Each client chooses, under a budget, whose models it averages with its own. Start with
`python -m dpfl_mpi` (`__main__.py`) or, in Python, with `dpfl_mpi.run` (`api.py`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpfl_mpi.version import VERSION

if TYPE_CHECKING:
    from dpfl_mpi.api import Result, plot, run, table

__version__ = VERSION
__all__ = ["Result", "__version__", "plot", "run", "table"]


def __getattr__(name: str) -> Any:
    """Return a name of `api`, which is imported at the first use."""
    if name not in {*__all__, "api"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module("dpfl_mpi.api")
    return api if name == "api" else getattr(api, name)
