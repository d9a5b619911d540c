"""How the samples of a data set are dealt to clients: one recipe for each `--partition`.

A recipe draws each client's pool, samples of the data's training half. `make` then splits each pool
into a training and a validation set, and deals the data's test half so that a client's test set has
the classes of its pool. The engine and `describe` call `deal`. Samples are row numbers of a half.
Where the paper is silent, recipes do as its authors' published code.
Axes: N clients, C classes, M samples.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from dpfl_mpi.data.partition import Partition, assemble, from_file, owners, weights
from dpfl_mpi.data.source import Source
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import who_can_take_part

# sizes are drawn until they are large enough, at most so many times
PROPOSALS = 10_000_000
NUMBERS = 200_000_000  # most numbers in all those draws: a minute, whatever N
SPLITS = np.random.RandomState()  # of `train_val`, which seeds it: a new one would take longer
TWO = "two per client: one to train, one to validate"
FEWER = "use fewer --clients"
ByHalf = Mapping[str, np.ndarray]  # an array for "train" and one for "test"
Samples = list[np.ndarray]  # the row numbers of each client's samples
Pair = tuple[np.ndarray, np.ndarray]
Rng = np.random.Generator


def deal(run: Resolved, source: Source) -> Partition:
    """Return which client has which samples in a Run, drawn or read from a file."""
    if run.partition.path:
        partition = from_file(run, source.labels, source.classes, source.sha256)
    else:
        partition = make(run, source.labels, source.classes, source.clients)
    return replace(partition, of_data=owners(partition, source.clients))


def make(run: Resolved, labels: ByHalf, classes: int, clients: ByHalf | None = None) -> Partition:
    """Return the partition that a Run draws from its partition seed.

    `labels` are those of the samples and `clients` the data's own clients, int64 `[M]`, by half.
    A `UserError` if the data have too few samples for it.
    """
    y, kind = labels["train"], run.partition.kind
    if run.clients > len(y) // 2:
        most = f"{len(y)} training samples allow at most {len(y) // 2}, {TWO}"
        raise UserError(f"--clients is {run.clients}; {most}")
    if (run.classes_per_client or 0) > classes:
        asked = f"--classes_per_client is {run.classes_per_client}"
        raise UserError(f"{asked}; the data have {classes} classes")
    rng = np.random.default_rng(np.random.SeedSequence((run.partition_seed, 100)))
    # the pool of each client, and with two recipes also its test set
    tests: Samples = []
    if kind == "natural":
        pools, tests = natural(run, labels, classes, clients or {}, rng)
    elif kind == "fedrep":
        pools, tests = fedrep(y, run, classes, rng)
    else:
        recipes = {"dirichlet": dirichlet, "pathological": pathological, "motivation": motivation}
        pools = recipes[kind](y, run, classes, rng)
    counts = np.asarray([np.bincount(y[pool], minlength=classes) for pool in pools])
    check_sizes(pools, 2, f"samples; it needs {TWO}")
    if not tests:
        deal_tests = share_test if kind == "motivation" else deal_test
        tests = deal_tests(counts, labels["test"], rng)
    check_sizes(tests, 1, "test samples; it needs one")
    splits = [train_val(pool, y, run.partition_seed) for pool in pools]
    parts = {"train": [s[0] for s in splits], "val": [s[1] for s in splits], "test": tests}
    return assemble(parts, counts, weights(run.found("dataset"), parts), kind == "fedrep")


def check_sizes(samples: Samples, least: int, what: str) -> None:
    """Raise `UserError` if a client has fewer than `least` samples."""
    for k, of_client in enumerate(samples):
        if len(of_client) < least:
            raise UserError(f"--partition: client {k} would hold {len(of_client)} {what}: {FEWER}")


def by_class(y: np.ndarray, classes: int, rng: Rng) -> Iterator[np.ndarray]:
    """Yield the samples of each class, shuffled."""
    return (rng.permutation(np.flatnonzero(y == c)) for c in range(classes))


def dirichlet(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> Samples:
    """Return each client's pool: class by class, clients get shares q ~ Dir(alpha) of its samples.

    A client that already has M / N samples gets nothing of the classes that follow. The draw is
    repeated until the smallest client has `min_samples`.
    """
    n, least = run.clients, run.min_samples
    if least * n > len(y):
        need = f"{n} clients would need {least * n} samples, the data have {len(y)}"
        raise UserError(f"--min_samples is {least}; {need}")
    class_sizes = np.bincount(y, minlength=classes)
    mean_size = len(y) / n

    def propose(batch: int) -> Pair:  # so many draws, of which the first good one is taken
        totals = np.zeros((batch, n), np.int64)
        sizes = np.zeros((batch, classes, n), np.int64)
        for c in range(classes):
            is_open = totals < mean_size
            q = rng.dirichlet(np.full(n, run.dirichlet_alpha), batch) * is_open
            # with a small alpha all shares of those that are open may be too small for a float
            for draw in np.flatnonzero((q.sum(1) == 0) & is_open.any(1)):
                alphas = np.full(is_open[draw].sum(), run.dirichlet_alpha)
                q[draw, is_open[draw]] = rng.dirichlet(alphas)
            sums = q.sum(1, keepdims=True)
            q = np.where(sums > 0, q / np.where(sums > 0, sums, 1), 1 / n)  # shares that sum to 1
            sizes[:, c] = cut(q, class_sizes[c])
            totals += sizes[:, c]
        return sizes, totals

    limit = min(PROPOSALS // (10 * classes), max(1, NUMBERS // (n * classes)))
    batch = 200_000 // (n * classes)
    sizes = first_accepted(propose, least, limit, batch, "--min_samples", "all clients")
    # cut the shuffled samples of each class into the clients' slices; a pool is one slice of each
    shuffled = zip(by_class(y, classes, rng), sizes, strict=True)
    slices = [np.split(samples, np.cumsum(of_class)[:-1]) for samples, of_class in shuffled]
    return [rng.permutation(np.concatenate(pool)) for pool in zip(*slices, strict=True)]


def pathological(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> Samples:
    """Return each client's pool: shares of `classes_per_client` classes drawn uniformly.

    The clients that drew a class, its holders, get shares q ~ Dir(alpha) of its samples; shares
    are drawn again until each holder has `min_per_class` samples of the class.
    """
    n, least = run.clients, run.min_per_class
    classes_of = np.asarray([rng.permutation(classes)[: run.classes_per_client] for _ in range(n)])
    slices: list[Samples] = [[] for _ in range(n)]  # of each client, one per class
    for c in range(classes):
        holders = np.flatnonzero((classes_of == c).any(1))
        samples = np.flatnonzero(y == c)
        h, m = len(holders), len(samples)
        if h == 0:
            continue  # with few clients a class may have no holder: its samples are not used
        if least * h > m:
            few = f"class {c} has {m} samples for {h} holders: use a smaller one"
            raise UserError(f"--min_per_class is {least}; {few}, or fewer --clients")

        def propose(batch: int, h: int = h, m: int = m) -> Pair:
            sizes = cut(rng.dirichlet(np.full(h, run.dirichlet_alpha), batch), m)
            return sizes, sizes

        limit = min(PROPOSALS, NUMBERS // h)
        whom = f"all holders of class {c}"
        sizes = first_accepted(propose, least, limit, 1_000_000 // h, "--min_per_class", whom)
        of_holders = np.split(rng.permutation(samples), np.cumsum(sizes)[:-1])
        for holder, of_holder in zip(holders, of_holders, strict=True):
            slices[holder].append(of_holder)
    return [rng.permutation(np.concatenate(of_client)) for of_client in slices]


def natural(
    run: Resolved, labels: ByHalf, classes: int, clients: ByHalf, rng: Rng
) -> tuple[Samples, Samples]:
    """Return the pools and test sets of N of the data's own clients, such as writers.

    They are drawn among those with at least `min_samples` samples. Each keeps its own samples of
    both halves. `clients` has the client of each sample.
    """
    n = run.clients
    if not clients:
        allowed = f"this {short(run.dataset)} has none: allowed are pathological, dirichlet"
        raise UserError(f"--partition natural needs a data set with clients of its own; {allowed}")
    least = max(run.min_samples, 3)
    count, able = who_can_take_part(clients["train"], clients["test"], least)
    if not len(who_can_take_part(clients["train"], clients["test"], 0)[1]):
        parts = "both parts, 2 samples to train and 1 to test"
        mend = "split each client's samples, in LEAF by -t sample"
        raise UserError(f"--partition is natural; none of the {count} clients has {parts}: {mend}")
    if n > len(able):
        able_are = f"{len(able)} have at least {least} samples, 2 to train and 1 to test"
        mend = f"{FEWER} or a smaller --min_samples"
        raise UserError(f"--clients is {n}; of the {count} clients in the data {able_are}: {mend}")
    chosen = np.sort(rng.permutation(able)[:n])
    samples = {}  # of each client of the data, by half
    for half, owner in clients.items():
        ends = np.cumsum(np.bincount(owner, minlength=count))
        samples[half] = np.split(np.argsort(owner, kind="stable"), ends[:-1])
    return [samples["train"][k] for k in chosen], [samples["test"][k] for k in chosen]


def fedrep(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> tuple[Samples, Samples]:
    """Return pools and test sets as the FedRep repository deals its FEMNIST.

    The paper's numbers most likely come from it. Client k has `classes_per_client` classes, k, k+1,
    ... modulo C, and floor((LogNormal(4, 1) + 100) / classes_per_client) samples of each: 90 % in
    its pool and 10 % to test. With `overlap` all clients of a class take the first samples of one
    list, as that script does, so that a client's test samples are others' training samples. Without
    it they take consecutive slices of the list.
    """
    n, per_client = run.clients, run.classes_per_client
    lists = list(by_class(y, classes, rng))
    per_class = np.floor((rng.lognormal(4, 1, n) + 100) / per_client).astype(np.int64)
    taken = np.zeros(classes, np.int64)  # samples of each class that clients have so far
    pools, tests = [], []
    for k in range(n):
        slices = []
        for c in ((k + i) % classes for i in range(per_client)):
            first = 0 if run.overlap else int(taken[c])
            slices.append(lists[c][first : first + per_class[k]])
            taken[c] += per_class[k]
        samples = rng.permutation(np.concatenate(slices))
        pool_size = int(0.9 * len(samples))
        pools.append(samples[:pool_size])
        tests.append(samples[pool_size:])
    available = np.bincount(y, minlength=classes)
    if not run.overlap and (taken > available).any():
        c = int(np.argmax(taken - available))
        lack = f"{taken[c]} samples of class {c}, the data have {available[c]}"
        raise UserError(f"--no-overlap: {n} clients would take {lack}; {FEWER}, or --overlap")
    return pools, tests


# of each client, how many samples of which class
MOTIVATION = (
    {0: 50, 4: 50, 6: 50, 8: 50},
    {0: 300, 6: 300, 1: 200, 3: 200},
    {4: 300, 8: 300, 5: 200, 7: 200},
)


def motivation(y: np.ndarray, _: Resolved, classes: int, rng: Rng) -> Samples:
    """Return the pools of the paper's example of three clients (its appendix A)."""
    # the second and the third client share two classes each with the first
    lists = list(by_class(y, classes, rng))
    for c in range(10):
        needed = sum(sizes.get(c, 0) for sizes in MOTIVATION)
        available = len(lists[c]) if c < classes else 0
        if available < needed:
            need = f"needs {needed} samples of class {c}; it has {available}"
            raise UserError(f"--partition motivation {need}: use cifar10")
    pools = []
    for sizes in MOTIVATION:
        parts = []
        for c, m in sizes.items():
            part, lists[c] = np.split(lists[c], [m])
            parts.append(part)
        pools.append(rng.permutation(np.concatenate(parts)))
    return pools


