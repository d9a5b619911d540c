from dpfl_mpi.figures.command import shipped

RUNS = shipped("label_flip", __name__)
