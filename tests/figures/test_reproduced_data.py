"""The data sets of reproduction/: groups.py, classes.py and real_images.py on tiny data."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, script
from PIL import Image

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.datasets import cifar10

groups, classes, real_images = (
    script(ROOT / "reproduction" / f"{name}.py") for name in ("groups", "classes", "real_images")
)
PER_CLASS = 4  # images: three to train, one to test


def numbered(classes):
    x, i = np.zeros((300, 32, 32, 3), np.uint8), np.r_[:200, :100]
    x[:, 0, 0, 0] = i
    return arrays_of(x, i % classes, test=np.arange(300) >= 200)


def read(monkeypatch, by, **options):
    """Return the data set that groups.py makes of these images."""
    source, classes = (groups.cifar100, 100) if by == "superclass" else (groups.cifar10, 10)
    monkeypatch.setattr(source, "read", lambda _: numbered(classes))
    return groups.read(Path("a"), by, **options)


def test_labels_are_moved_and_images_rotated_by_group(monkeypatch, tmp_path, said):
    out = read(monkeypatch, "labels", clients=8)
    assert np.bincount(out.train_clients).tolist() == [25] * 8
    assert out.client_names == tuple("01234567")
    numbers, shift = out.train_images[:, 0, 0, 0], np.array([0, 2, 5, 7])
    assert numbers.tolist() == list(range(200))
    train = (numbers + shift[out.train_clients % 4]) % 10
    test = (np.arange(100) + shift[out.test_clients % 4]) % 10
    np.testing.assert_array_equal(out.train_labels, train)
    np.testing.assert_array_equal(out.test_labels, test)
    owners = [read(monkeypatch, "labels", clients=8, seed=s).train_clients for s in (1, 1, 2)]
    assert (owners[0] == owners[1]).all() and (owners[0] != owners[2]).any()
    out = read(monkeypatch, "rotation", clients=8)
    corners = np.array([(0, 0), (31, 0), (31, 31), (0, 31)])  # anticlockwise
    row, column = corners[out.train_clients % 4].T
    np.testing.assert_array_equal(out.train_images[np.arange(200), row, column, 0], np.arange(200))
    np.testing.assert_array_equal(out.train_labels, np.arange(200) % 10)
    monkeypatch.setattr(groups.cifar10, "read", lambda _: numbered(10))
    words = f"{ROOT}/reproduction/groups.py --source {tmp_path} --by rotation --clients 8"
    out = said(prepare.main, *words.split(), f"--out={tmp_path}/a.h5")
    assert "200 training and 100 test images of 32x32x3, 10 classes, 8 clients" in out


def test_a_client_holds_one_superclass(monkeypatch):
    out = read(monkeypatch, "superclass", clients=40)
    for labels, owners in (
        (out.train_labels, out.train_clients),
        (out.test_labels, out.test_clients),
    ):
        np.testing.assert_array_equal(groups.SUPERCLASS[labels], owners % 20)
    assert np.bincount(groups.SUPERCLASS).tolist() == [5] * 20
    # aquatic mammals, people and trees, by the alphabetical numbers of their classes
    members = {0: [4, 30, 55, 72, 95], 14: [2, 11, 35, 46, 98], 17: [47, 52, 56, 59, 96]}
    for superclass, classes in members.items():
        assert np.flatnonzero(superclass == groups.SUPERCLASS).tolist() == classes


@pytest.mark.parametrize(("by", "group_of_class", "first_clients"), [
    ("animals", [0, 0, 1, 1, 1, 1, 1, 1, 0, 0], [0, 8]),
    ("pairs", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [0, 4, 8, 12, 16]),
])  # fmt: skip
def test_clients_hold_the_classes_of_their_group(monkeypatch, by, group_of_class, first_clients):
    monkeypatch.setattr(classes.cifar10, "read", lambda _: numbered(10))
    out = classes.read(Path("a"), by, 20, seed=1)
    assert np.bincount(out.train_clients).tolist() == [10] * 20
    assert np.bincount(out.test_clients).tolist() == [5] * 20
    for labels, owner in (
        (out.train_labels, out.train_clients),
        (out.test_labels, out.test_clients),
    ):
        group = np.searchsorted(first_clients, owner, side="right") - 1
        assert (np.array(group_of_class)[labels] == group).all()
    assert out.train_images[:, 0, 0, 0].tolist() == list(range(200))


def committed(clone, clients):
    """Commit clients' files as PFLlib writes them, by file name; return the commit."""
    for name, (images, labels) in clients.items():
        path = clone / "dataset" / "Cifar10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        half = np.float32(0.5)
        x = (images.transpose(0, 3, 1, 2) / np.float32(255) - half) / half
        np.savez_compressed(path, data={"x": x.astype(np.float32), "y": labels})
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "data"]):
        subprocess.run([*git, *words], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def test_exact_images_replace_the_jpegs(tmp_path, monkeypatch, said):
    """Two repositories share images, in no order; image 0 is only in the JPEG copy."""
    coarse = np.random.default_rng(0).integers(0, 256, (10 * PER_CLASS, 4, 4, 3), np.uint8)
    blurred = [Image.fromarray(x).resize((32, 32), Image.Resampling.BICUBIC) for x in coarse]
    truth, labels = np.stack(list(map(np.asarray, blurred))), np.arange(40) // PER_CLASS
    order = np.random.default_rng(1).permutation(np.arange(1, 40))
    parts = {"a/x": {"train/0.npz": order[:20], "test/0.npz": order[20:25]}}
    parts["b/x"] = {"train/0.npz": order[15:]}
    sources = []
    for name, rows in parts.items():
        files = {file: (truth[r], labels[r]) for file, r in rows.items()}
        sources.append((name, committed(tmp_path / name, files), ""))
    monkeypatch.setitem(real_images.SOURCES, "cifar10", tuple(sources))
    is_test = np.arange(40) % PER_CLASS == 3
    for i, image in enumerate(truth):
        part, name = "test" if is_test[i] else "train", cifar10.CLASSES[i // PER_CLASS]
        folder = tmp_path / "jpeg" / part / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i % PER_CLASS}.jpg", quality=80)
    zipped, jpeg = tmp_path / "out.zip", tmp_path / "jpeg"
    printed = said(real_images.main, "cifar10", tmp_path, zipped, "--jpeg", jpeg)
    for part in ("a/x", "25 new images", "14 new images", "3 of 4 matched"):
        assert part in printed
    out, copy = cifar10.read(zipped), cifar10.read(jpeg)
    np.testing.assert_array_equal(out.train_images[1:], truth[~is_test][1:])
    np.testing.assert_array_equal(out.test_images, truth[is_test])
    np.testing.assert_array_equal(out.train_images[0], copy.train_images[0])
    np.testing.assert_array_equal(out.train_labels, copy.train_labels)
    changed = (copy.test_images != truth[is_test]).any(axis=(1, 2, 3))
    assert changed.all()  # there was something to replace
