"""Recompute one Run of the page and compare it: `python reproduction/recompute.py RUN`.

RUN is eight hex digits from a runs.csv. It prints how many clients have the same accuracy, to the
last digit, and exits with 1 unless all have. The same bits are promised on x86 with Linux
(docs/kernels.md); elsewhere a few clients may differ.
"""

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
from dpfl_mpi.settings.command_line import Parser

HERE = Path(__file__).resolve().parent


def stored(run: str) -> tuple[pd.Series, np.ndarray]:
    """Return the line of a Run in a runs.csv, and its clients' accuracies, 0 to 1."""
    for path in sorted(HERE.glob("*/runs.csv")):
        runs = pd.read_csv(path, dtype={"run": str}).set_index("run")
        if run in runs.index:
            clients = pd.read_csv(path.with_name("clients.csv"), dtype={"run": str})
            clients = clients[clients["run"] == run].sort_values("client")
            return runs.loc[run], clients["test_acc"].to_numpy()
    raise UserError(f"RUN is {run}; allowed are the first columns of {HERE}/*/runs.csv")


@in_a_sentence
def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("recomputed"), metavar="DIR")
    args = parser.parse_args()
    line, expected = stored(args.run)
    flags = shlex.split(line["flags"])
    run, _ = parse(flags)
    sha, page_sha = open_source(run).sha256, line["data_sha256"]
    if sha != page_sha:
        hashes = f"sha256 {sha[:12]} instead of {page_sha[:12]}"
        print(f"note: these are not the page's images ({hashes}); few clients will agree")
    command = ["mpirun", "-n", str(args.ranks), sys.executable, "-m", "dpfl_mpi"]
    command += [*flags, f"--results={args.results}"]
    print(shlex.join(command), flush=True)
    if code := subprocess.run(command, check=False).returncode:
        return code
    with Result(run.path(args.results)) as result:
        got = accuracy(result)
    same = np.isclose(got, expected, rtol=0, atol=1e-12, equal_nan=True)
    means = f"mean {100 * np.nanmean(got):.4f}, stored {100 * np.nanmean(expected):.4f}"
    print(f"{same.sum()} of {len(same)} clients have the same accuracy; {means}")
    return int(not same.all())


if __name__ == "__main__":
    exit_with(main)
