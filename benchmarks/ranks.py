"""What ranks cost: two ranks of one run against two runs of one rank, side by side on two cores.

    python benchmarks/ranks.py --data data/cifar10.h5 [--clients 20] [--rounds 4] [--epochs 5]

All runs have N clients that train alone (Local), so there is only training and scoring. Printed:
steps per second of both, the share that the two ranks reach, and the share of a DPFL round that
exchange and recording take. The three are run in turn, `repeats` times.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _scale import PHASES, launch

from dpfl_mpi.results import Result
from dpfl_mpi.settings.fields import to_flags


def start(ranks: int, out: Path, fields: dict[str, Any]) -> subprocess.Popen[bytes]:
    flags = to_flags(fields | {"quiet": True, "fresh": True, "out": out})
    return launch(ranks, [sys.executable, "-m", "dpfl_mpi", *flags])


def throughput(path: Path) -> float:
    """Return gradient steps per second in the rounds after the first, by the slowest rank."""
    with Result(path) as result:
        steps = result["round/gradient_steps"]
        seconds = result["seconds/train"][2:, 2] + result["seconds/evaluate"][2:, 2]
        return float((steps[-1] - steps[1]) / seconds.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="data/cifar10.h5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs a round")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dpfl = {"dataset": "cifar10", "tau_init": 1, "tau_train": args.epochs}
    dpfl |= {name: getattr(args, name) for name in ("data", "clients", "rounds")}
    local = dpfl | {"method": "local"}
    shares, overheads = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            first, second, both, of_dpfl = (Path(folder, f"{i}.h5") for i in range(4))
            alone = [start(1, out, local | {"seed": i}) for i, out in enumerate((first, second))]
            assert [process.wait() for process in alone] == [0, 0]
            assert start(2, both, local).wait() == 0
            assert start(2, of_dpfl, dpfl).wait() == 0
            apart, together = throughput(first) + throughput(second), throughput(both)
            shares.append(together / apart)
            with Result(of_dpfl) as result:
                phase = {n: result[f"seconds/{n}"][1:, 2].sum() for n in PHASES}
            overheads.append(100 * (phase["exchange"] + phase["write"]) / sum(phase.values()))
            print(f"two runs of one rank {apart:.0f} steps/s, one run of two ranks "
                  f"{together:.0f} steps/s, share {shares[-1]:.3f}; exchange and recording "
                  f"{overheads[-1]:.1f} % of a DPFL round")  # fmt: skip
    print(f"ratio ranks: {statistics.median(shares):.3f}x   "
          f"share exchange+recording: {statistics.median(overheads):.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
