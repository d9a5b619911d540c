"""Who holds which sample: every sample once, minimums and caps kept, quotas and splits against plain twins."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_mpi.data import recipes
from dpfl_mpi.data.partition import PARTS, Partition
from dpfl_mpi.data.recipes import cut, deal_test, make, train_val
from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import Run

CLASSES = 10


def labels(train=2000, test=500, seed=0):
    """Shuffled labels of ten nearly equal classes."""
    rng = np.random.default_rng(seed)
    return {"train": rng.permutation(np.arange(train) % CLASSES), "test": rng.permutation(np.arange(test) % CLASSES)}


def run(**fields):
    return Run(**({"dataset": "digits", "clients": 20, "partition_seed": 1} | fields)).resolve()


PATHO = {"partition": "pathological", "classes_per_client": 3, "dirichlet_alpha": 0.5, "min_per_class": 5}
DIR = {"partition": "dirichlet", "dirichlet_alpha": 0.1, "min_samples": 10}


@pytest.mark.parametrize("fields", [PATHO, DIR, PATHO | {"clients": 40, "min_per_class": 3}, DIR | {"clients": 8}])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_sample_once(fields, seed):
    y = labels()
    dealt = make(run(**fields | {"partition_seed": seed}), y, CLASSES)
    assert sorted(np.concatenate([dealt.indices["train"], dealt.indices["val"]])) == list(range(2000))
    assert sorted(dealt.indices["test"]) == list(range(500))
    n = len(dealt.p)
    for k in range(n):
        pool = np.concatenate([dealt.of("train", k), dealt.of("val", k)])
        assert np.array_equal(np.bincount(y["train"][pool], minlength=CLASSES), dealt.class_counts[k])
        assert len(dealt.of("val", k)) == int(np.ceil(0.2 * len(pool)))
        assert set(y["test"][dealt.of("test", k)]) <= set(y["train"][pool])
        assert dealt.p[k] == pytest.approx(len(pool) / 2000, rel=1e-12)  # before the validation split
    assert dealt.p.sum() == pytest.approx(1, abs=1e-12)
    for part in PARTS:
        assert np.array_equal(dealt.sizes(part), [len(dealt.of(part, k)) for k in range(n)])


@pytest.mark.parametrize("seed", range(5))
def test_pathological_minimum_and_classes(seed):
    """Three classes per client, at least 5 samples of each; a class's holders differ in number (no balancing)."""
    dealt = make(run(**PATHO | {"partition_seed": seed}), labels(), CLASSES)
    assert ((dealt.class_counts > 0).sum(1) == 3).all()
    assert dealt.class_counts[dealt.class_counts > 0].min() >= 5
    assert len(set((dealt.class_counts > 0).sum(0))) > 1


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_minimum_and_cap(seed):
    """At least 10 samples per client; a client that held its mean share (100) before a class gets nothing of that class."""
    dealt = make(run(**DIR | {"partition_seed": seed}), labels(), CLASSES)
    assert dealt.class_counts.sum(1).min() >= 10
    before = np.cumsum(dealt.class_counts, 1) - dealt.class_counts
    assert (dealt.class_counts[before >= 100] == 0).all()
    assert (before[:, -1] >= 100).any()  # the cap did act
    assert dealt.class_counts.sum(1).max() > 100  # and is overshot, since it is tested before a class


def test_a_small_alpha_leaves_clients_without_classes():
    """Dir(100) gives every client nearly its mean share, Dir(0.05) does not."""
    even = make(run(**DIR | {"dirichlet_alpha": 100.0}), labels(), CLASSES).class_counts
    uneven = make(run(**DIR | {"dirichlet_alpha": 0.05, "min_samples": 2}), labels(), CLASSES).class_counts
    assert even.min() >= 3 and (uneven == 0).mean() > 0.5


def test_the_partition_seed_alone_decides():
    """The partition seed decides, and nothing else of the Run."""
    a, b, c = (
        make(run(**PATHO, seed=s, partition_seed=p), labels(), CLASSES).sha256() for s, p in ((1, 7), (2, 7), (1, 8))
    )
    assert a == b != c
    defaulted = make(run(**PATHO | {"partition_seed": None, "seed": 7}), labels(), CLASSES)
    assert defaulted.sha256() == a
    again = Partition.from_arrays(defaulted.arrays())
    assert again.sha256() == a and np.array_equal(again.p, defaulted.p)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 10_000))
def test_slices_sum_to_the_whole_and_keep_to_their_shares(q, m):
    """Non-negative sizes that sum to m, each within one sample of its share: floor of the running sum, in plain Python."""
    total = sum(q)
    q = np.array(q) / total if total > 0 else np.full(len(q), 1 / len(q))
    sizes = cut(q, m)
    points = [int(np.floor(x * m)) for x in np.cumsum(q)[:-1]]
    expected = [b - a for a, b in zip([0, *points], [*points, m], strict=True)]
    assert sizes.tolist() == expected
    assert sizes.sum() == m
    assert sizes.min() >= 0
    assert (np.abs(sizes - q * m) <= 1 + 1e-6).all()


def test_slices_of_a_batch_are_those_of_each_draw():
    q = np.random.default_rng(0).dirichlet(np.ones(5), (3, 4))
    assert np.array_equal(cut(q, 77)[2, 1], cut(q[2, 1], 77))


