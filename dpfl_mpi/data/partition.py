"""Who holds which sample: every client's train, validation and test sets, the file of them, and the part of a validation set that the search sees."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import NO_PARTITION, partition_file
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.storage.foreign import refused_as

PARTS = ("train", "val", "test")  # a client's three sets
SIDES = ("train", "train", "test")  # of the data, which each of them is from
FORMAT = "dpfl_mpi partition 1"
SLICE = 2**16  # clients whose samples come to all ranks at once, of which each keeps its own
Shared = Callable[[Callable[[], dict[str, np.ndarray]]], dict[str, np.ndarray]]  # root's arrays on every rank


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
        return len(self.p)

    def of(self, part: str, k: int) -> np.ndarray:
        return self.indices[part][self.indptr[part][k] : self.indptr[part][k + 1]]

    def sizes(self, part: str) -> np.ndarray:
        """Return how many samples every client has in one part, int64 `[N]`."""
        return np.diff(self.indptr[part])

    def sha256(self) -> str:
        """Return the hash that names this partition."""
        held = (self.indptr[part].tobytes() + self.indices[part].tobytes() for part in PARTS)
        return hashlib.sha256(b"".join(held)).hexdigest()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the partition as plain arrays by name; `from_arrays` is the inverse."""
        out = {f"{name}/{part}": getattr(self, name)[part] for name in ("indptr", "indices") for part in PARTS}
        out |= {"class_counts": self.class_counts, "p": self.p, "pooled": np.asarray(self.pooled)}
        return out if self.of_data is None else out | {"of_data": self.of_data}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        indptr, indices = ({part: arrays[f"{name}/{part}"] for part in PARTS} for name in ("indptr", "indices"))
        counts, p, pooled = arrays["class_counts"], arrays["p"], bool(arrays["pooled"])
        return cls(indptr, indices, counts, p, pooled, arrays.get("of_data"))

    def note(self) -> str:
        """Return which share of the test samples other clients train on or validate with: one sentence, or nothing unless pooled."""
        if not self.pooled:
            return ""
        used = np.concatenate([self.indices["train"], self.indices["val"]])
        share = np.isin(self.indices["test"], used).mean()
        if share == 0:
            return "clients share no image"
        return f"clients share images: {100 * share:.0f} % of the test images are in the training data of other clients"


@dataclass(frozen=True)
class Shard(Partition):
    """A partition as one rank has it: the samples of its own clients, for any other client none; sizes and what it says of itself are the whole's."""

    of_all: dict[str, np.ndarray] = field(default_factory=dict)  # int64 [N], samples of every client by part
    told: tuple[str, str] = ("", "")  # the hash and the note of the whole

    def sizes(self, part: str) -> np.ndarray:
        return self.of_all[part]

    def sha256(self) -> str:
        return self.told[0]

    def note(self) -> str:
        return self.told[1]


def sharded(make: Callable[[], Partition], shared: Shared, own: Callable[[np.ndarray], np.ndarray]) -> Shard:
    """Return this rank's part of what `make` makes on root alone; `own` tells this rank's clients, bool `[N]`, by the training sizes of all. Collective.

    `shared` brings root's arrays to every rank: here `SLICE` clients at a time, so that only root ever has the samples of all.
    """
    whole: list[Partition] = []

    def known() -> dict[str, np.ndarray]:
        whole.append(make())
        arrays = {name: values for name, values in whole[0].arrays().items() if not name.startswith("indices/")}
        told = json.dumps([whole[0].sha256(), whole[0].note()]).encode()
        return arrays | {"told": np.frombuffer(told, np.uint8)}

    arrays = shared(known)
    of_all = {part: np.diff(arrays[f"indptr/{part}"]) for part in PARTS}
    here, mine = own(of_all["train"]), dict(arrays)
    for part in PARTS:
        ends, kept = arrays[f"indptr/{part}"], []
        for first in range(0, len(here), SLICE):
            now = slice(first, min(first + SLICE, len(here)))

            def some(part: str = part, held: slice = slice(ends[now.start], ends[now.stop])) -> dict[str, np.ndarray]:
                return {"samples": whole[0].indices[part][held]}

            kept.append(shared(some)["samples"][np.repeat(here[now], of_all[part][now])])
        mine[f"indices/{part}"] = np.concatenate(kept)
        mine[f"indptr/{part}"] = np.concatenate([[0], np.cumsum(np.where(here, of_all[part], 0))])
    return replace(Shard.from_arrays(mine), of_all=of_all, told=tuple(json.loads(arrays["told"].tobytes())))


