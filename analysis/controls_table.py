"""`python analysis/controls_table.py [RESULT...]`: see --help, or dpfl_mpi/figures/controls_table.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("controls_table", __name__)
