from dpfl_mpi.figures.command import shipped

RUNS = shipped("tau_init_table", __name__)
