from dpfl_mpi.figures.command import shipped

RUNS = shipped("motivation", __name__)
