"""CIFAR-10 itself, where it is at hand: staged once from an archive of images, dealt as the paper deals it."""

import numpy as np
import pytest
from making import real

from dpfl_mpi import prepare
from dpfl_mpi.data.recipes import make
from dpfl_mpi.data.source import open_source
from dpfl_mpi.settings import Run

pytestmark = [pytest.mark.data, pytest.mark.slow]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    out = tmp_path_factory.mktemp("cifar") / "cifar10.h5"
    assert prepare.main(["cifar10", "--source", str(real("cifar10-images.tar.xz")), "--out", str(out)]) == 0
    return open_source(Run(dataset="cifar10", data=str(out)).resolve())


def test_the_prepared_images_are_those_of_cifar_10(source):
    assert source.shape == (32, 32, 3) and source.classes == 10
    assert np.bincount(source.labels["train"]).tolist() == [5000] * 10
    assert np.bincount(source.labels["test"]).tolist() == [1000] * 10
    mean = source.images("train", np.arange(50_000)).mean((0, 1, 2)) / 255
    assert mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=2e-3)  # CIFAR-10's
    rows = np.array([49_999, 0, 12_345])
    images = source.images("train", rows)
    assert images.dtype == np.uint8 and images.shape == (3, 32, 32, 3)
    assert np.array_equal(images[1:2], source.images("train", rows[1:2]))


@pytest.mark.parametrize("seed", [32, 42, 52])
def test_pathological(source, seed):
    """Patho(3) over 100 clients: at least 10 images per class held, sizes as simulated (minimum 67 to 88, mean 500)."""
    dealt = make(Run(dataset="cifar10", seed=seed).resolve(), source.labels, 10)
    sizes = dealt.class_counts.sum(1)
    assert ((dealt.class_counts > 0).sum(1) == 3).all()
    assert dealt.class_counts[dealt.class_counts > 0].min() >= 10
    assert sizes.sum() == 50_000 and len(set(np.concatenate([dealt.indices["train"], dealt.indices["val"]]))) == 50_000
    assert sorted(dealt.indices["test"]) == list(range(10_000))
    assert 40 <= sizes.min() <= 130 and 350 <= np.median(sizes) <= 520 and 1100 <= sizes.max() <= 2200
    assert np.corrcoef(sizes, dealt.sizes("test"))[0, 1] > 0.999  # a fifth of the training pool each


def test_dirichlet(source):
    """Dir(0.1) over 100 clients: at least 20 images, about 4.2 classes per client, the cap overshot."""
    dealt = make(Run(dataset="cifar10", partition="dirichlet", dirichlet_alpha=0.1).resolve(), source.labels, 10)
    sizes = dealt.class_counts.sum(1)
    assert 20 <= sizes.min() <= 60 and sizes.sum() == 50_000 and 1200 <= sizes.max() <= 2800
    assert 3.5 <= (dealt.class_counts > 0).sum(1).mean() <= 5.5
