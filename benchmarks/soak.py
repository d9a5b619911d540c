"""Whether a long run stays as small as it began: memory, files and windows of each rank.

    mpirun -n 2 python benchmarks/soak.py [ROUNDS=5000] [--SETTING=VALUE ...]

A tiny run with a checkpoint every 100 rounds. It fails where memory grew by more than 5 %, or the
number of open files or windows grew, after the first tenth of the rounds. `bad_network.py` starts
it on two hosts.
"""

import os
import sys
import tempfile
from pathlib import Path

from _scale import MB, options
from mpi4py import MPI

from dpfl_mpi import __main__
from dpfl_mpi.engine.record import Record
from dpfl_mpi.mpi.world import World

FLAGS = "--clients=4 --model=mlp --budget=2 --tau_init=1 --tau_train=1 --checkpoint_every=100"


def usage() -> tuple[float, int, int]:
    """Return resident MB, open files, and mapped segments of shared memory (of RMA windows)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = sum("/dev/shm" in line or "SYSV" in line for line in maps)
    files = len(os.listdir("/proc/self/fd"))
    return pages * os.sysconf("SC_PAGE_SIZE") / MB, files, segments


def main() -> int:
    """Return 1 where something grew."""
    parser = options(__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=5000)
    known, flags = parser.parse_known_args()
    by_round, record_round = {}, Record.round

    def watched(record, state):
        record_round(record, state)
        if record.parts.round % max(1, known.rounds // 10) == 0:
            by_round[record.parts.round] = usage()

    Record.round = watched
    with tempfile.TemporaryDirectory() as folder:  # of root's, which alone writes there
        fixed = [*FLAGS.split(), "--quiet", f"--rounds={known.rounds}", f"--out={folder}/soak.h5"]
        __main__.main(fixed + flags)
        world = World(MPI.COMM_WORLD)
        world.agree(False)
    first, last = by_round[sorted(by_round)[:2][-1]], by_round[max(by_round)]
    grew = last[0] > 1.05 * first[0] or last[1] > first[1] or last[2] > first[2]
    for rank in range(world.size):
        world.agree(False)  # one rank prints after the other
        if rank == world.rank:
            for t, (memory, files, segments) in sorted(by_round.items()):
                print(f"rank {rank}  round {t:5d}  {memory:7.1f} MB  {files:3d} files  "
                      f"{segments:3d} segments", flush=True)  # fmt: skip
            print(f"rank {rank}  {'GREW' if grew else 'flat'}", flush=True)
    return int(world.agree(grew))


if __name__ == "__main__":
    sys.exit(main())
