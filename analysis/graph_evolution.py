"""`python analysis/graph_evolution.py [RESULT...]`: see --help, or dpfl_mpi/figures/graph_evolution.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("graph_evolution", __name__)
