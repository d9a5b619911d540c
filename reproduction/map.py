"""Where does choosing pay? Harm, images per client and budget: the runs, and map.csv.

    python reproduction/map.py --prepare CIFAR10 --seeds 201   # prepare data, 3.5 GB a seed
    python -m dpfl_mpi.sweep reproduction/map.py --mixed       # compute runs; again to go on
    python reproduction/map.py --collect results               # add finished runs to map.csv
    python reproduction/map.py                                 # print the map

harm.py makes the data: 100 clients in four groups. A cell is what groups disagree in (a share of
the classes' names, or an angle of rotation), the images of a client, B_c and a seed; all its rows
train 160 local epochs. *One partner* is a round of B_c = 2, whose clients average with one random
client each: what they lose by it (`harm`, points of validation accuracy) is known before a choice.
Runs of data that are not prepared are left out, and those that map.csv holds.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from arena import GROUPS, known

from dpfl_mpi import prepare
from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.figures.command import gather
from dpfl_mpi.figures.tables import interval, markdown
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.command_line import Parser

HERE = Path(__file__).resolve().parent
FILE, DATASET = HERE / "map.csv", "reproduction/harm.py"
SEEDS = range(201, 206)  # fresh: no other run has them
HARMS = [(share, 0) for share in (0, 20, 40, 70, 100)]  # percent of the classes, degrees
HARMS += [(0, degrees) for degrees in (15, 30, 60, 90)]
IMAGES, BUDGETS = (50, 100, 200, 500), ("0.05N", "0.2N")
RANDOM, ORACLE, PARTNER = "Random graph", "Oracle", "One partner"
ROWS = {
    RANDOM: {"method": "random_graph"},
    ORACLE: {"method": "random_graph", "reach": GROUPS},
    "DPFL": {"method": "dpfl", "rounds": 30},
    "Nearest": {"method": "nearest"},
    "Spectral": {"method": "spectral"},
    PARTNER: {"method": "random_graph", "rounds": 1},
}


class Cell(NamedTuple):
    share: int
    degrees: int
    images: int
    budget: str
    seed: int
    row: str

    def data(self) -> str:
        return f"data/harm-{self.share}-{self.degrees}-{self.images}-{self.seed}.h5"

    def run(self) -> Run:
        fields = {"rounds": 32} | ROWS[self.row]
        same = {"dataset": DATASET, "data": self.data(), "budget": self.budget, "seed": self.seed}
        return Run(**same, **fields)


def cells() -> list[Cell]:
    """Return all cells, a seed after the other, few images first."""
    out = []
    for seed, images, harm in itertools.product(SEEDS, IMAGES, HARMS):
        out.append(Cell(*harm, images, "2", seed, PARTNER))
        rows = [row for row in ROWS if row != PARTNER]
        out += [Cell(*harm, images, *each) for each in itertools.product(BUDGETS, [seed], rows)]
    return out


CELLS = cells()
DONE = set(known(FILE).reindex(columns=Cell._fields).itertuples(index=False, name=None))
RUNS = [c.run() for c in CELLS if c not in DONE and Path(c.data()).is_file()]


def line_of(cell: Cell, result: Result) -> dict:
    """Return a cell's scores, percent, means over clients; `harm` in points, in the first round."""
    line = cell._asdict() | {"run": result.path.stem[-8:]}
    for name in ("best", "last"):
        line[name] = 100 * result[f"{name}/test_acc"].mean()
    lost = result["round/val_acc"][1] - result["mixed/val_acc"][1]
    return line | {"harm": 100 * lost.mean(), "commit": result.starts()[-1]["commit"]}


def collect(folder: str) -> None:
    """Add the finished cells of a folder to map.csv, in the order of CELLS."""
    before = known(FILE).to_dict("records")
    lines = {tuple(line[name] for name in Cell._fields): line for line in before}
    for cell in (cell for cell in CELLS if cell not in lines):
        for result in gather([cell.run()], folder)[0]:
            if result.finished:
                lines[cell] = line_of(cell, result)
    table = pd.DataFrame([lines[cell] for cell in CELLS if cell in lines]).round(4)
    table.to_csv(FILE, index=False)
    print(f"{len(table)} of {len(CELLS)} cells are in {FILE.name}")


def gains(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line per place of the map: harm, and what each row gains on the random graph."""
    place = ["share", "degrees", "images", "budget"]
    measured = runs[runs["row"] == PARTNER].groupby(place[:-1])["harm"].mean()
    out = []
    for names, part in runs[runs["row"] != PARTNER].groupby(place, sort=False):
        by_row = part.pivot(index="seed", columns="row", values="best")
        line = dict(zip(place, names, strict=True)) | {"harm": f"{measured[names[:-1]]:+.1f}"}
        for row in ROWS:
            if row in by_row and row != RANDOM:
                points = (by_row[row] - by_row[RANDOM]).dropna().to_numpy()
                line[row] = f"{points.mean():+.1f} ± {interval([points])[1]:.1f} ({len(points)})"
        out.append(line)
    return pd.DataFrame(out)


@in_a_sentence
def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--prepare", metavar="CIFAR10", help="prepare the data from what `prepare cifar10` takes")
    add("--seeds", type=int, nargs="+", default=list(SEEDS), help="of these seeds")
    add("--collect", metavar="DIR", help="add the finished runs of this folder to map.csv")
    args = parser.parse_args()
    if args.prepare:
        for seed, images, (share, degrees) in itertools.product(args.seeds, IMAGES, HARMS):
            options = {"share": share, "degrees": degrees, "images": images, "seed": seed}
            flags = [f"--{name}={value}" for name, value in options.items()]
            out = Cell(share, degrees, images, "2", seed, PARTNER).data()
            prepare.main([DATASET, "--source", args.prepare, "--out", out, *flags])
    elif args.collect:
        collect(args.collect)
    else:
        print(markdown(gains(known(FILE))))


if __name__ == "__main__":
    exit_with(main)
