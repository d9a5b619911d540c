from dpfl_mpi.figures.command import shipped

RUNS = shipped("accuracy_table", __name__)
