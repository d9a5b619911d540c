from dpfl_mpi.figures.command import shipped

RUNS = shipped("sparsity", __name__)
