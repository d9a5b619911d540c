"""Clients in groups, to whom the model of another group is of little help or harms: a data set of one's own.

    python -m dpfl_mpi.prepare reproduction/groups.py --source CIFAR10 --by labels --out data/labels-42.h5
    mpirun -n 8 python -m dpfl_mpi --dataset reproduction/groups.py --data data/labels-42.h5

CIFAR-10 is dealt at random in equal parts, and client k is in group k mod 4. `labels`: the names of the ten classes are moved on by 0, 2, 5 or 7 places
(concept shift: no two groups agree on any class). `rotation`: group g sees its images rotated by 90 g degrees. CIFAR-100 by `superclass`: client k
holds images of superclass k mod 20 alone, of all its five classes.

A client that knows its group: --method random_graph --reach 'groups:0,4,8;1,5,9;...', or with superclasses --method oracle.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets import cifar10, cifar100
from dpfl_mpi.settings import option

PAPER = cifar10.PAPER | {"partition": "natural"}
OWN_DATA = True
SOURCE = "what prepare cifar10 takes, or by superclass what prepare cifar100 takes"
GROUPS = 4
# the superclass of each of CIFAR-100's classes, which are in alphabetical order
SUPERCLASS = np.array([
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
    5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
    16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
])  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What `prepare` may be asked for."""

    by: Literal["labels", "rotation", "superclass"] = option("labels", "what differs between groups")
    clients: int = option(100, "clients", low=1)
    seed: int = option(42, "of who holds which images", low=0)


def read(source: Path, by: str = "labels", clients: int = 100, seed: int = 42) -> Arrays:
    """Return the images of all clients, client k with the name "k"."""
    data = (cifar100 if by == "superclass" else cifar10).read(source)
    rng = np.random.default_rng(seed)
    parts = [
        dealt(images, labels, by, clients, rng)
        for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels))
    ]
    x, y, owner = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    test = np.arange(len(y)) >= len(data.train_labels)
    return arrays_of(x, y, owner, test, str(source), f"groups by {by}, {clients} clients, seed {seed}")


def dealt(
    images: np.ndarray, labels: np.ndarray, by: str, clients: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images as their owners see them, the labels that these give them, and the owners `[M]`."""
    kind = SUPERCLASS[labels] if by == "superclass" else np.zeros_like(labels)
    kinds = 20 if by == "superclass" else 1
    owner = np.empty(len(labels), np.int64)
    for s in range(kinds):
        mine = rng.permutation(np.flatnonzero(kind == s))
        holders = np.arange(s, clients, kinds)
        owner[mine] = holders[np.arange(len(mine)) % len(holders)]
    group = owner % GROUPS
    if by == "labels":
        labels = (labels + 10 * group // GROUPS) % 10
    if by == "rotation":
        images = images.copy()
        for g in range(1, GROUPS):
            images[group == g] = np.rot90(images[group == g], g, axes=(1, 2))
    return images, labels, owner
