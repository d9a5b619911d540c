"""Every figure and table, one file each: `RUNS` are the Runs that it needs, `draw(frames)` makes it. `python analysis/NAME.py` draws it.

A figure is drawn of data frames (`frames`), which results and the CSV files of `reproduction/` both become; `paper` has the paper's numbers.
Nothing here imports torch or MPI: beside the package it takes the libraries of `pip install '.[analysis]'`.
"""

import importlib.util
import sys

from dpfl_mpi.errors import complain

LIBRARIES = ("numpy", "h5py", "matplotlib", "pandas", "scipy", "networkx", "tabulate", "jinja2")

if gone := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
    complain(f"error: the figures need {', '.join(gone)}: pip install {' '.join(gone)}")
    sys.exit(2)

import matplotlib  # noqa: E402

matplotlib.use("Agg")  # a login node has no display
