"""What a run shows while it goes on: a progress bar on a terminal, one plain line per round in a log."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from dpfl_mpi.engine.record import gather
from dpfl_mpi.engine.session import Session
from dpfl_mpi.federation import Parts
from dpfl_mpi.plugins import short

NOTES = ("val_acc", "test_acc", "models_received")


class Progress:
    """The bar or the lines, shown by root; every rank takes part, because the means are over all clients. Use with `with`."""

    def __init__(self, session: Session, first: int = 0):
        self.run, self.world, self.first = session.run, session.world, first
        self.shows = self.world.root and not session.job.quiet
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if self.shows and (sys.stderr.isatty() or os.environ.get("DPFL_MPI_TERMINAL")):
            from tqdm import tqdm

            total, title = self.run.rounds + 1 + self.run.finetune_epochs, short(self.run.method)
            self.bar = tqdm(total=total, initial=self.first, desc=title, unit="round", file=sys.stderr)
        self.start = time.perf_counter()
        return self

    def line(self, parts: Parts, t: int) -> None:
        """Show a round. Collective."""
        everyone = gather(parts, {name: parts.log.notes[name] for name in NOTES} | {"best": parts.scoring.best_test})
        if not self.shows:
            return
        val, test, best = (mean(everyone[name][parts.members.benign]) for name in (*NOTES[:2], "best"))
        received = everyone["models_received"].mean()
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        if self.bar is not None:
            self.bar.set_postfix_str(f"val {val:.1f} % test {best:.1f} %")
            self.bar.update()
        else:
            scores = f"val {val:6.2f} %  test {test:6.2f} %  best {best:6.2f} %"
            print(f"round {t:4d}  {scores}  received {received:5.1f}  {seconds:6.2f} s", flush=True)

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()


def mean(values: np.ndarray) -> float:
    """Return the mean in percent of those clients that have a score, 0 where none has."""
    known = values[np.isfinite(values)]
    return float(100 * known.mean()) if len(known) else 0.0
