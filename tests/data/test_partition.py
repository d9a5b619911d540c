"""Partitions: each sample once, limits kept, quotas and splits as plain twins have them."""

import functools
import json
import re
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import refused, run_here
from making import folder, leaf
from sklearn.model_selection import train_test_split

from dpfl_mpi.data import partition, recipes
from dpfl_mpi.data.partition import PARTS, save, sharded
from dpfl_mpi.data.recipes import cut, deal, deal_test, make, train_val
from dpfl_mpi.data.source import Arrays, as_dealt, in_memory
from dpfl_mpi.datasets import femnist
from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import Run

CLASSES = 10
PATHO = {"partition": "pathological", "classes_per_client": 3, "min_per_class": 5}
PATHO["dirichlet_alpha"] = 0.5
DIR = {"partition": "dirichlet", "dirichlet_alpha": 0.1, "min_samples": 10}


def labels(train=2000, test=500, seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"train": train, "test": test}
    return {half: rng.permutation(np.arange(m) % CLASSES) for half, m in sizes.items()}


def run(**fields):
    return Run(**({"dataset": "digits", "clients": 20, "partition_seed": 1} | fields)).resolve()


femnist_run = functools.partial(run, dataset="femnist", partition_seed=42)
natural = functools.partial(femnist_run, partition="natural", clients=4, min_samples=5)
fedrep = functools.partial(femnist_run, partition="fedrep", clients=12)


def dealt_of(y=None, **fields):
    return make(run(**fields), y or labels(), CLASSES)


def pool_of(dealt, k):
    return np.concatenate([dealt.of("train", k), dealt.of("val", k)])


@pytest.mark.parametrize("fields", [
    PATHO, DIR, PATHO | {"clients": 40, "min_per_class": 3}, DIR | {"clients": 8},
])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_sample_once(fields, seed):
    y = labels()
    dealt = dealt_of(y, **fields | {"partition_seed": seed})
    assert sorted(np.r_[dealt.indices["train"], dealt.indices["val"]]) == list(range(2000))
    assert sorted(dealt.indices["test"]) == list(range(500))
    for k in range(dealt.n):
        pool = pool_of(dealt, k)
        counts = np.bincount(y["train"][pool], minlength=CLASSES)
        assert np.array_equal(counts, dealt.class_counts[k])
        assert len(dealt.of("val", k)) == int(np.ceil(0.2 * len(pool)))
        assert set(y["test"][dealt.of("test", k)]) <= set(y["train"][pool])
        # p is that before the validation split
        assert dealt.p[k] == pytest.approx(len(pool) / 2000, rel=1e-12)
    assert dealt.p.sum() == pytest.approx(1, abs=1e-12)
    for part in PARTS:
        assert np.array_equal(dealt.sizes(part), [len(dealt.of(part, k)) for k in range(dealt.n)])


@pytest.mark.parametrize("seed", range(5))
def test_minimum_classes_and_cap(seed):
    """A client that has its mean share, 100, before a class gets nothing of that class."""
    counts = dealt_of(**PATHO | {"partition_seed": seed}).class_counts
    assert ((counts > 0).sum(1) == 3).all() and counts[counts > 0].min() >= 5
    assert len(set((counts > 0).sum(0))) > 1
    counts = dealt_of(**DIR | {"partition_seed": seed}).class_counts
    before = np.cumsum(counts, 1) - counts
    assert counts.sum(1).min() >= 10 and (counts[before >= 100] == 0).all()
    assert (before[:, -1] >= 100).any()  # the cap did act
    assert counts.sum(1).max() > 100  # and is overshot, since it is tested before a class


def test_alpha_and_the_partition_seed_decide():
    seeds = (1, 7), (2, 7), (1, 8)
    a, b, c = (dealt_of(**PATHO, seed=s, partition_seed=p).sha256() for s, p in seeds)
    assert a == b != c
    defaulted = dealt_of(**PATHO | {"partition_seed": None, "seed": 7})
    assert defaulted.sha256() == a
    even = dealt_of(**DIR | {"dirichlet_alpha": 100.0}).class_counts
    uneven = dealt_of(**DIR | {"dirichlet_alpha": 0.05, "min_samples": 2}).class_counts
    assert even.min() >= 3 and (uneven == 0).mean() > 0.5


