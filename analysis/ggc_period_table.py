"""Table: accuracy by the period P of the greedy search and by budget (CIFAR-10, Dir(0.1), seed 42)."""

from __future__ import annotations

from collections.abc import Sequence

from _common import Drawing, main

from _tables import by_budget

from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [
    Run(dataset="cifar10", partition="dirichlet", dirichlet_alpha=0.1, ggc_period=period, budget=budget)
    for period in (1, 5, 10, 20)
    for budget in ("inf", 20, 10, 5)
]
PAPER = {
    1: ("84.20", "83.67", "84.20", "84.33"),
    5: ("83.83", "84.01", "83.31", "83.73"),
    10: ("83.24", "84.17", "83.31", "83.03"),
    20: ("82.34", "82.59", "82.08", "82.73"),
}  # for inf, 20, 10, 5


def draw(results: Sequence[Result], paper: bool = False) -> Drawing:
    """Return the table."""
    dpfl = [r for r in results if r.run.method == "dpfl"]
    data, text, latex = by_budget(dpfl, "ggc_period", "P", PAPER if paper else None, "CIFAR-10 Dir(0.1)")
    return Drawing(data, text=text, latex=latex)


OPTIONS = {"paper": {"action": "store_true", "help": "add the paper's figures in brackets"}}

if __name__ == "__main__":
    main("ggc_period_table", __doc__, RUNS, draw, OPTIONS)
