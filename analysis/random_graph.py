from dpfl_mpi.figures.command import shipped

RUNS = shipped("random_graph", __name__)
