"""`Log`: what the verbs note about a round, and how long each phase of it took, until the engine records it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dpfl_mpi.results.schema import PHASES

SCORES = ("train_loss", "val_loss", "val_acc", "test_loss", "test_acc")  # of the reported models
MIXED = ("mixed_val_acc", "mixed_test_acc")  # of the rows after mixing


class Log:
    """The notes of one round: `notes[name]`, one value (or row) per client `[K]`, and `seconds[phase]`."""

    def __init__(self, k: int, synchronise: bool):
        self.k, self.synchronise = k, synchronise
        # gradient steps, and images scored, since the simulated clocks last moved (--network)
        self.steps, self.images = np.zeros(k, np.int64), np.zeros(k, np.int64)
        self._inside = 0.0  # seconds that phases inside the running one have counted, which it must not count again
        self.begin()

    def begin(self) -> None:
        """Start the notes of a round: scores NaN, counts 0."""
        self.notes = {name: np.full(self.k, np.nan) for name in (*SCORES, *MIXED)}
        self.notes |= {name: np.zeros(self.k) for name in ("evaluations", "models_received")}
        self.notes["cases"] = np.zeros((self.k, 4))
        self.every_row = False  # whether all rows came to all ranks, which counts no models received
        self.told = False  # whether fed.note_received has said how many these are
        self.again = np.zeros(self.k)  # models received that every_row had brought, and that nobody had told of
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase of the round, less what phases inside it have counted."""
        start, outer, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        if self.synchronise:
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
        self.seconds[phase] += spent - self._inside
        self._inside = outer + spent

    def count(self, phase: str, seconds: float) -> None:
        """Add seconds measured elsewhere to a phase, and take them off the phase that is running."""
        self.seconds[phase] += seconds
        self._inside += seconds
