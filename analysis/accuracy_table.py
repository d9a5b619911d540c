"""`python analysis/accuracy_table.py [RESULT...]`: see --help, or dpfl_mpi/figures/accuracy_table.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("accuracy_table", __name__)
