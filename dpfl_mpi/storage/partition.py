"""A partition file as it is read: who holds what, before it is known over which data."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpfl_mpi.errors import UserError

PARTS = ("train", "val", "test")  # a client's three sets


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
    if not file.is_file():
        raise UserError(
            f"--partition is file:{path}; there is no such file (`python -m dpfl_mpi.describe --save {path}` makes one)"
        )
    return parsed(path, file.stat().st_mtime_ns, file.stat().st_size)


@functools.lru_cache(maxsize=2)
def parsed(path: str, _time: int, _size: int) -> Stored:
    """Return a partition file; parsed once, though a run asks for N, the pool and the samples."""
    where = f"--partition is file:{path}, which"
    try:
        data = json.loads(Path(path).read_bytes())
        clients = data["clients"]
        parts = {part: [np.array(c[part], np.int64).reshape(len(c[part])) for c in clients] for part in PARTS}
        if any(isinstance(i, (float, str, bool)) for c in clients for part in PARTS for i in c[part][:1]):
            raise TypeError
        p = np.array(data["p"], np.float64).reshape(len(clients)) if data.get("p") is not None else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise UserError(
            f'{where} is no partition: JSON with "clients", a list of {{"train", "val", "test"}} index lists'
        ) from None
    if not clients:
        raise UserError(f"{where} holds no client")
    for part in PARTS:
        empty = next((k for k, samples in enumerate(parts[part]) if len(samples) == 0), None)
        if empty is not None:
            raise UserError(f"{where} gives client {empty} no {part} sample; each needs one")
    if p is not None and not (np.isfinite(p).all() and (p > 0).all()):
        raise UserError(f"{where} holds a p that is not positive")
    return Stored(parts, p, bool(data.get("pooled", False)), str(data.get("data_sha256", "")))
