from dpfl_mpi.figures.command import shipped

RUNS = shipped("report", __name__)
