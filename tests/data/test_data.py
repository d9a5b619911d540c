"""Natural clients, fedrep's users, partitions from a file, and the paper's partitions at its sizes."""

import dataclasses
import json
import time

import numpy as np
import pytest
from making import folder, leaf, real

from dpfl_mpi.data.partition import PARTS, Partition
from dpfl_mpi.data.partition_file import save
from dpfl_mpi.data.recipes import cut, deal, make
from dpfl_mpi.data.source import Arrays, in_memory, pooled
from dpfl_mpi.datasets import femnist
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import names
from dpfl_mpi.settings import Run


def writers(run, tmp_path, **kwargs):
    """Return the source of small LEAF shards as a run of `run` sees it."""
    source = in_memory(femnist.read(folder(tmp_path / "leaf", leaf(**kwargs))))
    return pooled(source) if run.partition == "fedrep" else source


def natural(**fields):
    return Run(**({"dataset": "femnist", "partition": "natural", "clients": 4, "min_samples": 5} | fields)).resolve()


def fedrep(**fields):
    return Run(**({"dataset": "femnist", "partition": "fedrep", "clients": 12} | fields)).resolve()


def letters(per_class=300, classes=10):
    """Return a pool of `classes` classes as fedrep sees it."""
    labels = np.repeat(np.arange(classes), per_class)
    images = np.zeros((len(labels), 2, 2, 1), np.uint8)
    whole = Arrays(images, labels, images[:0], labels[:0], tuple("abcdefghijklmnop"[:classes]), (0.0,), (1.0,))
    return pooled(in_memory(whole))


def test_natural_keeps_each_writers_own_split(tmp_path):
    run = natural()
    source = writers(run, tmp_path)
    dealt = deal(run, source)
    owner = []
    for k in range(4):
        pool = np.concatenate([dealt.of("train", k), dealt.of("val", k)])
        (mine,) = set(source.clients["train"][pool])
        assert sorted(pool) == np.flatnonzero(source.clients["train"] == mine).tolist()
        assert sorted(dealt.of("test", k)) == np.flatnonzero(source.clients["test"] == mine).tolist()
        owner.append(mine)
    assert len(set(owner)) == 4 and dealt.of_data.tolist() == owner
    assert Partition.from_arrays(dealt.arrays()).of_data.tolist() == owner
    others = {tuple(deal(natural(partition_seed=s), source).of("test", 0).tolist()) for s in range(12)}
    assert len(others) > 1  # drawn by seed


def test_femnist_weights_follow_what_is_left_to_train(tmp_path):
    run = natural(clients=6)
    dealt = deal(run, writers(run, tmp_path))
    assert np.allclose(dealt.p, dealt.sizes("train") / dealt.sizes("train").sum())
    other = make(dataclasses.replace(run, dataset="arrays"), *facts(writers(run, tmp_path)))
    sizes = other.sizes("train") + other.sizes("val")
    assert np.allclose(other.p, sizes / sizes.sum())


def facts(source):
    return source.labels, source.classes, source.clients


def test_missing_classes_are_gone_from_all_three_sets(tmp_path):
    run = natural(missing_classes=3)
    source = writers(run, tmp_path, labels=6, each=60)
    small = dataclasses.replace(source, classes=6)
    dealt = deal(run, small)
    for k in range(4):
        held = [set(source.labels["test" if part == "test" else "train"][dealt.of(part, k)]) for part in PARTS]
        assert 1 <= len(set.union(*held)) <= 3
    with pytest.raises(UserError, match="--missing_classes is 6; the data have 6 classes, so at most 5"):
        deal(natural(missing_classes=6), small)


def test_natural_refusals(tmp_path):
    source = writers(natural(), tmp_path)
    one = dataclasses.replace(source, labels={p: np.zeros_like(y) for p, y in source.labels.items()}, classes=400)
    for fields, data, text in (
        ({"clients": 7}, source, "--clients is 7; of the 6 clients in the data 6 have at least 5 samples"),
        ({"min_samples": 1000}, source, "of the 6 clients in the data 0 have at least 1000"),
        ({}, dataclasses.replace(source, clients={}), "needs a data set with clients of its own"),
        ({"missing_classes": 399}, one, r"--missing_classes is 399; .* none of 1000 draws"),
    ):
        with pytest.raises(UserError, match=text):
            deal(natural(**fields), data)


def test_fedrep_users(tmp_path):
    run, source = fedrep(clients=40), letters()
    dealt = deal(run, source)
    for u in range(40):
        held = np.flatnonzero(dealt.class_counts[u])
        assert sorted(held) == sorted((u + i) % 10 for i in range(3))
        sizes = [len(dealt.of(part, u)) for part in PARTS]
        assert sizes[0] + sizes[1] == int(0.9 * sum(sizes))
        assert not np.isin(dealt.of("test", u), np.concatenate([dealt.of("train", u), dealt.of("val", u)])).any()
    total = sum(dealt.sizes(part) for part in PARTS)
    assert 100 <= np.median(total) <= 220  # 158 in the original
    assert dealt.pooled and dealt.leaked() > 0.5 and "share images" in dealt.note()
    whole = np.concatenate([dealt.of(part, k) for k in (0, 10) for part in PARTS])
    assert len(np.unique(whole)) < len(whole)  # users 0 and 10 hold the same classes: prefixes of one list


