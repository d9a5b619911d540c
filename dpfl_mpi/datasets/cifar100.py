"""CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images in 100 classes."""

from pathlib import Path

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries
from dpfl_mpi.datasets._images import published
from dpfl_mpi.datasets.cifar10 import ARCHIVED, read_binaries
from dpfl_mpi.datasets.cifar10 import PAPER as CIFAR10
from dpfl_mpi.errors import UserError

# not in the paper: ten of 100 classes per client leave about ten holders of fifty images each
PAPER = CIFAR10 | {"classes_per_client": 10, "min_per_class": 2}
SOURCE = f"cifar-100-binary.tar.gz, {ARCHIVED}"
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
DOWNLOAD = (URL, "md5:03b5dce01913d631647c71ecec9e9cb8", 168_513_733)
TITLE = "CIFAR-100"
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)  # of its training images
IMAGES = {"train.bin": 50_000, "test.bin": 10_000}


def read(source: Path) -> Arrays:
    """Return CIFAR-100 from its binary archive, that archive unpacked, or images."""
    found = read_binaries(source, IMAGES, header=2, label_at=1, classes=100)
    if not found:
        images = published(source, (), MEAN, STD, "train", "test")
        if len(images.class_names) != 100:
            raise UserError(f"{source} has {len(images.class_names)} classes; CIFAR-100 has 100")
        return images
    names = tuple(map(str, range(100)))
    for path, get in entries(source):
        if path.name == "fine_label_names.txt":
            names = tuple(get().decode("utf-8", "replace").split())
    return Arrays(*found["train.bin"], *found["test.bin"], names, MEAN, STD)
