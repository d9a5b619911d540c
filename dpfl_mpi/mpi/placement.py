"""Which client is computed where, and what a node has: pure functions, so that `describe` can plan a run without MPI."""

import contextlib
import heapq
import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.launcher import output
from dpfl_mpi.storage.files import system

WAVE = 256  # clients of a rank that search Omega together at least,
WAVES = 8  # and how many such groups there are at most
MOST_ROWS = 256  # that one pass brings to all ranks, where every rank gets every row: 64 MB of CNNs


def place(work: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of every client, int64 `[N]`: heaviest client first, each to the rank with least work so far."""
    owner = np.zeros(len(work), np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    for k in np.lexsort((np.arange(len(work)), -work)):
        load, rank = heapq.heappop(loads)
        owner[k] = rank
        heapq.heappush(loads, (load + float(work[k]), rank))
    return owner


def rows_of(owner: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all clients rank by rank, heaviest first, and the row of every client on its rank, both int64 `[N]`."""
    order = np.lexsort((np.arange(len(owner)), -work, owner))
    counts = np.bincount(owner)
    row = np.empty(len(owner), np.int64)
    row[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order, row


def window_rows(window_gb: float, row: int) -> int:
    """Return how many rows of `row` bytes --window_gb allows a rank's window."""
    return int(window_gb * 2**30 // row)


def window_slots(wanted: Any, clients: Any, n: int) -> Any:
    """Return the slots that ranks with so many clients need at most: `wanted` models, and no more than there are other clients."""
    return np.minimum(wanted, n - clients)


def models_per_pass(need: np.ndarray, capacity: np.ndarray, clients: np.ndarray) -> int | None:
    """Return how many models every client may receive in one pass of the window; None where all fit, 0 where not even one does.

    Of each rank `[ranks]` the slots that it needs, those that its window may have, and its clients.
    """
    narrow = need > capacity
    return int((capacity[narrow] // clients[narrow]).min()) if narrow.any() else None


def groups_of(
    graph: CollaborationGraph, owner: np.ndarray, rank_by_rank: np.ndarray, capacity: np.ndarray
) -> np.ndarray | None:
    """Return for every client, int64 `[N]`, in which group of its rank's clients it receives: the window has room for all models of a group.

    None where a rank's window has no room for the models of one client.
    """
    away = graph.only(owner[graph.receivers()] != owner[graph.senders])
    group, rank, number, held = np.zeros(len(owner), np.int64), -1, 0, set[int]()
    for k in rank_by_rank.tolist():
        if owner[k] != rank:
            rank, number, held = int(owner[k]), 0, set()
        mine = set(away.of(k).tolist())
        if len(mine) > capacity[rank]:
            return None
        held |= mine
        if len(held) > capacity[rank]:
            number, held = number + 1, mine
        group[k] = number
    return group


def waves(clients: np.ndarray) -> int:
    """Return in how many groups the clients of each rank, at most these many, search Omega: the sums of one group at a time are held."""
    return max(1, min(WAVES, int(clients.max()) // WAVE))


def rows_per_pass(limit: np.ndarray, clients: np.ndarray, most: int) -> int:
    """Return how many clients' rows go to all ranks in one pass, at least one and at most `most`; a rank without clients receives none."""
    return max(1, int(np.minimum(limit, most)[clients > 0].min()))


def too_narrow(window_gb: float, row: int, clients: np.ndarray) -> UserError:
    """Return the error for a window that cannot hold one row of `row` bytes per client of a rank."""
    gib = 1.006 * clients.max() * row / 2**30  # three digits of it are enough
    need = f"one row of {row} bytes per client, {gib:.3g} GiB per rank"
    return UserError(f"--window_gb is {window_gb:g}; a pass needs {need}")


def node_memory(shared: bool = True) -> tuple[int, str]:
    """Return the bytes of memory this node can still give, and which limit that is: free memory, the cgroup's, for shared /dev/shm."""
    limits = []
    if shared and os.path.isdir("/dev/shm"):
        shm = os.statvfs("/dev/shm")
        limits.append((shm.f_bavail * shm.f_frsize, "/dev/shm"))
    free = re.findall(r"^MemAvailable: +(\d+) kB", system("/proc/meminfo"), re.MULTILINE)
    limits += [(int(kb) * 1024, "available memory") for kb in free]
    limits += [(room, "the cgroup's limit") for room in cgroup_rooms()]
    return min(limits, default=(2**62, "no limit known"))


def cgroup_rooms(root: str = "/") -> list[int]:
    """Return the bytes that each cgroup of this process, from its own up to the topmost, can still have; none where nothing limits it.

    A job's limit is that of a cgroup far below the topmost, such as `job_17/step_0`. Files that were read and can be dropped count as room.
    """
    rooms: list[int] = []
    named = re.findall(r"^\d+:(.*?):(.*)$", system(f"{root}/proc/self/cgroup"), re.MULTILINE)
    for mount, kind, top, used, cache in (
        ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        path = next((path for kinds, path in named if kind in kinds.split(",")), "/")
        own = Path(os.path.normpath(f"/{path}"))  # of a container it may be the host's: then only the topmost is there
        for group in (own, *own.parents):
            folder = Path(root, mount, str(group).lstrip("/"))
            with contextlib.suppress(OSError, ValueError):  # without a limit it is "max", or the file is not there
                rooms.append(int((folder / top).read_text()) - int((folder / used).read_text()))
                kept = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                rooms[-1] += int(kept.group(1)) if kept else 0
    return rooms


def installed_gpus() -> list[str]:
    """Return a name of each GPU of this node for CUDA_VISIBLE_DEVICES, whatever that says now: UUIDs, or numbers without nvidia-smi.

    A GPU that is split into MIG instances counts as these. The list is empty where the driver is not installed.
    """
    if listed := output(["nvidia-smi", "-L"]):
        found = re.findall(r"UUID: ((?:GPU|MIG)-[^)]+)", listed)
        split = {gpu for gpu, part in itertools.pairwise(found) if part[:3] == "MIG" and gpu[:3] == "GPU"}
        return [name for name in found if name not in split]
    with contextlib.suppress(OSError):
        return [str(i) for i in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    return []


def visible_gpus() -> list[str]:
    """Return the GPUs that a process started here may use: those of CUDA_VISIBLE_DEVICES where it is set, else all of the node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed_gpus()
    names = [name.strip() for name in visible.split(",")]
    hidden = [i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")]  # CUDA reads no further
    return names[: hidden[0]] if hidden else names
