from dpfl_mpi.figures.command import shipped

RUNS = shipped("traffic_and_time", __name__)
