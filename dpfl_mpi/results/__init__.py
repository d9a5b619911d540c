"""The results file: `schema` is its layout, `recorder` writes it, `result` reads it.

`summary` has its main figures and the lines that a run ends with.
"""

from dpfl_mpi.results.result import Result

__all__ = ["Result"]
