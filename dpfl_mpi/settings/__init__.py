"""`Run` says what decides the numbers, `Job` where and how they are computed; what they are made of: `fields`, `values`, `files`."""

from dpfl_mpi.settings.run import NUMERICS, Job, Resolved, Run, option

__all__ = ["NUMERICS", "Job", "Resolved", "Run", "option"]
