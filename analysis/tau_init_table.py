"""`python analysis/tau_init_table.py [RESULT...]`: see --help, or dpfl_mpi/figures/tau_init_table.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("tau_init_table", __name__)
