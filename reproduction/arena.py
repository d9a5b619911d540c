"""Does the choice of collaborators help? page.py makes its tables.

    python -m dpfl_mpi.sweep reproduction/arena.py       # compute the cells; again when it ends
    python reproduction/arena.py --collect results       # add finished cells to the CSV files
    python reproduction/arena.py --cell "Patho(3) Oracle"   # print the commands of some cells

arena.csv has a line per finished cell, arena-clients.csv a line per client of it. `accuracy` is on
all test images of a client's classes, weighted as its own are; `own` is on its own test images.
Cells in arena.csv are not computed again, so another machine can continue. When a row changes,
remove its lines.

A cell is a setting, a row and a seed. All rows of a setting and seed have the same clients, the
same budget (B_c = 0.1N; 6 of HAR's 30 people) and the same number of local epochs: methods that
train 10 epochs before round 1 have two rounds of 5 fewer. Random graphs of DPFL's degrees take
these from a result that the first call computes. real_images.py makes exact CIFAR images and says
where HAR is, groups.py makes the groups, a file per seed.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from csv_files import check_folder, core_hours, totals
from standings import DEGREES, HAR

from dpfl_mpi.engine.saved import source_of, with_code
from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.evaluate import accuracies, of_classes
from dpfl_mpi.figures.command import gather
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.fields import changed, to_flags

HERE = Path(__file__).resolve().parent
FILE, CLIENTS = HERE / "arena.csv", HERE / "arena-clients.csv"
KEYS = ["setting", "row", "epochs", "seed"]  # of a cell
Cell = tuple[str, str, int, Run]  # setting, row, local epochs, and the Run, which has the seed
SEEDS = (42, 32, 52)  # one partition each
MORE = (1, 2, 3, 4, 5, 6, 7)
GROUPS = "groups:" + ";".join(",".join(map(str, range(g, 100, 4))) for g in range(4))
WITHIN_GROUPS = {"method": "random_graph", "reach": GROUPS}
OWN: dict[str, Any] = {"dataset": "reproduction/groups.py", "budget": "0.1N"}
DIRICHLET = {"partition": "dirichlet", "dirichlet_alpha": 0.1}
# the fields of all cells of a setting, and those of its oracle
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "CIFAR-10 Patho(3)": ({"dataset": "cifar10", "budget": "0.1N"}, {}),
    "CIFAR-10 Dir(0.1)": ({"dataset": "cifar10", "budget": "0.1N"} | DIRICHLET, {}),
    "CIFAR-10, labels moved": (OWN | {"data": "data/labels-{seed}.h5"}, WITHIN_GROUPS),
    "CIFAR-10, rotated": (OWN | {"data": "data/rotation-{seed}.h5"}, WITHIN_GROUPS),
    "CIFAR-100, superclasses": (OWN | {"data": "data/superclass-{seed}.h5"}, {}),
    "CIFAR-100 Patho(10)": ({"dataset": "cifar100", "budget": "0.1N"}, {}),
    # all have the same six classes
    HAR: ({"dataset": "pfllib", "data": "data/har.h5", "budget": 6}, None),
}
# groups of clients that differ in more than their classes; client k is in group k mod these
GROUP_COUNTS = {
    "CIFAR-10, labels moved": 4,
    "CIFAR-10, rotated": 4,
    "CIFAR-100, superclasses": 20,
    HAR: 30,
}
FIVE_SEEDS = list(SETTINGS)[2:6]  # settings with five partitions of 160 epochs
FOUR = ("Random graph", "Oracle", "Nearest", "DPFL")
UNDRAWN = "Nearest, pool 1"

BEST_FORM = "DPFL, order loss, Omega every 5"  # of DPFL, after 160 epochs
FORWARD = {"order": "loss", "search": "forward"}
ROWS: dict[str, dict[str, Any]] = {
    "DPFL": {"method": "dpfl"},
    DEGREES: {"method": "random_graph"},
    "Local": {"method": "local"},
    "FedAvg+FT": {"method": "fedavg", "finetune_epochs": 10},
    "Oracle": {"method": "oracle"},
    "Nearest": {"method": "nearest"},
    "Pairwise": {"method": "pairwise"},
    "Ditto": {"method": "ditto"},
    "Random graph": {"method": "random_graph"},
}
RIVALS = {
    name: {"method": name.lower()}
    for name in ("DAC", "FedSim", "pFedSV", "DFedPGP", "Facade", "Sketch", "PENS")
}


def choice(**options: Any) -> dict[str, Any]:
    return {"method": "dpfl_choice", "options": options}


SWITCHES = {
    UNDRAWN: {"method": "nearest", "options": {"pool": 1}},
    "Nearest, hubs 0, pool 1": {"method": "nearest", "options": {"hubs": 0.0, "pool": 1}},
    "DPFL, order loss": choice(order="loss"),
    "DPFL, neither smaller": choice(neither="smaller"),
    "DPFL, neither keep_out": choice(neither="keep_out"),
    "DPFL, order loss, neither smaller": choice(order="loss", neither="smaller"),
    "DPFL, forward": choice(**FORWARD),
    "DPFL, forward, tolerance 0.02": choice(**FORWARD, tolerance=0.02),
    "DPFL, order loss, stop": choice(order="loss", neither="smaller", stop=True),
    BEST_FORM: choice(order="loss") | {"omega_period": 5},
    "DPFL, 20 nearest": {"method": "dpfl", "candidates": 20},
    "DPFL, 20 nearest, neither smaller": choice(neither="smaller") | {"candidates": 20},
}


def cell(setting: str, row: str, seed: int, epochs: int) -> Run | None:
    """Return the Run of a cell; None without an oracle, or without the result it replays."""
    same, oracle = SETTINGS[setting]
    fields = (ROWS | RIVALS | SWITCHES)[row]
    if row == "Oracle":
        if oracle is None:
            return None
        fields = oracle or fields
    before = 10 if find("method", fields["method"]).preprocesses else 0
    rounds = (epochs - before - fields.get("finetune_epochs", 0)) // 5
    fields = same | {"seed": seed, "rounds": rounds} | fields
    if "data" in fields:
        fields["data"] = fields["data"].format(seed=seed)
    if row == DEGREES:
        if "data" in fields and not Path(fields["data"]).is_file():
            return None
        dpfl = Run(**same | fields | {"method": "dpfl"}).path()
        if not dpfl.is_file():
            return None
        fields["graphs"] = str(dpfl)
    return Run(**fields)


def cells() -> Iterator[Cell]:
    """Yield the cells, the central ones first."""
    first, central, rotated = list(SETTINGS)[:3], list(SETTINGS)[:2], list(SETTINGS)[3:6]
    wanted = []
    for seed in SEEDS:
        wanted += [(s, row, seed, 160) for s in SETTINGS if s != HAR for row in ROWS]
        wanted += [(s, row, seed, 160) for s in first for row in SWITCHES | RIVALS]
    wanted += [(s, UNDRAWN, seed, 160) for s in rotated for seed in SEEDS]
    wanted += [(s, row, seed, 160) for s in FIVE_SEEDS for seed in MORE[:2] for row in FOUR]
    every_row = ROWS | SWITCHES | RIVALS
    wanted += [(HAR, row, seed, 160) for seed in (*SEEDS, *MORE) for row in every_row]
    wanted += [(s, row, seed, 500) for seed in (*SEEDS, *MORE) for s in central for row in ROWS]
    wanted += [(s, BEST_FORM, seed, 500) for seed in SEEDS for s in central]
    for setting, row, seed, epochs in wanted:
        if run := cell(setting, row, seed, epochs):
            yield setting, row, epochs, run


def known(file: Path) -> pd.DataFrame:
    """Return the lines of a CSV file of cells or clients, none if there is no such file."""
    if not file.is_file():
        return pd.DataFrame({"run": []})
    return pd.read_csv(file, dtype={"run": str, "commit": str})


def done_in(file: Path) -> set[tuple[Any, ...]]:
    """Return the `KEYS` of the cells in a CSV file."""
    return set(known(file).reindex(columns=KEYS).itertuples(index=False, name=None))


CELLS = list(cells())
DONE = done_in(FILE)


def is_wanted(setting: str, row: str, epochs: int, seed: int) -> bool:
    """Return whether a cell, or one that takes its degrees, is not in arena.csv."""
    rows = (row, DEGREES) if row == "DPFL" else (row,)
    return any((setting, name, epochs, seed) not in DONE for name in rows)


RUNS = [run for setting, row, epochs, run in CELLS if is_wanted(setting, row, epochs, run.seed)]


def clients_of(setting: str, result: Result) -> pd.DataFrame:
    """Return a cell's clients and their scores."""
    dataset = {"dataset": result.run.dataset} if result.run.contents.get("dataset") else {}
    result.run = with_code(result.run, dataset)
    source, n = source_of(result, None), len(result["client/p"])
    rows, weights = of_classes(result, source, np.arange(n) % GROUP_COUNTS.get(setting, 1))
    accuracy = accuracies(result, source, rows, "cpu", weights)
    scores = {"accuracy": accuracy, "own": result["best/test_acc"], "last": result["last/test_acc"]}
    columns = {"run": result.path.stem[-8:], "client": np.arange(n)}
    return pd.DataFrame(columns | scores).round(6)


