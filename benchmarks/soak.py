"""A long run stays as small as it began: `mpirun -n 2 python benchmarks/soak.py [ROUNDS=5000]` prints memory, files and windows of each rank.

A tiny run with a checkpoint every 100 rounds. Fails where memory grew by more than 5 % or a file handle or window was left, after the
first tenth of the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from mpi4py import MPI

from dpfl_mpi.engine import train
from dpfl_mpi.engine.record import Record
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job, Run


def usage() -> tuple[float, int, int]:
    """Return resident memory in MB, open files, and mapped shared-memory segments (an RMA window is one or a few)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    segments = sum("/dev/shm" in line or "SYSV" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir("/proc/self/fd")), segments


def main() -> int:
    """Run the rounds and return 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=5000)
    rounds = parser.parse_args().rounds
    world, seen, whole = World(MPI.COMM_WORLD), {}, Record.round

    def watched(record, state):
        whole(record, state)
        if record.parts.round % max(1, rounds // 10) == 0:
            seen[record.parts.round] = usage()

    Record.round = watched
    run = Run(clients=4, rounds=rounds, model="mlp", tau_init=1, tau_train=1, budget=2).resolve()
    with tempfile.TemporaryDirectory() as folder:
        out = world.decide(lambda: folder)
        train.train(run, Job(out=f"{out}/soak.h5", quiet=True, checkpoint_every="100"), world)
    first, last = seen[max(1, rounds // 10)], seen[max(seen)]
    grew = last[0] > 1.05 * first[0] or last[1] > first[1] or last[2] > first[2]
    for rank in range(world.size):
        world.agree(False)  # one after the other
        if rank == world.rank:
            for t, (memory, files, segments) in sorted(seen.items()):
                print(
                    f"rank {rank}  round {t:5d}  {memory:7.1f} MB  {files:3d} files  {segments:3d} segments", flush=True
                )
            print(f"rank {rank}  {'GREW' if grew else 'flat'}", flush=True)
    return int(world.agree(grew))


if __name__ == "__main__":
    sys.exit(main())
