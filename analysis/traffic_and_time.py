"""`python analysis/traffic_and_time.py [RESULT...]`: see --help, or dpfl_mpi/figures/traffic_and_time.py."""

from dpfl_mpi.figures.command import shipped

RUNS = shipped("traffic_and_time", __name__)
