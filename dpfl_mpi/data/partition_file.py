"""A partition as a file: `describe --save` writes it, `--partition file:PATH` deals it again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from dpfl_mpi.data.partition import PARTS, Partition, assemble, weights
from dpfl_mpi.data.source import Source
from dpfl_mpi.data.stored import load
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.storage.files import explained, replacing

FORMAT = "dpfl_mpi partition 1"


def save(partition: Partition, path: Path, run: Resolved, source: Source) -> None:
    """Write who holds what as JSON: `clients`, a list of {train, val, test} indices, so that any framework can run on the same split.

    Indices count the samples of the prepared file: train and val those under /train, test those under /test; where `pooled` is true,
    all three count one pool, /train followed by /test.
    """
    head = {
        "format": FORMAT,
        "dataset": short(run.dataset),
        "data_sha256": source.sha256,
        "partition_sha256": partition.sha256(),
        "made_by": f"--partition {run.partition} --clients {run.clients} --partition_seed {run.partition_seed}",
        "pooled": partition.pooled,
        "note": partition.note(),
        "p": partition.p.tolist(),
    }
    body = [{part: partition.of(part, k).tolist() for part in PARTS} for k in range(partition.n)]
    with explained(f"--save is {path}; it cannot be written"), replacing(path) as part:
        part.write_text(json.dumps(head | {"clients": body}))


def from_file(run: Resolved, source: Source) -> Partition:
    """Return the partition of `--partition file:PATH` over this data.

    Raises:
        UserError: it was made for other data, or for another number of clients, was changed since, names a sample that is not there, or deals one twice.
    """
    stored = load(run.partition.path)
    where = f"--partition is {run.partition}, which"
    if stored.n != run.clients:
        raise UserError(f"{where} holds {stored.n} clients; --clients is {run.clients}")
    if stored.data_sha256 and stored.data_sha256 != source.sha256:
        raise UserError(
            f"{where} was made for other data (sha256 {stored.data_sha256[:12]}, this {short(run.dataset)} has {source.sha256[:12]})"
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
    p = weights(run.dataset, stored.parts) if stored.p is None else stored.p
    partition = assemble(stored.parts, counts, p, stored.pooled)
    if stored.partition_sha256 not in ("", partition.sha256()):
        raise UserError(
            f"{where} is not the split it was written with (partition_sha256): take that line out to use it as it is now"
        )
    if stored.p is not None and abs(stored.p.sum() - 1) < 1e-9:
        return replace(partition, p=stored.p)  # dividing by a sum beside 1 would move the last bit
    return partition
