"""Asymmetry of the collaboration graph over rounds, in both definitions.

Left: the share of directed edges without their reverse. Right: the share of all unordered pairs of clients of which exactly one chose the other.
"""

import matplotlib.pyplot as plt
import pandas as pd

from dpfl_mpi.figures import sparsity
from dpfl_mpi.figures.command import Drawing
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.style import TEXT, legend
from dpfl_mpi.graph import asymmetry

RUNS = sparsity.RUNS
MEASURES = {
    "edges without their reverse": lambda graph: asymmetry(graph)[0],
    "pairs linked one way": lambda graph: asymmetry(graph)[1],
}


def draw(frames: Frames) -> Drawing:
    figure, panels = plt.subplots(1, 2, figsize=(TEXT, 2.2))
    data = []
    for axes, (name, measure) in zip(panels, MEASURES.items(), strict=True):
        data.append(sparsity.lines(axes, frames, name, measure))
        axes.set_ylabel(f"{name}, %")
        axes.set_ylim(bottom=0)
    legend(figure, panels[0], "outside upper center")
    both = pd.concat(data, ignore_index=True)
    return Drawing(both, figure, sparsity.first_and_last(both))
