"""`Run` says what decides the numbers, `Job` where and how they are computed."""

from dpfl_mpi.settings.job import Job
from dpfl_mpi.settings.run import NUMERICS, Resolved, Run, option

__all__ = ["NUMERICS", "Job", "Resolved", "Run", "option"]