@settings(max_examples=200)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 10_000))
def test_slices_sum_to_the_whole_and_keep_to_their_shares(q, m):
    """A twin in plain Python: floors of the running sum."""
    total = sum(q)
    q = np.array(q) / total if total > 0 else np.full(len(q), 1 / len(q))
    sizes = cut(q, m)
    points = [int(np.floor(x * m)) for x in np.cumsum(q)[:-1]]
    assert sizes.tolist() == [b - a for a, b in zip([0, *points], [*points, m], strict=True)]
    assert sizes.sum() == m and sizes.min() >= 0
    assert (np.abs(sizes - q * m) <= 1 + 1e-6).all()
    batch = cut(np.array([[q, q[::-1]]]), m)
    assert np.array_equal(batch[0, 0], sizes)  # slices of a batch are those of each draw


def quotas(counts, n_test):
    """Return the test split of one class in plain Python: rounded shares, then one each."""
    out, left = [], n_test
    for count in counts:
        out.append(min(round(count / max(sum(counts), 1) * n_test), left))
        left -= out[-1]
    first = [k for k, quota in enumerate(out) if quota]
    first += [k for k, count in enumerate(counts) if count and not out[k]]
    for k in first[:left]:
        out[k] += 1
    return out


@settings(max_examples=200)
@given(st.data())
def test_deal_test_against_a_twin(data):
    n, classes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 40), min_size=classes, max_size=classes)
    counts = np.array(data.draw(st.lists(row, min_size=n, max_size=n)))
    counts[0, 0] += 1  # pools are never empty
    m = data.draw(st.integers(0, 60))
    y_test = np.random.default_rng(m).integers(0, classes, m)
    dealt = deal_test(counts, y_test, np.random.default_rng(0))
    for c in range(classes):
        sizes = [int((y_test[t] == c).sum()) for t in dealt]
        assert sizes == quotas(counts[:, c].tolist(), int((y_test == c).sum()))
    assert len(np.concatenate(dealt)) == len(set(np.concatenate(dealt).tolist()))


