"""Which GPU a rank or a Run of a sweep gets, without one: by a fake nvidia-smi on PATH."""

import os
from types import SimpleNamespace

import pytest
import starts
import torch
from launch import refused
from starts import script

from dpfl_mpi.engine import build
from dpfl_mpi.mpi.node import gpus_in, installed_gpus, visible_gpus
from dpfl_mpi.numerics.device import devices_line, name_of, pick_device, place_of, why_hidden
from dpfl_mpi.settings import Job
from dpfl_mpi.sweep import __main__ as sweep

FOUR = "".join(f"GPU {i}: Fake H200 (UUID: GPU-{i}{i}{i}{i}-00)\n" for i in range(4))
# as `nvidia-smi -L` prints: MIG on some GPUs, on all, on none, and by a driver before 470
MIXED = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-6513270e-269e-5d37-b2a7-4de452e6b438)
  MIG 7g.80gb     Device  0: (UUID: MIG-d23f0824-128b-5f33-8c5c-7fd0a6a3a450)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-9531985d-5d9d-59f8-9818-e811892f902b)
  MIG 2g.20gb     Device  0: (UUID: MIG-36f675cc-81e7-5ef5-a8e2-5d940ed90475)
  MIG 1c.3g.40gb  Device  1: (UUID: MIG-6b0d549b-6f03-575a-9600-a35a099950d8)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-8d116ece-1738-57d9-bd9c-172411e20b8f)
"""
WHOLE = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8e81973e-0bec-57b0-b898-d190f9ebdacc)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-6b4cb242-4a23-5596-a217-beaddbc496cb)
"""
OLDER = """\
GPU 0: A100-PCIE-40GB (UUID: GPU-92276658-1e27-51c0-8a6a-63ec24ede6a4)
  MIG 4g.20gb Device 0: (UUID: MIG-GPU-92276658-1e27-51c0-8a6a-63ec24ede6a4/2/0)
  MIG 1g.5gb Device 1: (UUID: MIG-GPU-92276658-1e27-51c0-8a6a-63ec24ede6a4/9/0)
"""


@pytest.fixture
def smi(fakes, monkeypatch):
    """A function that sets what a fake nvidia-smi lists; CUDA_VISIBLE_DEVICES is not set."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # noted: what a test leaves is taken back
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    script(fakes / "nvidia-smi", f'test "$1" = -L && cat {fakes}/list')
    return (fakes / "list").write_text


def uuids(*numbers):
    return [f"GPU-{i}{i}{i}{i}-00" for i in numbers]


def test_gpus_of_a_node_and_why_none_is_seen(smi, monkeypatch):
    smi(FOUR)
    assert installed_gpus() == visible_gpus() == uuids(0, 1, 2, 3)
    # CUDA reads no further than -1
    some = {"2,3": ["2", "3"], "GPU-1111-00": uuids(1), "0,-1,1": ["0"]}
    for text, seen in (some | {"": [], "-1": [], "NoDevFiles": []}).items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible_gpus() == seen, text
        assert installed_gpus() == uuids(0, 1, 2, 3)
    smi(MIXED)
    uuids_begin = [uuid[:12] for uuid in installed_gpus()]
    assert uuids_begin == ["MIG-d23f0824", "MIG-36f675cc", "MIG-6b0d549b", "GPU-8d116ece"]
    smi("")
    assert installed_gpus() == [] and why_hidden() == ""
    smi(FOUR)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for value in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        hidden = f"4 GPUs are installed, but CUDA_VISIBLE_DEVICES is {value or 'empty'}"
        assert why_hidden() == hidden
    why = "--device is cuda; PyTorch sees no GPU here: 4 GPUs are installed, but CUDA_V"
    refused(why, pick_device, "cuda", "float32", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert why_hidden() == "4 GPUs are installed, but this PyTorch is built without CUDA"
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert "torch.cuda.init()" in why_hidden()


def test_what_nvidia_smi_lists():
    """The begin of each GPU's UUID, and how many MIG instances it has."""
    for text, gpus in (
        (MIXED, {"GPU-6513270e": 1, "GPU-9531985d": 2, "GPU-8d116ece": 0}),
        (WHOLE, {"GPU-8e81973e": 0, "GPU-6b4cb242": 0}),
        (OLDER, {"GPU-92276658": 2}),
        ("No devices found.\n", {}),
    ):
        listed = gpus_in(text)
        assert {gpu[:12]: len(instances) for gpu, *instances in listed} == gpus
        assert all(text.count(f"(UUID: {name})") == 1 for gpu in listed for name in gpu)
    assert gpus_in(OLDER)[0][2] == "MIG-GPU-92276658-1e27-51c0-8a6a-63ec24ede6a4/9/0"


