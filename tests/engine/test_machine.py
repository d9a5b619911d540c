"""Two processors that call themselves the same are told apart, and a Run that goes on elsewhere says what differs."""

import pytest
import torch

from dpfl_mpi.engine import machine

EPYC = {
    "vendor_id": "AuthenticAMD",
    "cpu family": "25",
    "model": "17",
    "model name": "AMD EPYC",
    "stepping": "1",
    "flags": "fpu sse2 avx2 fma avx512f smep",
}
ARM = {
    "CPU implementer": "0x41",
    "CPU architecture": "8",
    "CPU part": "0xd40",
    "CPU revision": "1",
    "Features": "fp sve",
}


def test_a_processor_is_more_than_its_name(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine, "cpuinfo", lambda: EPYC)
    assert machine.processor() == {
        "vendor": "AuthenticAMD",
        "family": "25",
        "model": "17",
        "stepping": "1",
        "capability": "AVX512",
        "extensions": "avx2 avx512f fma",
    }
    monkeypatch.setattr(machine, "cpuinfo", lambda: ARM)
    assert [*machine.processor().values()] == ["0x41", "8", "0xd40", "1", "AVX512", "sve"]
    monkeypatch.setattr(machine, "cpuinfo", dict)  # no Linux
    assert [*machine.processor().values()] == ["unknown"] * 4 + ["AVX512", ""]


def start(**processor):
    known = {"vendor": "AuthenticAMD", "family": "25", "model": "17", "stepping": "1"} | processor
    return {
        "device": "cpu",
        "cpu": "AMD EPYC",
        "processor": known,
        "threads": 1,
        "versions": {"torch": "2.13.0", "h5py": "3.16"},
        "time": processor,  # no two are alike, and no number depends on it
    }


def test_a_start_on_another_processor_of_the_same_name_warns(capsys):
    other = start(model="1", stepping="2") | {"versions": {"torch": "2.12.0", "h5py": "3.16"}}
    machine.warn_of_change(other, start())
    assert capsys.readouterr().err == (
        "warning: this start may round differently than the one before "
        "(processor model 1 -> 17; processor stepping 2 -> 1; versions torch 2.12.0 -> 2.13.0)\n"
    )


@pytest.mark.parametrize("missing", ["processor", "device", "versions"])
def test_what_a_start_does_not_know_is_no_difference(capsys, missing):
    before = {name: fact for name, fact in start().items() if name != missing}
    machine.warn_of_change(before, start())
    assert capsys.readouterr().err == ""
    machine.warn_of_change(before | {"threads": 2}, start())
    assert "(threads 2 -> 1)" in capsys.readouterr().err


def test_the_processor_is_no_difference_under_the_native_kernels_alone(capsys):
    native = {"kernels": "native", "portable": True}
    machine.warn_of_change(start(model="1") | native, start() | native)
    assert capsys.readouterr().err == ""
    machine.warn_of_change(start(model="1") | native | {"portable": False}, start() | native)
    assert "processor model 1 -> 17" in capsys.readouterr().err
    machine.warn_of_change(start() | native, start() | {"kernels": "torch", "portable": False})
    assert "(kernels native -> torch)" in capsys.readouterr().err
