"""Which GPU a rank or a Run of a sweep gets, without one: by a fake nvidia-smi on PATH."""

from functools import partial
from types import SimpleNamespace

import pytest
import starts
import torch
from launch import refused
from starts import script

from dpfl_mpi.engine import build
from dpfl_mpi.models.mlp import MLP
from dpfl_mpi.mpi.node import installed_gpus, visible_gpus
from dpfl_mpi.numerics import select_backend as selection
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.device import pick_device, why_hidden
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.recorded import RecordedBackend
from dpfl_mpi.numerics.select_backend import select_backend
from dpfl_mpi.settings import Job
from dpfl_mpi.sweep import __main__ as sweep

ALONE = SimpleNamespace(agree=bool)
FOUR = "".join(f"GPU {i}: Fake H200 (UUID: GPU-{i}{i}{i}{i}-00)\n" for i in range(4))
SPLIT = """GPU 0: Fake A100 (UUID: GPU-0000-00)
  MIG 3g.20gb     Device  0: (UUID: MIG-aaaa-00)
  MIG 3g.20gb     Device  1: (UUID: MIG-bbbb-00)
GPU 1: Fake A100 (UUID: GPU-1111-00)
"""


@pytest.fixture
def smi(fakes, monkeypatch):
    """A function that sets what a fake nvidia-smi lists; CUDA_VISIBLE_DEVICES is not set."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script(fakes / "nvidia-smi", f'test "$1" = -L && cat {fakes}/list')
    return (fakes / "list").write_text


def uuids(*numbers):
    return [f"GPU-{i}{i}{i}{i}-00" for i in numbers]


def test_gpus_of_a_node(smi, monkeypatch):
    smi(FOUR)
    assert installed_gpus() == visible_gpus() == uuids(0, 1, 2, 3)
    # CUDA reads no further than -1
    some = {"2,3": ["2", "3"], "GPU-1111-00": uuids(1), "0,-1,1": ["0"]}
    for text, seen in (some | {"": [], "-1": [], "NoDevFiles": []}).items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible_gpus() == seen, text
        assert installed_gpus() == uuids(0, 1, 2, 3)
    smi(SPLIT)
    assert installed_gpus() == ["MIG-aaaa-00", "MIG-bbbb-00", "GPU-1111-00"]
    smi("")
    assert installed_gpus() == []


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_ranks_of_a_node_have_different_gpus(monkeypatch, request, wanted):
    """By a PyTorch that sees four GPUs."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    devices = [pick_device(wanted, "float32", local_rank) for local_rank in range(6)]
    assert [d.index for d in devices] == chosen == [0, 1, 2, 3, 0, 1]
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert pick_device("cpu", "float32", 1).type == "cpu"


def test_a_gpu_computes_with_recorded_steps(monkeypatch):
    """All clients of a rank are one block, launched as a recording unless that is switched off."""
    ensemble = SimpleNamespace(device=torch.device("cuda"), bfloat16_products=False)
    sgd = SGD(16, 0.9, 1e-3, 20.0)
    tried = []
    monkeypatch.setattr(selection, "check_several", lambda *of: tried.append(of))
    kinds = {("auto", 0): RecordedBackend, ("torch", 0): Backend, ("auto", 2): RecordedBackend}
    for (kernels, block), kind in kinds.items():
        backend, _ = select_backend(kernels, block, ALONE, ensemble, range(3), sgd)
        assert type(backend) is kind
        assert backend.blocks == ([slice(0, 2), slice(2, 3)] if block else [slice(0, 3)])
    assert len(select_backend("auto", 1, ALONE, ensemble, range(3), sgd)[0].blocks) == 3
    assert tried == [(ensemble, range(3), 2)] * 3 + [(ensemble, range(3), 1)]
    assert select_backend("compiled", 0, ALONE, ensemble, range(3), sgd)[0].name == "compiled"
    why = "--kernels is native; the native kernels compute in float32 on a CPU"
    refused(why, select_backend, "native", 0, ALONE, ensemble, range(3), sgd)
    ensemble.device = torch.device("cpu")
    why = "--kernels is compiled, which needs a GPU"
    refused(why, select_backend, "compiled", 0, ALONE, ensemble, [], sgd)


