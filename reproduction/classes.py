"""CIFAR-10 in groups of clients that hold other classes, as DAC's authors deal it.

    python -m dpfl_mpi.prepare reproduction/classes.py --source CIFAR10 --by animals --seed 1 \
        --out data/animals-1.h5

Of 100 clients, `animals` gives the first 40 vehicles and the others animals. `pairs`: the first 20
hold airplanes and automobiles, the next 20 birds and cats, and so on. All images are dealt at
random, so every client has 500 to train and validate, and 100 to test.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets import cifar10
from dpfl_mpi.settings import option

PAPER = cifar10.PAPER | {"partition": "natural"}
OWN_DATA = True
SOURCE = "what prepare cifar10 takes"
GROUPS = {  # of classes
    "animals": [[0, 1, 8, 9], [2, 3, 4, 5, 6, 7]],
    "pairs": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],
}


@dataclass(frozen=True)
class Options:
    by: Literal["animals", "pairs"] = option("animals", "which classes are in a group")
    clients: int = option(100, "clients, a number that 10 divides", low=10)
    seed: int = option(42, "of which images a client holds", low=0)


def read(source: Path, by: str, clients: int, seed: int) -> Arrays:
    """Return the images of all clients, client k with the name "k"."""
    data, rng = cifar10.read(source), np.random.default_rng(seed)
    labels = data.train_labels, data.test_labels
    parts = [owners(y, GROUPS[by], clients, rng) for y in labels]
    x = np.concatenate([data.train_images, data.test_images])
    owner, group = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    y, test = np.concatenate(labels), np.arange(len(x)) >= len(labels[0])
    return arrays_of(x, y, owner, test, str(source), f"{by}, seed {seed}", group=group)


def owners(
    y: np.ndarray, groups: list[list[int]], clients: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the client and the group of each image; a group of m classes has m tenths of all."""
    owner, group, first = np.empty_like(y), np.empty_like(y), 0
    for g, classes in enumerate(groups):
        mine = rng.permutation(np.flatnonzero(np.isin(y, classes)))
        holders = len(classes) * clients // 10
        owner[mine], group[mine] = first + np.arange(len(mine)) % holders, g
        first += holders
    return owner, group
