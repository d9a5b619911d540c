"""--search_share: the greedy search sees one part of a client's validation images, and the client's round is chosen on the other.

With a share of 1, as in the paper, both use all of them.
"""

import dataclasses

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.data.partition import Partition
from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import Resolved


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
    """Return the partition with each client's validation images in a new order, those of the search first, and their numbers, int64 `[N]`.

    `labels` are those of the training pool. With --search_share 1 nothing changes.

    Raises:
        UserError: a client has a single validation image.
    """
    sizes = partition.sizes("val")
    if run.search_share == 1:
        return partition, sizes
    if (sizes < 2).any():
        raise UserError(
            f"--search_share is {run.search_share:g}; client {np.argmax(sizes < 2)} has a single validation image, and both parts need one"
        )
    out, searched = [], np.zeros(partition.n, np.int64)
    for k in range(partition.n):
        mine = partition.of("val", k)
        seen = split(labels[mine], run.search_share, streams.stream(run.seed, streams.SEARCH, k, 0))
        out += [mine[seen], mine[~seen]]
        searched[k] = seen.sum()
    indices = partition.indices | {"val": np.concatenate(out)}
    return dataclasses.replace(partition, indices=indices), searched
