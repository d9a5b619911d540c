"""What a checkpoint costs: `[mpirun -n R] python benchmarks/checkpoint_cost.py [FOLDER]` saves and reads back K = 100 CNNs per rank.

Prints seconds and MB for the state of DPFL: rows, momentum and best rows, 62,006 parameters each. The folder's disk is what is measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from mpi4py import MPI

from dpfl_mpi.mpi.world import World
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.survival.checkpoint import Checkpoints

K, W, REPEATS = 100, 62_016, 5


def main() -> None:
    """Save and restore a few times and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=".", help="whose disk is measured")
    args = parser.parse_args()
    world = World(MPI.COMM_WORLD)
    n = K * world.size
    mine = {
        "best": torch.rand(K, W), "best_round": np.zeros(K, np.int64), "best_val": np.zeros(K), "best_test": np.zeros(K),
        "best_confusion": np.zeros((K, 10, 10), np.int64), "last_test": np.zeros(K), "epochs": np.zeros(K, np.int64),
        "steps": np.zeros(K, np.int64),
    }  # fmt: skip
    shared = {
        "alive": np.ones(n, bool),
        "budget": np.zeros(n, np.int64),
        "diverged_round": np.zeros(n, np.int64),
    }
    parts = SimpleNamespace(
        round=0, about={"data_sha256": "", "partition_sha256": ""}, n=n, training=SimpleNamespace(momentum={"w": torch.rand(K, W)}),
        state=lambda: (mine, shared), set_state=lambda number, values, momentum: None,
        members=SimpleNamespace(owner=np.repeat(np.arange(world.size), K), row_of=np.tile(np.arange(K), world.size)),
        backend=SimpleNamespace(ensemble=SimpleNamespace(device=torch.device("cpu"))),
        ids=np.arange(K) + K * world.rank,
    )  # fmt: skip
    run, state = Run().resolve(), {"client": {"w": torch.rand(K, W)}, "shared": {}}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(world.decide(lambda: folder)) / "x.h5"
        recorder = Recorder(path, run, {}, {}) if world.root else None
        save, load = [], []
        for parts.round in range(REPEATS):
            checkpoints = Checkpoints(path, run, Job(), world)
            start = time.perf_counter()
            checkpoints.save(parts, state, recorder)
            save.append(time.perf_counter() - start)
            start = time.perf_counter()
            assert checkpoints.restore(parts) is not None
            load.append(time.perf_counter() - start)
        if world.root:
            size = 3 * K * W * 4 / 1e6
            print(
                f"{world.size} ranks x {K} clients, {size:.0f} MB per rank: "
                f"save {np.median(save):.2f} s ({np.min(save):.2f} to {np.max(save):.2f}), restore {np.median(load):.2f} s"
            )
            recorder.abandon()


if __name__ == "__main__":
    main()
