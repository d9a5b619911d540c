"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32, ten classes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries
from dpfl_mpi.datasets._images import published
from dpfl_mpi.errors import UserError

TITLE = "CIFAR-10"
PAPER = {
    "partition": "pathological",
    "classes_per_client": 3,
    "dirichlet_alpha": 0.5,
    "min_per_class": 10,
    "min_samples": 20,
    "clients": 100,
    "model": "cnn",
    "rounds": 98,
    "tau_init": 10,
    "tau_train": 5,
    "budget": "0.1N",
    "lr": 0.01,
    "weight_decay": 1e-3,
    "lr_decay": 1.0,
    "batch_size": 16,
    "augment": True,
}
DECAY = {"weight_decay": 1e-4, "lr_decay": 0.998}  # of the authors' code
# its first graph is that of its third round: 15 epochs, then 97 rounds, 500 epochs in all
AUTHORS_CODE = {"tau_init": 15, "rounds": 97, "batch_size": 32, **DECAY}
ARCHIVED = "that archive unpacked, or a folder or archive of {train,test}/CLASS/*.png"
SOURCE = f"cifar-10-binary.tar.gz, {ARCHIVED}"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
DOWNLOAD = (URL, "md5:c32a1d4ab5d03f1284b67883e8d87530", 170_052_171)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in the authors' code
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32  # bytes of an image: red, green, blue planes
TRAIN, TEST = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)
IMAGES = 10_000  # in each file
# files of the archive for Python
PICKLED = ("data_batch_1", "test_batch", "train", "test", "meta", "batches.meta")


def read(source: Path) -> Arrays:
    """Return CIFAR-10 from its binary archive, that archive unpacked, or images."""
    files = dict.fromkeys((*TRAIN, *TEST), IMAGES)
    found = read_binaries(source, files, header=1, label_at=0, classes=len(CLASSES))
    if not found:
        return published(source, CLASSES, MEAN, STD, "train", "test")
    images, labels = (np.concatenate([found[name][i] for name in TRAIN]) for i in (0, 1))
    return Arrays(images, labels, *found[TEST[0]], CLASSES, MEAN, STD)


def read_binaries(
    source: Path, files: Mapping[str, int], header: int, label_at: int, classes: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images `[M, 32, 32, 3]` and labels of CIFAR's binary files; nothing if there are none.

    `files` says how many images each file holds: records of `header` bytes, of which the one at
    `label_at` is the label, then the planes.
    """
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    record = header + PIXELS
    for path, get in entries(source):
        name = path.name
        if name in PICKLED:
            pickles = "the archive for Python, whose pickles are not read"
            raise UserError(f"{source} is {pickles}; take the binary one")
        if name not in files:
            continue
        data, length = get(), files[name] * record
        if len(data) != length:
            raise UserError(f"{source}: {name} has {len(data)} bytes, not {length}")
        rows = np.frombuffer(data, np.uint8).reshape(-1, record)
        labels = rows[:, label_at].astype(np.int64)
        if labels.max() >= classes:
            label = f"the label {labels.max()}; allowed are 0 to {classes - 1}"
            raise UserError(f"{source}: {name} holds {label}")
        planes = rows[:, header:].reshape(-1, 3, 32, 32)
        found[name] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels
    missing = [name for name in files if name not in found]
    if found and missing:
        raise UserError(f"{source} has no {missing[0]}: it is not the whole of the binary archive")
    return found
