"""Asymmetry of the collaboration graph over rounds, in both definitions.

Left: the share of directed edges without their reverse. Right: the share of all unordered pairs of clients of which exactly one chose the other.
"""

from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.figures import sparsity
from dpfl_mpi.figures.command import Drawing
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.style import TEXT, legend
from dpfl_mpi.graph import asymmetry

RUNS = sparsity.RUNS


def share(definition: int, adjacency: np.ndarray) -> float:
    """Return the asymmetry of a graph `[N, N]` in the first or the second definition."""
    return asymmetry(adjacency)[definition]


def draw(frames: Frames) -> Drawing:
    figure, panels = plt.subplots(1, 2, figsize=(TEXT, 2.2))
    data = []
    for i, (axes, name) in enumerate(zip(panels, ("edges without their reverse", "pairs linked one way"), strict=True)):
        data.append(sparsity.lines(axes, frames, name, partial(share, i)))
        axes.set_ylabel(f"{name}, %")
        axes.set_ylim(bottom=0)
    legend(figure, panels[0], "outside upper center")
    both = pd.concat(data, ignore_index=True)
    return Drawing(both, figure, sparsity.first_and_last(both))