def line_of(run: Run, result: Result) -> dict[str, Any]:
    """Return a cell's costs: per client, but core hours of all."""
    n, total = len(result["client/p"]), totals(result)
    models = total["models_received"] / n
    return {
        "run": result.path.stem[-8:],
        "partition": result.fact("partition_sha256")[:12],
        "models": models,
        "megabytes": 4e-6 * models * int(result.fact("parameters")),
        "evaluations": total["evaluations"] / n,
        "steps": total["gradient_steps"] / n,
        "core_hours": core_hours(result),
        "commit": result.starts()[-1]["commit"],
        "flags": shlex.join(to_flags(changed(run))),
    }


def collect(
    folder: str, cells: Sequence[Cell], file: Path, clients_file: Path, scores: Sequence[str]
) -> None:
    """Add finished cells that a CSV file lacks, and `scores` of their clients to another one.

    Both files are written after each cell.
    """
    check_folder(folder)
    runs, clients, done = known(file), known(clients_file), done_in(file)
    for setting, row, epochs, run in cells:
        key = (setting, row, epochs, run.seed)
        results = gather([run], folder)[0] if key not in done else []
        for result in filter(lambda result: result.finished, results):
            line = dict(zip(KEYS, key, strict=True)) | line_of(run, result)
            runs = in_order(pd.concat([runs, pd.DataFrame([line])]))
            of_cell = clients_of(setting, result)[["run", "client", *scores]]
            clients = pd.concat([clients[clients["run"] != line["run"]], of_cell])
            clients = runs[["run"]].merge(clients, on="run").astype({"client": int})
            runs.to_csv(file, index=False)
            clients.to_csv(clients_file, index=False)
    print(f"{len(runs)} of {len(cells)} cells are in {file.name}")


