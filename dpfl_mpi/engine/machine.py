"""What computes the numbers: processor, device, versions; and a warning where that changes."""

import platform
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from dpfl_mpi.errors import complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.mpi.launcher import output
from dpfl_mpi.storage.files import system
from dpfl_mpi.version import VERSION

GIT_S = 10  # seconds that git may take
# facts of a start on which the last bits depend
ROUNDING = ("device", "kernels", "cpu", "processor", "threads", "versions")
# the lines of /proc/cpuinfo that tell two processors of one name apart, on x86 and on ARM
X86 = {"vendor": "vendor_id", "family": "cpu family", "model": "model", "stepping": "stepping"}
ARM = {
    "vendor": "CPU implementer",
    "family": "CPU architecture",
    "model": "CPU part",
    "stepping": "CPU revision",
}
VECTORS = ("avx", "fma", "amx", "asimd", "sve")  # how the names of vector extensions begin


def describe_start(hosts: list[str], parts: Parts) -> dict[str, Any]:
    """Return what computes the numbers: time, hosts, ranks, device, processor, versions, commit."""
    backend, on_gpu = parts.backend, parts.backend.ensemble.device.type == "cuda"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    libraries = {library.__name__: library.__version__ for library in (torch, np, h5py)}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": parts.world.size,
        "hosts": sorted(set(hosts)),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "kernels": backend.name,
        "portable": backend.name == "native" and parts.run.found("method").elementwise,
        "cpu": cpuinfo().get("model name", platform.machine()),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "block": max((b.stop - b.start for b in backend.blocks), default=0),
        "commit": output(git, GIT_S).partition("\n")[0],  # "" where this is no checkout
        "versions": {"dpfl_mpi": VERSION, "python": platform.python_version()} | libraries,
    }


def warn_of_change(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn where a Run goes on with what may round differently.

    The native kernels give the same bits on all processors.
    """
    portable = before.get("portable") and now.get("portable")
    ignored = ("cpu", "processor") if portable else ()
    changes = []
    for name in ROUNDING:
        if name in ignored or name not in before or name not in now:
            continue
        old, new = before[name], now[name]
        if isinstance(old, dict):
            facts = [fact for fact in old if fact in new and old[fact] != new[fact]]
            changes += [f"{name} {fact} {old[fact]} -> {new[fact]}" for fact in facts]
        elif old != new:
            changes.append(f"{name} {old} -> {new}")
    if changes:
        differently = "this start may round differently than the one before"
        complain(f"warning: {differently} ({'; '.join(changes)})")


def processor() -> dict[str, str]:
    """Return what tells processors apart that may round differently."""
    lines = cpuinfo()
    out = {name: lines.get(X86[name], lines.get(ARM[name], "unknown")) for name in X86}
    flags = (lines.get("flags") or lines.get("Features", "")).split()
    out["capability"] = torch.backends.cpu.get_cpu_capability()  # torch's kernels, such as AVX512
    out["extensions"] = " ".join(sorted(flag for flag in flags if flag.startswith(VECTORS)))
    return out


def cpuinfo() -> dict[str, str]:
    """Return the lines of /proc/cpuinfo on the first processor, by name; nothing without Linux."""
    first = system("/proc/cpuinfo").partition("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
