"""How samples are dealt to clients, as in the authors' published code where the paper is silent.

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

PROPOSALS = 10_000_000  # most draws of proportions
NUMBERS = 200_000_000  # most numbers in all those draws: a minute, whatever N
SPLITS = np.random.RandomState()  # seeded for each split: making one takes longer
TWO = "two per client: one to train, one to validate"
FEWER = "use fewer --clients"
ByHalf = Mapping[str, np.ndarray]  # "train" and "test"
Pools = list[np.ndarray]  # the samples of each client
Pair = tuple[np.ndarray, np.ndarray]
Rng = np.random.Generator


def deal(run: Resolved, source: Source) -> Partition:
    """Return the partition of a Run over its data, drawn or read from a file."""
    if run.partition.path:
        partition = from_file(run, source.labels, source.classes, source.sha256)
    else:
        partition = make(run, source.labels, source.classes, source.clients)
    return replace(partition, of_data=owners(partition, source.clients))


def make(run: Resolved, labels: ByHalf, classes: int, clients: ByHalf | None = None) -> Partition:
    """Return the partition of a Run, drawn from its partition seed.

    Args:
        labels: the "train" and "test" labels, int64 `[M]`.
        clients: the data's own client of every sample, int64 `[M]`.

    Raises:
        UserError: if the data cannot be dealt so.
    """
    y, kind = labels["train"], run.partition.kind
    if run.clients > len(y) // 2:
        most = f"{len(y)} training samples allow at most {len(y) // 2}, {TWO}"
        raise UserError(f"--clients is {run.clients}; {most}")
    if (run.classes_per_client or 0) > classes:
        asked = f"--classes_per_client is {run.classes_per_client}"
        raise UserError(f"{asked}; the data have {classes} classes")
    rng = np.random.default_rng(np.random.SeedSequence((run.partition_seed, 100)))
    tests: Pools = []
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


def check_sizes(parts: Pools, least: int, what: str) -> None:
    for k, samples in enumerate(parts):
        if len(samples) < least:
            raise UserError(f"--partition: client {k} would hold {len(samples)} {what}: {FEWER}")


def by_class(y: np.ndarray, classes: int, rng: Rng) -> Iterator[np.ndarray]:
    return (rng.permutation(np.flatnonzero(y == c)) for c in range(classes))


def dirichlet(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> Pools:
    """Return each client's pool: of every class, in order, a share q ~ Dir(alpha).

    A client that already has its mean share of samples gets none of the classes that follow. The
    draw is repeated until the smallest client has `min_samples`.
    """
    n, least = run.clients, run.min_samples
    if least * n > len(y):
        need = f"{n} clients would need {least * n} samples, the data have {len(y)}"
        raise UserError(f"--min_samples is {least}; {need}")
    sizes_c = np.bincount(y, minlength=classes)
    cap = len(y) / n

    def propose(batch: int) -> Pair:
        totals = np.zeros((batch, n), np.int64)
        slices = np.zeros((batch, classes, n), np.int64)
        for c in range(classes):
            q = rng.dirichlet(np.full(n, run.dirichlet_alpha), batch) * (totals < cap)
            sums = q.sum(1, keepdims=True)
            q = np.where(sums > 0, q / np.where(sums > 0, sums, 1), 1 / n)
            slices[:, c] = cut(q, sizes_c[c])
            totals += slices[:, c]
        return slices, totals

    limit = min(PROPOSALS // (10 * classes), max(1, NUMBERS // (n * classes)))
    batch = 200_000 // (n * classes)
    slices = first_accepted(propose, least, limit, batch, "--min_samples", "all clients")
    shuffled = zip(by_class(y, classes, rng), slices, strict=True)
    pieces = [np.split(samples, np.cumsum(sizes)[:-1]) for samples, sizes in shuffled]
    return [rng.permutation(np.concatenate(pool)) for pool in zip(*pieces, strict=True)]


def pathological(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> Pools:
    """Return each client's pool: shares of `classes_per_client` classes drawn uniformly.

    A class is dealt to its holders by Dir(alpha) until each has `min_per_class` of it.
    """
    n, least = run.clients, run.min_per_class
    drawn = [rng.permutation(classes)[: run.classes_per_client] for _ in range(n)]
    classes_of = np.asarray(drawn)
    pieces: list[Pools] = [[] for _ in range(n)]
    for c in range(classes):
        holders = np.flatnonzero((classes_of == c).any(1))
        samples = np.flatnonzero(y == c)
        k, m = len(holders), len(samples)
        if k == 0:
            continue  # with few clients a class may have no holder: its samples are not used
        if least * k > m:
            few = f"class {c} has {m} samples for {k} holders: use a smaller one"
            raise UserError(f"--min_per_class is {least}; {few}, or fewer --clients")

        def propose(batch: int, k: int = k, m: int = m) -> Pair:
            slices = cut(rng.dirichlet(np.full(k, run.dirichlet_alpha), batch), m)
            return slices, slices

        limit = min(PROPOSALS, NUMBERS // k)
        whom = f"all holders of class {c}"
        slices = first_accepted(propose, least, limit, 1_000_000 // k, "--min_per_class", whom)
        parts = np.split(rng.permutation(samples), np.cumsum(slices)[:-1])
        for holder, part in zip(holders, parts, strict=True):
            pieces[holder].append(part)
    return [rng.permutation(np.concatenate(p)) for p in pieces]


def natural(
    run: Resolved, labels: ByHalf, classes: int, clients: ByHalf, rng: Rng
) -> tuple[Pools, Pools]:
    """Return pools and test samples of N of the data's own clients, such as writers.

    They are drawn among those with at least `min_samples` samples, and keep their own train and
    test split.
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
    rows = {}
    for half, owner in clients.items():
        ends = np.cumsum(np.bincount(owner, minlength=count))
        rows[half] = np.split(np.argsort(owner, kind="stable"), ends[:-1])
    return [rows["train"][k] for k in chosen], [rows["test"][k] for k in chosen]