def test_fedrep_without_overlap():
    source = letters(per_class=2000)
    dealt = deal(fedrep(clients=40, overlap=False), source)
    used = np.concatenate([dealt.indices[part] for part in PARTS])
    assert len(np.unique(used)) == len(used) and dealt.leaked() == 0 and dealt.note() == "clients share no image"
    with pytest.raises(
        UserError, match=r"--no-overlap: 40 clients would take \d+ samples of class \d, the data have 100"
    ):
        deal(fedrep(clients=40, overlap=False), letters(per_class=100))
    assert fedrep(overlap=False).slug() != fedrep().slug()
    with pytest.raises(UserError, match="--classes_per_client is 3; the data have 2 classes"):
        deal(fedrep(), letters(classes=2))


def test_pool_gives_images_of_both_parts(tmp_path):
    source = in_memory(femnist.read(folder(tmp_path / "leaf", leaf())))
    whole, first = pooled(source), len(source.labels["train"])
    rows = np.array([first + 2, 0, first, 5])
    assert np.array_equal(whole.images("test", rows)[[0, 2]], source.images("test", np.array([2, 0])))
    assert np.array_equal(whole.images("train", rows)[[1, 3]], source.images("train", np.array([0, 5])))
    assert np.array_equal(whole.labels["test"][first:], source.labels["test"])


@pytest.mark.parametrize("kind", ["natural", "fedrep", "pathological"])
def test_saved_partition_is_the_same_partition(tmp_path, kind):
    fields = {"dirichlet_alpha": 5.0, "min_per_class": 1, "classes_per_client": 8} if kind == "pathological" else {}
    run = Run(dataset="femnist", partition=kind, clients=5, min_samples=None if fields else 5, **fields).resolve()
    source = letters() if kind == "fedrep" else writers(run, tmp_path, each=100, labels=10)
    source = dataclasses.replace(source, classes=10)
    dealt = deal(run, source)
    save(dealt, tmp_path / "p.json", run, source.sha256)
    again = Run(dataset="femnist", partition=f"file:{tmp_path / 'p.json'}").resolve()
    assert again.clients == 5 and again.slug().startswith("femnist-file-dpfl-")
    read = deal(again, source)
    assert read.sha256() == dealt.sha256() and read.pooled == dealt.pooled
    for name, array in dealt.arrays().items():
        assert read.arrays()[name].tobytes() == array.tobytes(), name
    assert Partition.from_arrays(read.arrays()).sha256() == dealt.sha256()
    (tmp_path / "q.json").write_bytes((tmp_path / "p.json").read_bytes())
    moved = Run(dataset="femnist", partition=f"file:{tmp_path / 'q.json'}")
    assert moved.slug() == again.slug()  # a file counts by its content
    assert not list(tmp_path.glob(".*"))


def edited(tmp_path, edit):
    """Return the error of a saved partition of three clients after `edit` of its JSON."""
    run = fedrep(clients=3)
    source = letters()
    path = tmp_path / "p.json"
    save(deal(run, source), path, run, source.sha256)
    data = json.loads(path.read_text())
    text = edit(data)
    path.write_text(text if isinstance(text, str) else json.dumps(data))
    with pytest.raises(UserError) as error:
        deal(Run(dataset="femnist", partition=f"file:{path}").resolve(), source)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda d: "{", "is not a partition"),
        (lambda d: "[]", "is not a partition"),
        (lambda d: d["clients"][1].pop("val"), "is not a partition"),
        (lambda d: d["clients"][1].update(val=["a"]), "is not a partition"),
        (lambda d: d["clients"][1].update(val=[1.5]), "is not a partition"),
        (lambda d: d.update(clients=[], p=[]), "holds no client"),
        (lambda d: d["clients"][1].update(test=[]), "gives client 1 no test sample"),
        (lambda d: d["clients"][1].update(test=[3000]), "gives client 1 the test sample 3000; allowed are 0 to 2999"),
        (lambda d: d["clients"][1].update(train=[4, 4]), "gives client 1 a train sample twice"),
        (lambda d: d["clients"][2].update(val=d["clients"][2]["train"][:1]), "a sample in both train and val"),
        (lambda d: d["clients"][2].update(test=d["clients"][2]["train"][:1]), "a sample in both train and test"),
        (lambda d: d.update(data_sha256="0" * 64), "was made for other data"),
        (lambda d: d.update(p=[0.5, 0.5, 0]), "p that is not positive"),
        (lambda d: d.update(p=[1.0]), "is not a partition"),
    ],
)
def test_malformed_partition_file(tmp_path, edit, text):
    assert text in edited(tmp_path, edit)


