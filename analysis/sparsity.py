"""`python analysis/sparsity.py [RESULT...]`: see --help, or dpfl_mpi/figures/sparsity.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("sparsity", __name__)
