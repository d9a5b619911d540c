"""`python analysis/greedy_cases.py [RESULT...]`: see --help, or dpfl_mpi/figures/greedy_cases.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("greedy_cases", __name__)
