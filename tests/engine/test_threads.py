"""`--threads_per_client`: the same numbers by any number of threads; what refuses it."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import differences, federation, refused, run_here

from dpfl_mpi import show
from dpfl_mpi.engine import build
from dpfl_mpi.numerics import native_backend
from dpfl_mpi.numerics import select_backend as selection
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job

FIELDS = {"dataset": "digits", "clients": 3, "rounds": 2, "tau_init": 1, "tau_train": 1}
FIELDS |= {"budget": 2}
IMAGES = {"dataset": "image_folder", "classes_per_client": 2}


@pytest.mark.parametrize("method", ["dpfl", "apfl", "perfedavg", "pfedme"])
def test_three_threads_write_the_file_of_one(method, colour_file, tmp_path):
    """The CNN with crops under dpfl, else the perceptron, by other calls of the kernels."""
    images = IMAGES | {"data": str(colour_file), "model": "cnn", "augment": True}
    fields = FIELDS | {"method": method} | (images if method == "dpfl" else {})
    one = run_here(tmp_path / "1.h5", fields, save_models=True)
    three = run_here(tmp_path / "3.h5", fields, save_models=True, threads_per_client=3)
    assert differences(one, three) == []
    before = three.stat().st_mtime_ns
    run_here(three, fields, threads_per_client=2)  # the same Run, which is there
    assert three.stat().st_mtime_ns == before


def test_the_threads_reach_the_kernels():
    with federation(FIELDS, threads_per_client=3) as fed:
        native, calls = fed.backend.native, []
        native.calls["train"] = lambda *of: calls.append(of[2:5])
        native.run("train", np.zeros(2))
    assert native.members == 3 and calls == [(2, 1, 3)]
    assert len(native.memory) == native.calls["space"](native.net, 3) + 64


def test_where_the_native_kernels_do_not_compute(monkeypatch, tmp_path, capsys):
    """Start, log and result say why, each once; with threads it is refused."""
    one = "--threads_per_client is 2; allowed is 1"
    by_torch = f"{one} where PyTorch computes"
    refused(by_torch, federation, FIELDS, threads_per_client=2, kernels="torch")

    def missing():
        raise native_backend.UserError("the kernels were not built")

    monkeypatch.setattr(native_backend, "load", missing)
    why = f"{by_torch}: the kernels were not built"
    refused(why, federation, FIELDS, threads_per_client=2)
    warning = "the kernels were not built: PyTorch computes, usually 2 to 8 times slower"
    log = tmp_path / "log.jsonl"
    path = run_here(tmp_path / "a.h5", FIELDS, log=str(log), quiet=False)
    assert capsys.readouterr().err == f"warning: {warning}\n"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("warning") for line in lines] == [warning, None, None]
    with Result(path) as result:
        assert " ".join(show.origin(result).split()).endswith(f"warning {warning}")
    gpu = SimpleNamespace(device=torch.device("cuda"), bfloat16_products=False)
    for kernels in ("auto", "native", "torch"):
        of = kernels, SimpleNamespace(agree=bool), gpu, [], None, 2
        refused(f"{one} on a GPU", selection.select_backend, *of)


def test_a_rank_with_too_few_cores_warns(monkeypatch, capsys):
    """One of two ranks is bound to one core, as by Open MPI."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    world = SimpleNamespace(root=True, texts=lambda text: [text, "1"])
    build.warn_of_few_cores(Job(threads_per_client=1), world)
    build.warn_of_few_cores(Job(threads_per_client=2), world)
    world.texts = lambda text: [text, text]
    build.warn_of_few_cores(Job(threads_per_client=3), world)
    build.warn_of_few_cores(Job(threads_per_client=4), world)
    bound = "a rank is bound to {} core{}, which its threads share; mpirun --bind-to none or "
    bound += "srun --cpus-per-task={} gives it more"
    assert capsys.readouterr().err.splitlines() == [
        "warning: --threads_per_client is 2, but " + bound.format(1, "", 2),
        "warning: --threads_per_client is 4, but " + bound.format(3, "s", 4),
    ]
