"""The results file: `schema` says what it holds, `recorder` writes it, `result` reads it, `scores`, `outcome` and `summary` sum it up."""

from dpfl_mpi.results.result import Result

__all__ = ["Result"]
