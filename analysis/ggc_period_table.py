from dpfl_mpi.figures.command import shipped

RUNS = shipped("ggc_period_table", __name__)
