"""`python analysis/ggc_period_table.py [RESULT...]`: see --help, or dpfl_mpi/figures/ggc_period_table.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("ggc_period_table", __name__)
