from dpfl_mpi.figures.command import shipped

RUNS = shipped("asymmetry", __name__)
