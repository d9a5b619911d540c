"""DPFL whose search departs from Algorithms 2 and 3, one cause at a time; without options it is `dpfl`, bit for bit.

Each option of `settings.search.Rule` is one departure (docs/controls.md). Own losses cost an evaluation per candidate, and no model more: a search
receives each once in lines 1 to 7 anyway.
"""

from dataclasses import replace

from dpfl_mpi.methods import dpfl
from dpfl_mpi.settings.search import Rule as Options

METHOD = replace(dpfl.METHOD, title="DPFL, other choice", asks_all=True, line="--")
__all__ = ["METHOD", "Options", "init", "round"]
init, round = dpfl.init, dpfl.round
