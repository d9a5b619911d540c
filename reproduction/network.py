"""What a network changes: `python -m dpfl_mpi.sweep reproduction/network.py` computes the Runs.
`python reproduction/network.py --collect DIR` writes network.csv, a line per time of each finished result there; page.py makes the tables of
network.md of it.

CIFAR-10 Patho(3), N = 100, B_c = 0.1N, three partitions, 160 local epochs, under two profiles. DPFL, a random graph and pairwise choice are tried with
models up to 1 and 5 rounds old, and with two codecs, one at a time; FedAvg+FT and Local beside them. `python analysis/hours.py RESULT...` draws them.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.figures.command import gather
from dpfl_mpi.figures.hours import measure as over_time
from dpfl_mpi.figures.names import method_name
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

FILE = Path(__file__).with_suffix(".csv")
SEEDS = (42, 32, 52)  # a partition each
PROFILES = ("phones", "hospitals")
CHANGES: tuple[dict[str, Any], ...] = ({}, {"staleness": 1}, {"staleness": 5}, {"codec": "int8"}, {"codec": "topk:0.1"})


def runs(seed: int) -> Iterator[Run]:
    """Yield the Runs of a partition. DPFL and its like train 10 epochs before round 1 and 5 in each of 30; the others 5 in each of 32 or 30, and tune 10."""
    for network in PROFILES:
        same = {"dataset": "cifar10", "budget": "0.1N", "seed": seed, "network": network}
        for method in ("dpfl", "random_graph", "pairwise"):
            yield from (Run(**same, method=method, rounds=30, **change) for change in CHANGES)
        yield Run(**same, method="fedavg", rounds=30, finetune_epochs=10)
        yield Run(**same, method="local", rounds=32)


RUNS = [run for seed in SEEDS for run in runs(seed)]


def lines_of(result: Result) -> pd.DataFrame:
    """Return a line per time; of tuned models one line, after as many steps of their own as the slowest client takes for that."""
    run, lines = result.run, over_time(result)
    if run.finetune_epochs:
        steps = run.finetune_epochs * -(-result["client/n_train"] // run.batch_size)
        end, accuracy = (steps * result["network/step"]).max() / 3600, 100 * np.nanmean(result["best/test_acc"])
        lines = lines.tail(1).assign(hours=lambda last: last["hours"] + end, accuracy=accuracy)
    changes = [f"staleness {run.staleness}"] * (run.staleness > 0) + [str(run.codec)] * bool(run.codec)
    row = ", ".join([method_name(run), *changes])
    return lines.assign(network=str(run.network), row=row, seed=run.seed, run=result.path.stem[-8:])


def collect(folder: str) -> None:
    results, _ = gather(RUNS, folder)
    done = [result for result in results if result.finished]
    if done:
        pd.concat(map(lines_of, done)).round(4).to_csv(FILE, index=False)
    print(f"{len(done)} of {len(RUNS)} Runs are finished in {folder}{f', written to {FILE}' if done else ''}")


@in_a_sentence
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", metavar="DIR", required=True, help="write network.csv of this folder's results")
    collect(parser.parse_args().collect)


if __name__ == "__main__":
    exit_with(main)