def share_test(counts: np.ndarray, y_test: np.ndarray, rng: Rng) -> Samples:
    """Return each client's test set: the largest one that has the class shares of its pool.

    `counts` are the samples of each class in the pools, `[N, C]`. Clients may share test samples,
    as disjoint sets would be small.
    """
    lists = list(by_class(y_test, counts.shape[1], rng))
    available = np.asarray([len(samples) for samples in lists])
    tests = []
    for count in counts:
        scale = (available[count > 0] / count[count > 0]).min()  # the scarcest class limits it
        parts = [lists[c][: int(count[c] * scale)] for c in np.flatnonzero(count)]
        tests.append(np.concatenate(parts))
    return tests


def cut(q: np.ndarray, m: int) -> np.ndarray:
    """Return how many of m samples each of n clients gets, by its share `q` `[..., n]`."""
    # the samples are cut at floor(cumsum(q) m), so that the sizes sum to m
    points = np.floor(np.cumsum(q, -1) * m).astype(np.int64)
    points[..., -1] = m
    return np.diff(points, axis=-1, prepend=0)


def first_accepted(
    propose: Callable[[int], Pair], least: int, limit: int, batch: int, flag: str, whom: str
) -> np.ndarray:
    """Return the first draw of sizes in which the smallest of n clients has at least `least`.

    `propose(number)` returns so many draws at once, and the total of each client in each of them,
    `[number, n]`. Batches grow up to `batch`, and how they grow decides what is drawn. A
    `UserError` after `limit` draws, or earlier if there is no hope.
    """
    tried, number = 0, 16
    best = 0  # the largest smallest total so far
    enough, drawn = 0, 0  # totals of at least `least`, and all totals
    while tried < limit:
        number = min(number * 4, max(1, batch), limit - tried)
        draws, totals = propose(number)
        smallest = totals.min(1)
        good = np.flatnonzero(smallest >= least)
        if len(good):
            return draws[good[0]]
        tried += number
        best = max(best, int(smallest.max()))
        enough += int((totals >= least).sum())
        drawn += totals.size
        # Dirichlet shares are negatively associated: all n are large enough at most as often as
        # n independent ones would be
        if drawn > 500_000 and limit * (enough / drawn) ** totals.shape[1] < 1e-3:
            break
    lower = f"{flag} {best}, " if best > 1 else ""  # a client needs two samples
    mend = f"use {lower}fewer --clients or a larger --dirichlet_alpha"
    raise UserError(f"{flag} is {least}; none of {tried} draws gave {whom} so many: {mend}")


