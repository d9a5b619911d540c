"""Every figure and table, one file each. `python analysis/NAME.py` draws NAME.

A figure's `RUNS` are the Runs that it needs; `draw(frames)` makes a `Drawing` of their data frames
(`frames`). It imports neither torch nor MPI, but the libraries of `pip install '.[analysis]'`.
"""

import importlib.util
import sys

from dpfl_mpi.errors import complain

LIBRARIES = ("numpy", "h5py", "matplotlib", "pandas", "scipy", "networkx", "tabulate", "jinja2")

if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
    complain(f"error: the figures need {', '.join(missing)}: pip install {' '.join(missing)}")
    sys.exit(2)

import matplotlib  # noqa: E402

matplotlib.use("Agg")  # a login node has no display
