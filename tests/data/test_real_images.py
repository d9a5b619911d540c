"""reproduction/: groups.py on images whose first pixel is their number, real_images.py on a tiny CIFAR-10 from clients' files and its JPEG copy."""

import subprocess
from pathlib import Path

import numpy as np
from launch import ROOT, script
from PIL import Image

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.datasets import cifar10

groups, real_images = (script(ROOT / "reproduction" / f"{name}.py") for name in ("groups", "real_images"))


# groups.py --------------------------------------------------------------------------------------------------------------
def whole(classes):
    """Return 200 training and 100 test images; the upper left pixel of image i is i, and its class i mod `classes`."""
    x, i = np.zeros((300, 32, 32, 3), np.uint8), np.r_[:200, :100]
    x[:, 0, 0, 0] = i
    return arrays_of(x, i % classes, test=np.arange(300) >= 200)


def read(monkeypatch, by, **options):
    """Return the data set of these images."""
    classes = 100 if by == "superclass" else 10
    monkeypatch.setattr(groups.cifar100 if by == "superclass" else groups.cifar10, "read", lambda _: whole(classes))
    return groups.read(Path("a"), by, **options)


def test_labels_are_moved_on_by_group(monkeypatch):
    out = read(monkeypatch, "labels", clients=8)
    assert np.bincount(out.train_clients).tolist() == [25] * 8 and out.client_names == tuple("01234567")
    number, shift = out.train_images[:, 0, 0, 0], np.array([0, 2, 5, 7])
    assert number.tolist() == list(range(200))
    np.testing.assert_array_equal(out.train_labels, (number + shift[out.train_clients % 4]) % 10)
    np.testing.assert_array_equal(out.test_labels, (np.arange(100) + shift[out.test_clients % 4]) % 10)
    owners = [read(monkeypatch, "labels", clients=8, seed=s).train_clients for s in (1, 1, 2)]
    assert (owners[0] == owners[1]).all() and (owners[0] != owners[2]).any()


def test_images_are_rotated_by_group(monkeypatch):
    out = read(monkeypatch, "rotation", clients=8)
    corner = np.array([(0, 0), (31, 0), (31, 31), (0, 31)])[out.train_clients % 4]  # against the clock
    np.testing.assert_array_equal(out.train_images[np.arange(200), corner[:, 0], corner[:, 1], 0], np.arange(200))
    np.testing.assert_array_equal(out.train_labels, np.arange(200) % 10)


def test_a_client_holds_one_superclass(monkeypatch):
    out = read(monkeypatch, "superclass", clients=40)
    for labels, owners in ((out.train_labels, out.train_clients), (out.test_labels, out.test_clients)):
        np.testing.assert_array_equal(groups.SUPERCLASS[labels], owners % 20)
    assert np.bincount(groups.SUPERCLASS).tolist() == [5] * 20
    # aquatic mammals, people and trees, by the alphabetical numbers of beaver, dolphin, otter, seal, whale; baby, boy, girl, man, woman; ...
    members = {0: [4, 30, 55, 72, 95], 14: [2, 11, 35, 46, 98], 17: [47, 52, 56, 59, 96]}
    assert {s: np.flatnonzero(s == groups.SUPERCLASS).tolist() for s in members} == members


def test_prepare_takes_it(monkeypatch, tmp_path, said):
    monkeypatch.setattr(groups.cifar10, "read", lambda _: whole(10))
    words = f"{ROOT}/reproduction/groups.py --source {tmp_path} --by rotation --clients 8 --out {tmp_path}/a.h5"
    assert "200 training and 100 test images of 32x32x3, 10 classes, 8 clients" in said(prepare.main, *words.split())


# real_images.py ---------------------------------------------------------------------------------------------------------
A_CLASS = 4  # images: three to train, one to test


def committed(clone, clients):
    """Write clients' files as PFLlib does, images and labels by the name of the file, and commit them; return the commit."""
    for name, (images, labels) in clients.items():
        path = clone / "dataset" / "Cifar10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        x = ((images.transpose(0, 3, 1, 2) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)).astype(np.float32)
        np.savez_compressed(path, data={"x": x, "y": labels})
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "data"]):
        subprocess.run([*git, *words], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def test_exact_images_take_the_place_of_the_jpegs(tmp_path, monkeypatch, capsys):
    """Of blurred noise, so that a JPEG is near it. Two repositories share images, in no order; of image 0 there is the JPEG alone."""
    coarse = np.random.default_rng(0).integers(0, 256, (10 * A_CLASS, 4, 4, 3), np.uint8)
    truth = np.stack([np.asarray(Image.fromarray(x).resize((32, 32), Image.Resampling.BICUBIC)) for x in coarse])
    labels, order = np.arange(40) // A_CLASS, np.random.default_rng(1).permutation(np.arange(1, 40))
    rows = {"a/x": {"train/0.npz": order[:20], "test/0.npz": order[20:25]}, "b/x": {"train/0.npz": order[15:]}}
    files = {name: {file: (truth[r], labels[r]) for file, r in each.items()} for name, each in rows.items()}
    sources = tuple((name, committed(tmp_path / name, each), "") for name, each in files.items())
    monkeypatch.setitem(real_images.SOURCES, "cifar10", sources)
    for i, image in enumerate(truth):
        place = tmp_path / "jpeg" / ("test" if i % A_CLASS == 3 else "train") / cifar10.CLASSES[i // A_CLASS]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i % A_CLASS}.jpg", quality=80)
    real_images.main(["cifar10", str(tmp_path), str(tmp_path / "out.zip"), "--jpeg", str(tmp_path / "jpeg")])
    told = capsys.readouterr().out
    assert all(s in told for s in ("a/x", "25 images that were not there yet", "14 images", "3 of 4 placed"))
    out, copy = cifar10.read(tmp_path / "out.zip"), cifar10.read(tmp_path / "jpeg")
    test = np.arange(40) % A_CLASS == 3
    np.testing.assert_array_equal(out.train_images[1:], truth[~test][1:])
    np.testing.assert_array_equal(out.test_images, truth[test])
    np.testing.assert_array_equal(out.train_images[0], copy.train_images[0])
    np.testing.assert_array_equal(out.train_labels, copy.train_labels)
    assert (copy.test_images != truth[test]).any(axis=(1, 2, 3)).all()  # there was something to mend