# scikit-learn refuses to stratify a class of one sample, and two samples of four classes
@pytest.mark.parametrize("counts, stratified", [
    ([50, 30, 20], True), ([20, 1], False), ([2] * 4, False), ([9] * 4, True),
    ([7, 7, 3, 3, 3], True), ([5], True),
])  # fmt: skip
def test_split_is_scikit_learns_stratified_where_it_can_be(counts, stratified):
    y = np.repeat(np.arange(len(counts)), counts)
    pool = np.random.default_rng(0).permutation(len(y))
    train, val = train_val(pool, y, 5)
    n_val = -(-len(y) // 5)
    classes = y[pool] if stratified else None
    twin = train_test_split(pool, test_size=n_val, random_state=5, stratify=classes)
    assert np.array_equal(train, twin[0]) and np.array_equal(val, twin[1]) and len(val) == n_val
    assert counts[0] != 50 or np.bincount(y[val]).tolist() == [10, 6, 4]


def test_a_class_without_holders_is_left_out():
    """Two clients of one class each: eight classes have no holder, to train or to test."""
    y = labels()
    dealt = dealt_of(y, **PATHO | {"clients": 2, "classes_per_client": 1})
    classes = np.flatnonzero(dealt.class_counts.sum(0))
    assert 1 <= len(classes) <= 2
    assert set(y["test"][dealt.indices["test"]]) == set(classes)
    assert len(dealt.indices["test"]) == 50 * len(classes)
    assert dealt.note() == f"{CLASSES - len(classes)} of 10 classes are with no client"
    refused("client ... would hold 0 test samples", dealt_of, labels(test=20), **PATHO)


def test_the_smallest_alpha_gives_each_class_to_few():
    """Where all shares but those of full clients are 0 in floats, a class goes to one of them."""
    y = labels()["train"]
    alone = DIR | {"dirichlet_alpha": 0.003, "clients": 8, "min_samples": 2}
    for seed in range(5):
        pools = recipes.dirichlet(y, run(**alone), CLASSES, np.random.default_rng(seed))
        holders = [sum(c in y[pool] for pool in pools) for c in range(CLASSES)]
        assert max(holders) <= 3 and sum(map(len, pools)) == 2000


def test_validation_samples_that_others_train_on_are_counted(tmp_path):
    y, path = labels(), tmp_path / "p.json"
    clients = [
        {"train": [4, 5], "val": [0, 1], "test": [0]},
        {"train": [0], "val": [9], "test": [1]},
    ]
    path.write_text(json.dumps({"clients": clients}))
    read = partition.from_file(run(partition=f"file:{path}", clients=2), y, CLASSES, "")
    note = read.note().split(";")[0]
    assert note == "33 % of the validation samples are in the training data of other clients"


@pytest.mark.parametrize("fields, flag", [
    (PATHO | {"min_per_class": 15, "dirichlet_alpha": 0.3}, "min_per_class"),
    (DIR | {"min_samples": 60}, "min_samples"),
])  # fmt: skip
def test_a_refusal_names_a_minimum_that_works(fields, flag, monkeypatch):
    monkeypatch.setattr(recipes, "PROPOSALS", 20_000)
    text = refused(f"--{flag} is {fields[flag]}; none of ... draws gave all", dealt_of, **fields)
    for _ in range(CLASSES):  # another class may be rarer still
        least = int(re.search(rf"use --{flag} (\d+)", text).group(1))
        assert least < fields[flag]
        try:
            dealt = dealt_of(**fields | {flag: least})
            break
        except UserError as again:
            text = str(again)
    counts = dealt.class_counts if flag == "min_per_class" else dealt.class_counts.sum(1)
    assert counts[counts > 0].min() >= least > 0


def test_a_refusal_proposes_no_minimum_that_is_refused(monkeypatch):
    """--min_samples is at least 2, and a client needs two samples."""
    monkeypatch.setattr(recipes, "PROPOSALS", 20_000)
    for fields in (DIR | {"min_samples": 5}, PATHO | {"min_per_class": 2}):
        text = refused("none of ... draws gave all", dealt_of, **fields | {"clients": 300})
        assert text.endswith(": use fewer --clients or a larger --dirichlet_alpha")


LARGE = {"dataset": "cinic10", "dirichlet_alpha": 0.1}  # of 180,000 samples


@pytest.mark.parametrize("fields, sentence", [
    ({"clients": 1001}, "--clients is 1001; 2000 training samples allow at most 1000"),
    (PATHO | {"classes_per_client": 11}, "--classes_per_client is 11; the data have 10 classes"),
    (PATHO | {"min_per_class": 100}, "--min_per_class is 100; class 0 has 200 samples for"),
    (PATHO | {"clients": 900}, "is 5; ... holders: use a smaller one, or fewer --clients"),
    (DIR | {"min_samples": 101}, "20 clients would need 2020 samples, the data have 2000"),
    ({"partition": "natural"}, "allowed are pathological, dirichlet"),
    ({"partition": "file:no/none.json", "clients": None}, "there is no such file"),
    (LARGE | {"partition": "dirichlet", "clients": 1000}, "draws gave all"),
    (LARGE | {"partition": "pathological", "clients": 1000}, "draws gave all"),
    (LARGE | {"partition": "dirichlet", "clients": 10_000}, "clients would need 200000 samples"),
    (LARGE | {"partition": "pathological", "clients": 10_000}, "class 0 has 18000 samples for"),
    (LARGE | {"partition": "pathological", "clients": 90_001}, "samples allow at most 90000"),
])  # fmt: skip
def test_refused_in_seconds(fields, sentence):
    start, y = time.process_time(), labels(180_000, 90_000) if "dataset" in fields else labels()
    refused(sentence, dealt_of, y, **fields)
    assert time.process_time() - start < 20


@pytest.mark.slow
@pytest.mark.parametrize("dataset, train, test, clients", [
    ("cifar10", 50_000, 10_000, 100), ("cinic10", 180_000, 90_000, 200),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["dirichlet", "pathological"])
def test_partitions_at_the_papers_sizes(dataset, train, test, clients, kind):
    """Patho(3): at least 10 images of each class. Dir(0.1): at least 20 images in all."""
    alpha = {"dirichlet_alpha": 0.1} if kind == "dirichlet" else {}
    start = time.process_time()
    dealt = make(Run(dataset=dataset, partition=kind, **alpha).resolve(), labels(train, test), 10)
    assert time.process_time() - start < 30
    holds, sizes = dealt.class_counts > 0, dealt.class_counts.sum(1)
    assert len(sizes) == clients and sizes.sum() == train
    assert sorted(np.r_[dealt.indices["train"], dealt.indices["val"]]) == list(range(train))
    assert sorted(dealt.indices["test"]) == list(range(test))
    if kind == "dirichlet":
        assert sizes.min() >= 20 and 3.5 <= holds.sum(1).mean() <= 5.5
        assert sizes.max() > 1.1 * train / clients
        return
    assert (holds.sum(1) == 3).all() and dealt.class_counts[holds].min() >= 10
    assert np.corrcoef(sizes, dealt.sizes("test"))[0, 1] > 0.999  # each has the same share of both
    if dataset == "cifar10":  # as simulated apart: minimum 67 to 88, mean 500
        assert 40 <= sizes.min() <= 130 and 350 <= np.median(sizes) <= 520
        assert 1100 <= sizes.max() <= 2200


def writers(tmp_path, **kwargs):
    return in_memory(femnist.read(folder(tmp_path / "leaf", leaf(**kwargs))))


def test_ranks_share_out_the_samples_and_know_the_sizes_of_all(monkeypatch):
    monkeypatch.setattr(partition, "SLICE", 3)
    whole, sent = dealt_of(clients=8, **PATHO), []

    def from_root(make):
        sent.append(make())
        return sent[-1]

    for i, own in enumerate(([6, 0, 3], [], [7, 5, 4, 2, 1])):
        share = Mock(side_effect=sent) if i else from_root
        shard = sharded(None if i else whole, share, lambda _, own=own: np.isin(range(8), own))
        assert shard.sha256() == whole.sha256() and np.array_equal(shard.p, whole.p)
        for part in PARTS:
            assert np.array_equal(shard.sizes(part), whole.sizes(part))
            samples = [whole.of(part, k) if k in own else [] for k in range(8)]
            assert all(np.array_equal(shard.of(part, k), samples[k]) for k in range(8))
            assert len(shard.indices[part]) == sum(map(len, samples))


def letters(per_class=300, classes=10):
    y = np.repeat(np.arange(classes), per_class)
    x, names = np.zeros((len(y), 2, 2, 1), np.uint8), tuple("abcdefghijklmnop"[:classes])
    return as_dealt(fedrep(), in_memory(Arrays(x, y, x[:0], y[:0], names, (0.0,), (1.0,))))


def test_natural(tmp_path):
    source = writers(tmp_path)
    dealt = deal(natural(), source)
    train, test = source.clients["train"], source.clients["test"]
    owner = []
    for k in range(4):
        pool = pool_of(dealt, k)
        owner.append(train[pool[0]])
        assert sorted(pool) == np.flatnonzero(train == owner[k]).tolist()
        assert sorted(dealt.of("test", k)) == np.flatnonzero(test == owner[k]).tolist()
    assert len(set(owner)) == 4 and dealt.of_data.tolist() == owner
    grouped = replace(source, client_groups=tuple("AABBCC"))
    assert dealt.names_and_groups(grouped) == {
        "name": [f"f0{i}" for i in owner], "group": ["AABBCC"[i] for i in owner]
    }  # fmt: skip
    numbers = replace(source, client_names=tuple(map(str, range(6))))
    assert deal(natural(clients=6), numbers).names_and_groups(numbers) == {}
    dealt = [deal(natural(partition_seed=seed), source) for seed in range(12)]
    assert len({tuple(each.of("test", 0).tolist()) for each in dealt}) > 1  # drawn by seed
    source, run = writers(tmp_path), natural(clients=6)
    dealt = deal(run, source)
    assert np.allclose(dealt.p, dealt.sizes("train") / dealt.sizes("train").sum())
    other = deal(replace(run, dataset="arrays"), source)
    sizes = other.sizes("train") + other.sizes("val")
    assert np.allclose(other.p, sizes / sizes.sum())
    source = writers(tmp_path)
    split = {"train": source.clients["train"] % 4, "test": 4 + source.clients["test"] % 2}
    few = "--clients is {}; of the 6 clients in the data {} have at least {} samples"
    for fields, data, text in (
        ({}, replace(source, clients=split), "none of the 6 clients has both parts, 2 samples"),
        ({"clients": 7}, source, few.format(7, 6, 5)),
        ({"min_samples": 1000}, source, few.format(4, 0, 1000)),
        ({}, replace(source, clients={}), "needs a data set with clients of its own"),
    ):
        refused(text, deal, natural(**fields), data)


def test_fedrep(tmp_path):
    dealt = deal(fedrep(clients=40), letters())
    for u in range(40):
        classes = {(u + i) % 10 for i in range(3)}
        assert set(np.flatnonzero(dealt.class_counts[u])) == classes
        pool, test = pool_of(dealt, u), dealt.of("test", u)
        assert len(pool) == int(0.9 * (len(pool) + len(test)))
        assert not np.isin(test, pool).any()
    assert 100 <= np.median(sum(dealt.sizes(part) for part in PARTS)) <= 220  # 158 in the original
    note = re.fullmatch(r"clients share images: (\d+) % of the test images are in .*", dealt.note())
    assert dealt.pooled and float(note[1]) > 50
    whole = np.concatenate([dealt.of(part, k) for k in (0, 10) for part in PARTS])
    # users 0 and 10 hold the same classes: prefixes of one list
    assert len(np.unique(whole)) < len(whole)
    apart = fedrep(clients=40, overlap=False)
    assert apart.slug() != fedrep(clients=40).slug()
    dealt = deal(apart, letters(per_class=2000))
    used = np.concatenate([dealt.indices[part] for part in PARTS])
    assert len(np.unique(used)) == len(used) and dealt.note() == "clients share no image"
    dealt.indices["val"][:] = dealt.indices["train"][0]
    assert re.fullmatch("clients share images: 0 % of the test images are in .*", dealt.note())
    text = "40 clients would take ... samples of class ..., the data have 200; use fewer --clients"
    refused(f"--no-overlap: {text}, or --overlap", deal, apart, letters(per_class=200))
    text = "--classes_per_client is 3; the data have 2 classes"
    refused(text, deal, fedrep(), letters(classes=2))
    source = writers(tmp_path)
    whole, first = as_dealt(fedrep(), source), len(source.labels["train"])
    assert whole.pooled and as_dealt(natural(), source) is source
    rows = np.array([first + 2, 0, first, 5])
    test, train = whole.images("test", rows)[[0, 2]], whole.images("train", rows)[[1, 3]]
    assert np.array_equal(test, source.images("test", np.array([2, 0])))
    assert np.array_equal(train, source.images("train", np.array([0, 5])))
    assert np.array_equal(whole.labels["test"][first:], source.labels["test"])


@pytest.mark.parametrize("kind", ["natural", "fedrep", "pathological"])
def test_saved_partition_is_the_same_partition(tmp_path, kind):
    patho = {"dirichlet_alpha": 5.0, "min_per_class": 1, "classes_per_client": 8}
    fields = patho if kind == "pathological" else {"min_samples": 5}
    run = Run(dataset="femnist", partition=kind, clients=5, **fields).resolve()
    source = letters() if kind == "fedrep" else writers(tmp_path, each=100, labels=10)
    source = replace(source, classes=10)
    dealt = deal(run, source)
    save(dealt, tmp_path / "p.json", run, source.sha256)
    again = Run(dataset="femnist", partition=f"file:{tmp_path / 'p.json'}").resolve()
    assert again.clients == 5 and again.slug().startswith("femnist-file-dpfl-")
    read = deal(again, source)
    assert (read.sha256(), read.pooled) == (dealt.sha256(), dealt.pooled)
    for name in ("p", "class_counts", "of_data"):
        assert repr(getattr(read, name)) == repr(getattr(dealt, name)), name
    assert not list(tmp_path.glob(".*"))
    edited = json.loads((tmp_path / "p.json").read_text())
    edited["clients"][0]["train"].pop()
    del edited["partition_sha256"], edited["p"]
    (tmp_path / "p.json").write_text(json.dumps(edited))
    less = deal(Run(dataset="femnist", partition=f"file:{tmp_path / 'p.json'}").resolve(), source)
    assert len(less.of("train", 0)) == len(dealt.of("train", 0)) - 1


ODD = "is not a partition"


@pytest.mark.parametrize("edit, text", [
    (lambda d: "{", ODD), (lambda d: "[]", ODD), (lambda d: d.update(pooled=1), ODD),
    (lambda d: d["clients"][1].pop("val"), ODD),
    *((lambda d, odd=odd: d["clients"][1].update(val=[odd]), ODD)
      for odd in ("a", "1", 1.5, 1.0, True, None, 10**30, [1])),
    (lambda d: d.update(clients=[], p=[]), "holds no client"),
    (lambda d: d["clients"][1].update(test=[]), "gives client 1 no test sample"),
    (lambda d: d["clients"][1].update(test=[5, -2]), "1 the test sample -2; allowed are 0 to 2999"),
    (lambda d: d["clients"][1].update(test=[3000]), "1 the test sample 3000"),
    (lambda d: d["clients"][1].update(train=[4, 4]), "gives client 1 a train sample twice"),
    (lambda d: d["clients"][2]["val"].append(d["clients"][2]["train"][0]), "both train and val"),
    (lambda d: d["clients"][2]["test"].append(d["clients"][2]["train"][0]), "both train and test"),
    (lambda d: d.update(data_sha256="0" * 64), "was made for other data"),
    (lambda d: d["clients"][1]["test"].pop(), "was changed since it was written"),
    (lambda d: d.update(p=[0.5, 0.5, 0]), "holds a p that is not positive"),
    (lambda d: d.update(p=[1e308, 1e308, 1]), "or too large"),
    (lambda d: d.update(p=[1]), ODD), (lambda d: d.update(p=[]), ODD),
])  # fmt: skip
def test_an_edited_partition_file(tmp_path, edit, text):
    run, source, path = fedrep(clients=3), letters(), tmp_path / "p.json"
    save(deal(run, source), path, run, source.sha256)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"p": [1, 2, 1]}))
    again = lambda: deal(Run(dataset="femnist", partition=f"file:{path}").resolve(), source)  # noqa: E731
    assert again().p.tolist() == [0.25, 0.5, 0.25]
    edited = edit(data)
    path.write_text(edited if isinstance(edited, str) else json.dumps(data))
    refused(text, again)


