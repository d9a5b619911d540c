"""One file a model, found by its name: `build(shape, classes) -> torch.nn.Module` and `HEAD`, the name of its last layer.

Any module works whose forward takes `[S, C, H, W]` floats and keeps no batch statistics. A module may offer `stacked()`, kernels that
compute many clients' models at once; without them `Ensemble` uses `torch.func`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from dpfl_mpi.plugins import find


def load(name: str) -> ModuleType:
    """Return the module of a model by its name; this imports torch, which `plugins.find` does not.

    Raises:
        UserError: there is no such model.
    """
    find("model", name)
    return importlib.import_module(f"dpfl_mpi.models.{name}")
