"""One rank of `python -m dpfl_mpi`, watched: `mpirun -n R python benchmarks/_rank.py FOLDER FLAGS` writes FOLDER/RANK.json at its end.

Seconds are counted from the start of the process (by the kernel's clock, 10 ms), bytes are of this rank: `resident` the largest resident
memory (other ranks' windows that it wrote to are part of it where they share a node), `private` the largest without shared memory, sampled,
`imported` (and `imported_private`) memory after the
imports, `samples` this rank's images and labels, `read` what resident memory grew by while they were read.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

SAMPLE = 0.05  # seconds between two looks at the memory


def since_start() -> float:
    """Return the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def memory(name: str) -> int:
    """Return a line of /proc/self/status in bytes: "VmRSS", "RssAnon"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Run the program with the flags of this command line and note what it took."""
    folder = Path(sys.argv[1])
    began = time.perf_counter()
    import torch  # timed by itself: what it costs is no part of the program's start

    seen: dict[str, Any] = {"torch": time.perf_counter() - began, "private": 0}
    from dpfl_mpi.__main__ import main as program
    from dpfl_mpi.federation.training import Training
    from dpfl_mpi.numerics.clients import Clients

    seen["imported"], seen["imported_private"] = memory("VmRSS"), memory("RssAnon")
    local_opt = Training.local_opt

    def first(self: Training, *args: Any, **how: Any) -> torch.Tensor:
        seen["first_step"] = since_start()
        Training.local_opt = local_opt  # type: ignore[method-assign]
        return local_opt(self, *args, **how)

    Training.local_opt = first  # type: ignore[method-assign]
    read = Clients.__init__

    def watched(self: Clients, *args: Any) -> None:
        start = memory("VmRSS")
        read(self, *args)
        seen["read"] = memory("VmRSS") - start
        seen["samples"] = sum(t.nbytes for t in (self.x, self.y, self.score_x, self.score_y))

    Clients.__init__ = watched  # type: ignore[method-assign]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE):
            seen["private"] = max(seen["private"], memory("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    program(sys.argv[2:])
    ended.set()
    watcher.join()
    from mpi4py import MPI

    seen["whole"], seen["resident"] = since_start(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