def quotas(counts, n_test):
    """The test split of one class in plain Python: rounded shares, never more than there are, the rest one each to the first holders."""
    held, out, given_away = sum(counts), [], 0
    for count in counts:
        quota = min(round(count / held * n_test), n_test - given_away)
        given_away += quota
        out.append(quota)
    first = [k for k, quota in enumerate(out) if quota] + [k for k, c in enumerate(counts) if c and not out[k]]
    for k in first[: n_test - given_away]:
        out[k] += 1
    return out


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_deal_test_against_a_twin(data):
    n, classes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    counts = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 40), min_size=classes, max_size=classes), min_size=n, max_size=n))
    )
    counts[0, 0] += 1  # pools are never empty
    m = data.draw(st.integers(0, 60))
    y_test = np.random.default_rng(m).integers(0, classes, m)
    dealt = deal_test(counts, y_test, np.random.default_rng(0))
    for c in range(classes):
        got = [int((y_test[t] == c).sum()) for t in dealt]
        expected = quotas(counts[:, c].tolist(), int((y_test == c).sum())) if counts[:, c].sum() else [0] * n
        assert got == expected
    assert len(np.concatenate(dealt)) == len(set(np.concatenate(dealt).tolist()))


def test_a_small_test_set_goes_to_holders():
    """Forty holders of a class with ten test images: every quota rounds to 0, and still only holders get one, one each."""
    counts = np.array([[1]] * 40 + [[0]])
    dealt = deal_test(counts, np.zeros(10, np.int64), np.random.default_rng(0))
    assert [len(t) for t in dealt] == [1] * 10 + [0] * 31


def test_split_is_scikit_learns_stratified():
    """A client with enough of each class: a stratified fifth, the same as scikit-learn's by the same seed."""
    from sklearn.model_selection import train_test_split

    y = np.repeat([0, 1, 2], [50, 30, 20])
    pool = np.random.default_rng(0).permutation(100)
    train, val = train_val(pool, y, 5)
    assert np.bincount(y[val]).tolist() == [10, 6, 4]
    twin = train_test_split(pool, test_size=0.2, random_state=5, stratify=y[pool])
    assert np.array_equal(train, twin[0]) and np.array_equal(val, twin[1])


@pytest.mark.parametrize(
    "counts",
    [
        [20, 1],  # a class with one sample
        [2, 2, 2, 2],  # two validation samples for four classes: scikit-learn would refuse to stratify
        [1, 1],
    ],
)
def test_split_falls_back_to_unstratified(counts):
    from sklearn.model_selection import train_test_split

    y = np.repeat(np.arange(len(counts)), counts)
    pool = np.arange(len(y))
    train, val = train_val(pool, y, 1)
    n_val = -(-len(y) // 5)
    assert len(val) == n_val and sorted([*train, *val]) == pool.tolist()
    twin = train_test_split(pool, test_size=n_val, random_state=1)
    assert np.array_equal(train, twin[0])


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        (PATHO | {"min_per_class": 15, "dirichlet_alpha": 0.3}, "min_per_class"),
        (DIR | {"min_samples": 60}, "min_samples"),
    ],
)
def test_refusal_names_acceptance_and_a_minimum_that_works(fields, flag, monkeypatch):
    monkeypatch.setattr(recipes, "PROPOSALS", 20_000)
    with pytest.raises(UserError) as refused:
        make(run(**fields), labels(), CLASSES)
    text = str(refused.value)
    assert re.search(r"accepted: 0 in \d+", text)
    assert text.startswith(f"--{flag} is {fields[flag]};")
    for _ in range(CLASSES):  # another class may be rarer still; then the sentence names its own minimum
        least = int(re.search(rf"use --{flag} (\d+)", text).group(1))
        assert least < fields[flag]
        try:
            dealt = make(run(**fields | {flag: least}), labels(), CLASSES)
            break
        except UserError as again:
            text = str(again)
    counts = dealt.class_counts if flag == "min_per_class" else dealt.class_counts.sum(1)
    assert counts[counts > 0].min() >= least > 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"clients": 1001}, "--clients is 1001; 2000 training samples allow at most 1000"),
        (PATHO | {"classes_per_client": 11}, "--classes_per_client is 11; the data have 10 classes"),
        (PATHO | {"min_per_class": 100}, "--min_per_class is 100; class 0 has 200 samples for"),
        (DIR | {"min_samples": 101}, "--min_samples is 101; 20 clients would need 2020 samples, the data have 2000"),
        ({"partition": "natural"}, "allowed are pathological, dirichlet"),
    ],
)
def test_refused(fields, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        make(run(**fields), labels(), CLASSES)


def test_a_client_without_test_samples_is_refused():
    y = labels(test=20)
    with pytest.raises(UserError, match=r"client \d+ would hold no test sample"):
        make(run(**PATHO), y, CLASSES)


def test_a_class_without_holders_is_left_out():
    """Two clients of one class each: the other eight classes have no holder, in training as in testing."""
    y = labels()
    dealt = make(run(**PATHO | {"clients": 2, "classes_per_client": 1}), y, CLASSES)
    held = np.flatnonzero(dealt.class_counts.sum(0))
    assert 1 <= len(held) <= 2
    assert set(y["test"][dealt.indices["test"]]) == set(held)
    assert len(dealt.indices["test"]) == 50 * len(held)
