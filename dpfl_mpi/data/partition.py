"""A partition says which client has which samples.

Each client has three sets, called parts: train, val and test. Rank 0 makes the whole partition
(`recipes.deal`), from which each rank gets the samples of its own clients (`sharded`). A JSON
file can hold a partition (`save`, `from_file`). With --search_share, `search_first` tells apart the
validation samples by which clients choose their collaborators.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.data.source import Source
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import NO_PARTITION, partition_file
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.storage.foreign import refused_as

PARTS = ("train", "val", "test")
# in which half of the data the samples of a part are
HALF = {"train": "train", "val": "train", "test": "test"}
FORMAT = "dpfl_mpi partition 1"
SLICE = 2**16  # clients whose samples are sent to all ranks at once
ByName = dict[str, np.ndarray]


@dataclass(frozen=True)
class Partition:
    """Every client's samples: of client k `indices[part][indptr[part][k] : indptr[part][k + 1]]`.

    An index of train and val is a row of the data's training half, one of test a row of its test
    half. If `pooled`, all are rows of one pool: training samples, then test samples.
    """

    indptr: ByName  # by part, int64 [N + 1]
    indices: ByName  # by part, int64 [M]
    class_counts: np.ndarray  # int64 [N, C], training and validation samples together
    p: np.ndarray  # float64 [N], the clients' weights in averages; their sum is 1
    pooled: bool = False
    # int64 [N]: which of the data's own clients each client is; None if clients were made up
    of_data: np.ndarray | None = None
    # of a rank's share, which lacks other clients' samples: `sizes`, `sha256` and `note` of all
    whole: dict[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.p)

    def of(self, part: str, k: int) -> np.ndarray:
        """Return the samples of client k in one part."""
        return self.indices[part][self.indptr[part][k] : self.indptr[part][k + 1]]

    def sizes(self, part: str) -> np.ndarray:
        """Return how many samples every client has in one part, int64 `[N]`."""
        return self.whole["sizes"][part] if self.whole else np.diff(self.indptr[part])

    def names_and_groups(self, source: Source) -> dict[str, list[str]]:
        """Return the clients' "name" and "group", `[N]` each, as far as the data have them."""
        # names that only repeat the clients' numbers are left out
        if self.of_data is None:
            return {}
        texts = {"name": source.client_names, "group": source.client_groups}
        out = {what: [of_all[i] for i in self.of_data] for what, of_all in texts.items() if of_all}
        if out.get("name") == list(map(str, range(self.n))):
            del out["name"]
        return out

    def sha256(self) -> str:
        """Return the hash that names this partition."""
        if self.whole:
            return str(self.whole["sha256"])
        arrays = (self.indptr[part].tobytes() + self.indices[part].tobytes() for part in PARTS)
        return hashlib.sha256(b"".join(arrays)).hexdigest()

    def note(self) -> str:
        """Return what a reader of the results must know of it, in words; "" for nothing."""
        if self.whole:
            return str(self.whole["note"])
        notes = []
        training = "are in the training data of other clients"
        if self.pooled:
            used = np.concatenate([self.indices["train"], self.indices["val"]])
            share = np.isin(self.indices["test"], used).mean()
            images = np.concatenate([used, self.indices["test"]])
            if share or len(np.unique(images)) < len(images):
                test = f"{100 * share:.0f} % of the test images {training}"
                notes.append(f"clients share images: {test}")
            else:
                notes.append("clients share no image")
        elif shared := np.isin(self.indices["val"], self.indices["train"]).mean():
            notes.append(f"{100 * shared:.0f} % of the validation samples {training}")
        if empty := int((self.class_counts.sum(0) == 0).sum()):
            notes.append(f"{empty} of {self.class_counts.shape[1]} classes are with no client")
        return "; ".join(notes)