def test_motivation_has_the_papers_counts(tmp_path):
    rng = np.random.default_rng(0)
    sizes = {"train": 700, "test": 100}
    classes = {part: rng.permutation(np.repeat(np.arange(10), n)) for part, n in sizes.items()}
    resolved = Run(dataset="cifar10", partition="motivation").resolve()
    assert resolved.clients == 3
    dealt = make(resolved, classes, 10)
    expected = np.zeros((3, 10), int)
    expected[0, [0, 4, 6, 8]] = 50
    expected[1, [0, 6, 1, 3]] = 300, 300, 200, 200
    expected[2, [4, 8, 5, 7]] = 300, 300, 200, 200
    assert np.array_equal(dealt.class_counts, expected)
    pools = [dealt.of(part, k) for part in ("train", "val") for k in range(3)]
    assert len(np.unique(np.concatenate(pools))) == 200 + 1000 + 1000
    tested = [classes["test"][dealt.of("test", k)] for k in range(3)]
    tests = np.array([np.bincount(each, minlength=10) for each in tested])
    assert np.array_equal(tests[0] > 0, expected[0] > 0) and (tests[0, [0, 4, 6, 8]] == 100).all()
    assert tests[1, [0, 6, 1, 3]].tolist() == [100, 100, 66, 66]
    fields = {"partition": "motivation"}
    refused("needs 350 samples of class 0; it has 1", run_here, tmp_path / "unused.h5", fields)
