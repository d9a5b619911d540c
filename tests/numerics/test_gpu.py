"""What must hold on a GPU; skipped where PyTorch sees none."""

import numpy as np
import pytest
import torch
from launch import differences, mpirun, run_here, run_many

from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.results import Result
from dpfl_mpi.settings.fields import to_flags

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not HAS_GPU, reason="PyTorch sees no GPU here")
FIELDS = {"dataset": "image_folder", "model": "cnn", "clients": 8, "classes_per_client": 2}
FIELDS |= {"batch_size": 8, "budget": 4, "rounds": 10, "tau_init": 2, "tau_train": 2, "seed": 5}


@pytest.fixture(scope="module")
def fields(colour_file):
    return FIELDS | {"data": str(colour_file)}


@pytest.fixture(scope="module")
def gpu(fields, tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("gpu") / "run.h5", fields, device="cuda")


def test_same_bits_twice(gpu, fields, tmp_path):
    assert differences(gpu, run_here(tmp_path / "again.h5", fields, device="cuda")) == []


def test_the_bits_of_a_cpu(gpu, fields, tmp_path):
    assert differences(gpu, run_here(tmp_path / "cpu.h5", fields, device="cpu")) == []


def test_as_pytorch_and_two_ranks_on_one_gpu_compute(gpu, fields, tmp_path):
    short = fields | {"rounds": 2}
    by_torch = run_here(tmp_path / "torch.h5", short, device="cuda", kernels="torch")
    one = run_here(tmp_path / "one.h5", short, device="cuda")
    two = run_many(2, tmp_path, {"two": short}, two={"device": "cuda"})["two"]
    assert differences(one, two) == []
    with Result(gpu) as a, Result(by_torch) as b:
        np.testing.assert_allclose(a["round/val_loss"][:2], b["round/val_loss"][:2], rtol=1e-3)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_learns_as_well(gpu, fields, tmp_path, precision):
    low = run_here(tmp_path / "low.h5", fields | {"precision": precision}, device="cuda")
    with Result(gpu) as a, Result(low) as b:
        assert not Result.same_numbers(a, b)
        assert abs(a["best/test_acc"].mean() - b["best/test_acc"].mean()) <= 0.05


RESNET = {"model": "resnet", "model_options": {"widths": "8", "blocks": 1, "groups": 2}}


@pytest.mark.parametrize("method", [name for name in shipped("method") if name != "replay"])
def test_every_method_learns_as_on_a_cpu(fields, tmp_path, method):
    few = fields | {"rounds": 3, "method": method} | (RESNET if method == "fedbn" else {})
    cpu = run_here(tmp_path / "cpu.h5", few, device="cpu")
    gpu = run_here(tmp_path / "gpu.h5", few, device="cuda")
    if find("method", method).elementwise:  # no sums, exp or log of PyTorch's own
        assert differences(gpu, cpu) == []
    with Result(gpu) as a, Result(cpu) as b:
        np.testing.assert_allclose(a["round/val_loss"][0], b["round/val_loss"][0], rtol=1e-3)
        assert abs(a.test_acc - b.test_acc) <= 0.03


SMALL = """
import sys, torch
torch.cuda.set_per_process_memory_fraction(1e-4)
from dpfl_mpi.__main__ import main
main(sys.argv[1:])
"""


def test_a_full_gpu_is_one_sentence(fields, tmp_path):
    flags = to_flags(fields | {"device": "cuda", "out": str(tmp_path / "full.h5")})
    done = mpirun(2, "-c", SMALL, *flags)
    sentence = "\nerror: the GPU's memory is full"
    assert done.returncode == 2 and sentence in f"\n{done.stderr}", done.stderr
