"""What computes the numbers: processor, device, versions; and a warning where that changes."""

import platform
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from dpfl_mpi.batch import output
from dpfl_mpi.errors import complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.mpi.world import LIBRARY
from dpfl_mpi.storage.files import proc_text
from dpfl_mpi.version import VERSION

GIT_S = 10  # seconds that git may take
# facts of a start on which the last bits depend
ROUNDING = ("device", "kernels", "cpu", "processor", "threads", "versions")
# the lines of /proc/cpuinfo that tell two processors of one name apart, on x86 and on ARM
LINES = {
    "vendor": ("vendor_id", "CPU implementer"),
    "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU revision"),
}
VECTORS = ("avx", "fma", "amx", "asimd", "sve")  # how the names of vector extensions begin


def describe_start(parts: Parts) -> dict[str, Any]:
    """Return on root what computes the numbers: time, hosts, device, versions. Collective."""
    hosts = parts.world.hosts()
    if not parts.world.root:
        return {}
    backend, on_gpu = parts.backend, parts.backend.ensemble.device.type == "cuda"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    libraries = {library.__name__: library.__version__ for library in (torch, np, h5py)}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": parts.world.size,
        "hosts": sorted(set(hosts)),
        "exchange": f"{parts.mail.mailroom.transfer} of {LIBRARY}",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "kernels": backend.name,
        "warning": backend.warning,
        "portable": backend.name == "native" and parts.run.found("method").elementwise,
        "cpu": cpuinfo().get("model name", platform.machine()),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "commit": output(git, GIT_S).partition("\n")[0],  # "" where this is no checkout
        "versions": {"dpfl_mpi": VERSION, "python": platform.python_version()} | libraries,
    }


def rounding(start: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a start on which the last bits depend, by name."""
    out: dict[str, Any] = {}
    for name in ROUNDING:
        value = start.get(name, {})
        if isinstance(value, dict):
            out |= {f"{name} {fact}": of_fact for fact, of_fact in value.items()}
        else:
            out[name] = value
    return out


def warn_of_change(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn where a Run goes on by hardware or versions that may round differently."""
    old, new = rounding(before), rounding(now)
    changed = [name for name in old if name in new and old[name] != new[name]]
    if before.get("portable") and now.get("portable"):  # the same bits on all processors
        changed = [name for name in changed if not name.startswith(("cpu", "processor"))]
    if changed:
        changes = "; ".join(f"{name} {old[name]} -> {new[name]}" for name in changed)
        complain(f"warning: this start may round differently than the one before ({changes})")


def processor() -> dict[str, str]:
    """Return what tells processors apart that may round differently."""
    lines = cpuinfo()
    out = {n: lines.get(x86, lines.get(arm, "unknown")) for n, (x86, arm) in LINES.items()}
    flags = (lines.get("flags") or lines.get("Features", "")).split()
    out["capability"] = torch.backends.cpu.get_cpu_capability()  # torch's kernels, such as AVX512
    out["extensions"] = " ".join(sorted(flag for flag in flags if flag.startswith(VECTORS)))
    return out


def cpuinfo() -> dict[str, str]:
    """Return the lines of /proc/cpuinfo on the first processor, by name; nothing without Linux."""
    first = proc_text("/proc/cpuinfo").partition("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
