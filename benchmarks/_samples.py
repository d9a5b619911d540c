"""Clients of random samples, for benchmarks of the numerics alone."""

from collections.abc import Sequence

import numpy as np

from dpfl_mpi.data.partition import assemble
from dpfl_mpi.data.source import Source
from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.optimiser import SGD

CIFAR = (32, 32, 3)
S = 16  # mini-batch
PAPER_SGD = SGD(S, momentum=0.9, weight_decay=1e-3, clip_norm=20.0)


def clients_of(
    ensemble: Ensemble,
    images: np.ndarray,
    labels: np.ndarray,
    train: Sequence[np.ndarray],
    val: Sequence[np.ndarray],
    augment: bool = False,
) -> Clients:
    """Return clients by the rows of `images` that each trains on, and that each validates on."""
    k, classes = len(train), int(labels.max()) + 1
    parts = {"train": list(train), "val": list(val), "test": [np.zeros(1, np.int64)] * k}
    partition = assemble(parts, np.ones((k, classes), np.int64), np.ones(k), False)
    both = {"train": labels, "test": labels}
    read = lambda part, rows: images[rows]  # noqa: E731
    shape, dtype = images.shape[1:], ensemble.dtype
    source = Source(shape, classes, MEAN, STD, both, sha256="", images=read, dtype=dtype)
    return Clients(source, partition, np.arange(k), 0, augment, ensemble)
