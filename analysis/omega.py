from dpfl_mpi.figures.command import shipped

RUNS = shipped("omega", __name__)