def test_a_rank_without_a_gpu_computes_as_those_with_one():
    """Ranks with a GPU do not ask who has the native kernels: no rank may wait for them."""
    device, module = torch.device("cpu"), MLP(64, 10)
    ensemble = SimpleNamespace(device=device, bfloat16_products=False, module=module)
    asked = []
    world = SimpleNamespace(agree=lambda flag: asked.append(flag) or True)  # another rank has a GPU
    backend, _ = select_backend("auto", 0, world, ensemble, range(3), SGD(16, 0.9, 1e-3, 20.0))
    assert type(backend) is Backend and asked == [False]


def test_why_no_gpu_is_seen(smi, monkeypatch):
    smi("")
    assert why_hidden() == ""
    smi(FOUR)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for value, said in (("", "empty"), ("-1", "-1"), ("NoDevFiles", "NoDevFiles")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert why_hidden() == f"4 GPUs are installed, but CUDA_VISIBLE_DEVICES is {said}"
    why = "--device is cuda; PyTorch sees no GPU here: 4 GPUs are installed, but CUDA_V"
    refused(why, pick_device, "cuda", "float32", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert why_hidden() == "4 GPUs are installed, but this PyTorch is built without CUDA"
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert "torch.cuda.init()" in why_hidden()


def test_auto_says_that_gpus_are_hidden(smi, monkeypatch, tmp_path, capfd):
    """In one line; a CPU that was asked for is no news."""
    smi(FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = "4 GPUs are installed, but CUDA_VISIBLE_DEVICES is empty"
    said = f"warning: --device auto takes the CPU: {hidden}"
    for device, lines in (("auto", [said]), ("cpu", [])):
        starts.here(tmp_path / f"{device}.h5", starts.small(rounds=1), device=device, quiet=False)
        assert [line for line in capfd.readouterr().err.splitlines() if "GPU" in line] == lines


def test_ranks_that_share_a_gpu_are_counted(monkeypatch, capsys):
    def properties(device):
        return SimpleNamespace(uuid=f"GPU-{device.index}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for index, alike in ((0, {"GPU-0": 3}), (1, {"GPU-1": 2}), (2, {})):
        most_alike = partial(lambda alike, name: alike.get(name, 1), alike)
        world = SimpleNamespace(root=True, agree=bool, most_alike=most_alike)
        build.warn_of_device(Job(), world, torch.device("cuda", index))
    turns = "they take turns on it, unless CUDA's MPS runs"
    shared = f"warning: up to {{}} ranks share one GPU; {turns}".format
    assert capsys.readouterr().err.splitlines() == [shared(3), shared(2)]


# sweeps -------------------------------------------------------------------------------------------
def test_gpus_that_cannot_be(smi, tmp_path, said):
    for text, gpus, there in (("", 1, 0), (FOUR, 5, 4), (FOUR, 0, 4)):
        smi(text)
        words = ["--methods=local", *starts.of_sweep(tmp_path), "--gpus", gpus]
        allowed = f"allowed is 1 up to the number of GPUs visible here, {there}"
        assert f"--gpus is {gpus}; {allowed}" in said(sweep.main, *words, code=2)
    assert not list(tmp_path.glob("sweeps/*"))


@pytest.mark.parametrize(("visible", "words", "expected"), [
    (None, [], uuids(0, 1)),
    (None, ["--gpus", "2", "--ranks", "2"], [",".join(uuids(0, 1)), ",".join(uuids(2, 3))]),
    ("2,3", ["--gpus", "2"], ["2,3", "2,3"]),  # one after the other
    ("1,1", [], ["1", "1"]),  # named twice, it computes two Runs at once
    (None, ["--device=cpu"], ["unset", "unset"]),
    ("", [], ["", ""]),  # whoever hides all GPUs means it; each Run says it in its log
])  # fmt: skip
def test_runs_of_a_local_sweep_have_gpus_of_their_own(
    smi, fakes, swept, monkeypatch, visible, words, expected
):
    """An mpirun that only writes down what CUDA_VISIBLE_DEVICES was is first on PATH."""
    smi(FOUR)
    (seen := fakes / "seen").mkdir()
    script(fakes / "mpirun", f'echo "${{CUDA_VISIBLE_DEVICES-unset}}" > {seen}/$$; sleep 0.5')
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    done = swept("--seeds", "1,2", "--max_parallel", "2", *words)
    assert sorted(path.read_text().strip() for path in seen.iterdir()) == expected
    assert "--ranks" not in words or "GPUs visible here: 4; per Run 2;" in done.out
