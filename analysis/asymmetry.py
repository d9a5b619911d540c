"""`python analysis/asymmetry.py [RESULT...]`: see --help, or dpfl_mpi/figures/asymmetry.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("asymmetry", __name__)
