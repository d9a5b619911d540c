"""Which client has which samples, the file that says so, and the search's validation samples."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.data.source import Source
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import NO_PARTITION, partition_file
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.storage.foreign import refused_as

PARTS = ("train", "val", "test")  # a client's three sets
# which part of the data each of a client's sets is drawn from
HALF = {"train": "train", "val": "train", "test": "test"}
FORMAT = "dpfl_mpi partition 1"
SLICE = 2**16  # clients whose samples are sent to all ranks at once
ByName = dict[str, np.ndarray]


@dataclass(frozen=True)
class Partition:
    """Every client's samples: `indices[part][indptr[part][k] : indptr[part][k + 1]]`.

    Indices of train and val count the data's training samples, those of test its test samples. If
    `pooled`, all count one pool: training samples, then test samples.
    """

    indptr: ByName  # by part, int64 [N + 1]
    indices: ByName  # by part, int64 [M]
    class_counts: np.ndarray  # int64 [N, C], training and validation samples together
    p: np.ndarray  # float64 [N], proportional to `weights`; sum 1
    pooled: bool = False
    # int64 [N], which of the data's own clients each client is; None if it is none of them
    of_data: np.ndarray | None = None

    @property
    def n(self) -> int:
        return len(self.p)

    def of(self, part: str, k: int) -> np.ndarray:
        return self.indices[part][self.indptr[part][k] : self.indptr[part][k + 1]]

    def sizes(self, part: str) -> np.ndarray:
        """Return how many samples every client has in one part, int64 `[N]`."""
        return np.diff(self.indptr[part])

    def names_and_groups(self, source: Source) -> dict[str, list[str]]:
        """Return the clients' `name` and `group`, `[N]` each, as far as the data have them.

        Clients that are drawn have none. Names that only repeat the clients' numbers are left out.
        """
        if self.of_data is None:
            return {}
        lists = {"name": source.client_names, "group": source.client_groups}
        out = {what: [texts[i] for i in self.of_data] for what, texts in lists.items() if texts}
        if out.get("name") == list(map(str, range(self.n))):
            del out["name"]
        return out

    def sha256(self) -> str:
        """Return the hash that names this partition."""
        arrays = (self.indptr[part].tobytes() + self.indices[part].tobytes() for part in PARTS)
        return hashlib.sha256(b"".join(arrays)).hexdigest()

    def note(self) -> str:
        """Return how many test samples other clients train on, as a sentence; "" unless pooled."""
        if not self.pooled:
            return ""
        used = np.concatenate([self.indices["train"], self.indices["val"]])
        share = np.isin(self.indices["test"], used).mean()
        if share == 0:
            return "clients share no image"
        training = "are in the training data of other clients"
        return f"clients share images: {100 * share:.0f} % of the test images {training}"

    def arrays(self) -> ByName:
        """Return the partition as plain arrays by name; `from_arrays` is the inverse."""
        out = {f"indptr/{part}": self.indptr[part] for part in PARTS}
        out |= {f"indices/{part}": self.indices[part] for part in PARTS}
        out |= {"class_counts": self.class_counts, "p": self.p, "pooled": np.asarray(self.pooled)}
        return out if self.of_data is None else out | {"of_data": self.of_data}

    @classmethod
    def from_arrays(cls, arrays: ByName, **fields: Any) -> Self:
        indptr, indices = (
            {part: arrays[f"{name}/{part}"] for part in PARTS} for name in ("indptr", "indices")
        )
        counts, p, pooled = arrays["class_counts"], arrays["p"], bool(arrays["pooled"])
        return cls(indptr, indices, counts, p, pooled, arrays.get("of_data"), **fields)


@dataclass(frozen=True)
class Shard(Partition):
    """A rank's share of a partition: other clients have no samples, but their sizes are known."""

    whole_sizes: ByName = field(default_factory=dict)  # by part, int64 [N]
    whole_sha256: str = ""
    whole_note: str = ""

    def sizes(self, part: str) -> np.ndarray:
        return self.whole_sizes[part]

    def sha256(self) -> str:
        return self.whole_sha256

    def note(self) -> str:
        return self.whole_note


