from dpfl_mpi.figures.command import shipped

RUNS = shipped("pareto", __name__)
