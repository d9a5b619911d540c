"""What ranks cost: two ranks of one run on two cores against two independent runs of one rank, side by side.

    python benchmarks/ranks.py --data data/cifar10.h5 [--clients 20] [--rounds 4] [--epochs 5]

Both do the same work: one run of N clients on two ranks against two runs at once of N/2 clients each on one rank (Local, so that nothing but
training and scoring happens). Printed: client-steps per second of both, the share that the two ranks reach, and how much of a DPFL round exchange and recording
take. The three are run in turn, `repeats` times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES


def launch(ranks: int, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Return the running program."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [
        "mpirun",
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "dpfl_mpi",
        "--quiet",
        "--fresh",
        "--out",
        str(out),
        *flags,
    ]
    return subprocess.Popen(command, env=env)


def throughput(path: Path) -> float:
    """Return gradient steps per second of training in the rounds after the first (slowest rank, waits for it included)."""
    with Result(path) as result:
        steps = result["round/gradient_steps"]
        seconds = result["seconds/train"][2:, 2] + result["seconds/evaluate"][2:, 2]
        return float((steps[-1] - steps[1]) / seconds.sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="data/cifar10.h5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs a round")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    shares, overheads = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            common = (
                "--dataset",
                "cifar10",
                "--data",
                args.data,
                "--rounds",
                str(args.rounds),
                "--clients",
                str(args.clients),
                "--tau_train",
                str(args.epochs),
            )
            local = (*common, "--method", "local")
            both = [launch(1, Path(folder, f"{i}.h5"), *local, "--seed", str(i)) for i in range(2)]
            assert [p.wait() for p in both] == [0, 0]
            apart = sum(throughput(Path(folder, f"{i}.h5")) for i in range(2))
            assert launch(2, Path(folder, "two.h5"), *local).wait() == 0
            together = throughput(Path(folder, "two.h5"))
            shares.append(together / apart)
            assert launch(2, Path(folder, "dpfl.h5"), *common, "--tau_init", "1").wait() == 0
            with Result(Path(folder, "dpfl.h5")) as result:
                phase = {n: result[f"seconds/{n}"][1:, 2].sum() for n in PHASES}
            overheads.append((phase["exchange"] + phase["write"]) / sum(phase.values()))
            print(f"two runs of one rank {apart:.0f} steps/s, one run of two ranks {together:.0f} steps/s, share {shares[-1]:.3f}; "
                  f"exchange and recording {100 * overheads[-1]:.1f} % of a DPFL round")  # fmt: skip
    print(
        f"ratio ranks: {statistics.median(shares):.3f}x   share exchange+recording: {100 * statistics.median(overheads):.1f} %"
    )
