"""`python analysis/random_graph.py [RESULT...]`: see --help, or dpfl_mpi/figures/random_graph.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("random_graph", __name__)
