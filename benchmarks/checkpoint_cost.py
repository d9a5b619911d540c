"""What a checkpoint costs: seconds to save and to read K = 100 CNNs per rank.

    [mpirun -n R] python benchmarks/checkpoint_cost.py [FOLDER]

The state is that of DPFL: models, momentum and best models, 62,006 parameters each. What is
measured is the disk that FOLDER is on; what was just written may be read from memory.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
from _scale import MB, flags_for, make_data, options
from mpi4py import MPI

from dpfl_mpi.engine.build import build
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.survival.checkpoint import Checkpoints

K, REPEATS = 100, 5


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="whose disk is measured")
    args = parser.parse_args()
    world = World(MPI.COMM_WORLD)
    n = K * world.size
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        folder = Path(world.decide(lambda: own))
        world.decide(lambda: make_data(folder / "data.h5", n, 5, 2, 32))
        fields = flags_for(str(folder / "data.h5"), model="cnn", clients=n, budget=10)
        run = Run(**fields).resolve()
        parts = build(run, Job(), world)
        w = parts.fed.local_opt(parts.fed.common_row(), epochs=1)
        parts.fed.evaluate(w)
        state = {"client": {"w": w}, "shared": {}}
        path = folder / "x.h5"
        recorder = Recorder(path, run, {}, {}) if world.root else None
        save, load = [], []
        for number in range(REPEATS):
            parts.begin_round(number)
            checkpoints = Checkpoints(path, run.key(), Job(), world)
            start = time.perf_counter()
            checkpoints.save(parts, state, recorder)
            save.append(time.perf_counter() - start)
            start = time.perf_counter()
            assert checkpoints.restore(parts) is not None
            load.append(time.perf_counter() - start)
        if world.root:
            size = 3 * w.nbytes / MB
            print(f"{world.size} ranks x {K} clients, {size:.0f} MB per rank: "
                  f"save {np.median(save):.2f} s ({min(save):.2f} to {max(save):.2f}), "
                  f"restore {np.median(load):.2f} s")  # fmt: skip
            recorder.abandon()
        parts.close()


if __name__ == "__main__":
    main()
