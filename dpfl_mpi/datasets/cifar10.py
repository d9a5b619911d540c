"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32 in ten classes, from the binary archive or a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import entries, image_splits, size
from dpfl_mpi.errors import UserError

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
# its first graph is that of its third round: 15 epochs, then 97 rounds, 500 epochs in all
AUTHORS_CODE = {"weight_decay": 1e-4, "lr_decay": 0.998, "tau_init": 15, "rounds": 97, "batch_size": 32}
DATA = "data/cifar10.h5"
SOURCE = "cifar-10-binary.tar.gz, that archive unpacked, or a folder or archive of {train,test}/CLASS/*.png"
DOWNLOAD = (
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
    170_052_171,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in the authors' code
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32  # bytes of an image: red, green, blue planes
TRAIN, TEST = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)
A_FILE = 10_000  # images in each


def read(source: Path) -> Arrays:
    """Return CIFAR-10 from its binary archive (`cifar-10-binary.tar.gz`), that archive unpacked, or images {train,test}/CLASS/*."""
    found = binaries(source, (*TRAIN, *TEST), A_FILE * (1 + PIXELS))
    if found is None:
        splits, _ = image_splits(source, ("train", "test"), CLASSES, colour=True)
        if splits["train"][0].shape[1:] != (32, 32, 3):
            raise UserError(f"{source} holds images of {size(splits['train'][0][0])}; CIFAR-10 has 32x32")
        (x, y), (x_test, y_test) = splits["train"], splits["test"]
        return Arrays(x, y, x_test, y_test, CLASSES, MEAN, STD)
    (x, y), (x_test, y_test) = (records(source, found, names, 1, 0, len(CLASSES)) for names in (TRAIN, TEST))
    return Arrays(x, y, x_test, y_test, CLASSES, MEAN, STD)


def binaries(source: Path, names: tuple[str, ...], length: int) -> dict[str, bytes] | None:
    """Return the named files out of an archive or folder, None where none of them is there. Nothing is unpacked.

    Raises:
        UserError: one of them is missing, or has not `length` bytes; the archive is CIFAR's pickled one.
    """
    from tqdm import tqdm

    found: dict[str, bytes] = {}
    others = 0
    with tqdm(total=len(names), desc=f"reading {source.name}", unit="file", disable=None) as bar:
        for path, get in entries(source, length):
            if path.name in names and path.name not in found:
                found[path.name] = get()
                if len(found[path.name]) != length:
                    raise UserError(f"{source}: {path.name} has {len(found[path.name])} bytes, not {length}: truncated")
                bar.update()
            elif path.name in ("data_batch_1", "test_batch", "train", "test", "meta", "batches.meta"):
                raise UserError(
                    f"{source} is the archive for Python, which holds pickles and is not read; take the binary one"
                )
            else:
                others += 1
            if len(found) == len(names) or (not found and others > 100):
                break  # all there, or images
    if not found:
        return None
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(f"{source} has no {missing[0]}: it is not the whole of the binary archive")
    return found


def records(
    source: Path, found: dict[str, bytes], names: tuple[str, ...], header: int, label_at: int, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return images `[M, 32, 32, 3]` and labels of files of records: `header` bytes, of which one is the label, then the planes."""
    images, labels = [], []
    for name in names:
        rows = np.frombuffer(found[name], np.uint8).reshape(-1, header + PIXELS)
        labels.append(rows[:, label_at].astype(np.int64))
        if labels[-1].max() >= classes:
            raise UserError(f"{source}: {name} holds the label {labels[-1].max()}; allowed are 0 to {classes - 1}")
        images.append(rows[:, header:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)
