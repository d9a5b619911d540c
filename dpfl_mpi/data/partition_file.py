"""A partition as a file: `describe --save` writes it, `--partition file:PATH` deals it again."""

import functools
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpfl_mpi.data.partition import PARTS, Partition, assemble, weights
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import NO_PARTITION, no_partition, partition_file
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.storage.foreign import refused_as

FORMAT = "dpfl_mpi partition 1"


class Stored(NamedTuple):
    """A partition file as it was read: the samples of each part and client, and what it was made for."""

    parts: dict[str, list[np.ndarray]]
    p: np.ndarray | None
    pooled: bool
    data_sha256: str
    partition_sha256: str


def save(partition: Partition, path: Path, run: Resolved, data_sha256: str) -> None:
    """Write who holds what as JSON: `clients`, a list of {train, val, test} indices, so that any framework can run on the same split.

    Indices count the samples of the prepared file: train and val those under /train, test those under /test; where `pooled` is true,
    all three count one pool, /train followed by /test.
    """
    held = {
        "format": FORMAT,
        "dataset": short(run.dataset),
        "data_sha256": data_sha256,
        "partition_sha256": partition.sha256(),
        "made_by": f"--partition {run.partition} --clients {run.clients} --partition_seed {run.partition_seed}",
        "pooled": partition.pooled,
        "note": partition.note(),
        "p": partition.p.tolist(),
        "clients": [{part: partition.of(part, k).tolist() for part in PARTS} for k in range(partition.n)],
    }
    with explained(f"--save is {path}; it cannot be written"), replacing(path) as part:
        part.write_text(json.dumps(held))


def load(path: str) -> Stored:
    """Return a partition file.

    Raises:
        UserError: there is no such file, or it is not one.
    """
    file = Path(path)
    return parsed(path, *((file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else (0, 0)))


@functools.lru_cache(maxsize=2)
def parsed(path: str, _time: int, _size: int) -> Stored:
    """Return a partition file; parsed once, though a run asks for N, the pool and the samples."""
    data = partition_file(path)
    with refused_as(str(no_partition(path, NO_PARTITION))):
        clients, p = data["clients"], data.get("p")
        if any(type(i) is not int for c in clients for part in PARTS for i in c[part]):
            raise TypeError  # an index, and neither true, 1.0 nor "1"
        parts = {part: [np.array(c[part], np.int64).reshape(len(c[part])) for c in clients] for part in PARTS}
        p = None if p is None else np.array(p, np.float64).reshape(len(clients))
        known = data.get("pooled", False), data.get("data_sha256", ""), data.get("partition_sha256", "")
        if [type(value) for value in known] != [bool, str, str]:
            raise TypeError
    return Stored(parts, p, *known)


def from_file(run: Resolved, labels: dict[str, np.ndarray], classes: int, data_sha256: str) -> Partition:
    """Return the partition of `--partition file:PATH` over data with these labels and this SHA-256.

    Raises:
        UserError: it was made for other data, or for another number of clients, was changed since, names a sample that is not there, or deals one twice.
    """
    stored = load(run.partition.path)
    where, n = f"--partition is {run.partition}, which", len(stored.parts["train"])
    if n != run.clients:
        raise UserError(f"{where} holds {n} clients; --clients is {run.clients}")
    if stored.data_sha256 not in ("", data_sha256):
        raise UserError(
            f"{where} was made for other data (sha256 {stored.data_sha256[:12]}, this {short(run.dataset)} has {data_sha256[:12]})"
        )
    if stored.p is not None and not (np.isfinite(stored.p).all() and (stored.p > 0).all()):
        raise UserError(f"{where} holds a p that is not positive")
    counts = []
    for k in range(n):
        mine = {part: stored.parts[part][k] for part in PARTS}
        for part, samples in mine.items():
            size = len(labels["test" if part == "test" else "train"])
            if len(samples) == 0:
                raise UserError(f"{where} gives client {k} no {part} sample; each needs one")
            if samples.min() < 0 or samples.max() >= size:
                raise UserError(
                    f"{where} gives client {k} the {part} sample {samples.max()}; allowed are 0 to {size - 1}"
                )
            if len(np.unique(samples)) < len(samples):
                raise UserError(f"{where} gives client {k} a {part} sample twice")
        for one, other in combinations(PARTS, 2):
            if (other == "val" or stored.pooled) and np.isin(mine[one], mine[other]).any():
                raise UserError(f"{where} gives client {k} a sample in both {one} and {other}")
        counts.append(np.bincount(labels["train"][np.concatenate([mine["train"], mine["val"]])], minlength=classes))
    p = weights(run.found("dataset"), stored.parts) if stored.p is None else stored.p
    partition = assemble(stored.parts, np.array(counts), p, stored.pooled)
    if stored.partition_sha256 not in ("", partition.sha256()):
        raise UserError(
            f"{where} is not the split it was written with (partition_sha256): take that line out to use it as it is now"
        )
    if stored.p is not None and abs(stored.p.sum() - 1) < 1e-9:
        return replace(partition, p=stored.p)  # dividing by a sum beside 1 would move the last bit
    return partition
