"""`python analysis/omega.py [RESULT...]`: see --help, or dpfl_mpi/figures/omega.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("omega", __name__)
