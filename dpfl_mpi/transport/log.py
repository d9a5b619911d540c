"""`Log`: what the verbs note about a round, and the seconds of its phases, until it is recorded."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dpfl_mpi.results.schema import PHASES

SCORES = ("train_loss", "val_loss", "val_acc", "test_loss", "test_acc")  # of the reported models
MIXED = ("mixed_val_acc", "mixed_test_acc")  # of the rows after mixing


class Log:
    """`notes[name]`: one value or row per client `[K]`; `seconds[phase]`: of this rank."""

    def __init__(self, k: int, synchronise: bool):
        """Note k clients; with `synchronise` a phase ends when the GPU has finished."""
        self.k, self.synchronise = k, synchronise
        # gradient steps taken and images scored since the simulated clocks last moved (--network)
        self.steps, self.images = np.zeros(k, np.int64), np.zeros(k, np.int64)
        self._inner = 0.0  # seconds of phases inside the running one
        self.begin()

    def begin(self) -> None:
        """Start a round: scores are NaN, counts 0."""
        self.notes = {name: np.full(self.k, np.nan) for name in (*SCORES, *MIXED)}
        self.notes |= {name: np.zeros(self.k) for name in ("evaluations", "models_received")}
        self.notes["cases"] = np.zeros((self.k, 4))
        self.seconds = dict.fromkeys(PHASES, 0.0)
        # fed.every_row counts no models received; fed.note_received says how many they are
        self.every_row_called = False
        self.received_noted = False  # whether it was said
        self.counted_twice = np.zeros(self.k)  # models counted since, which every_row had brought

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase, less that of phases within it."""
        start, outer, self._inner = time.perf_counter(), self._inner, 0.0
        yield
        if self.synchronise:
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
        self.seconds[phase] += spent - self._inner
        self._inner = outer + spent

    def count(self, phase: str, seconds: float) -> None:
        """Add seconds measured elsewhere to a phase, and take them off the running one."""
        self.seconds[phase] += seconds
        self._inner += seconds
