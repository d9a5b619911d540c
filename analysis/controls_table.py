from dpfl_mpi.figures.command import shipped

RUNS = shipped("controls_table", __name__)