def test_partition_names(tmp_path):
    with pytest.raises(UserError, match="allowed are pathological, dirichlet, natural, fedrep"):
        Run(partition="random").resolve()
    with pytest.raises(UserError, match="there is no such file"):
        Run(partition=f"file:{tmp_path}/none.json").resolve()
    assert {"cifar10", "cifar100", "cinic10", "femnist", "image_folder", "arrays", "digits"} <= set(names("dataset"))
    assert not any(name.startswith("_") for name in names("dataset"))


@pytest.mark.parametrize(
    ("dataset", "values"),
    [("cinic10", (200, 48, 10, 5, 0.01, 16, True)), ("femnist", (100, 48, 4, 2, 0.001, 10, False))],
)
def test_papers_settings(dataset, values):
    run = Run(dataset=dataset).resolve()
    assert (run.clients, run.rounds, run.tau_init, run.tau_train, run.lr, run.batch_size, run.augment) == values
    assert run.weight_decay == 1e-3 and Run(dataset=dataset, method="local").resolve().rounds == 50
    code = Run(dataset=dataset, preset="authors_code").resolve()
    assert code.partition.kind == ("fedrep" if dataset == "femnist" else "pathological")


@pytest.mark.parametrize("classes", [10, 62])
def test_models_have_10_and_62_outputs(classes):
    from dpfl_mpi.models.cnn import build

    parameters = sum(p.numel() for p in build((28, 28, 1), classes).parameters())
    assert parameters == {10: 37_586, 62: 42_838}[classes]


def test_defaults_of_new_fields_name_the_old_results():
    plain = Run(dataset="cifar10")
    assert plain.slug() == dataclasses.replace(plain, missing_classes=0, overlap=True).slug()
    assert plain.slug() == dataclasses.replace(plain, missing_classes=2, overlap=False).slug()  # Patho reads neither
    assert not {"missing_classes", "overlap"} & set(plain.key())


def cinic(**fields):
    """Return labels of CINIC-10's size and a run on them."""
    labels = {"train": np.repeat(np.arange(10), 18_000), "test": np.repeat(np.arange(10), 9000)}
    return Run(dataset="cinic10", **fields).resolve(), labels, 10


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"partition": "dirichlet", "dirichlet_alpha": 0.1}, {"partition": "pathological"}])
def test_cinic10_at_the_papers_size(fields):
    start = time.process_time()
    run, labels, classes = cinic(**fields)
    dealt = make(run, labels, classes)
    assert time.process_time() - start < 30
    sizes = dealt.sizes("train") + dealt.sizes("val")
    assert sizes.sum() == 180_000 and dealt.sizes("test").sum() == 90_000 and len(sizes) == 200
    if run.partition.kind == "dirichlet":
        assert sizes.min() >= 20 and 4 < (dealt.class_counts > 0).sum(1).mean() < 5
    else:
        assert ((dealt.class_counts > 0).sum(1) == 3).all() and dealt.class_counts[dealt.class_counts > 0].min() >= 10


def test_hopeless_partition_is_refused_in_seconds_with_arithmetic():
    for fields, text in (
        ({"partition": "dirichlet", "dirichlet_alpha": 0.1, "clients": 1000}, "so all at once with at most 1e-"),
        ({"partition": "pathological", "clients": 1000}, "so all at once with at most 1e-"),
        (
            {"partition": "dirichlet", "dirichlet_alpha": 0.1, "clients": 10_000},
            "10000 clients would need 200000 samples, the data have 180000",
        ),
        ({"partition": "pathological", "clients": 10_000}, "class 0 has 18000 samples for"),
        ({"partition": "pathological", "clients": 90_001}, "180000 training samples allow at most 90000"),
    ):
        start = time.process_time()
        with pytest.raises(UserError, match=text):
            make(*cinic(**fields))
        assert time.process_time() - start < 20


def test_rejection_bound_is_never_below_what_is_observed():
    """Negative association: that all n reach `least` is at most as likely as for n independent ones."""
    rng = np.random.default_rng(0)
    held = cut(rng.dirichlet(np.full(30, 0.5), 20_000), 5000)
    for least in (1, 2):
        all_at_once, each = (held >= least).all(1).mean(), (held >= least).mean()
        assert 0 < all_at_once <= each**30


@pytest.mark.data
@pytest.mark.slow
def test_femnists_own_writers_can_be_dealt_as_clients(tmp_path):
    with np.load(real("femnist.npz")) as data:
        keep = ~data["dup"]
        users, number = np.unique(data["writers"][keep], return_inverse=True)
        images, labels = data["images"][keep][..., None], data["labels"][keep].astype(np.int64)
        split = data["split"][keep] == 1
    arrays = Arrays(
        images[~split], labels[~split], images[split], labels[split], tuple(femnist.SYMBOLS), (0.0,), (1.0,), number[~split], number[split],
        tuple(users),
    )  # fmt: skip
    source = in_memory(arrays)
    dealt = deal(natural(clients=100, min_samples=50, missing_classes=20), source)
    assert dealt.n == 100 and dealt.sizes("test").min() >= 1 and (dealt.class_counts > 0).sum(1).max() <= 42
