"""How samples are dealt to clients: Dir(alpha), Patho(classes), natural clients, fedrep's users, the motivating example, or as a file has it.

They are those of the authors' published pipeline where the paper names only the distribution. Axes: N clients, C classes, M samples.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from dpfl_mpi.data.partition import Partition, assemble, from_file, owners, weights
from dpfl_mpi.data.source import Source, client_sizes
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.files import able

PROPOSALS = 10_000_000  # draws of proportions before a partition is refused
WORK = 200_000_000  # numbers in all those draws: what is refused is refused within a minute, whatever N
SPLITS = np.random.RandomState()  # seeded for each split: to make one takes longer than that
TWO = "two per client: one to train, one to validate"
ByPart = dict[str, np.ndarray]  # mostly "train" and "test"
Pools = list[np.ndarray]  # the samples of each client
Pair = tuple[np.ndarray, np.ndarray]
Rng = np.random.Generator


def deal(run: Resolved, source: Source) -> Partition:
    """Return the partition of a resolved Run over its data: drawn, or read from a file."""
    if run.partition.path:
        partition = from_file(run, source.labels, source.classes, source.sha256)
    else:
        partition = make(run, source.labels, source.classes, source.clients)
    return replace(partition, of_data=owners(partition, source.clients))


def make(run: Resolved, labels: ByPart, classes: int, clients: ByPart | None = None) -> Partition:
    """Return the partition of a resolved Run, drawn from its partition seed; `UserError`, with the arithmetic, where the data cannot be dealt so.

    `labels` are the "train" and "test" labels, int64 `[M]`, `clients` the data's own client of every sample.
    """
    y = labels["train"]
    if run.clients > len(y) // 2:
        raise UserError(f"--clients is {run.clients}; {len(y)} training samples allow at most {len(y) // 2}, {TWO}")
    if (run.classes_per_client or 0) > classes:
        raise UserError(f"--classes_per_client is {run.classes_per_client}; the data have {classes} classes")
    rng = np.random.default_rng(np.random.SeedSequence((run.partition_seed, 100)))
    tests: list[np.ndarray] = []
    if run.partition.kind == "natural":
        pools, tests = natural(run, labels, classes, clients or {}, rng)
    elif run.partition.kind == "fedrep":
        pools, tests = fedrep(y, run, classes, rng)
    else:
        recipe = {"dirichlet": dirichlet, "pathological": pathological, "motivation": motivation}[run.partition.kind]
        pools = recipe(y, run, classes, rng)
    counts = np.asarray([np.bincount(y[pool], minlength=classes) for pool in pools])
    for k, pool in enumerate(pools):
        if len(pool) < 2:
            raise UserError(f"--partition: client {k} would hold {len(pool)} samples, and needs {TWO}: fewer --clients")
    if not tests:
        tests = (share_test if run.partition.kind == "motivation" else deal_test)(counts, labels["test"], rng)
    for k, test in enumerate(tests):
        if len(test) == 0:
            there = f"{len(labels['test'])} are dealt in proportion to training samples, and it has {len(pools[k])}"
            raise UserError(f"--partition: client {k} would hold no test sample; {there}: use fewer --clients")
    splits = [train_val(pool, y, run.partition_seed) for pool in pools]
    parts = {"train": [s[0] for s in splits], "val": [s[1] for s in splits], "test": tests}
    return assemble(parts, counts, weights(run.found("dataset"), parts), run.partition.kind == "fedrep")


def by_class(y: np.ndarray, classes: int, rng: Rng) -> Iterator[np.ndarray]:
    return (rng.permutation(np.flatnonzero(y == c)) for c in range(classes))


def dirichlet(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> Pools:
    """Return the pool of each client: of every class, in numeric order, shares q ~ Dir(alpha) over all clients.

    A client that already holds its mean share of samples gets none of the classes that follow; the draw is repeated until the smallest
    client has `min_samples`.
    """
    n, least = run.clients, run.min_samples
    if least * n > len(y):
        raise UserError(f"--min_samples is {least}; {n} clients would need {least * n} samples, the data have {len(y)}")
    sizes_c = np.bincount(y, minlength=classes)
    cap = len(y) / n

    def propose(batch: int) -> Pair:
        held = np.zeros((batch, n), np.int64)
        slices = np.zeros((batch, classes, n), np.int64)
        for c in range(classes):
            q = rng.dirichlet(np.full(n, run.dirichlet_alpha), batch) * (held < cap)
            total = q.sum(1, keepdims=True)
            q = np.where(total > 0, q / np.where(total > 0, total, 1), 1 / n)
            slices[:, c] = cut(q, sizes_c[c])
            held += slices[:, c]
        return slices, held

    limit = min(PROPOSALS // (10 * classes), max(1, WORK // (n * classes)))
    slices = accept(propose, least, limit, 200_000 // (n * classes), "--min_samples", "a client")
    dealt = zip(by_class(y, classes, rng), slices, strict=True)
    pieces = [np.split(samples, np.cumsum(sizes)[:-1]) for samples, sizes in dealt]
    return [rng.permutation(np.concatenate(mine)) for mine in zip(*pieces, strict=True)]


def pathological(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> Pools:
    """Return the pool of each client: `classes_per_client` classes drawn uniformly, each dealt by Dir(alpha) until each holder has `min_per_class` of it."""
    n, least = run.clients, run.min_per_class
    holds = np.asarray([rng.permutation(classes)[: run.classes_per_client] for _ in range(n)])
    pieces: list[list[np.ndarray]] = [[] for _ in range(n)]
    for c in range(classes):
        holders = np.flatnonzero((holds == c).any(1))
        samples = np.flatnonzero(y == c)
        k, m = len(holders), len(samples)
        if k == 0:
            continue  # with few clients a class may have no holder: its samples are not used
        if least * k > m:
            said = f"--min_per_class is {least}; class {c} has {m} samples for {k} holders"
            most = f"at most {m // k}, or" if m // k > 1 else "use"
            raise UserError(f"{said}: {most} fewer --clients")

        def propose(batch: int, k: int = k, m: int = m) -> Pair:
            slices = cut(rng.dirichlet(np.full(k, run.dirichlet_alpha), batch), m)
            return slices, slices

        limit = min(PROPOSALS, WORK // k)
        slices = accept(propose, least, limit, 1_000_000 // k, "--min_per_class", f"a holder of class {c}")
        for holder, part in zip(holders, np.split(rng.permutation(samples), np.cumsum(slices)[:-1]), strict=True):
            pieces[holder].append(part)
    return [rng.permutation(np.concatenate(p)) for p in pieces]


def natural(run: Resolved, labels: ByPart, classes: int, clients: ByPart, rng: Rng) -> tuple[Pools, Pools]:
    """Return pool and test samples of N of the data's own clients (writers), drawn among those with at least `min_samples` samples.

    The data's own train and test split is kept. With `missing_classes`, each client loses so many of all classes, drawn for it by
    itself, from all three sets; a draw that leaves it without two samples to train and one to test is repeated.
    """
    n, lost = run.clients, run.missing_classes
    if not clients:
        none = f"this {short(run.dataset)} has none: allowed are pathological, dirichlet"
        raise UserError(f"--partition natural needs a data set with clients of its own; {none}")
    if lost >= classes:
        raise UserError(f"--missing_classes is {lost}; the data have {classes} classes, so at most {classes - 1}")
    sizes = dict(zip(("train", "test"), client_sizes(clients), strict=True))
    everyone, least = len(sizes["train"]), max(run.min_samples, 3)
    can = able(sizes["train"], sizes["test"], least)
    if not len(able(sizes["train"], sizes["test"], 0)):
        parts = f"none of the {everyone} clients in the data has both parts, 2 samples to train and 1 to test"
        raise UserError(f"--partition is natural; {parts}: split each client's samples, in LEAF by -t sample")
    if n > len(can):
        have = f"of the {everyone} clients in the data {len(can)} have at least {least} samples, 2 to train, 1 to test"
        raise UserError(f"--clients is {n}; {have}: use fewer --clients or a smaller --min_samples")
    chosen = np.sort(rng.permutation(can)[:n])
    rows = {part: np.split(np.argsort(clients[part], kind="stable"), np.cumsum(sizes[part])[:-1]) for part in sizes}
    pools, tests = [], []
    for client in chosen:
        train, test = rows["train"][client], rows["test"][client]
        for _ in range(1000):
            missing = rng.permutation(classes)[:lost]
            pool, mine = (r[~np.isin(labels[part][r], missing)] for part, r in (("train", train), ("test", test)))
            if lost == 0 or (len(pool) >= 2 and len(mine)):
                break
        else:
            none = f"none of 1000 draws left client {client} of the data 2 samples to train and 1 to test"
            raise UserError(f"--missing_classes is {lost} of {classes}; {none}: use fewer, or a larger --min_samples")
        pools.append(pool)
        tests.append(mine)
    return pools, tests


def fedrep(y: np.ndarray, run: Resolved, classes: int, rng: Rng) -> tuple[Pools, Pools]:
    """Return pool and test samples of users as the FedRep repository makes its FEMNIST, where the paper's numbers most likely come from.

    User u holds classes u, u+1, ... modulo C (`classes_per_client` of them), of each floor((LogNormal(4, 1) + 100) / classes_per_client)
    samples; shuffled, 90 % train and 10 % test. With `overlap` all users of a class take a prefix of the same list, as that script does
    (its cursor is reset for each user): one user's test samples are then others' training samples. Without, they take consecutive slices.
    """
    n, held = run.clients, run.classes_per_client
    lists = list(by_class(y, classes, rng))
    a_class = np.floor((rng.lognormal(4, 1, n) + 100) / held).astype(np.int64)
    have, taken, enough = np.bincount(y, minlength=classes), np.zeros(classes, np.int64), 0
    pools, tests = [], []
    for u in range(n):
        pieces = []
        for c in ((u + i) % classes for i in range(held)):
            first = 0 if run.overlap else int(taken[c])
            pieces.append(lists[c][first : first + a_class[u]])
            taken[c] += a_class[u]
        enough += bool((taken <= have).all())
        mine = rng.permutation(np.concatenate(pieces))
        cut_at = int(0.9 * len(mine))
        pools.append(mine[:cut_at])
        tests.append(mine[cut_at:])
    if not run.overlap and enough < n:
        c = int(np.argmax(taken - have))
        fewer = f"use {f'at most {enough} --clients, or ' if enough else ''}--overlap"
        lack = f"{taken[c]} samples of class {c}, the data have {have[c]}"
        raise UserError(f"--no-overlap: {n} clients would take {lack}; {fewer}")
    return pools, tests


# samples of a class
MOTIVATION = {0: 50, 4: 50, 6: 50, 8: 50}, {0: 300, 6: 300, 1: 200, 3: 200}, {4: 300, 8: 300, 5: 200, 7: 200}


def motivation(y: np.ndarray, _: Resolved, classes: int, rng: Rng) -> Pools:
    """Return the pools of the paper's three-client example (its appendix A): clients 2 and 3 share two classes each with client 1."""
    of = list(by_class(y, classes, rng))
    for c in range(10):
        need, there = sum(held.get(c, 0) for held in MOTIVATION), len(of[c]) if c < classes else 0
        if there < need:
            raise UserError(f"--partition motivation needs {need} samples of class {c}; it has {there}: use cifar10")
    pools = []
    for held in MOTIVATION:
        parts = []
        for c, m in held.items():
            part, of[c] = np.split(of[c], [m])
            parts.append(part)
        pools.append(rng.permutation(np.concatenate(parts)))
    return pools


