"""Table 1 on FEMNIST with one writer per client, as the paper's text describes it.

Its numbers most likely come from `--partition fedrep`. Run with
`python -m dpfl_mpi.sweep reproduction/writers.py`.
"""

from dpfl_mpi.figures.accuracy_table import rows_on

RUNS = rows_on({"dataset": "femnist"})
