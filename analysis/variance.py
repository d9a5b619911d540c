from dpfl_mpi.figures.command import shipped

RUNS = shipped("variance", __name__)