def sharded(
    whole: Partition | None,
    share: Callable[[Callable[[], ByName]], ByName],
    choose_own: Callable[[np.ndarray], np.ndarray],
) -> Shard:
    """Return this rank's share of a partition that root alone has. Collective.

    Args:
        whole: the partition on root, None elsewhere.
        share: returns on every rank the arrays that its argument returns on root.
        choose_own: returns this rank's clients, bool `[N]`, from all clients' training sizes.
    """

    def facts() -> ByName:
        assert whole is not None
        texts = json.dumps({"whole_sha256": whole.sha256(), "whole_note": whole.note()}).encode()
        arrays = {n: a for n, a in whole.arrays().items() if not n.startswith("indices/")}
        return arrays | {"texts": np.frombuffer(texts, np.uint8)}

    def samples(part: str, rows: slice) -> np.ndarray:
        return share(lambda: {"rows": whole.indices[part][rows]})["rows"]  # type: ignore[union-attr]

    arrays = share(facts)
    sizes = {part: np.diff(arrays[f"indptr/{part}"]) for part in PARTS}
    own, out = choose_own(sizes["train"]), dict(arrays)
    for part in PARTS:
        starts = arrays[f"indptr/{part}"]
        pieces = []
        for first in range(0, len(own), SLICE):  # or every rank would need memory for all samples
            last = min(first + SLICE, len(own))
            is_own = np.repeat(own[first:last], sizes[part][first:last])
            pieces.append(samples(part, slice(starts[first], starts[last]))[is_own])
        out[f"indices/{part}"] = np.concatenate(pieces)
        out[f"indptr/{part}"] = np.concatenate([[0], np.cumsum(np.where(own, sizes[part], 0))])
    return Shard.from_arrays(out, whole_sizes=sizes, **json.loads(arrays["texts"].tobytes()))


def assemble(
    parts: dict[str, list[np.ndarray]], counts: np.ndarray, w: np.ndarray, pooled: bool
) -> Partition:
    """Return the partition of these samples by part and client; p is proportional to `w` `[N]`."""
    indptr = {
        name: np.concatenate([[0], np.cumsum([len(x) for x in part])])
        for name, part in parts.items()
    }
    indices = {name: np.concatenate(part).astype(np.int64) for name, part in parts.items()}
    return Partition(indptr, indices, counts, w / w.sum(), pooled)