def share_test(counts: np.ndarray, y_test: np.ndarray, rng: Rng) -> Pools:
    """Return for each client as many test samples as keep its class shares; clients may share samples: three disjoint sets would be small."""
    of = list(by_class(y_test, counts.shape[1], rng))
    there = np.asarray([len(samples) for samples in of])
    tests = []
    for held in counts:
        scale = (there[held > 0] / held[held > 0]).min()
        tests.append(np.concatenate([of[c][: int(held[c] * scale)] for c in np.flatnonzero(held)]))
    return tests


def cut(q: np.ndarray, m: int) -> np.ndarray:
    """Return slice sizes `[..., n]` that sum to m: cut points floor(cumsum(q) m), the last at m."""
    points = np.floor(np.cumsum(q, -1) * m).astype(np.int64)
    points[..., -1] = m
    return np.diff(points, axis=-1, prepend=0)


def accept(propose: Callable[[int], Pair], least: int, limit: int, batch: int, flag: str, whose: str) -> np.ndarray:
    """Return the first proposal in which everyone holds at least `least`; refuse after `limit` of them, or when it is hopeless.

    Shares of a Dirichlet draw are negatively associated (one is large where others are small), so all n reach `least` at most as often as
    n independent ones would: q^n, where q is the share that reach it. That bound refuses in seconds what draws would refuse in hours.
    The first batches are small, so that an easy draw costs little; the result does depend on that schedule, which is fixed.
    """
    tried, best, size, reach, seen = 0, -1, 16, 0, 0
    while tried < limit:
        size = min(size * 4, max(1, batch), limit - tried)
        slices, held = propose(size)
        smallest = held.min(1)
        good = np.flatnonzero(smallest >= least)
        if len(good):
            return slices[good[0]]
        tried += size
        if smallest.max() > best:
            best, reached = int(smallest.max()), 0
        reached += int((smallest >= best).sum())
        reach, seen = reach + int((held >= least).sum()), seen + held.size
        n = held.shape[1]
        log10 = n * math.log10(reach / seen) if reach else -math.inf
        if seen > 500_000 and log10 < -3 - math.log10(limit):
            break
    lower = f"{flag} {best}, " if best > 1 else ""  # a client needs two samples
    raise UserError(
        f"{flag} is {least}; no draw gave {whose} so many (accepted: 0 in {tried}; of all {n} each reaches it with probability {reach / seen:.3g}, "
        f"so all at once with at most 1e{max(log10, -9999):.0f}). The most that a draw gave the smallest was {best} ({reached} in {tried}): "
        f"use {lower}fewer --clients or a larger --dirichlet_alpha"
    )


