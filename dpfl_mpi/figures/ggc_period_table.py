"""Table: accuracy by P, the period of the greedy search, and by budget.

CIFAR-10, Dir(0.1), seed 42.
"""

from dpfl_mpi.figures import paper as published
from dpfl_mpi.figures.command import PAPER, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.tau_init_table import table

DIRICHLET = {"partition": "dirichlet", "dirichlet_alpha": 0.1}
RUNS = cifar10(**DIRICHLET, ggc_period=(1, 5, 10, 20), budget=("inf", 20, 10, 5))
OPTIONS = PAPER


def draw(frames: Frames, paper: bool = False) -> Drawing:
    numbers = published.PERIOD if paper else {}
    return table(frames, "ggc_period", "P", numbers, "CIFAR-10 Dir(0.1)")
