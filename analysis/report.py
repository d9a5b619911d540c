"""`python analysis/report.py [RESULT...]`: see --help, or dpfl_mpi/figures/report.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("report", __name__)
