"""What a run shows while it goes on: a progress bar on a terminal, one plain line per round in a log."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from dpfl_mpi.federation import Parts
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Job, Run


class Progress:
    """The bar or the lines, shown by root; every rank takes part, because the means are over all clients. Use with `with`."""

    def __init__(self, run: Run, job: Job, world: World, first: int = 0):
        self.run, self.job, self.world, self.first = run, job, world, first
        self.bar: Any = None

    def __enter__(self) -> Progress:
        terminal = sys.stderr.isatty() or bool(os.environ.get("DPFL_MPI_TERMINAL"))
        if self.world.root and not self.job.quiet and terminal:
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.run.rounds + 1 + self.run.finetune_epochs,
                initial=self.first,
                desc=short(self.run.method),
                unit="round",
                file=sys.stderr,
            )
        self.start = time.perf_counter()
        return self

    def line(self, parts: Parts, t: int) -> None:
        """Show a round. Collective."""
        benign = parts.members.benign[parts.ids]
        sums = []  # over this rank's benign clients: each score's sum, and how many have it
        for values in (parts.log.notes["val_acc"], parts.log.notes["test_acc"], parts.scoring.best_test):
            ok = np.isfinite(values) & benign
            sums += [values[ok].sum(), ok.sum()]
        means = self.world.spread(np.array([*sums, parts.log.notes["models_received"].sum()], np.float64))[
            :, 1
        ]  # over ranks
        if not self.world.root or self.job.quiet:
            return
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        val, test, best = 100 * means[0:6:2] / np.maximum(means[1:6:2], 1e-9)
        received = means[6] * self.world.size
        if self.bar is not None:
            self.bar.set_postfix_str(f"val {val:.1f} % test {best:.1f} %")
            self.bar.update()
        else:
            print(
                f"round {t:4d}  val {val:6.2f} %  test {test:6.2f} %  best {best:6.2f} %  "
                f"received {received / parts.n:5.1f}  {seconds:6.2f} s",
                flush=True,
            )

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
