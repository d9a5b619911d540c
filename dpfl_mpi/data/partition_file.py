"""A partition as a file: `describe --save` writes it, `--partition file:PATH` deals it again."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpfl_mpi.config import Run
from dpfl_mpi.errors import UserError

if TYPE_CHECKING:
    from dpfl_mpi.data.source import Source
from dpfl_mpi.data.partition import PARTS, Partition, assemble, weights

FORMAT = "dpfl_mpi partition 1"


def save(partition: Partition, path: Path, run: Run, source: Source) -> None:
    """Write who holds what as JSON: `clients`, a list of {train, val, test} indices, so that any framework can run on the same split.

    Indices count the samples of the prepared file: train and val those under /train, test those under /test; where `pooled` is true,
    all three count one pool, /train followed by /test.
    """
    head = {
        "format": FORMAT,
        "dataset": run.dataset,
        "data_sha256": source.sha256,
        "partition_sha256": partition.sha256(),
        "made_by": f"--partition {run.partition} --clients {run.clients} --partition_seed {run.partition_seed}",
        "pooled": partition.pooled,
        "note": partition.note(),
        "p": partition.p.tolist(),
    }
    body = [{part: partition.of(part, k).tolist() for part in PARTS} for k in range(partition.n)]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(head | {"clients": body}))
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"--save is {path}; it cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


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


def from_file(run: Run, source: Source) -> Partition:
    """Return the partition of `--partition file:PATH` over this data.

    Raises:
        UserError: it was made for other data, or for another number of clients, names a sample that is not there, or deals one twice.
    """
    stored = load(str(run.partition_file))
    where = f"--partition is {run.partition}, which"
    if stored.n != run.clients:
        raise UserError(f"{where} holds {stored.n} clients; --clients is {run.clients}")
    if stored.data_sha256 and stored.data_sha256 != source.sha256:
        raise UserError(
            f"{where} was made for other data (sha256 {stored.data_sha256[:12]}, this {run.dataset} has {source.sha256[:12]})"
        )
    for part in PARTS:
        size = len(source.labels["test" if part == "test" else "train"])
        for k, samples in enumerate(stored.parts[part]):
            if samples.min() < 0 or samples.max() >= size:
                raise UserError(
                    f"{where} gives client {k} the {part} sample {samples.max()}; allowed are 0 to {size - 1}"
                )
            if len(np.unique(samples)) < len(samples):
                raise UserError(f"{where} gives client {k} a {part} sample twice")
    for k, (train, val, test) in enumerate(zip(*(stored.parts[part] for part in PARTS), strict=True)):
        for one, other, names in (
            (train, val, "train and val"),
            (train, test, "train and test"),
            (val, test, "val and test"),
        ):
            if (names == "train and val" or stored.pooled) and np.isin(one, other).any():
                raise UserError(f"{where} gives client {k} a sample in both {names}")
    y = source.labels["train"]
    counts = np.array(
        [
            np.bincount(y[np.concatenate(pair)], minlength=source.classes)
            for pair in zip(stored.parts["train"], stored.parts["val"], strict=True)
        ]
    )
    partition = assemble(
        stored.parts, counts, weights(run, stored.parts) if stored.p is None else stored.p, stored.pooled
    )
    if stored.p is not None and abs(stored.p.sum() - 1) < 1e-9:
        return replace(partition, p=stored.p)  # dividing by a sum beside 1 would move the last bit
    return partition
