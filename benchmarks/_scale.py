"""What benchmarks of many clients and ranks share: data, watched runs and fits."""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.mpi.launcher import OPEN_MPI
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings.fields import to_flags

RANK = Path(__file__).with_name("_rank.py")
CLASSES = 3  # of a client: it has classes in common with some clients only
MB = 1e6


def options(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose help is a docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw)


def numbers(text: str) -> list[int]:
    """Return the whole numbers of a list with commas."""
    return [int(word) for word in text.split(",")]


def make_data(path: Path, clients: int, pool: int, test: int, side: int = 16) -> None:
    """Write a prepared file: `pool` samples per client to train and validate on, `test` to test on.

    They are digits of scikit-learn, enlarged from 8x8 to `side` and moved by up to an eighth of it,
    so that there are enough of them; those of 32x32 have three colours, as CIFAR-10 has. Each
    client has three of the ten classes.
    """
    from sklearn.datasets import load_digits

    from dpfl_mpi import prepare
    from dpfl_mpi.data.own import arrays_of

    digits, rng, times = load_digits(), np.random.default_rng(0), side // 8
    small = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    padding = (0, 0), (times, times), (times, times)
    padded = np.pad(small.repeat(times, 1).repeat(times, 2), padding)
    of_class = [np.flatnonzero(digits.target == c) for c in range(10)]
    each = pool + test
    classes = np.array([rng.permutation(10)[:CLASSES] for _ in range(clients)])
    y = np.take_along_axis(classes, rng.integers(0, CLASSES, (clients, each)), 1).reshape(-1)
    draws = rng.integers(0, 10_000, len(y))
    digit = np.array([of_class[c][i % len(of_class[c])] for c, i in zip(y, draws, strict=True)])
    dy, dx = rng.integers(0, 2 * times + 1, (2, len(y)))
    x = np.empty((len(y), side, side), np.uint8)
    for i in range(2 * times + 1):
        for j in range(2 * times + 1):
            now = (dy == i) & (dx == j)
            x[now] = padded[digit[now], i : i + side, j : j + side]
    if side == 32:
        x = np.repeat(x[..., None], 3, axis=3)
    client = np.repeat(np.arange(clients), each)
    is_test = np.tile(np.arange(each) >= pool, clients)
    prepare.write(arrays_of(x, y, client, is_test), "arrays", path, own=True)


def flags_for(data: Path, **fields: Any) -> dict[str, Any]:
    """Return the fields of a Run on a file of `make_data`, one local epoch a round."""
    flags = {"dataset": "arrays", "data": str(data), "partition": "natural", "min_samples": 3}
    return flags | {"tau_init": 1, "tau_train": 1} | fields


def launch(ranks: int, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `mpirun -n RANKS COMMAND`, one thread per rank; `options` go to `subprocess.Popen`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_"))}
    env |= OPEN_MPI | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["mpirun", "-n", str(ranks), *command], env=env, **options)


@dataclasses.dataclass(frozen=True)
class Watched:
    """A finished run."""

    path: Path  # the results file
    ranks: list[dict[str, Any]]  # what `_rank.py` wrote, by rank

    def most(self, name: str) -> float:
        """Return the largest value over ranks."""
        return max(rank[name] for rank in self.ranks)

    def seconds(self, first: int = 1, end: int | None = None) -> dict[str, float]:
        """Return the slowest rank's mean seconds by phase, over rounds `first` to `end` - 1.

        Preprocessing is round 0.
        """
        with Result(self.path) as result:
            rounds = {name: result[f"seconds/{name}"][first:end, 2] for name in PHASES}
        return {name: float(seconds.mean()) for name, seconds in rounds.items()}


def run(folder: Path, ranks: int, name: str, flags: dict[str, object]) -> Watched:
    """Compute a run, which writes `folder/name.h5`, and return it; exit where it fails."""
    notes = folder / f"{name}.ranks"
    notes.mkdir(parents=True, exist_ok=True)
    out = folder / f"{name}.h5"
    job = {"quiet": True, "fresh": True, "checkpoint_every": "never", "out": out}
    words = to_flags(flags | job)
    if code := launch(ranks, [sys.executable, str(RANK), str(notes), *words]).wait():
        sys.exit(f"error: the run {name} on {ranks} ranks ended with exit code {code}")
    of_ranks = [(notes / f"{rank}.json").read_text() for rank in range(ranks)]
    return Watched(out, [json.loads(text) for text in of_ranks])


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) of the least squares fit y = a + b x; nan with fewer than two points."""
    if len(x) < 2:
        return math.nan, math.nan
    b, a = np.polyfit(x, y, 1)
    return float(a), float(b)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return b of the least squares fit log y = a + b log x: 1 is linear, 0 constant."""
    return slope(np.log(x), np.log(y))[1] if min(y) > 0 else math.nan
