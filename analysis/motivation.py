"""`python analysis/motivation.py [RESULT...]`: see --help, or dpfl_mpi/figures/motivation.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("motivation", __name__)
