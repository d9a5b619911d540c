"""A folder of FL-bench's `generate_data.py`: `data.npy`, `targets.npy` and `partition.pkl`."""

from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import check_one, entries
from dpfl_mpi.datasets._pickles import read_npy, unpickle
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import refused_as

PAPER = {"partition": "natural", "min_samples": 3}
OWN_DATA = True
NEEDED = ("data.npy", "targets.npy", "partition.pkl")
SOURCE = "FL-bench's folder of a data set, such as data/femnist, or an archive of it, "
SOURCE += f"with {', '.join(NEEDED)}"
NO_DOWNLOAD = "run FL-bench's generate_data.py, and name data/femnist, say, with --source PATH"
FILE_BYTES = 16 * 2**30  # most


def read(source: Path) -> Arrays:
    """Return the samples that clients hold; client k is named "k".

    What a client validates with is joined to its training part.
    """
    files = {path: get() for path, get in entries(source, FILE_BYTES) if path.name in NEEDED}
    check_one(source, (path.parent for path in files))
    found = {path.name: data for path, data in files.items()}
    for name in NEEDED:
        if name not in found:
            makes = "which FL-bench makes for synthetic, femnist and celeba"
            if name == "data.npy":
                makes += "; of data that FL-bench downloads it keeps the partition alone"
            raise UserError(f"{source} holds no {name}, {makes}")
    x, y = (read_npy(f"{source}: {name}", found[name]) for name in NEEDED[:2])
    if y.ndim != 1 or x.shape[:1] != y.shape:
        raise UserError(f"{source}: targets.npy is {y.shape}, and data.npy {x.shape}")
    partition = unpickle(found["partition.pkl"], f"{source}: partition.pkl")
    clients = partition.get("data_indices") if isinstance(partition, dict) else None
    if not (isinstance(clients, list) and clients):
        raise UserError(f"{source}: partition.pkl has no data_indices, a list of clients")
    rows, owners, test = [], [], []
    for k, sets in enumerate(clients):
        known = isinstance(sets, dict) and {"train", "test"} <= set(sets)
        if not known or not set(sets) <= {"train", "val", "test"}:
            raise UserError(f"{source}: partition.pkl has no train and test of client {k}")
        for part, indices in sets.items():
            rows.append(checked_indices(source, k, indices, len(y)))
            owners.append(np.full(len(rows[-1]), k))
            test.append(np.full(len(rows[-1]), part == "test"))
    chosen = np.concatenate(rows)
    if len(np.unique(chosen)) < len(chosen):
        raise UserError(f"{source}: partition.pkl deals a sample twice")
    counts = f"{len(clients)} clients, who hold {len(chosen)} of {len(y)} samples"
    note = f"FL-bench's {source.name}, {counts}"
    client, is_test = np.concatenate(owners), np.concatenate(test)
    return arrays_of(x[chosen], y[chosen], client, is_test, str(source), note)


def checked_indices(source: Path, k: int, indices: Any, samples: int) -> np.ndarray:
    with refused_as(f"{source}: partition.pkl gives client {k} no list of indices"):
        out = np.asarray(indices)
    if out.size == 0:
        return np.empty(0, np.int64)
    whole = out.ndim == 1 and out.dtype.kind in "iu"
    if not whole or out.min() < 0 or out.max() >= samples:
        raise UserError(f"{source}: client {k} has indices beyond 0 to {samples - 1}")
    return out.astype(np.int64)
