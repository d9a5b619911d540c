"""`python analysis/learning_curves.py [RESULT...]`: see --help, or dpfl_mpi/figures/learning_curves.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("learning_curves", __name__)
