"""DPFL whose search departs from Algorithms 2 and 3, one cause at a time; without options it is `dpfl`, bit for bit.

Each option of `settings.search.Rule` is one departure (docs/controls.md). Own losses cost an evaluation per candidate, and no model more: a search
receives each once in lines 1 to 7 anyway.
"""

from dpfl_mpi.methods import Method, dpfl
from dpfl_mpi.settings.search import Rule as Options

METHOD = Method(
    "DPFL, other choice",
    dpfl.CITATION,
    ignores=("graphs",),
    asks_all=True,
    preprocesses=True,
    elementwise=True,
    colour="#0072B2",
    line="--",
    marker="X",
)
__all__ = ["METHOD", "Options", "init", "round"]
init, round = dpfl.init, dpfl.round
