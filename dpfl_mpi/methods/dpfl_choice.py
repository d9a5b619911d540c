"""DPFL, other choice: its search departs from Algorithms 2 and 3 as options say.

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Without options it is `dpfl`, bit for bit. Each option of `settings.search.Rule` is one departure.
Own losses cost an evaluation per candidate and no model more: a search receives each one anyway.
"""

from dataclasses import replace

from dpfl_mpi.methods import dpfl
from dpfl_mpi.settings.search import Rule as Options

METHOD = replace(dpfl.METHOD, title="DPFL, other choice", asks_all=True, look="#0072B2 -- X")
__all__ = ["METHOD", "Options", "init", "round"]
init, round = dpfl.init, dpfl.round
