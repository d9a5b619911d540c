from dpfl_mpi.figures.command import shipped

RUNS = shipped("hours", __name__)
