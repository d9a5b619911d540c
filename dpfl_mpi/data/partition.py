"""Who holds which sample: Dir(alpha), Patho(classes), natural clients, fedrep's users or a file, and every client's train/val/test split.

The recipes are those of the authors' published pipeline where the paper names only the distribution. Axes: N clients, C classes, M samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PARTS = ("train", "val", "test")  # a client's three sets
SIDES = ("train", "train", "test")  # of the data, which each of them is from


@dataclass(frozen=True)
class Partition:
    """For each part the samples of client k: `indices[part][indptr[part][k] : indptr[part][k + 1]]`; train and val index the training pool."""

    indptr: dict[str, np.ndarray]  # int64 [N + 1]
    indices: dict[str, np.ndarray]  # int64 [M]
    class_counts: np.ndarray  # int64 [N, C], training and validation samples together
    # float64 [N], shares of the pool before the validation split (FEMNIST: of what is left to train); sum 1
    p: np.ndarray
    pooled: bool = False  # test indexes the same pool as train and val: training samples first, then test samples
    # int64 [N], which of the data's own clients each client is; None where clients were made instead
    of_data: np.ndarray | None = None

    @property
    def n(self) -> int:
        """Number of clients N."""
        return len(self.p)

    def of(self, part: str, k: int) -> np.ndarray:
        """Return the samples of client k in one part."""
        return self.indices[part][self.indptr[part][k] : self.indptr[part][k + 1]]

    def sizes(self, part: str) -> np.ndarray:
        """Return how many samples every client has in one part, int64 `[N]`."""
        return np.diff(self.indptr[part])

    def sha256(self) -> str:
        """Return the hash that names this partition."""
        sha = hashlib.sha256()
        for part in PARTS:
            sha.update(self.indptr[part].tobytes() + self.indices[part].tobytes())
        return sha.hexdigest()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the partition as plain arrays by name; `from_arrays` is the inverse."""
        out = {f"{name}/{part}": getattr(self, name)[part] for name in ("indptr", "indices") for part in PARTS}
        out |= {"class_counts": self.class_counts, "p": self.p, "pooled": np.array(self.pooled)}
        return out if self.of_data is None else out | {"of_data": self.of_data}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Partition:
        """Return the partition that `arrays` describes."""
        return cls(
            {part: arrays[f"indptr/{part}"] for part in PARTS},
            {part: arrays[f"indices/{part}"] for part in PARTS},
            arrays["class_counts"],
            arrays["p"],
            bool(arrays["pooled"]),
            arrays.get("of_data"),
        )

    def leaked(self) -> float:
        """Return the share of all clients' test samples that another client trains on or validates with: 0 unless pooled."""
        if not self.pooled:
            return 0.0
        used = np.unique(np.concatenate([self.indices["train"], self.indices["val"]]))
        return float(np.isin(self.indices["test"], used).mean())

    def note(self) -> str:
        """Return what a reader of results must know about the partition: one sentence, or nothing."""
        if not self.pooled:
            return ""
        share = self.leaked()
        if share == 0:
            return "clients share no image"
        return f"clients share images: {100 * share:.0f} % of the test images are in the training data of other clients"


def assemble(parts: dict[str, list[np.ndarray]], counts: np.ndarray, w: np.ndarray, pooled: bool) -> Partition:
    """Return the partition of these samples per part and client; `w` `[N]` is proportional to p."""
    return Partition(
        indptr={name: np.concatenate([[0], np.cumsum([len(x) for x in part])]) for name, part in parts.items()},
        indices={name: np.concatenate(part).astype(np.int64) for name, part in parts.items()},
        class_counts=counts,
        p=w / w.sum(),
        pooled=pooled,
    )


def owners(partition: Partition, clients: Mapping[str, np.ndarray] | None) -> np.ndarray | None:
    """Return which of the data's own clients each client is, int64 `[N]`; None where one holds samples of several, or the data have none.

    Args:
        clients: that of every training and of every test sample, by part.
    """
    if not clients or partition.pooled:
        return None
    out = []
    for k in range(partition.n):
        whose = [clients[side][partition.of(part, k)] for part, side in zip(PARTS, SIDES, strict=True)]
        found = np.unique(np.concatenate(whose))
        if len(found) != 1:
            return None
        out.append(found[0])
    return np.array(out, np.int64)


def weights(dataset: Any, parts: dict[str, list[np.ndarray]]) -> np.ndarray:
    """Return what p_k is proportional to for a data set's module: a client's pool, or for FEMNIST the samples left to train (as the authors' code has it)."""
    after = getattr(dataset, "WEIGHTS", "pool") == "train"
    return np.array([len(t) + (0 if after else len(v)) for t, v in zip(parts["train"], parts["val"], strict=True)])
