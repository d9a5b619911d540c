"""`python analysis/label_flip.py [RESULT...]`: see --help, or dpfl_mpi/figures/label_flip.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("label_flip", __name__)