def fedrep(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> tuple[Pools, Pools]:
    """Return pools and test samples of users as the FedRep repository makes its FEMNIST.

    The paper's numbers most likely come from it. User u has the classes u, u+1, ... modulo C,
    `classes_per_client` of them, of each floor((LogNormal(4, 1) + 100) / classes_per_client)
    samples; of these 90 % train and 10 % test. With `overlap` all users of a class take a prefix of
    the same list, as that script does: a user's test samples are others' training samples.
    Without, they take consecutive slices.
    """
    n, per_client = run.clients, run.classes_per_client
    lists = list(by_class(y, classes, rng))
    per_class = np.floor((rng.lognormal(4, 1, n) + 100) / per_client).astype(np.int64)
    taken = np.zeros(classes, np.int64)
    pools, tests = [], []
    for u in range(n):
        pieces = []
        for c in ((u + i) % classes for i in range(per_client)):
            first = 0 if run.overlap else int(taken[c])
            pieces.append(lists[c][first : first + per_class[u]])
            taken[c] += per_class[u]
        samples = rng.permutation(np.concatenate(pieces))
        pool_size = int(0.9 * len(samples))
        pools.append(samples[:pool_size])
        tests.append(samples[pool_size:])
    available = np.bincount(y, minlength=classes)
    if not run.overlap and (taken > available).any():
        c = int(np.argmax(taken - available))
        lack = f"{taken[c]} samples of class {c}, the data have {available[c]}"
        raise UserError(f"--no-overlap: {n} clients would take {lack}; {FEWER}, or --overlap")
    return pools, tests


# samples of each class, by client
MOTIVATION = (
    {0: 50, 4: 50, 6: 50, 8: 50},
    {0: 300, 6: 300, 1: 200, 3: 200},
    {4: 300, 8: 300, 5: 200, 7: 200},
)


def motivation(y: np.ndarray, _: Resolved, classes: int, rng: Rng) -> Pools:
    """Return the pools of the paper's example of three clients (its appendix A).

    Clients 2 and 3 share two classes each with client 1.
    """
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


def share_test(counts: np.ndarray, y_test: np.ndarray, rng: Rng) -> Pools:
    """Return each client's test samples: as many as keep its class shares.

    Clients may share samples, as three disjoint sets would be small.
    """
    lists = list(by_class(y_test, counts.shape[1], rng))
    available = np.asarray([len(samples) for samples in lists])
    tests = []
    for count in counts:
        scale = (available[count > 0] / count[count > 0]).min()
        parts = [lists[c][: int(count[c] * scale)] for c in np.flatnonzero(count)]
        tests.append(np.concatenate(parts))
    return tests


def cut(q: np.ndarray, m: int) -> np.ndarray:
    """Return slice sizes `[..., n]` that sum to m: cut points floor(cumsum(q) m), the last at m."""
    points = np.floor(np.cumsum(q, -1) * m).astype(np.int64)
    points[..., -1] = m
    return np.diff(points, axis=-1, prepend=0)


def first_accepted(
    propose: Callable[[int], Pair], least: int, limit: int, batch: int, flag: str, whom: str
) -> np.ndarray:
    """Return the first proposal in which the smallest of n sizes is at least `least`.

    `UserError` after `limit` proposals, or earlier if acceptance is hopeless. Dirichlet shares are
    negatively associated, so all n reach `least` at most as often as n independent ones: q^n, where
    q is the share that does. The growing batches are part of the result, as each one draws.
    """
    tried, best, size, enough, drawn = 0, 0, 16, 0, 0
    while tried < limit:
        size = min(size * 4, max(1, batch), limit - tried)
        slices, sizes = propose(size)
        smallest = sizes.min(1)
        good = np.flatnonzero(smallest >= least)
        if len(good):
            return slices[good[0]]
        tried += size
        best = max(best, int(smallest.max()))
        enough += int((sizes >= least).sum())
        drawn += sizes.size
        if drawn > 500_000 and limit * (enough / drawn) ** sizes.shape[1] < 1e-3:
            break
    lower = f"{flag} {best}, " if best > 1 else ""  # a client needs two samples
    mend = f"use {lower}fewer --clients or a larger --dirichlet_alpha"
    raise UserError(f"{flag} is {least}; none of {tried} draws gave {whom} so many: {mend}")


def deal_test(counts: np.ndarray, y_test: np.ndarray, rng: Rng) -> Pools:
    """Return each client's test samples: of a class its share of that class's training pool.

    They are disjoint, and the whole test set is used.
    """
    pieces = []
    for c, samples in enumerate(by_class(y_test, counts.shape[1], rng)):
        count = counts[:, c]
        if count.sum() == 0:
            continue
        quota = np.rint(count / count.sum() * len(samples)).astype(np.int64)
        quota = np.diff(np.minimum(np.cumsum(quota), len(samples)), prepend=0)
        left = len(samples) - int(quota.sum())
        # one each to the first clients with a quota, then to other holders of the class
        others = np.flatnonzero((quota == 0) & (count > 0))
        first = np.concatenate([np.flatnonzero(quota), others])
        quota[first[:left]] += 1
        pieces.append(np.split(samples, np.cumsum(quota)[:-1]))
    return [np.concatenate(test) for test in zip(*pieces, strict=True)]


def train_val(pool: np.ndarray, y: np.ndarray, seed: int) -> Pair:
    """Return 80 % of a client's pool to train and ceil(20 %) to validate.

    They are stratified by class where every class allows it: the samples of scikit-learn's
    `train_test_split`, in less than a quarter of its time.
    """
    _, classes = np.unique(y[pool], return_inverse=True)
    counts, n_val = np.bincount(classes), -(-len(pool) // 5)
    SPLITS.seed(seed)
    if counts.min() < 2 or min(n_val, len(pool) - n_val) < len(counts):
        order = SPLITS.permutation(len(pool))
        return pool[order[n_val:]], pool[order[:n_val]]
    n_train_c = apportion(counts, len(pool) - n_val)
    n_val_c = apportion(counts - n_train_c, n_val)
    train, val = [], []
    by_class = np.split(np.argsort(classes, kind="stable"), np.cumsum(counts)[:-1])
    for rows, a, b in zip(by_class, n_train_c, n_val_c, strict=True):
        order = rows[SPLITS.permutation(len(rows))]
        train.append(order[:a])
        val.append(order[a : a + b])
    shuffled = [SPLITS.permutation(np.concatenate(rows)) for rows in (train, val)]
    return pool[shuffled[0]], pool[shuffled[1]]


def apportion(counts: np.ndarray, draws: int) -> np.ndarray:
    """Return each class's number of draws, int64 `[C]`: its share, rounded by largest remainders.

    Ties are broken by lot.
    """
    exact = counts / counts.sum() * draws
    out = np.floor(exact)
    rest, left = exact - out, int(draws - out.sum())
    for value in np.unique(rest)[::-1]:
        alike = np.flatnonzero(rest == value)
        if left > 0:
            out[SPLITS.choice(alike, min(len(alike), left), replace=False)] += 1
        left -= len(alike)
    return out.astype(np.int64)
