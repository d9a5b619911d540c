from dpfl_mpi.figures.command import shipped

RUNS = shipped("graph_evolution", __name__)
