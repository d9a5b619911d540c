"""reproduction/groups.py: what each group sees of images whose first pixel is their number and whose label is known."""

import importlib.util
from pathlib import Path

import numpy as np
from launch import ROOT

from dpfl_mpi import prepare
from dpfl_mpi.data.source import Arrays

spec = importlib.util.spec_from_file_location("groups", ROOT / "reproduction" / "groups.py")
groups = importlib.util.module_from_spec(spec)
spec.loader.exec_module(groups)


def whole(classes):
    """Return 200 training and 100 test images; the upper left pixel of image i is i, and its class i mod `classes`."""
    parts = []
    for m in (200, 100):
        x = np.zeros((m, 32, 32, 3), np.uint8)
        x[:, 0, 0, 0] = np.arange(m)
        parts += [x, np.arange(m) % classes]
    return Arrays(*parts, tuple(map(str, range(classes))), (0.5,) * 3, (0.25,) * 3)


def read(monkeypatch, by, **options):
    """Return the data set of these images."""
    classes = 100 if by == "superclass" else 10
    monkeypatch.setattr(groups.cifar100 if by == "superclass" else groups.cifar10, "read", lambda _: whole(classes))
    return groups.read(Path("a"), by, **options)


def test_labels_are_moved_on_by_group(monkeypatch):
    out = read(monkeypatch, "labels", clients=8)
    assert np.bincount(out.train_clients).tolist() == [25] * 8 and out.client_names == tuple("01234567")
    number = out.train_images[:, 0, 0, 0]
    assert number.tolist() == list(range(200))
    moved = np.array([0, 2, 5, 7])[out.train_clients % 4]
    np.testing.assert_array_equal(out.train_labels, (number + moved) % 10)
    np.testing.assert_array_equal(out.test_labels, (np.arange(100) + np.array([0, 2, 5, 7])[out.test_clients % 4]) % 10)


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


def test_the_seed_says_who_holds_what(monkeypatch):
    owners = [read(monkeypatch, "labels", clients=8, seed=s).train_clients for s in (1, 1, 2)]
    assert (owners[0] == owners[1]).all() and (owners[0] != owners[2]).any()


def test_prepare_takes_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(groups.cifar10, "read", lambda _: whole(10))
    (tmp_path / "source").mkdir()
    words = [
        "--source",
        str(tmp_path / "source"),
        "--by",
        "rotation",
        "--clients",
        "8",
        "--out",
        str(tmp_path / "a.h5"),
    ]
    assert prepare.main([str(ROOT / "reproduction" / "groups.py"), *words]) == 0
    assert "200 training and 100 test images of 32x32x3, 10 classes, 8 clients" in capsys.readouterr().out
