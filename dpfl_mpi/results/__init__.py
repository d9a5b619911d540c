"""The results file: `schema` says what it holds, `recorder` writes it, `result` reads it, `summary` tells it in a few figures and lines."""

from dpfl_mpi.results.result import Result

__all__ = ["Result"]