def assemble(parts: dict[str, list[np.ndarray]], counts: np.ndarray, w: np.ndarray, pooled: bool) -> Partition:
    """Return the partition of these samples per part and client; `w` `[N]` is proportional to p."""
    indptr = {name: np.concatenate([[0], np.cumsum([len(x) for x in part])]) for name, part in parts.items()}
    indices = {name: np.concatenate(part).astype(np.int64) for name, part in parts.items()}
    return Partition(indptr, indices, counts, w / w.sum(), pooled)


def owners(partition: Partition, clients: Mapping[str, np.ndarray] | None) -> np.ndarray | None:
    """Return which of the data's own clients each client is, int64 `[N]`; None where one holds samples of several, or the data have none."""
    if not clients or partition.pooled:
        return None
    out = []
    for k in range(partition.n):
        whose = [clients[side][partition.of(part, k)] for part, side in zip(PARTS, SIDES, strict=True)]
        if len(found := np.unique(np.concatenate(whose))) != 1:
            return None
        out.append(found[0])
    return np.asarray(out, np.int64)


def weights(dataset: Any, parts: dict[str, list[np.ndarray]]) -> np.ndarray:
    """Return what p_k is proportional to for a data set's module: a client's pool, or for FEMNIST the samples left to train (as the authors' code has it)."""
    after = getattr(dataset, "WEIGHTS", "pool") == "train"
    return np.asarray([len(t) + (0 if after else len(v)) for t, v in zip(parts["train"], parts["val"], strict=True)])


# as a file: `describe --save` writes it, `--partition file:PATH` deals it again -----------------------------------------
def save(partition: Partition, path: Path, run: Resolved, data_sha256: str) -> None:
    """Write who holds what as JSON: `clients`, a list of {train, val, test} indices, so that any framework can run on the same split.

    Indices count the samples of the prepared file: train and val those under /train, test those under /test; where `pooled` is true,
    all three count one pool, /train followed by /test.
    """
    held: dict[str, Any] = {"format": FORMAT, "dataset": short(run.dataset), "data_sha256": data_sha256}
    held["partition_sha256"] = partition.sha256()
    held["made_by"] = f"--partition {run.partition} --clients {run.clients} --partition_seed {run.partition_seed}"
    held |= {"pooled": partition.pooled, "note": partition.note(), "p": partition.p.tolist()}
    held["clients"] = [{part: partition.of(part, k).tolist() for part in PARTS} for k in range(partition.n)]
    with explained(f"--save is {path}; it cannot be written"), replacing(path) as part:
        part.write_text(json.dumps(held))


