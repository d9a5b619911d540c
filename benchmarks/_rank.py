"""One rank of `python -m dpfl_mpi`, watched: its end writes FOLDER/RANK.json.

    mpirun -n R python benchmarks/_rank.py FOLDER FLAGS

- first_step: seconds from the start of the process to the first gradient step.
- torch: seconds of importing torch.
- imported_private: memory after the imports, bytes.
- resident: largest resident memory, with windows of other ranks of this node that it wrote to.
- private: largest memory without what is shared, sampled.
- samples: bytes of this rank's samples and labels.
- read: bytes by which resident memory grew while they were read.
"""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

SAMPLE_S = 0.05  # between two looks at the memory


def seconds_since_start() -> float:
    """Return the age of this process, by the kernel's clock of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def memory(name: str) -> int:
    """Return a line of /proc/self/status in bytes: "VmRSS", "RssAnon"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    start = time.perf_counter()
    import torch  # timed by itself: it is no part of the program's start

    found: dict[str, Any] = {"torch": time.perf_counter() - start, "private": 0}
    from dpfl_mpi.__main__ import main as program
    from dpfl_mpi.federation.training import Training
    from dpfl_mpi.numerics.clients import Clients

    found["imported_private"] = memory("RssAnon")
    local_opt, read = Training.local_opt, Clients.__init__

    def first(self: Training, *args: Any, **options: Any) -> torch.Tensor:
        found["first_step"] = seconds_since_start()
        Training.local_opt = local_opt  # type: ignore[method-assign]
        return local_opt(self, *args, **options)

    def watched(self: Clients, *args: Any, **options: Any) -> None:
        before = memory("VmRSS")
        read(self, *args, **options)
        found["read"] = memory("VmRSS") - before
        found["samples"] = sum(t.nbytes for t in (self.x, self.y, self.score_x, self.score_y))

    Training.local_opt = first  # type: ignore[method-assign]
    Clients.__init__ = watched  # type: ignore[method-assign]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            found["private"] = max(found["private"], memory("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    program(sys.argv[2:])
    ended.set()
    watcher.join()
    from mpi4py import MPI

    found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(sys.argv[1], f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