def sharded(
    whole: Partition | None,
    share: Callable[[Callable[[], ByName]], ByName],
    choose_own: Callable[[np.ndarray], np.ndarray],
) -> Partition:
    """Return this rank's share of a partition that rank 0 alone has. Collective.

    Args:
        whole: the partition on rank 0, None elsewhere.
        share: returns on every rank the arrays that its argument returns on rank 0.
        choose_own: returns which clients this rank has, bool `[N]`, from all training sizes.
    """

    def all_but_samples() -> ByName:  # on rank 0
        assert whole is not None
        facts = {"sha256": whole.sha256(), "note": whole.note(), "pooled": whole.pooled}
        out = {f"indptr/{part}": whole.indptr[part] for part in PARTS}
        out |= {"class_counts": whole.class_counts, "p": whole.p}
        out["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        return out if whole.of_data is None else out | {"of_data": whole.of_data}

    def samples(part: str, rows: slice) -> np.ndarray:
        return share(lambda: {"rows": whole.indices[part][rows]})["rows"]  # type: ignore[union-attr]

    arrays = share(all_but_samples)
    sizes = {part: np.diff(arrays[f"indptr/{part}"]) for part in PARTS}
    own, indptr, indices = choose_own(sizes["train"]), {}, {}
    for part in PARTS:
        starts = arrays[f"indptr/{part}"]
        pieces = []
        # clients are shared a slice at a time: no rank needs memory for all samples
        for first in range(0, len(own), SLICE):
            last = min(first + SLICE, len(own))
            is_own = np.repeat(own[first:last], sizes[part][first:last])
            of_slice = samples(part, slice(starts[first], starts[last]))
            pieces.append(of_slice[is_own])
        indices[part] = np.concatenate(pieces)
        indptr[part] = np.concatenate([[0], np.cumsum(np.where(own, sizes[part], 0))])
    counts, p, of_data = arrays["class_counts"], arrays["p"], arrays.get("of_data")
    facts: Any = json.loads(arrays["facts"].tobytes()) | {"sizes": sizes}
    return Partition(indptr, indices, counts, p, facts["pooled"], of_data, facts)


def assemble(
    parts: dict[str, list[np.ndarray]], counts: np.ndarray, weight: np.ndarray, pooled: bool
) -> Partition:
    """Return the partition that has these samples of each client in each part."""
    # `counts` are its `class_counts`; p is proportional to `weight` `[N]`
    indptr, indices = {}, {}
    for part, samples in parts.items():
        indptr[part] = np.concatenate([[0], np.cumsum([len(of_client) for of_client in samples])])
        indices[part] = np.concatenate(samples).astype(np.int64)
    return Partition(indptr, indices, counts, weight / weight.sum(), pooled)


def owners(partition: Partition, clients: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return which of the data's own clients each client is, int64 `[N]`.

    `clients` has for each half of the data ("train", "test") whose sample each one is. None if the
    data have no clients, if a client has samples of several, or if the indices of the partition
    count through both halves.
    """
    if not clients or partition.pooled:
        return None
    out = []
    for k in range(partition.n):
        of_samples = [clients[HALF[part]][partition.of(part, k)] for part in PARTS]
        distinct = np.unique(np.concatenate(of_samples))
        if len(distinct) != 1:
            return None
        out.append(distinct[0])
    return np.asarray(out, np.int64)


def weights(dataset: Any, parts: dict[str, list[np.ndarray]]) -> np.ndarray:
    """Return each client's number of training and validation samples, p before it is normalised.

    If the module of the data set says `WEIGHTS = "train"`, only training samples count, as in the
    code published with the paper.
    """
    sizes = {part: np.asarray([len(x) for x in parts[part]]) for part in ("train", "val")}
    only_train = getattr(dataset, "WEIGHTS", "pool") == "train"
    return sizes["train"] if only_train else sizes["train"] + sizes["val"]


# the file of `describe --save` and `--partition file:PATH` ----------------------------------------
def save(partition: Partition, path: Path, run: Resolved, data_sha256: str) -> None:
    """Write a partition as JSON, so that any framework can run on the same split."""
    # "clients" has the indices of each client's train, val and test, as in `Partition`
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
    """Return the partition of `--partition file:PATH`; `UserError` if it does not fit the data."""
    # `labels` are those of the data by half. Without `p` in the file, p follows from `weights`.
    where, content = f"--partition is {run.partition}, which", partition_file(run.partition.path)
    with refused_as(NO_PARTITION.format(run.partition.path)):
        clients = content["clients"]
        for indices in (client[part] for client in clients for part in PARTS):
            if any(type(index) is not int for index in indices):
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
    if not (math.isfinite(sum(p.tolist())) and (p > 0).all()):
        raise UserError(f"{where} holds a p that is not positive, or too large")
    # a p that was written by `save` is kept to the bit
    return replace(partition, p=p if abs(p.sum() - 1) < 1e-9 else p / p.sum())


def check_client(where: str, client: ByName, lengths: dict[str, int], pooled: bool) -> None:
    """Raise `UserError` if a client's part is empty, or has a sample twice or one not in the data.

    `lengths` is how many samples each half has.
    """
    for part, samples in client.items():
        end = lengths[HALF[part]]
        if len(samples) == 0:
            raise UserError(f"{where} no {part} sample; each needs one")
        if len(outside := samples[(samples < 0) | (samples >= end)]):
            raise UserError(f"{where} the {part} sample {outside[0]}; allowed are 0 to {end - 1}")
        if len(np.unique(samples)) < len(samples):
            raise UserError(f"{where} a {part} sample twice")
    for a, b in combinations(PARTS, 2):
        same_pool = pooled or HALF[a] == HALF[b]
        if same_pool and np.isin(client[a], client[b]).any():
            raise UserError(f"{where} a sample in both {a} and {b}")


# --search_share -----------------------------------------------------------------------------------
# The greedy search for collaborators scores models on this share of a client's validation images;
# the others choose the client's best round. With 1, both use all of them.
def split(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return which of M images the search sees, bool `[M]`: the same share of each class.

    Systematic sampling: the images are ordered at random, class by class, and every (1 / share)-th
    is taken. M is at least 2, and both sides get at least one image.
    """
    m = len(labels)
    # the classes are in random order, or rounding would favour some
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
    """Return the partition with the validation images that each client's search sees in front."""
    # also return how many these are, int64 `[N]`, for the clients of this rank
    sizes = partition.sizes("val")
    if run.search_share == 1:
        return partition, sizes
    if (sizes < 2).any():
        single = f"client {np.argmax(sizes < 2)} has a single validation image"
        allowed = "and both parts need one: allowed is 1"
        raise UserError(f"--search_share is {run.search_share:g}; {single}, {allowed}")
    ordered = partition.indices["val"].copy()
    n_seen = np.zeros(partition.n, np.int64)
    starts = partition.indptr["val"]
    for k in np.flatnonzero(np.diff(starts)).tolist():  # this rank's clients
        images, first = partition.of("val", k), starts[k]
        rng = streams.stream(run.seed, streams.SEARCH, k, 0)
        seen = split(labels[images], run.search_share, rng)
        ordered[first : first + len(images)] = np.concatenate([images[seen], images[~seen]])
        n_seen[k] = seen.sum()
    return replace(partition, indices=partition.indices | {"val": ordered}), n_seen