def deal_test(counts: np.ndarray, y_test: np.ndarray, rng: Rng) -> Samples:
    """Return each client's test set, disjoint from the others'.

    Who has a tenth of the training samples of a class gets a tenth of its test samples. `counts`
    are the training samples by client and class, `[N, C]`.
    """
    slices = []  # of each class, one per client
    for c, samples in enumerate(by_class(y_test, counts.shape[1], rng)):
        count = counts[:, c]
        if count.sum() == 0:
            continue
        quota = np.rint(count / count.sum() * len(samples)).astype(np.int64)
        quota = np.diff(np.minimum(np.cumsum(quota), len(samples)), prepend=0)
        # rounding may leave some: one each to the first clients with a quota, then to other holders
        left = len(samples) - int(quota.sum())
        others = np.flatnonzero((quota == 0) & (count > 0))
        first = np.concatenate([np.flatnonzero(quota), others])
        quota[first[:left]] += 1
        slices.append(np.split(samples, np.cumsum(quota)[:-1]))
    return [np.concatenate(of_client) for of_client in zip(*slices, strict=True)]


def train_val(pool: np.ndarray, y: np.ndarray, seed: int) -> Pair:
    """Return a client's training set, 80 % of its pool, and its validation set, ceil(20 %).

    Both have each class in these shares, where every class has enough samples. They are what
    scikit-learn's `train_test_split` returns, in less than a quarter of its time.
    """
    _, classes = np.unique(y[pool], return_inverse=True)
    counts, n_val = np.bincount(classes), -(-len(pool) // 5)
    SPLITS.seed(seed)
    if counts.min() < 2 or min(n_val, len(pool) - n_val) < len(counts):  # too few of a class
        order = SPLITS.permutation(len(pool))
        return pool[order[n_val:]], pool[order[:n_val]]
    train_sizes = apportion(counts, len(pool) - n_val)  # of each class
    val_sizes = apportion(counts - train_sizes, n_val)
    train, val = [], []
    of_classes = np.split(np.argsort(classes, kind="stable"), np.cumsum(counts)[:-1])
    for of_class, n_train_c, n_val_c in zip(of_classes, train_sizes, val_sizes, strict=True):
        order = of_class[SPLITS.permutation(len(of_class))]
        train.append(order[:n_train_c])
        val.append(order[n_train_c : n_train_c + n_val_c])
    shuffled = [SPLITS.permutation(np.concatenate(part)) for part in (train, val)]
    return pool[shuffled[0]], pool[shuffled[1]]


def apportion(counts: np.ndarray, draws: int) -> np.ndarray:
    """Return how many of `draws` samples each class gets, int64 `[C]`, in proportion to `counts`.

    The shares are rounded down, and the classes with the largest remainders get one more; of
    equal remainders some are drawn at random.
    """
    exact = counts / counts.sum() * draws
    out = np.floor(exact)
    remainder, left = exact - out, int(draws - out.sum())
    for value in np.unique(remainder)[::-1]:
        alike = np.flatnonzero(remainder == value)
        if left > 0:
            out[SPLITS.choice(alike, min(len(alike), left), replace=False)] += 1
        left -= len(alike)
    return out.astype(np.int64)
