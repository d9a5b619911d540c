"""The rivals of the map, tuned by validation on a seed that no table reports.

    python -m dpfl_mpi.prepare reproduction/harm.py --source CIFAR10 --images 100 --seed 42 \
        --out data/harm-100-0-100-42.h5
    python -m dpfl_mpi.sweep reproduction/tuned.py          # compute the grids; again to go on
    python reproduction/tuned.py --collect results          # add finished runs to tuned.csv

All rows of `GRIDS` train at 100 % of the names. A line of tuned.csv has the mean over clients of
each one's best validation accuracy, percent. map.py takes the best options of each row, but for L2C
and FedPAC, whose 0.01 was tried later.
"""

from dataclasses import replace
from pathlib import Path

import pandas as pd
from arena import known
from csv_files import check_folder
from map import MADE, Cell

from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.figures.command import gather
from dpfl_mpi.settings.command_line import Parser

FILE = Path(__file__).resolve().parent / "tuned.csv"
SEED = 42
GRIDS = {
    "CFL": [
        {"eps1": eps1, "eps2": 0.0, "after": after}
        for after, lengths in ((5, (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)), (10, (0.5,)), (15, (2.0,)))
        for eps1 in lengths
    ],
    "DAC": [{"tau": tau} for tau in (5.0, 30.0, 100.0, 300.0, 1000.0)],
    "PENS": [{"m": m} for m in (1, 2, 5, 10)],
    # the largest alpha that FedAMP allows, and a pull of so many times lambda / alpha
    "FedAMP": [
        {"sigma": sigma, "alpha": sigma / 99, "lam": sigma / 99 * pull}
        for sigma in (1.0, 10.0, 100.0, 1000.0)
        for pull in ((0.1, 1.0, 10.0) if sigma >= 100 else (0.1, 1.0))
    ],
    "Morph": [{"beta": beta} for beta in (0.0, 50.0, 500.0)],
    "L2C": [{"eta": eta} for eta in (0.01, 0.1, 1.0, 10.0, 100.0)],
    "FedPAC": [{"lam": lam} for lam in (0.01, 0.1, 1.0)],
    "FedFomo": [
        {"epsilon": epsilon, "decay": decay}
        for epsilon, decay in ((0.3, 0.0), (0.3, 0.05), (0.0, 0.0))
    ],
}
TUNED = [
    (row, replace(Cell(MADE, 100, 0, 100, "0.2N", SEED, row).run(), options=options))
    for row, grid in GRIDS.items()
    for options in grid
]
RUNS = [run for _, run in TUNED]


@in_a_sentence
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--collect", metavar="DIR", required=True, help="a folder with results")
    folder = parser.parse_args().collect
    check_folder(folder)
    before = known(FILE).itertuples(index=False, name=None)
    validation = {(row, options): value for row, options, value in before}
    for row, run in TUNED:
        options = ", ".join(f"{name} {value:.4g}" for name, value in run.options.items())
        for result in filter(lambda result: result.finished, gather([run], folder)[0]):
            validation[row, options] = round(100 * result["round/val_acc"].max(0).mean(), 2)
    lines = [(row, options, value) for (row, options), value in validation.items()]
    lines.sort(key=lambda line: [*GRIDS].index(line[0]))
    pd.DataFrame(lines, columns=["row", "options", "validation"]).to_csv(FILE, index=False)
    print(f"{len(lines)} of {len(RUNS)} runs are in {FILE.name}")


if __name__ == "__main__":
    exit_with(main)
