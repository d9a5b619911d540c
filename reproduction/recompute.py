"""Recompute one Run of the page and hold it to its lines: `python reproduction/recompute.py RUN` (eight hex digits of a runs.csv).

Prints how many clients have the same accuracy, to the last digit, and ends with 1 where not all have. Same bits are promised on the CPUs that the
README of the project names; elsewhere a few clients may differ.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from dpfl_mpi.data.source import open_source
from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.figures.frames import accuracy
from dpfl_mpi.mpi.start import parse
from dpfl_mpi.results import Result

HERE = Path(__file__).resolve().parent


def stored(run: str) -> tuple[pd.Series, np.ndarray]:
    for path in sorted(HERE.glob("*/runs.csv")):
        runs = pd.read_csv(path, dtype={"run": str}).set_index("run")
        if run in runs.index:
            clients = pd.read_csv(path.with_name("clients.csv"), dtype={"run": str})
            return runs.loc[run], clients[clients["run"] == run].sort_values("client")["test_acc"].to_numpy()
    raise UserError(f"RUN is {run}; allowed are the first columns of {HERE}/*/runs.csv")


@in_a_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("recomputed"), metavar="DIR")
    args = parser.parse_args()
    line, expected = stored(args.run)
    flags = shlex.split(line["flags"])
    asked, _ = parse(flags)
    if (sha := open_source(asked).sha256) != line["data_sha256"]:
        hashes = f"sha256 {sha[:12]}, {line['data_sha256'][:12]} there"
        print(f"note: these are other images than the page's ({hashes}); few clients will agree", flush=True)
    command = ["mpirun", "-n", str(args.ranks), sys.executable, "-m", "dpfl_mpi", *flags, f"--results={args.results}"]
    print(shlex.join(command), flush=True)
    if code := subprocess.run(command, check=False).returncode:
        return code
    with Result(asked.path(args.results)) as result:
        got = accuracy(result)
    same = np.isclose(got, expected, rtol=0, atol=1e-12, equal_nan=True)
    means = f"mean {100 * np.nanmean(got):.4f}, stored {100 * np.nanmean(expected):.4f}"
    print(f"{same.sum()} of {len(same)} clients have the same accuracy; {means}")
    return int(not same.all())


if __name__ == "__main__":
    exit_with(main)
