"""A partition file as it is read: who holds what, before it is known over which data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.settings.files import NO_PARTITION, no_partition, partition_file


@dataclass(frozen=True)
class Stored:
    """A partition file as it was read: the samples of each part and client, and what it was made for."""

    parts: dict[str, list[np.ndarray]]
    p: np.ndarray | None
    pooled: bool
    data_sha256: str

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
    try:
        clients = data["clients"]
        parts = {part: [np.array(c[part], np.int64).reshape(len(c[part])) for c in clients] for part in PARTS}
        if any(isinstance(i, (float, str, bool)) for c in clients for part in PARTS for i in c[part][:1]):
            raise TypeError
        p = np.array(data["p"], np.float64).reshape(len(clients)) if data.get("p") is not None else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise no_partition(path, NO_PARTITION) from None
    for part in PARTS:
        empty = next((k for k, samples in enumerate(parts[part]) if len(samples) == 0), None)
        if empty is not None:
            raise no_partition(path, f"gives client {empty} no {part} sample; each needs one")
    if p is not None and not (np.isfinite(p).all() and (p > 0).all()):
        raise no_partition(path, "holds a p that is not positive")
    return Stored(parts, p, bool(data.get("pooled", False)), str(data.get("data_sha256", "")))
