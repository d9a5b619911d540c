"""Table: accuracy by the local epochs before the first graph, tau_init, and by budget (CIFAR-10, Patho(3), three seeds)."""

from __future__ import annotations

from collections.abc import Sequence

from _common import SEEDS, Drawing, main

from _tables import by_budget

from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [
    Run(dataset="cifar10", tau_init=tau, budget=budget, seed=seed)
    for tau in (1, 5, 10)
    for budget in ("inf", 20, 10, 5)
    for seed in SEEDS
]
PAPER = {
    1: ("81.86", "82.33", "82.53", "82.30"),
    5: ("83.03", "82.53", "82.58", "80.90"),
    10: ("83.04", "82.83", "82.52", "82.17"),
}  # for inf, 20, 10, 5


def draw(results: Sequence[Result], paper: bool = False) -> Drawing:
    """Return the table."""
    dpfl = [r for r in results if r.run.method == "dpfl"]
    data, text, latex = by_budget(dpfl, "tau_init", "tau_init", PAPER if paper else None, "CIFAR-10 Patho(3)")
    return Drawing(data, text=text, latex=latex)


OPTIONS = {"paper": {"action": "store_true", "help": "add the paper's figures in brackets"}}

if __name__ == "__main__":
    main("tau_init_table", __doc__, RUNS, draw, OPTIONS)
