"""The kernels of `lanes/` on a CPU: the library, and one network's calls.

The library has its functions in several forms, one for each width of the processor's vectors.
"""

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.lanes.declared import FUNCTIONS, SOURCES
from dpfl_mpi.numerics.lanes.plan import Plan

LIBRARY = SOURCES / "_lanes.so"
SPACE = 128  # bytes of which a team's work space is a multiple, as in lanes/calls.h
FORMS = {"avx512": 512, "avx2": 256, "portable": 128}  # bits of a vector; results are the same


@functools.cache
def load(path: Path = LIBRARY) -> Any:
    """Return the library.

    `UserError`: it was not built, is for another processor, or is older than its sources.
    """
    mend = "install again where there is a C compiler (pip install -e .)"
    if not path.exists():
        raise UserError(f"the kernels were not built: {path} is not there; {mend}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(f"the kernels cannot be loaded ({error}); {mend}") from error
    library.source.restype = ctypes.c_char_p
    # in the order of setup.py
    files = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.c")], key=lambda file: file.name)
    sources = b"".join(file.read_bytes() for file in files)
    if hashlib.sha256(sources).hexdigest() != library.source().decode():
        raise UserError(f"the kernels are of another version of their sources; {mend}")
    return library


def forms(path: Path = LIBRARY) -> list[str]:
    """Return the forms that this processor can run and the library has, the fastest first."""
    library, known = load(path), FORMS.items()
    fit = [(name, bits) for name, bits in known if bits <= library.widest()]
    return [name for name, bits in fit if hasattr(library, f"train_{bits}")]


class Cpu:
    """The kernels of a network in one form, with the work space of each team of threads."""

    def __init__(
        self,
        plan: Plan,
        ensemble: Ensemble,
        form: str = "",
        members: int = 1,
        teams: int = 1,
        path: Path = LIBRARY,
    ):
        """Take a network in the form that is named, or in the fastest.

        The threads of a team, `members`, compute a client together; `teams` compute a client each
        at the same time. Neither number changes a bit. `UserError`: the library cannot be used, or
        has no such form here.
        """
        available = forms(path)
        self.form, self.members, self.teams = form or available[0], members, teams
        if self.form not in available:
            found = ", ".join(available)
            raise UserError(f"--kernels is {form}; this processor and library have {found}")
        library, bits = load(path), FORMS[self.form]
        self.calls: dict[str, Any] = {}
        for name, (result, arguments) in FUNCTIONS.items():
            call = self.calls[name] = getattr(library, f"{name}_{bits}")
            call.restype, call.argtypes = result, arguments
        self.net, self.width = plan.net, ensemble.width
        self.net.width = ensemble.width
        # the library knows the addresses of these, which must stay alive
        self._kept_alive = plan, ensemble.scale, ensemble.shift
        if ensemble.dtype != "int32":
            self.net.scale = ensemble.scale.data_ptr()
            self.net.shift = ensemble.shift.data_ptr()
        # a work space per team: zeros, as the padding around values must be
        space = -(-self.calls["space"](self.net, members) // SPACE) * SPACE
        self.memory = np.zeros(teams * space + 64, np.uint8)
        self._aligned = -(-self.memory.ctypes.data // 64) * 64  # its first cache line

    def run(self, verb: str, structs: np.ndarray, sizes: Any = None) -> np.ndarray:
        """Compute a task for each client in place; return the tasks."""
        how = len(structs), self.teams, self.members, self._aligned
        self.calls[verb](self.net, structs.ctypes.data, *how)
        return structs

    def means(
        self, models: np.ndarray, p: np.ndarray, ends: np.ndarray, p_sums: np.ndarray, out: Tensor
    ) -> None:
        """Write k weighted averages of models, sum p w / p_sums in float64, into `out` `[k, W]`.

        `models` are the addresses of the models' rows, uint64 `[E]`, and `p` their weights, float64
        `[E]`. Average i is of the models with numbers from ends[i] to ends[i + 1] - 1, int64
        `[k + 1]`. Where `p_sums`, float64 `[k]`, is 0, the row stays.
        """
        k, e = len(p_sums), int(ends[-1])
        lists = address(models, "uint64", e), address(p, "float64", e)
        rows = address(ends, "int64", k + 1), address(p_sums, "float64", k)
        to = address(out.numpy(), "float32", k, self.width)
        self.calls["means"](*lists, *rows, k, to, self.width)

    def fixed(self, models: np.ndarray, p: np.ndarray, out: Tensor) -> None:
        """Write the sum of `fixed_point` of models into `out`, int64 `[W]`; see `means`."""
        lists = address(models, "uint64", len(p)), address(p, "float64", len(p))
        to = address(out.numpy(), "int64", self.width)
        self.calls["fixed"](*lists, len(p), to, self.width)


def address(array: np.ndarray, dtype: str, *shape: int) -> int:
    """Return where an array's memory starts; `ValueError`: another type, shape or order."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        is_now = f"{array.dtype} {array.shape}"
        raise ValueError(f"an array {is_now}, not {dtype} {shape} without gaps")
    return array.ctypes.data
