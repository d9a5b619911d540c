from dpfl_mpi.figures.command import shipped

RUNS = shipped("greedy_cases", __name__)
