"""`Run` says what decides the numbers, `Job` where and how they are computed.

`fields` know their range and their help, `values` are settings that are written as a short text, `files` what files hold that settings name,
`command_line` is the parser.
"""

from dpfl_mpi.settings.job import Job
from dpfl_mpi.settings.run import NUMERICS, Resolved, Run, option

__all__ = ["NUMERICS", "Job", "Resolved", "Run", "option"]
