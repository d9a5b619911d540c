"""CIFAR-10 in four groups of clients that disagree as much as one asks: a data set of one's own.

    python -m dpfl_mpi.prepare reproduction/harm.py --source CIFAR10 --share 40 --images 100 \
        --out data/harm-40-0-100-201.h5
    mpirun -n 8 python -m dpfl_mpi --dataset reproduction/harm.py --data data/harm-40-0-100-201.h5

The images are dealt at random in equal parts; client k is in group k mod 4. `share` percent of the
classes, at random, have other names in each group: group g calls the i-th of these m classes as the
others call the (i + g)-th, modulo m. Of two classes (20 %) there are only two such orders, so that
groups 0 and 2 agree, and 1 and 3. `degrees`: group g sees its images rotated by g times as much.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets import cifar10
from dpfl_mpi.settings import option

PAPER = cifar10.PAPER | {"partition": "natural"}
OWN_DATA = True
SOURCE = "what prepare cifar10 takes"
GROUPS = 4


@dataclass(frozen=True)
class Options:
    share: float = option(100, "classes that groups name differently, percent", low=0, high=100)
    degrees: float = option(0, "rotation from one group to the next", low=0, high=90)
    images: int = option(500, "training images per client", low=1)
    clients: int = option(100, "clients", low=GROUPS)
    seed: int = option(42, "of which images a client holds, and of the classes", low=0)


def read(
    source: Path, share: float, degrees: float, images: int, clients: int, seed: int
) -> Arrays:
    """Return the images of all clients, client k with the name "k"."""
    data, rng = cifar10.read(source), np.random.default_rng(seed)
    renamed = rng.permutation(10)[: round(share / 10)]
    parts = []
    for x, y, most in (
        (data.train_images, data.train_labels, images),
        (data.test_images, data.test_labels, len(data.test_labels)),
    ):
        each = min(most, len(y) // clients)
        mine = rng.permutation(len(y))[: each * clients]
        owner = np.repeat(np.arange(clients), each)
        parts.append((*as_seen(x[mine], y[mine], owner % GROUPS, renamed, degrees), owner))
    x, y, owner = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    test = np.arange(len(y)) >= len(parts[0][1])
    note = f"four groups, {share:g} % of classes and {degrees:g} degrees apart, seed {seed}"
    return arrays_of(x, y, owner, test, str(source), note, group=owner % GROUPS)


def as_seen(
    x: np.ndarray, y: np.ndarray, group: np.ndarray, renamed: np.ndarray, degrees: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels as each image's group sees and names them."""
    x, y = x.copy(), y.copy()
    for g in range(1, GROUPS):
        names = np.arange(10)
        names[renamed] = np.roll(renamed, -g)
        y[group == g] = names[y[group == g]]
        if degrees:
            x[group == g] = [rotated(image, g * degrees) for image in x[group == g]]
    return x, y


def rotated(image: np.ndarray, degrees: float) -> np.ndarray:
    """Return an image rotated to the left, its corners filled with the nearest pixels."""
    if degrees % 90 == 0:
        return np.rot90(image, round(degrees / 90))
    side = len(image)
    wide = np.pad(image, ((side, side), (side, side), (0, 0)), mode="edge")
    turned = np.asarray(Image.fromarray(wide).rotate(degrees, Image.Resampling.BILINEAR))
    return turned[side : 2 * side, side : 2 * side]
