"""`python analysis/variance.py [RESULT...]`: see --help, or dpfl_mpi/figures/variance.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("variance", __name__)
