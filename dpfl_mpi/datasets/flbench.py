"""A folder that FL-bench's `generate_data.py` made: `data.npy`, `targets.npy`, and `partition.pkl`, which says who holds which of them."""

from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import check_one, entries, npy, unpickled
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import refused_as

PAPER = {"partition": "natural", "min_samples": 3}
OWN_DATA = True
SOURCE = "FL-bench's folder of a data set, such as data/femnist, or an archive of it, with data.npy, targets.npy and partition.pkl"
NO_DOWNLOAD = "FL-bench makes these files: run its generate_data.py, and name data/femnist, say, with --source PATH"
NEEDED = ("data.npy", "targets.npy", "partition.pkl")
A_FILE = 16 * 2**30  # bytes


def read(source: Path) -> Arrays:
    """Return the samples that clients hold, client k with the name "k"; what a client validates with is joined to its training part."""
    held = {path: get() for path, get in entries(source, A_FILE) if path.name in NEEDED}
    check_one(source, (path.parent for path in held))
    found = {path.name: data for path, data in held.items()}
    if missing := [name for name in NEEDED if name not in found]:
        note = "; of data that FL-bench downloads it keeps the partition alone" if missing[0] == "data.npy" else ""
        raise UserError(f"{source} holds no {missing[0]}, which FL-bench makes for synthetic, femnist and celeba{note}")
    x, y = (npy(f"{source}: {name}", found[name]) for name in NEEDED[:2])
    if y.ndim != 1 or x.shape[:1] != y.shape:
        raise UserError(f"{source}: data.npy is {x.shape}, targets.npy {y.shape}; one label per sample is needed")
    dealt = unpickled(found["partition.pkl"], f"{source}: partition.pkl")
    clients = dealt.get("data_indices") if isinstance(dealt, dict) else None
    if not (isinstance(clients, list) and clients):
        raise UserError(f"{source}: partition.pkl is no dictionary with data_indices, a list of clients")
    rows, owners, test = [], [], []
    for k, sets in enumerate(clients):
        if not (isinstance(sets, dict) and {"train", "test"} <= set(sets) <= {"train", "val", "test"}):
            raise UserError(f"{source}: partition.pkl has no train and test of client {k}")
        for part, indices in sets.items():
            rows.append(whole(source, k, indices, len(y)))
            owners.append(np.full(len(rows[-1]), k))
            test.append(np.full(len(rows[-1]), part == "test"))
    chosen = np.concatenate(rows)
    if len(np.unique(chosen)) < len(chosen):
        raise UserError(f"{source}: partition.pkl deals a sample twice")
    note = f"FL-bench's {source.name}, {len(clients)} clients, who hold {len(chosen)} of {len(y)} samples"
    return arrays_of(x[chosen], y[chosen], np.concatenate(owners), np.concatenate(test), str(source), note)


def whole(source: Path, k: int, indices: Any, samples: int) -> np.ndarray:
    with refused_as(f"{source}: partition.pkl gives client {k} no list of indices"):
        out = np.asarray(indices)
    if out.size == 0:
        return np.empty(0, np.int64)
    if out.ndim != 1 or out.dtype.kind not in "iu" or out.min() < 0 or out.max() >= samples:
        raise UserError(f"{source}: partition.pkl gives client {k} indices beyond 0 to {samples - 1}")
    return out.astype(np.int64)
