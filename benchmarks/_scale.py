"""What the benchmarks of many clients and ranks share: data with as many clients as wanted, and a run of which every rank is watched."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dpfl_mpi.data.partition import FORMAT
from dpfl_mpi.mpi.launcher import OPEN_MPI
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings.fields import to_flags

RANK = Path(__file__).with_name("_rank.py")
CLASSES = 3  # of a client: there is somebody to collaborate with, and somebody not to


def make_data(path: Path, clients: int, pool: int, test: int, side: int = 16) -> None:
    """Write a prepared file of `clients` clients with `pool` samples to train and validate on and `test` to test on each.

    Real digits of scikit-learn, 8x8, enlarged to `side` and moved by up to an eighth of it, so that there are as many as wanted; each
    client draws its samples from three of the ten classes.
    """
    from sklearn.datasets import load_digits

    from dpfl_mpi import prepare
    from dpfl_mpi.data.own import arrays_of

    digits = load_digits()
    rng = np.random.default_rng(0)
    small = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    large = small.repeat(side // 8, 1).repeat(side // 8, 2)
    reach = side // 8
    padded = np.pad(large, ((0, 0), (reach, reach), (reach, reach)))
    of_class = [np.flatnonzero(digits.target == c) for c in range(10)]
    each = pool + test
    held = np.array([rng.permutation(10)[:CLASSES] for _ in range(clients)])
    y = np.take_along_axis(held, rng.integers(0, CLASSES, (clients, each)), 1).reshape(-1)
    which = np.array(
        [of_class[c][i % len(of_class[c])] for c, i in zip(y, rng.integers(0, 10_000, len(y)), strict=True)]
    )
    dy, dx = rng.integers(0, 2 * reach + 1, (2, len(y)))
    x = np.empty((len(y), side, side), np.uint8)
    for i in range(2 * reach + 1):
        for j in range(2 * reach + 1):
            here = (dy == i) & (dx == j)
            x[here] = padded[which[here], i : i + side, j : j + side]
    client, is_test = np.repeat(np.arange(clients), each), np.tile(np.arange(each) >= pool, clients)
    prepare.write(arrays_of(x, y, client, is_test), "arrays", path, own=True)


def deal(path: Path, images: Path, clients: int, pool: int, test: int) -> None:
    """Write a partition of a prepared file of images as JSON: each client draws its samples from three of ten classes, and clients share images."""
    with h5py.File(images) as file:
        of_class = {
            side: [np.flatnonzero(file[f"{side}/labels"][()] == c) for c in range(10)] for side in ("train", "test")
        }
    rng = np.random.default_rng(0)
    held = []
    for _ in range(clients):
        classes = rng.permutation(10)[:CLASSES]
        mine, tested = (
            rng.choice(np.concatenate([of_class[side][c] for c in classes]), n, replace=False).tolist()
            for side, n in (("train", pool), ("test", test))
        )
        held.append({"train": mine[pool // 5 :], "val": mine[: pool // 5], "test": tested})
    path.write_text(json.dumps({"format": FORMAT, "clients": held}))


@dataclasses.dataclass(frozen=True)
class Watched:
    """What a run took."""

    path: Path  # the results file
    ranks: list[dict[str, Any]]  # what `_rank.py` wrote, by rank

    def most(self, name: str) -> float:
        """Return the largest value over ranks."""
        return max(rank[name] for rank in self.ranks)

    def seconds(self, first: int = 1, end: int | None = None) -> dict[str, float]:
        """Return the mean seconds of a round from `first` up to `end`, slowest rank, by phase; preprocessing is round 0."""
        with Result(self.path) as result:
            return {name: float(result[f"seconds/{name}"][first:end, 2].mean()) for name in PHASES}


def run(folder: Path, ranks: int, name: str, flags: dict[str, object]) -> Watched:
    """Return what a run with these flags took; it computes afresh and writes `folder/name.h5`.

    Raises:
        SystemExit: the run failed; its own message was printed.
    """
    seen = folder / f"{name}.ranks"
    seen.mkdir(parents=True, exist_ok=True)
    out = folder / f"{name}.h5"
    words = to_flags(flags | {"quiet": True, "fresh": True, "out": out})
    if code := launch(ranks, [sys.executable, str(RANK), str(seen), *words]).wait():
        sys.exit(f"error: the run {name} on {ranks} ranks ended with exit code {code}")
    return Watched(out, [json.loads((seen / f"{rank}.json").read_text()) for rank in range(ranks)])


def launch(ranks: int, command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """Return `mpirun -n RANKS COMMAND`, which runs now, one thread per rank; `how` goes to `subprocess.Popen`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_"))}
    env |= OPEN_MPI | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["mpirun", "-n", str(ranks), *command], env=env, **how)


def numbers(text: str) -> list[int]:
    """Return the whole numbers of a list with commas."""
    return [int(word) for word in text.split(",")]


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return b of the least squares fit log y = a + b log x: 1 is linear, 0 constant; nan with fewer than two points."""
    return slope(np.log(x), np.log(y))[1] if min(y) > 0 else math.nan


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) of the least squares fit y = a + b x."""
    if len(x) < 2:
        return math.nan, math.nan
    b, a = np.polyfit(x, y, 1)
    return float(a), float(b)