def from_file(run: Resolved, labels: dict[str, np.ndarray], classes: int, data_sha256: str) -> Partition:
    """Return the partition of `--partition file:PATH` over data with these labels and this SHA-256; `UserError` where it does not fit them."""
    where, held = f"--partition is {run.partition}, which", partition_file(run.partition.path)
    with refused_as(NO_PARTITION.format(run.partition.path)):
        clients, p = held["clients"], held.get("p")
        if any(type(i) is not int for c in clients for part in PARTS for i in c[part]):
            raise TypeError  # an index, and neither true, 1.0 nor "1"
        parts = {part: [np.asarray(c[part], np.int64).reshape(len(c[part])) for c in clients] for part in PARTS}
        p = None if p is None else np.asarray(p, np.float64).reshape(len(clients))
        known = held.get("pooled", False), held.get("data_sha256", ""), held.get("partition_sha256", "")
        if [type(value) for value in known] != [bool, str, str]:
            raise TypeError
    pooled, of_data, of_partition = known
    if len(clients) != run.clients:
        raise UserError(f"{where} holds {len(clients)} clients; --clients is {run.clients}")
    if of_data not in ("", data_sha256):
        raise UserError(f"{where} was made for other data (sha256 {of_data[:12]}, here {data_sha256[:12]})")
    if p is not None and not (np.isfinite(p).all() and (p > 0).all()):
        raise UserError(f"{where} holds a p that is not positive")
    counts = []
    for k in range(run.clients):
        mine = {part: parts[part][k] for part in PARTS}
        check_client(f"{where} gives client {k}", mine, {part: len(y) for part, y in labels.items()}, pooled)
        counts.append(np.bincount(labels["train"][np.r_[mine["train"], mine["val"]]], minlength=classes))
    w = weights(run.found("dataset"), parts) if p is None else p
    partition = assemble(parts, np.asarray(counts), w, pooled)
    if of_partition not in ("", partition.sha256()):
        raise UserError(f"{where} was changed since it was written: to use it so, take out its partition_sha256 and p")
    if p is not None and abs(p.sum() - 1) < 1e-9:
        return replace(partition, p=p)  # dividing by a sum beside 1 would move the last bit
    return partition


def check_client(where: str, mine: dict[str, np.ndarray], sizes: dict[str, int], pooled: bool) -> None:
    """Raise `UserError` where a client of a file has no sample of a part, one twice, or one that is not there; `sizes` are the data's."""
    for (part, samples), side in zip(mine.items(), SIDES, strict=True):
        if len(samples) == 0:
            raise UserError(f"{where} no {part} sample; each needs one")
        if len(outside := samples[(samples < 0) | (samples >= sizes[side])]):
            raise UserError(f"{where} the {part} sample {outside[0]}; allowed are 0 to {sizes[side] - 1}")
        if len(np.unique(samples)) < len(samples):
            raise UserError(f"{where} a {part} sample twice")
    for one, other in combinations(PARTS, 2):
        if (other == "val" or pooled) and np.isin(mine[one], mine[other]).any():
            raise UserError(f"{where} a sample in both {one} and {other}")


# --search_share: the search sees one part of a client's validation images, its round is chosen on the other; 1: both use all
def split(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return which images the search sees, bool `[M]`: a share of them, of each class that share to within one image.

    Systematic sampling: the images are put in a random order, class by class, and of them each (1 / share)-th is taken. M is at least 2;
    each part gets at least one image.
    """
    m = len(labels)
    rank = rng.permutation(int(labels.max()) + 1)  # the order of the classes is random, or rounding would prefer some
    order = rng.permutation(m)
    order = order[np.argsort(rank[labels[order]], kind="stable")]
    taken = np.diff(np.floor(np.arange(m + 1) * share + 0.5)) > 0
    if not taken.any():
        taken[0] = True
    if taken.all():
        taken[-1] = False
    out = np.zeros(m, bool)
    out[order] = taken
    return out


def search_first(run: Resolved, labels: np.ndarray, partition: Partition) -> tuple[Partition, np.ndarray]:
    """Return the partition with each client's validation images reordered, those of the search first, and their numbers, int64 `[N]`: of those that it has."""
    sizes = partition.sizes("val")
    if run.search_share == 1:
        return partition, sizes
    if (sizes < 2).any():
        alone = f"client {np.argmax(sizes < 2)} has a single validation image"
        raise UserError(f"--search_share is {run.search_share:g}; {alone}, and both parts need one: allowed is 1")
    out, searched = [], np.zeros(partition.n, np.int64)
    for k in np.flatnonzero(np.diff(partition.indptr["val"])).tolist():  # of a rank's shard its own clients
        mine = partition.of("val", k)
        seen = split(labels[mine], run.search_share, streams.stream(run.seed, streams.SEARCH, k, 0))
        out += [mine[seen], mine[~seen]]
        searched[k] = seen.sum()
    val = np.concatenate([np.zeros(0, np.int64), *out])
    return replace(partition, indices=partition.indices | {"val": val}), searched