def test_neighbours_share_a_gpu():
    for ranks, devices, places in (
        (1, 4, [0]),
        (4, 4, [0, 1, 2, 3]),
        (6, 4, [0, 0, 1, 2, 2, 3]),
        (8, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        (3, 1, [0, 0, 0]),
    ):
        assert [place_of(rank, ranks, devices) for rank in range(ranks)] == places


@pytest.fixture
def cuda(monkeypatch, request):
    """A function that sets how many GPUs PyTorch says that it sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_ranks_of_a_node_have_different_gpus(smi, cuda, wanted):
    smi(FOUR)
    cuda(4)
    devices = [pick_device(wanted, "float32", rank, 4) for rank in range(4)]
    assert [d.index for d in devices] == [0, 1, 2, 3]
    assert pick_device(wanted, "float32", 5, 6).index == 3
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert pick_device("cpu", "float32", 1, 2).type == "cpu"


@pytest.mark.parametrize(("visible", "taken"), [
    (None, ["MIG-d23f0824", "MIG-36f675cc", "MIG-6b0d549b", "GPU-8d116ece"]),
    ("1", ["MIG-36f675cc", "MIG-36f675cc", "MIG-6b0d549b", "MIG-6b0d549b"]),
    ("GPU-9531985d,0", ["MIG-36f675cc", "MIG-36f675cc", "MIG-6b0d549b", "MIG-d23f0824"]),
    ("MIG-6b0d549b,MIG-36f675cc", ["MIG-6b0d549b"] * 2 + ["MIG-36f675cc"] * 2),
    ("MIG-6b0d549b", ["MIG-6b0d549b"] * 4),  # of each task, as Slurm may name it
    ("2", ["2"] * 4),  # it is whole
    ("", [""] * 4),
])  # fmt: skip
def test_a_rank_has_one_mig_instance(smi, cuda, monkeypatch, visible, taken):
    """Of four ranks on a node with three instances and a whole GPU, before CUDA starts."""
    smi(MIXED)
    cuda(1)
    seen = []
    now = lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or True  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", now)
    for rank in range(4):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        pick_device("cpu", "float32", rank, 4)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
        for _ in range(2):  # a second Run of a process keeps it
            assert pick_device("auto", "float32", rank, 4).index == 0
    assert [name[:12] for name in seen[::2]] == taken and seen[::2] == seen[1::2]


def test_one_line_says_which_ranks_have_which_gpu(monkeypatch):
    def properties(device):
        uuids = [gpu for gpu, *_ in gpus_in(WHOLE)]
        return SimpleNamespace(name="NVIDIA H100", uuid=uuids[device.index].removeprefix("GPU-"))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one, two = (name_of(torch.device("cuda", i)) for i in range(2))
    assert one == "NVIDIA H100 (GPU-8e81973e-0bec-57b0-b898-d190f9ebdacc)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus_in(OLDER)[0][2])
    part, cpu = name_of(torch.device("cuda", 0)), name_of(torch.device("cpu"))
    assert part == "NVIDIA H100 (MIG-GPU-92276658-1e27-51c0-8a6a-63ec24ede6a4/9/0)" and cpu == ""
    for names, sentence in (
        ([cpu, cpu], ""),
        ([one], "devices: rank 0 on NVIDIA H100 (GPU-8e81973e)"),
        ([one] * 4 + [two] * 4,
         "devices: ranks 0-3 on NVIDIA H100 (GPU-8e81973e); 4-7 on NVIDIA H100 (GPU-6b4cb242)"),
        ([one, two, one, part, cpu],
         "devices: ranks 0, 2 on NVIDIA H100 (GPU-8e81973e); 1 on NVIDIA H100 (GPU-6b4cb242); "
         "3 on NVIDIA H100 (MIG-GPU-92276658/9/0); 4 on the CPU"),
    ):  # fmt: skip
        assert devices_line(names) == sentence
    many = devices_line([f"A100 (GPU-{i})" for i in range(20)])
    assert many.endswith("; 7 on A100 (GPU-7); 12 more devices")


def test_ranks_that_share_a_gpu_are_counted(capsys):
    lines = []
    for names in (["A", "B", "A", "A", "B"], ["A", "A"], ["A", "B", "", ""], ["", ""]):
        world = SimpleNamespace(root=True, agree=bool, texts=lambda _, names=names: names)
        build.tell_devices(Job(device="cpu"), world, torch.device("cpu"))
        lines.append(devices_line(names))
    turns = "they take turns on it, unless CUDA's MPS runs"
    shared = f"warning: up to {{}} ranks share one GPU; {turns}".format
    sentence = capsys.readouterr()
    assert sentence.err.splitlines() == [shared(3), shared(2)]
    assert sentence.out.splitlines() == lines[:3] and lines[3] == ""


def test_gpus_that_cannot_be(smi, tmp_path, said, monkeypatch, capfd):
    for text, gpus, there in (("", 1, 0), (FOUR, 5, 4), (FOUR, 0, 4)):
        smi(text)
        words = ["--methods=local", *starts.of_sweep(tmp_path), "--gpus", gpus]
        allowed = f"allowed is 1 up to the number of GPUs visible here, {there}"
        assert f"--gpus is {gpus}; {allowed}" in said(sweep.main, *words, code=2)
    assert not list(tmp_path.glob("sweeps/*"))
    smi(FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = "4 GPUs are installed, but CUDA_VISIBLE_DEVICES is empty"
    warning = f"warning: --device auto takes the CPU: {hidden}"
    for device, lines in (("auto", [warning]), ("cpu", [])):
        starts.here(tmp_path / f"{device}.h5", starts.small(rounds=1), device=device, quiet=False)
        assert [line for line in capfd.readouterr().err.splitlines() if "GPU" in line] == lines


@pytest.mark.parametrize(("visible", "words", "expected"), [
    (None, [], uuids(0, 1)),
    (None, ["--gpus", "2", "--ranks", "2"], [",".join(uuids(0, 1)), ",".join(uuids(2, 3))]),
    ("2,3", ["--gpus", "2"], ["2,3", "2,3"]),  # one after the other
    ("1,1", [], ["1", "1"]),  # named twice, it computes two Runs at once
    (None, ["--device=cpu"], ["unset", "unset"]),
    ("", [], ["", ""]),  # whoever hides all GPUs means it; each Run says it in its log
])  # fmt: skip
def test_runs_of_a_sweep_have_own_gpus(smi, fakes, swept, monkeypatch, visible, words, expected):
    """An mpirun that only writes down what CUDA_VISIBLE_DEVICES was is first on PATH."""
    smi(FOUR)
    (seen := fakes / "seen").mkdir()
    script(fakes / "mpirun", f'echo "${{CUDA_VISIBLE_DEVICES-unset}}" > {seen}/$$; sleep 0.5')
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    done = swept("--seeds", "1,2", "--max_parallel", "2", *words)
    assert sorted(path.read_text().strip() for path in seen.iterdir()) == expected
    assert "--ranks" not in words or "GPUs visible here: 4; per Run 2;" in done.out
