"""Table: accuracy by tau_init, the local epochs before the first graph, and by budget.

CIFAR-10, Patho(3), three seeds.
"""

from collections.abc import Mapping
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import paper as published
from dpfl_mpi.figures.command import PAPER, SEEDS, Drawing, cifar10
from dpfl_mpi.figures.frames import Frames, of_results
from dpfl_mpi.figures.names import named, repetitions
from dpfl_mpi.figures.tables import by_budget

RUNS = cifar10(tau_init=(1, 5, 10), budget=("inf", 20, 10, 5), seed=SEEDS)
OPTIONS = PAPER


def table(
    frames: Frames, field: str, symbol: str, numbers: Mapping[Any, str], setting: str
) -> Drawing:
    """Return the table of DPFL by a field and by budget; `variant` is what else differs."""
    searched = frames.files[frames.files["method"] == "dpfl"]
    if not len(searched):
        raise UserError("none of these results is of DPFL")
    dpfl = of_results(list(searched["result"]))
    groups = named(repetitions(dpfl.files["result"]), lambda run: "", (field, "budget"))
    variants = {str(r.path): variant for _, variant, group in groups for r in group}
    rows = dpfl.rows.assign(variant=dpfl.rows["run"].map(variants))
    data, text, latex = by_budget(dpfl, rows, field, symbol, numbers, setting)
    return Drawing(data, text=text, latex=latex)


def draw(frames: Frames, paper: bool = False) -> Drawing:
    numbers = published.TAU_INIT if paper else {}
    return table(frames, "tau_init", "tau_init", numbers, "CIFAR-10 Patho(3)")
