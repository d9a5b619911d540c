"""Two processors that call themselves the same are told apart, and a Run that goes on elsewhere says what differs."""

import pytest
import torch

from dpfl_mpi.engine import machine

EPYC = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17", "model name": "AMD EPYC", "stepping": "1"}
EPYC["flags"] = "fpu sse2 avx2 fma avx512f smep"
ARM = {"CPU implementer": "0x41", "CPU architecture": "8", "CPU part": "0xd40", "CPU revision": "1"}
ARM["Features"] = "fp sve"


@pytest.mark.parametrize(
    ("cpuinfo", "facts"),
    [
        (EPYC, ["AuthenticAMD", "25", "17", "1", "AVX512", "avx2 avx512f fma"]),
        (ARM, ["0x41", "8", "0xd40", "1", "AVX512", "sve"]),
        ({}, ["unknown"] * 4 + ["AVX512", ""]),  # no Linux
    ],
)
def test_a_processor_is_more_than_its_name(cpuinfo, facts, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine, "cpuinfo", lambda: cpuinfo)
    names = ["vendor", "family", "model", "stepping", "capability", "extensions"]
    assert machine.processor() == dict(zip(names, facts, strict=True))


def start(model="17", stepping="1", torch="2.13.0", **more):
    return {
        "device": "cpu",
        "cpu": "AMD EPYC",
        "processor": {"vendor": "AuthenticAMD", "family": "25", "model": model, "stepping": stepping},
        "threads": 1,
        "versions": {"torch": torch, "h5py": "3.16"},
        "time": model,  # no number depends on it
    } | more


NATIVE = {"kernels": "native", "portable": True}


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (start("1", "2"), start(), "processor model 1 -> 17; processor stepping 2 -> 1"),
        (start(torch="2.12.0"), start(), "versions torch 2.12.0 -> 2.13.0"),
        (start(threads=2), start(), "threads 2 -> 1"),
        # the processor is no difference under the native kernels alone
        (start("1", **NATIVE), start(**NATIVE), ""),
        (start("1", kernels="native", portable=False), start(**NATIVE), "processor model 1 -> 17"),
        (start(**NATIVE), start(kernels="torch", portable=False), "kernels native -> torch"),
        # nor is what a start does not know
        *(({n: fact for n, fact in start().items() if n != gone}, start(), "") for gone in ("processor", "versions")),
    ],
)
def test_a_start_that_may_round_differently_warns(before, now, changes, capsys):
    machine.warn_of_change(before, now)
    warning = f"warning: this start may round differently than the one before ({changes})\n"
    assert capsys.readouterr().err == (warning if changes else "")
