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
def test_three_threads_write_the_file_of_one(method, colour_file, tmp_path, monkeypatch):
    """The CNN with crops under dpfl, else the perceptron, by other calls of the kernels.

    Then a rank of six threads computes two clients at a time.
    """
    images = IMAGES | {"data": str(colour_file), "model": "cnn", "augment": True}
    fields = FIELDS | {"method": method} | (images if method == "dpfl" else {})
    one = run_here(tmp_path / "1.h5", fields, save_models=True)
    three = run_here(tmp_path / "3.h5", fields, save_models=True, threads_per_client=3)
    assert differences(one, three) == []
    before = three.stat().st_mtime_ns
    run_here(three, fields, threads_per_client=2)  # the same Run, which is there
    assert three.stat().st_mtime_ns == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(6)})
    six = run_here(tmp_path / "6.h5", fields, save_models=True, threads_per_client=3)
    assert differences(one, six) == []


def test_a_rank_of_three_threads_writes_the_file_of_one(monkeypatch, tmp_path):
    """Its calls are of all eight clients, three at a time; of one thread, of a client each."""
    fields = FIELDS | {"clients": 8, "budget": 3}
    monkeypatch.setattr(native_backend, "BLOCK_BYTES", 1)
    one = run_here(tmp_path / "1.h5", fields, save_models=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(4)})
    three = run_here(tmp_path / "3.h5", fields, save_models=True)
    assert differences(one, three) == []
    with federation(fields) as fed:
        assert fed.backend.native.teams == 3 and fed.backend.blocks == [slice(0, 8)]


# of a client, of the rank, cores -> teams
@pytest.mark.parametrize(
    ("members", "threads", "cores", "teams"),
    [(3, 1, 8, 1), (3, 7, 8, 2), (1, 7, 8, 7), (1, 64, 2, 2), (4, 2, 2, 1)],
)
def test_the_threads_reach_the_kernels(members, threads, cores, teams, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cores)})
    with federation(FIELDS, threads_per_client=members) as fed:
        native, calls = fed.backend.native, []
        native.calls["train"] = lambda *of: calls.append(of[2:5])
        native.run("train", np.zeros(2))
        space = native.calls["space"](native.net, members)
    assert calls == [(2, teams, members)]
    assert len(native.memory) == teams * space + 64


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
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    build.warn_of_few_cores(Job(threads_per_client=4), world)
    bound = "a rank is bound to {} core{}, which its threads share; mpirun --bind-to none or "
    bound += "srun --cpus-per-task={} gives it more"
    assert capsys.readouterr().err.splitlines() == [
        "warning: --threads_per_client is 2, but " + bound.format(1, "", 2),
        "warning: --threads_per_client is 4, but " + bound.format(3, "s", 4),
        "warning: OMP_NUM_THREADS is 8, but " + bound.format(3, "s", 8),
    ]
