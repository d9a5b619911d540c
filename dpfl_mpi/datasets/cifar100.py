"""CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images in 100 or 20 classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries
from dpfl_mpi.datasets._images import image_splits
from dpfl_mpi.datasets.cifar10 import ARCHIVED, PIXELS, read_binaries
from dpfl_mpi.datasets.cifar10 import PAPER as CIFAR10
from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import option

# not in the paper: ten of 100 classes per client leave about ten holders of fifty images each
PAPER = CIFAR10 | {"classes_per_client": 10, "min_per_class": 2}
SOURCE = f"cifar-100-binary.tar.gz, {ARCHIVED}"
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
DOWNLOAD = (URL, "md5:03b5dce01913d631647c71ecec9e9cb8", 168_513_733)
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)  # of its training images
IMAGES = {"train.bin": 50_000, "test.bin": 10_000}


@dataclass(frozen=True)
class Options:
    labels: Literal["fine", "coarse"] = option("fine", "100 classes, or the 20 superclasses")


def read(source: Path, labels: str = "fine") -> Arrays:
    """Return CIFAR-100 from its binary archive, that archive unpacked, or images."""
    label_at, classes = (1, 100) if labels == "fine" else (0, 20)
    found = read_binaries(source, IMAGES, header=2, label_at=label_at, classes=classes)
    if found:
        names = tuple(map(str, range(classes)))
        for path, get in entries(source, 60_000 * (2 + PIXELS)):
            if path.name == f"{labels}_label_names.txt":
                listed = tuple(get().decode("utf-8", "replace").split())
                names = listed if len(listed) == classes else names
                break
        return Arrays(*found["train.bin"], *found["test.bin"], names, MEAN, STD)
    if labels == "coarse":
        raise UserError(f"--labels coarse needs the binary archive; {source} holds images")
    splits, names = image_splits(source, ("train", "test"), shape=(32, 32, 3))
    return Arrays(*splits["train"], *splits["test"], names, MEAN, STD)
