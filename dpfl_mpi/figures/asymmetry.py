"""Asymmetry of the collaboration graph over rounds, in both definitions.

Left: the share of directed edges whose reverse is not an edge. Right: the share of all unordered
pairs of clients of which exactly one chose the other.
"""

from dpfl_mpi.figures import sparsity
from dpfl_mpi.figures.command import Drawing
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.style import TEXT
from dpfl_mpi.graph import asymmetry

RUNS = sparsity.RUNS
MEASURES = {
    "edges without their reverse": lambda graph: asymmetry(graph)[0],
    "pairs linked one way": lambda graph: asymmetry(graph)[1],
}


def draw(frames: Frames) -> Drawing:
    return sparsity.draw_measures(frames, MEASURES, TEXT, ylim=(0, None))
