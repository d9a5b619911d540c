"""What a network changes. page.py makes its tables.

    python -m dpfl_mpi.sweep reproduction/network.py      # compute the Runs
    python reproduction/network.py --collect results      # write network.csv
    python analysis/hours.py RESULT...                    # draw some of them

CIFAR-10 Patho(3), N = 100, B_c = 0.1N, three partitions, 160 local epochs, two profiles. DPFL, a
random graph and pairwise choice run with models up to 1 or 5 rounds old, and with two codecs, one
change at a time; FedAvg+FT and Local for comparison.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.figures.command import gather
from dpfl_mpi.figures.hours import measure
from dpfl_mpi.figures.names import method_name
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.command_line import Parser

FILE = Path(__file__).with_suffix(".csv")
SEEDS = (42, 32, 52)  # one partition each
PROFILES = ("phones", "hospitals")
STALENESS = ({"staleness": 1}, {"staleness": 5})
CODECS = ({"codec": "int8"}, {"codec": "topk:0.1"})
CHANGES: tuple[dict[str, Any], ...] = ({}, *STALENESS, *CODECS)


def runs(seed: int) -> Iterator[Run]:
    """Yield the Runs of a partition, all of 160 local epochs.

    Methods with a graph train 10 epochs before round 1, FedAvg+FT the last 10 for fine-tuning.
    """
    for network in PROFILES:
        same = {"dataset": "cifar10", "budget": "0.1N", "seed": seed, "network": network}
        for method in ("dpfl", "random_graph", "pairwise"):
            yield from (Run(**same, method=method, rounds=30, **change) for change in CHANGES)
        yield Run(**same, method="fedavg", rounds=30, finetune_epochs=10)
        yield Run(**same, method="local", rounds=32)


RUNS = [run for seed in SEEDS for run in runs(seed)]


def lines_of(result: Result) -> pd.DataFrame:
    """Return a line per time; of fine-tuned models one, when the slowest client has tuned."""
    run, lines = result.run, measure(result)
    if run.finetune_epochs:
        steps = run.finetune_epochs * -(-result["client/n_train"] // run.batch_size)
        hours = (steps * result["network/step"]).max() / 3600
        accuracy = 100 * np.nanmean(result["best/test_acc"])
        lines = lines.tail(1)
        lines = lines.assign(hours=lines["hours"] + hours, accuracy=accuracy)
    words = [method_name(run)]
    words += [f"staleness {run.staleness}"] if run.staleness else []
    words += [str(run.codec)] if run.codec else []
    columns = {"network": str(run.network), "row": ", ".join(words), "seed": run.seed}
    return lines.assign(**columns, run=result.path.stem[-8:])


@in_a_sentence
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--collect", metavar="DIR", required=True, help="folder of the results")
    folder = parser.parse_args().collect
    finished = [result for result in gather(RUNS, folder)[0] if result.finished]
    print(f"{len(finished)} of {len(RUNS)} Runs are finished in {folder}")
    if finished:
        pd.concat(map(lines_of, finished)).round(4).to_csv(FILE, index=False)
        print(FILE)


if __name__ == "__main__":
    exit_with(main)
