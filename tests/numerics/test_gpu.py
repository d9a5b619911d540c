"""What must hold on a GPU; skipped where PyTorch sees none (`tests/numerics/test_ensemble.py` calls the same code on a CPU)."""

import numpy as np
import pytest
import torch
from launch import differences, run_here, run_many

from dpfl_mpi.results import Result

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
FIELDS = {"dataset": "image_folder", "model": "cnn", "clients": 8, "classes_per_client": 2, "batch_size": 8}
FIELDS |= {"budget": 4, "rounds": 10, "tau_init": 2, "tau_train": 2, "seed": 5}


@pytest.fixture(scope="module")
def fields(colour_file):
    return FIELDS | {"data": str(colour_file)}


@pytest.fixture(scope="module")
def gpu(fields, tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("gpu") / "run.h5", fields, device="cuda")


def test_same_bits_twice(gpu, fields, tmp_path):
    assert differences(gpu, run_here(tmp_path / "again.h5", fields, device="cuda")) == []


def test_as_a_cpu_decides(gpu, fields, tmp_path):
    with Result(gpu) as a, Result(run_here(tmp_path / "cpu.h5", fields, device="cpu")) as b:
        assert np.array_equal(a.graph(0), b.graph(0)) and np.array_equal(a.graph(1), b.graph(1))
        assert abs(a["best/test_acc"].mean() - b["best/test_acc"].mean()) <= 0.005


def test_recorded_steps_are_the_launched_ones_and_ranks_share_a_gpu(gpu, fields, tmp_path):
    """Two ranks on one GPU: the same decisions; sums over clients are exact, so only the kernels' shapes differ."""
    short = fields | {"rounds": 2}
    eager = run_here(tmp_path / "eager.h5", short, device="cuda", cuda_graphs=False)
    two = run_many(2, tmp_path, {"two": short}, two={"device": "cuda"})["two"]
    with Result(gpu) as a, Result(eager) as b, Result(two) as c:
        assert np.array_equal(a.graph(0), c.graph(0))
        np.testing.assert_allclose(a["round/val_loss"][:2], b["round/val_loss"][:2], rtol=1e-3)
        np.testing.assert_allclose(a["round/val_loss"][0], c["round/val_loss"][0], rtol=1e-3)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_learns_as_well(gpu, fields, tmp_path, precision):
    path = run_here(tmp_path / "low.h5", fields | {"precision": precision}, device="cuda")
    with Result(gpu) as a, Result(path) as b:
        assert not Result.same_numbers(a, b)
        assert abs(a["best/test_acc"].mean() - b["best/test_acc"].mean()) <= 0.05
