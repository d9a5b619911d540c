from dpfl_mpi.figures.command import shipped

RUNS = shipped("learning_curves", __name__)
