"""What this node has: memory that it can still give, what killed runs left in it, and GPUs."""

import contextlib
import os
import re
import stat
import time
from pathlib import Path

from dpfl_mpi.batch import ANSWER_S, output
from dpfl_mpi.storage.files import proc_text

# files of a cgroup, by version: the limit, what is used, and the cache in memory.stat
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
MPI_NAMES = ("mpich_sh*", "sm_segment.*", "osc_sm.*", "vader_segment.*")  # MPICH, Open MPI
ABANDONED_S = 5  # a segment older than this that no process maps was left by a killed run


def node_memory(shared: bool = True) -> tuple[int, str]:
    """Return the bytes free on this node, if `shared` also in /dev/shm, and what limits them."""
    limits = []
    if shared and os.path.isdir("/dev/shm"):
        shm = os.statvfs("/dev/shm")
        limits.append((shm.f_bavail * shm.f_frsize, "/dev/shm"))
    free = re.findall(r"^MemAvailable: +(\d+) kB", proc_text("/proc/meminfo"), re.MULTILINE)
    limits += [(int(kb) * 1024, "available memory") for kb in free]
    limits += [(room, "the cgroup's limit") for room in cgroup_rooms()]
    return min(limits, default=(2**62, "no limit known"))


def cgroup_rooms(root: str = "/") -> list[int]:
    """Return the bytes left to each cgroup of this process, from its own to the topmost.

    A job's limit is in a cgroup far below the topmost, such as `job_17/step_0`. Cached files count
    as room, because they can be dropped. Version 2 groups without a limit have no entry.
    """
    rooms: list[int] = []
    groups = re.findall(r"^\d+:(.*?):(.*)$", proc_text(f"{root}/proc/self/cgroup"), re.MULTILINE)
    # by mount and kind: in version 2 a process is in one group without kinds, in 1 in one per kind
    mounts = ("sys/fs/cgroup", "", VERSION_2), ("sys/fs/cgroup/memory", "memory", VERSION_1)
    for mount, kind, (limit, used, cache) in mounts:
        path = next((path for kinds, path in groups if kind in kinds.split(",")), "/")
        # in a container the path may be the host's: then only the topmost group has files
        own = Path(os.path.normpath(f"/{path}"))
        for group in (own, *own.parents):
            folder = Path(root, mount, str(group).lstrip("/"))
            with contextlib.suppress(OSError, ValueError):  # no file, or "max": no limit
                room = int((folder / limit).read_text()) - int((folder / used).read_text())
                rooms.append(room)
                text = (folder / "memory.stat").read_text()
                cached = re.search(rf"^{cache} (\d+)$", text, re.MULTILINE)
                rooms[-1] += int(cached.group(1)) if cached else 0
    return rooms


def mapped(pid: str) -> set[str]:
    """Return the files in /dev/shm that a process maps, as far as this user may see them."""
    return set(re.findall(r"/dev/shm/\S+", proc_text(f"/proc/{pid}/maps")))


def remove_left() -> None:
    """Remove files in /dev/shm that ranks of this user left when they were ended by `kill -9`."""
    left = []
    for path in (path for name in MPI_NAMES for path in Path("/dev/shm").glob(name)):
        with contextlib.suppress(OSError):
            found = path.lstat()
            own_file = found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode)
            if own_file and time.time() - found.st_mtime > ABANDONED_S:
                left.append(path)
    processes = Path("/proc").glob("[0-9]*") if left else ()
    in_use = {name for process in processes for name in mapped(process.name)}
    for path in left:
        if str(path) not in in_use:
            with contextlib.suppress(OSError):  # another start may have removed it
                path.unlink()


def gpus_in(listed: str) -> list[list[str]]:
    """Return the UUID of each GPU that `nvidia-smi -L` lists, and those of its MIG instances."""
    gpus: list[list[str]] = []
    for name in re.findall(r"UUID: ((?:GPU|MIG)-[^)]+)", listed):
        if name.startswith("GPU"):
            gpus.append([name])
        else:
            gpus[-1].append(name)
    return gpus


def installed_gpus() -> list[str]:
    """Return this node's GPUs as CUDA_VISIBLE_DEVICES would name them, ignoring its present value.

    They are UUIDs (of MIG instances where a GPU is split), numbers without nvidia-smi, or none.
    """
    if listed := output(["nvidia-smi", "-L"], ANSWER_S):
        return [name for gpu, *instances in gpus_in(listed) for name in instances or [gpu]]
    with contextlib.suppress(OSError):
        return [str(i) for i in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    return []


def visible_gpus() -> list[str]:
    """Return the GPUs, or their MIG instances, of CUDA_VISIBLE_DEVICES, else of this node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed_gpus()
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores everything from the first of these on
    ends = [i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")]
    gpus = gpus_in(output(["nvidia-smi", "-L"], ANSWER_S))
    return [part for name in names[: min(ends, default=None)] for part in parts_of(name, gpus)]


def parts_of(name: str, gpus: list[list[str]]) -> list[str]:
    """Return the MIG instances of a GPU, named by number or UUID; the name if it has none."""
    for number, (uuid, *instances) in enumerate(gpus):
        if instances and (name == str(number) or uuid.startswith(name)):
            return instances
    return [name]