def owners(partition: Partition, clients: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return which of the data's own clients each client is, int64 `[N]`.

    None if the data have none, or if a client has samples of several.
    """
    if not clients or partition.pooled:
        return None
    out = []
    for k in range(partition.n):
        names = [clients[HALF[part]][partition.of(part, k)] for part in PARTS]
        found = np.unique(np.concatenate(names))
        if len(found) != 1:
            return None
        out.append(found[0])
    return np.asarray(out, np.int64)


def weights(dataset: Any, parts: dict[str, list[np.ndarray]]) -> np.ndarray:
    """Return what p_k is proportional to, int64 `[N]`: training and validation samples.

    With the data set's `WEIGHTS = "train"` only training samples, as in the authors' code.
    """
    sizes = {part: np.asarray([len(x) for x in parts[part]]) for part in ("train", "val")}
    only_train = getattr(dataset, "WEIGHTS", "pool") == "train"
    return sizes["train"] if only_train else sizes["train"] + sizes["val"]


# the file of `describe --save` and `--partition file:PATH` ----------------------------------------
def save(partition: Partition, path: Path, run: Resolved, data_sha256: str) -> None:
    """Write a partition as JSON, so that any framework can run on the same split.

    `clients` is a list of {train, val, test} indices, which count as in `Partition`.
    """
    recipe = f"--partition {run.partition} --clients {run.clients}"
    content: dict[str, Any] = {
        "format": FORMAT,
        "dataset": short(run.dataset),
        "data_sha256": data_sha256,
        "partition_sha256": partition.sha256(),
        "made_by": f"{recipe} --partition_seed {run.partition_seed}",
        "pooled": partition.pooled,
        "note": partition.note(),
        "p": partition.p.tolist(),
        "clients": [
            {part: partition.of(part, k).tolist() for part in PARTS} for k in range(partition.n)
        ],
    }
    with explained(f"--save is {path}; it cannot be written"), replacing(path) as part:
        part.write_text(json.dumps(content))


def from_file(run: Resolved, labels: ByName, classes: int, data_sha256: str) -> Partition:
    """Return the partition of `--partition file:PATH`; `UserError` if it does not fit the data.

    Without `p` in the file, p follows from the numbers of samples.
    """
    where, content = f"--partition is {run.partition}, which", partition_file(run.partition.path)
    with refused_as(NO_PARTITION.format(run.partition.path)):
        clients = content["clients"]
        if any(type(i) is not int for c in clients for part in PARTS for i in c[part]):
            raise TypeError  # true, 1.0 and "1" are not indices
        parts = {part: [np.asarray(c[part], np.int64) for c in clients] for part in PARTS}
        pooled, made_for = content.get("pooled", False), content.get("data_sha256", "")
        written = content.get("partition_sha256", "")
        if (type(pooled), type(made_for), type(written)) != (bool, str, str):
            raise TypeError
        p = content.get("p")
        if p is not None:
            p = np.asarray(p, np.float64).reshape(len(clients))
    if len(clients) != run.clients:
        raise UserError(f"{where} holds {len(clients)} clients; --clients is {run.clients}")
    if made_for not in ("", data_sha256):
        raise UserError(f"{where} was made for other data, of sha256 {made_for[:12]}")
    lengths = {half: len(y) for half, y in labels.items()}
    counts = []
    for k in range(run.clients):
        client = {part: parts[part][k] for part in PARTS}
        check_client(f"{where} gives client {k}", client, lengths, pooled)
        pool = np.concatenate([client["train"], client["val"]])
        counts.append(np.bincount(labels["train"][pool], minlength=classes))
    partition = assemble(parts, np.asarray(counts), weights(run.found("dataset"), parts), pooled)
    if written not in ("", partition.sha256()):
        edit = "to use it so, take out its partition_sha256 and p"
        raise UserError(f"{where} was changed since it was written: {edit}")
    if p is None:
        return partition
    if not (np.isfinite(p).all() and (p > 0).all()):
        raise UserError(f"{where} holds a p that is not positive")
    # dividing by a sum beside 1 would move the last bit
    return replace(partition, p=p if abs(p.sum() - 1) < 1e-9 else p / p.sum())


def check_client(where: str, client: ByName, lengths: dict[str, int], pooled: bool) -> None:
    """Raise `UserError` if a part is empty, or holds a sample twice or one that is not there."""
    for part, samples in client.items():
        end = lengths[HALF[part]]
        if len(samples) == 0:
            raise UserError(f"{where} no {part} sample; each needs one")
        if len(outside := samples[(samples < 0) | (samples >= end)]):
            raise UserError(f"{where} the {part} sample {outside[0]}; allowed are 0 to {end - 1}")
        if len(np.unique(samples)) < len(samples):
            raise UserError(f"{where} a {part} sample twice")
    for one, other in combinations(PARTS, 2):
        same_pool = pooled or HALF[one] == HALF[other]
        if same_pool and np.isin(client[one], client[other]).any():
            raise UserError(f"{where} a sample in both {one} and {other}")


# --search_share: the search sees a share of a client's validation images, and its round is chosen
# on the others; with 1 both use all ---------------------------------------------------------------
def split(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return which images the search sees, bool `[M]`: of each class its share, within one image.

    Systematic sampling: the images are ordered at random, class by class, and each (1 / share)-th
    is taken. M is at least 2, and both parts get at least one image.
    """
    m = len(labels)
    # the order of the classes is random, or rounding would favour some
    rank = rng.permutation(int(labels.max()) + 1)
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


def search_first(
    run: Resolved, labels: np.ndarray, partition: Partition
) -> tuple[Partition, np.ndarray]:
    """Return the partition with the search's validation images of each client in front.

    Also return how many these are, int64 `[N]`; on a rank only its own clients count.
    """
    sizes = partition.sizes("val")
    if run.search_share == 1:
        return partition, sizes
    if (sizes < 2).any():
        alone = f"client {np.argmax(sizes < 2)} has a single validation image"
        allowed = "and both parts need one: allowed is 1"
        raise UserError(f"--search_share is {run.search_share:g}; {alone}, {allowed}")
    ordered = partition.indices["val"].copy()
    searched = np.zeros(partition.n, np.int64)
    starts = partition.indptr["val"]
    for k in np.flatnonzero(np.diff(starts)).tolist():  # other ranks have the others
        rows, first = partition.of("val", k), starts[k]
        seen = split(labels[rows], run.search_share, streams.stream(run.seed, streams.SEARCH, k, 0))
        ordered[first : first + len(rows)] = np.concatenate([rows[seen], rows[~seen]])
        searched[k] = seen.sum()
    return replace(partition, indices=partition.indices | {"val": ordered}), searched