def in_order(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of cells by setting, epochs, row and seed, rounded."""
    runs = runs.astype({"epochs": int, "seed": int}).round(4)  # of an empty file they are floats
    rows = list(ROWS | RIVALS | SWITCHES)
    places = {"setting": list(SETTINGS).index, "row": rows.index}
    by = ["setting", "epochs", "row", "seed"]
    return runs.sort_values(by, key=lambda c: c.map(places[c.name]) if c.name in places else c)


def prepared(data: str) -> str:
    """Return the command that prepares a data file; CLONES, OUT.zip are as in real_images.py."""
    kind, _, seed = Path(data).stem.partition("-")
    groups = f"reproduction/groups.py --source OUT.zip --by {kind} --seed {seed}"
    har = "pfllib --source CLONES/TsingZ0/HtFL-OnDevice/dataset/HAR"
    return f"python -m dpfl_mpi.prepare {groups if seed else har} --out {data}"


def print_commands(words: str) -> None:
    """Print the commands of the cells whose names contain all words."""
    names = {
        f"{setting}, {row}, {epochs} epochs, seed {run.seed}": run
        for setting, row, epochs, run in CELLS
    }
    found = {n: run for n, run in names.items() if all(word in n for word in words.split())}
    if not found:
        note = "DPFL's degrees need a result of DPFL"
        raise UserError(f"--cell is {words}; no cell's name has these words ({note})")
    for name, run in found.items():
        print(f"# {name}")
        if run.data:
            print(prepared(run.data))
        print(f"mpirun -n 2 python -m dpfl_mpi {shlex.join(to_flags(changed(run)))}")


@in_a_sentence
def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--collect", metavar="DIR", help="write the CSV files from the results in this folder")
    add("--cell", metavar="WORDS", default="", help="print the commands of these cells (all)")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect, CELLS, FILE, CLIENTS, ["accuracy", "own"])
    else:
        print_commands(args.cell)


if __name__ == "__main__":
    exit_with(main)
