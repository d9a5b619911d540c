"""The rows of Table 1 on FEMNIST with a writer per client, as the paper's text has it; its numbers most likely come from `--partition fedrep`.

Run with `python -m dpfl_mpi.sweep reproduction/writers.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "analysis")]

from _common import SEEDS

from accuracy_table import FEMNIST_TUNING, ROWS

from dpfl_mpi.config import Run

RUNS = [
    Run(dataset="femnist", **row | (FEMNIST_TUNING if "finetune_epochs" in row else {}), seed=seed)
    for row in ROWS
    for seed in SEEDS
]
