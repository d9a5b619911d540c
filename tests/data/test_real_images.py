"""reproduction/real_images.py: the exact images of a tiny CIFAR-10 from clients' files and its JPEG copy."""

import importlib.util
import subprocess

import numpy as np
import pytest
from launch import ROOT
from PIL import Image

from dpfl_mpi.datasets import cifar10
from dpfl_mpi.errors import UserError

spec = importlib.util.spec_from_file_location("real_images", ROOT / "reproduction" / "real_images.py")
real_images = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real_images)

A_CLASS = 4  # images: three to train, one to test


@pytest.fixture
def truth():
    """Blurred noise, so that a JPEG of it is near it, `[40, 32, 32, 3]`; four of each class."""
    coarse = np.random.default_rng(0).integers(0, 256, (10 * A_CLASS, 4, 4, 3), np.uint8)
    return np.stack([np.asarray(Image.fromarray(x).resize((32, 32), Image.Resampling.BICUBIC)) for x in coarse])


def copied(folder, images):
    """Write the JPEG copy: of each class three images in train and one in test."""
    for i, image in enumerate(images):
        name, number = cifar10.CLASSES[i // A_CLASS], i % A_CLASS
        place = folder / ("test" if number == 3 else "train") / name / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place, quality=80)


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


def test_exact_images_take_the_place_of_the_jpegs(truth, tmp_path, monkeypatch, capsys):
    """Two repositories share images, in no order; of one image there is the JPEG alone."""
    labels, order = (
        np.arange(40) // A_CLASS,
        np.random.default_rng(1).permutation(np.arange(1, 40)),
    )  # nobody has image 0
    first, second = ({name: (truth[rows], labels[rows]) for name, rows in each.items()} for each in (
        {"train/0.npz": order[:20], "test/0.npz": order[20:25]}, {"train/0.npz": order[15:]},
    ))  # fmt: skip
    sources = tuple((name, committed(tmp_path / name, files), "") for name, files in (("a/x", first), ("b/x", second)))
    monkeypatch.setitem(real_images.SOURCES, "cifar10", sources)
    copied(tmp_path / "jpeg", truth)
    real_images.main(["cifar10", str(tmp_path), str(tmp_path / "out.zip"), "--jpeg", str(tmp_path / "jpeg")])
    told = capsys.readouterr().out
    assert (
        "a/x" in told
        and "25 images that were not there yet" in told
        and "14 images" in told
        and "3 of 4 placed" in told
    )
    out, copy = cifar10.read(tmp_path / "out.zip"), cifar10.read(tmp_path / "jpeg")
    test = np.arange(40) % A_CLASS == 3
    np.testing.assert_array_equal(out.train_images[1:], truth[~test][1:])
    np.testing.assert_array_equal(out.test_images, truth[test])
    np.testing.assert_array_equal(out.train_images[0], copy.train_images[0])
    np.testing.assert_array_equal(out.train_labels, copy.train_labels)
    assert (copy.test_images != truth[test]).any(axis=(1, 2, 3)).all()  # there was something to mend


def test_a_match_that_is_not_one_to_one_is_refused(truth):
    with pytest.raises(UserError, match="3 places of 4 images"):
        real_images.placed(truth[[0, 1, 2, 2]], truth[:4])
    with pytest.raises(UserError, match="ratio 1"):
        real_images.placed(truth[:1], truth[[1, 1, 2]])


def test_other_floats_are_refused():
    np.testing.assert_array_equal(real_images.pixels("a", np.float32([-1, 1, 2 * (7 / 255) - 1])), [0, 255, 7])
    for wrong in (0.001, 1.5):
        with pytest.raises(UserError, match="a holds numbers that are no"):
            real_images.pixels("a", np.float32([wrong]))


def test_cifar100_has_its_test_part_by_hash():
    images = np.random.default_rng(2).integers(0, 256, (102, 32, 32, 3), np.uint8)
    names = [name for name, _ in real_images.by_hash(images, np.full(102, 7))]
    assert names[:3] == ["train/07/0000.png", "train/07/0001.png", "test/07/0002.png"] and len(names) == 102
    again = dict(real_images.by_hash(images[::-1], np.full(102, 7)))
    assert all((again[name] == image).all() for name, image in real_images.by_hash(images, np.full(102, 7)))