def deal_test(counts: np.ndarray, y_test: np.ndarray, rng: Rng) -> Pools:
    """Return each client's test samples: of every class the client's share of that class's training pool; disjoint, the whole test set used."""
    pieces = []
    for c, samples in enumerate(by_class(y_test, counts.shape[1], rng)):
        held = counts[:, c].sum()
        if held == 0:
            continue
        quota = np.rint(counts[:, c] / held * len(samples)).astype(np.int64)
        quota = np.diff(np.minimum(np.cumsum(quota), len(samples)), prepend=0)
        left = len(samples) - int(quota.sum())
        # one each to the first clients with a quota; of shares so small that all round to 0, to the first holders of the class
        first = np.concatenate([np.flatnonzero(quota), np.flatnonzero((quota == 0) & (counts[:, c] > 0))])
        quota[first[:left]] += 1
        pieces.append(np.split(samples, np.cumsum(quota)[:-1]))
    return [np.concatenate(mine) for mine in zip(*pieces, strict=True)]


def train_val(pool: np.ndarray, y: np.ndarray, seed: int) -> Pair:
    """Return 80 % of a client's pool to train and ceil(20 %) to validate, stratified by class where every class allows it.

    These are the samples of scikit-learn's `train_test_split`, in less than a quarter of its time: root splits every client's pool.
    """
    _, of = np.unique(y[pool], return_inverse=True)
    counts, n_val = np.bincount(of), -(-len(pool) // 5)
    SPLITS.seed(seed)
    if counts.min() < 2 or min(n_val, len(pool) - n_val) < len(counts):
        order = SPLITS.permutation(len(pool))
        return pool[order[n_val:]], pool[order[:n_val]]
    n_train_c = shares(counts, len(pool) - n_val)
    n_val_c = shares(counts - n_train_c, n_val)
    train, val = [], []
    of_class = np.split(np.argsort(of, kind="stable"), np.cumsum(counts)[:-1])
    for mine, a, b in zip(of_class, n_train_c, n_val_c, strict=True):
        order = mine[SPLITS.permutation(len(mine))]
        train.append(order[:a])
        val.append(order[a : a + b])
    return pool[SPLITS.permutation(np.concatenate(train))], pool[SPLITS.permutation(np.concatenate(val))]


def shares(counts: np.ndarray, draws: int) -> np.ndarray:
    """Return how many of so many draws each class gets, int64 `[C]`: its share rounded down, and one more by the largest remainders, ties by lot."""
    exact = counts / counts.sum() * draws
    out = np.floor(exact)
    rest, left = exact - out, int(draws - out.sum())
    for value in np.unique(rest)[::-1]:
        alike = np.flatnonzero(rest == value)
        if left > 0:
            out[SPLITS.choice(alike, min(len(alike), left), replace=False)] += 1
        left -= len(alike)
    return out.astype(np.int64)
