"""A partition file as it is read: who holds what, before it is known over which data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.settings.files import NO_PARTITION, no_partition, partition_file
from dpfl_mpi.storage.foreign import refused_as


@dataclass(frozen=True)
class Stored:
    """A partition file as it was read: the samples of each part and client, and what it was made for."""

    parts: dict[str, list[np.ndarray]]
    p: np.ndarray | None
    pooled: bool
    data_sha256: str
    partition_sha256: str = ""

    @property
    def n(self) -> int:
        """Number of clients N."""
        return len(self.parts["train"])


def load(path: str) -> Stored:
    """Return a partition file.

    Raises:
        UserError: there is no such file, or it is not one; the sentence names the client.
    """
    file = Path(path)
    return parsed(path, *((file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else (0, 0)))


@functools.lru_cache(maxsize=2)
def parsed(path: str, _time: int, _size: int) -> Stored:
    """Return a partition file; parsed once, though a run asks for N, the pool and the samples."""
    data = partition_file(path)
    with refused_as(str(no_partition(path, NO_PARTITION))):
        clients = data["clients"]
        if any(type(i) is not int for c in clients for part in PARTS for i in c[part]):
            raise TypeError  # an index, and neither true, 1.0 nor "1"
        parts = {part: [np.array(c[part], np.int64).reshape(len(c[part])) for c in clients] for part in PARTS}
        p = np.array(data["p"], np.float64).reshape(len(clients)) if data.get("p") is not None else None
        known = {name: data.get(name, "") for name in ("data_sha256", "partition_sha256")}
        if not (isinstance(data.get("pooled", False), bool) and all(isinstance(text, str) for text in known.values())):
            raise TypeError
    for part in PARTS:
        empty = next((k for k, samples in enumerate(parts[part]) if len(samples) == 0), None)
        if empty is not None:
            raise no_partition(path, f"gives client {empty} no {part} sample; each needs one")
    if p is not None and not (np.isfinite(p).all() and (p > 0).all()):
        raise no_partition(path, "holds a p that is not positive")
    return Stored(parts, p, data.get("pooled", False), **known)
