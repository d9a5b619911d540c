"""What computed the numbers: processor, device, versions, commit; and a warning where a Run goes on with others."""

import platform
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from dpfl_mpi import __version__
from dpfl_mpi.errors import complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.mpi.launcher import output
from dpfl_mpi.storage.files import system

ROUNDING = ("device", "kernels", "cpu", "processor", "threads", "versions")  # of a start: what the last bits depend on
# the lines of /proc/cpuinfo that tell two processors of one name apart, on x86 and on ARM
X86, ARM = ("vendor_id", "cpu family", "model", "stepping"), ("implementer", "architecture", "part", "revision")
IDENTITY = dict(zip(("vendor", "family", "model", "stepping"), zip(X86, ARM, strict=True), strict=True))
VECTORS = ("avx", "fma", "amx", "asimd", "sve")  # how the names of the extensions begin


def describe_start(hosts: list[str], parts: Parts) -> dict[str, Any]:
    """Return what computed the numbers: time, hosts, ranks, device, root's processor, versions, commit."""
    native = parts.backend.name == "native"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": parts.world.size,
        "hosts": sorted(set(hosts)),
        "device": torch.cuda.get_device_name() if parts.backend.ensemble.device.type == "cuda" else "cpu",
        "kernels": parts.backend.name,
        "portable": native and parts.run.found("method").elementwise,
        "cpu": cpuinfo().get("model name", platform.machine()),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "block": max((b.stop - b.start for b in parts.backend.blocks), default=0),
        "commit": output(git, 10).partition("\n")[0],  # of the source this runs from, "" where it is no checkout
        "versions": {"dpfl_mpi": __version__, "python": platform.python_version()}
        | {library.__name__: library.__version__ for library in (torch, np, h5py)},
    }


def warn_of_change(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn where a Run goes on with what may round differently; the native kernels give the same bits on all processors."""
    same = ("cpu", "processor") if before.get("portable") and now.get("portable") else ()
    changed = []
    for name in (name for name in ROUNDING if name in before and name in now and name not in same):
        # several facts of one name: "processor stepping", "versions torch"
        old, new = (facts if isinstance(facts, dict) else {"": facts} for facts in (before[name], now[name]))
        differ = (fact for fact in old if fact in new and old[fact] != new[fact])
        changed += [f"{name} {fact} {old[fact]} -> {new[fact]}".replace("  ", " ") for fact in differ]
    if changed:
        text = f"warning: this start may round differently than the one before ({'; '.join(changed)})"
        complain(text)


def processor() -> dict[str, str]:
    """Return what tells processors of one name apart, which may round differently, and the vector extensions that torch uses."""
    known = cpuinfo()
    out = {name: known.get(x86, known.get(f"CPU {arm}", "unknown")) for name, (x86, arm) in IDENTITY.items()}
    flags = (known.get("flags") or known.get("Features", "")).split()
    out["capability"] = torch.backends.cpu.get_cpu_capability()  # the kernels that torch chose, such as AVX512
    out["extensions"] = " ".join(sorted(flag for flag in flags if flag.startswith(VECTORS)))
    return out


def cpuinfo() -> dict[str, str]:
    """Return what Linux says of the first processor, by name; nothing elsewhere."""
    first = system("/proc/cpuinfo").partition("\n\n")[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
