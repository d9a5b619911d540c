"""Asymmetry of the collaboration graph over rounds, in both definitions.

Left: the share of directed edges without their reverse. Right: the share of all unordered pairs of clients of which exactly one chose the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import TEXT, Drawing, legend, main

import matplotlib.pyplot as plt
import pandas as pd
from sparsity import RUNS as SPARSITY
from sparsity import first_and_last, lines

from dpfl_mpi.graph import asymmetry
from dpfl_mpi.results import Result

RUNS = SPARSITY  # the same runs


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.2))
    edges = lines(left, results, "edges without their reverse", lambda a: asymmetry(a)[0])
    pairs = lines(right, results, "pairs linked one way", lambda a: asymmetry(a)[1])
    left.set_ylabel("edges without their reverse, %")
    right.set_ylabel("pairs linked one way, %")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    legend(figure, *left.get_legend_handles_labels(), "outside upper center")
    data = pd.concat([edges, pairs], ignore_index=True)
    return Drawing(data, figure, first_and_last(data))


if __name__ == "__main__":
    main("asymmetry", __doc__, RUNS, draw)
