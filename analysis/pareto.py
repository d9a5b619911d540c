"""`python analysis/pareto.py [RESULT...]`: see --help, or dpfl_mpi/figures/pareto.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("pareto", __name__)
