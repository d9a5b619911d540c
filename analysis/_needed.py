"""Ends the process with one sentence where a library that figures need is missing. `_common` imports it before any of them."""

import importlib.util
import sys

LIBRARIES = ("numpy", "h5py", "matplotlib", "pandas", "scipy", "networkx", "tabulate", "jinja2")

if gone := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
    print(f"error: the figures need {', '.join(gone)}: pip install {' '.join(gone)}", file=sys.stderr)
    sys.exit(2)
