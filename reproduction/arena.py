"""Does the choice of collaborators help? `python -m dpfl_mpi.sweep reproduction/arena.py`, again when that is through, computes the cells.
With `--collect DIR` arena.csv gets a line of each finished cell, arena-clients.csv one of each client of it; page.py makes the tables of arena.md of them.
A client's accuracy is on all test images of its classes, weighted as its own are; `own` is that on its own.
Cells that arena.csv has are not computed again, so the work can go on on another machine; where a row changes, take its lines out.
`--cell WORDS` prints the commands of the cells whose names have all of these words, and that of their data.

A cell is a setting, a row and a seed. All rows of a setting and seed have the same clients, the budget B_c = 0.1N (HAR's 30 people: 6) and as many local epochs:
methods that train 10 epochs before round 1 have two rounds of 5 less. Random graphs of DPFL's degrees take those of a result, which the first call computes.
Exact CIFAR-10 and CIFAR-100 images and HAR: real_images.py. Groups: groups.py, a file per seed.
"""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from standings import DEGREES

from dpfl_mpi.engine.saved import source_of, with_code
from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.evaluate import accuracies, of_classes
from dpfl_mpi.figures.command import gather
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import changed, to_flags

HERE = Path(__file__).resolve().parent
FILE, CLIENTS = HERE / "arena.csv", HERE / "arena-clients.csv"
KEYS = ["setting", "row", "epochs", "seed"]  # of a cell
SEEDS = (42, 32, 52)  # a partition each
MORE = (1, 2, 3, 4, 5, 6, 7)
GROUPS = "groups:" + ";".join(",".join(map(str, range(g, 100, 4))) for g in range(4))
ALONE = {"method": "random_graph", "reach": GROUPS}  # any of one's own group
OWN: dict[str, Any] = {"dataset": str(Path("reproduction/groups.py")), "budget": "0.1N"}
HAR = "HAR, 30 people"
DIRICHLET = {"partition": "dirichlet", "dirichlet_alpha": 0.1}
# what all its cells have in common, and the oracle's
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "CIFAR-10 Patho(3)": ({"dataset": "cifar10", "budget": "0.1N"}, {}),
    "CIFAR-10 Dir(0.1)": ({"dataset": "cifar10", "budget": "0.1N"} | DIRICHLET, {}),
    "CIFAR-10, labels moved": (OWN | {"data": "data/labels-{seed}.h5"}, ALONE),
    "CIFAR-10, rotated": (OWN | {"data": "data/rotation-{seed}.h5"}, ALONE),
    "CIFAR-100, superclasses": (OWN | {"data": "data/superclass-{seed}.h5"}, {}),
    "CIFAR-100 Patho(10)": ({"dataset": "cifar100", "budget": "0.1N"}, {}),
    HAR: ({"dataset": "pfllib", "data": "data/har.h5", "budget": 6}, None),  # all have the same six classes
}
ALIKE = {  # in so many groups, client k in k mod these, are clients who differ in more than their classes
    "CIFAR-10, labels moved": 4,
    "CIFAR-10, rotated": 4,
    "CIFAR-100, superclasses": 20,
    HAR: 30,
}
FIVE = list(SETTINGS)[2:6]  # partitions of 160 epochs; the first two have 500 epochs
FOUR = ("Random graph", "Oracle", "Nearest", "DPFL")
UNDRAWN = "Nearest, pool 1"
CHOICE = {"method": "dpfl_choice"}
LONG = "DPFL, order loss, Omega every 5"  # of DPFL's forms the best of 160 epochs
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
    for name in ("DAC", "FedSim", "pFedSV", "DFedPGP", "Facade", "Sketch", "PENS", "CoBo")
}
SWITCHES = {
    UNDRAWN: {"method": "nearest", "options": {"pool": 1}},
    "Nearest, hubs 0, pool 1": {"method": "nearest", "options": {"hubs": 0.0, "pool": 1}},
    "DPFL, order loss": CHOICE | {"options": {"order": "loss"}},
    "DPFL, neither smaller": CHOICE | {"options": {"neither": "smaller"}},
    "DPFL, neither keep_out": CHOICE | {"options": {"neither": "keep_out"}},
    "DPFL, order loss, neither smaller": CHOICE | {"options": {"order": "loss", "neither": "smaller"}},
    "DPFL, forward": CHOICE | {"options": FORWARD},
    "DPFL, forward, tolerance 0.02": CHOICE | {"options": FORWARD | {"tolerance": 0.02}},
    "DPFL, order loss, stop": CHOICE | {"options": {"order": "loss", "neither": "smaller", "stop": True}},
    LONG: CHOICE | {"options": {"order": "loss"}, "omega_period": 5},
    "DPFL, 20 nearest": {"method": "dpfl", "candidates": 20},
    "DPFL, 20 nearest, neither smaller": CHOICE | {"options": {"neither": "smaller"}, "candidates": 20},
}


def cell(setting: str, row: str, seed: int, epochs: int) -> Run | None:
    """Return the Run of a cell, None where a setting has no oracle, or where it takes its degrees from a result that is not there."""
    same, oracle = SETTINGS[setting]
    fields = (ROWS | RIVALS | SWITCHES)[row]
    if row == "Oracle":
        if oracle is None:
            return None
        fields = oracle or fields
    later = 10 if find("method", fields["method"]).preprocesses else 0
    rounds = (epochs - later - fields.get("finetune_epochs", 0)) // 5
    fields = same | {"seed": seed, "rounds": rounds} | fields
    if "data" in fields:
        fields["data"] = fields["data"].format(seed=seed)
    if row == DEGREES:
        if "data" in fields and not Path(fields["data"]).is_file():
            return None
        of = Run(**same | fields | {"method": "dpfl"}).path()
        if not of.is_file():
            return None
        fields["graphs"] = str(of)
    return Run(**fields)


def cells() -> Iterator[tuple[str, str, int, Run]]:
    """Yield (setting, row, local epochs, Run), the central ones first."""
    first, central = list(SETTINGS)[:3], list(SETTINGS)[:2]
    asked = []
    for seed in SEEDS:
        asked += [(s, row, seed, 160) for s in SETTINGS if s != HAR for row in ROWS]
        asked += [(s, row, seed, 160) for s in first for row in SWITCHES | RIVALS]
    asked += [(s, UNDRAWN, seed, 160) for s in list(SETTINGS)[3:6] for seed in SEEDS]
    asked += [(s, row, seed, 160) for s in FIVE for seed in MORE[:2] for row in FOUR]
    asked += [(HAR, row, seed, 160) for seed in (*SEEDS, *MORE) for row in ROWS | SWITCHES | RIVALS]  # seconds each
    asked += [(s, row, seed, 500) for seed in (*SEEDS, *MORE) for s in central for row in ROWS]
    asked += [(s, LONG, seed, 500) for seed in SEEDS for s in central]
    for setting, row, seed, epochs in asked:
        if run := cell(setting, row, seed, epochs):
            yield setting, row, epochs, run


def known(file: Path) -> pd.DataFrame:
    """Return the lines of a CSV file that was collected before, none where there is none."""
    return pd.read_csv(file, dtype={"run": str, "commit": str}) if file.is_file() else pd.DataFrame({"run": []})


def place(setting: str, row: str, epochs: int, seed: int) -> tuple[int, ...]:
    """Return where a cell's line comes: by setting, epochs, row, seed."""
    return list(SETTINGS).index(setting), epochs, list(ROWS | RIVALS | SWITCHES).index(row), seed


CELLS = list(cells())
DONE = {place(*line) for line in known(FILE).reindex(columns=KEYS).itertuples(index=False)}


def lacks(setting: str, row: str, epochs: int, seed: int) -> bool:
    """Return whether a cell is to be computed: it is not in arena.csv, or the degrees of one that is not are its."""
    wanted = (row, DEGREES) if row == "DPFL" else (row,)
    return any(place(setting, name, epochs, seed) not in DONE for name in wanted)


RUNS = [run for setting, row, epochs, run in CELLS if lacks(setting, row, epochs, run.seed)]


def clients_of(setting: str, result: Result) -> pd.DataFrame:
    """Return a cell's lines of arena-clients.csv."""
    result.run = with_code(result.run, {"dataset": result.run.dataset} if result.run.contents.get("dataset") else {})
    source, n = source_of(result, None), len(result["client/p"])
    rows, weights = of_classes(result, source, np.arange(n) % ALIKE.get(setting, 1))
    accuracy = accuracies(result, source, rows, "test", "cpu", weights)
    scores = {"accuracy": accuracy.round(6), "own": result["best/test_acc"].round(6)}
    return pd.DataFrame({"run": result.path.stem[-8:], "client": np.arange(n)} | scores)


def line_of(asked: Run, result: Result) -> dict[str, Any]:
    """Return what a cell cost, per client: models and megabytes received, evaluations of the search, gradient steps; core hours of all."""
    run, n = result.run, len(result["client/p"])
    steps = result["finetune/gradient_steps" if run.finetune_epochs else "round/gradient_steps"][-1]
    models = float(result["traffic/models_received"].sum(0).mean())
    ranks = result.starts()[-1]["ranks"]
    return {
        "run": result.path.stem[-8:],
        "partition": result.fact("partition_sha256")[:12],
        "models": models,
        "megabytes": 4e-6 * models * int(result.fact("parameters")),
        "evaluations": result["graph/evaluations"].sum() / n if "graph/evaluations" in result else 0.0,
        "steps": steps / n,
        "core_hours": sum(float(result[f"seconds/{phase}"][:, 1].sum()) for phase in PHASES) * ranks / 3600,
        "commit": result.starts()[-1]["commit"],
        "flags": shlex.join(to_flags(changed(asked))),
    }


def collect(folder: str) -> None:
    """Add the cells that arena.csv lacks and whose results are there, and write both files after each."""
    if not Path(folder).is_dir():
        raise UserError(f"--collect is {folder}; allowed is a folder with results")
    lines, clients = known(FILE).to_dict("records"), known(CLIENTS)
    for *cell, run in CELLS:
        for result in gather([run], folder)[0] if place(*cell, run.seed) not in DONE else ():
            if result.finished:
                lines.append(dict(zip(KEYS, (*cell, run.seed), strict=True)) | line_of(run, result))
                clients = pd.concat([clients[clients["run"] != lines[-1]["run"]], clients_of(cell[0], result)])
                write(lines, clients)
    print(f"{len(lines)} cells are in {FILE.name}; {len(RUNS)} were still to be computed when this began")


def write(lines: list[dict[str, Any]], clients: pd.DataFrame) -> None:
    made = pd.DataFrame(sorted(lines, key=lambda line: place(*(line[key] for key in KEYS)))).round(4)
    clients = made[["run"]].merge(clients, on="run").astype({"client": int})  # an empty file's columns are floats
    made.to_csv(FILE, index=False)
    clients.to_csv(CLIENTS, index=False)


def prepared(data: str) -> str:
    """Return the command that prepares a setting's own data; CLONES and OUT.zip are as in real_images.py."""
    by, _, seed = Path(data).stem.partition("-")
    groups = f"reproduction/groups.py --source OUT.zip --by {by} --seed {seed}"
    har = "pfllib --source CLONES/TsingZ0/HtFL-OnDevice/dataset/HAR"
    return f"python -m dpfl_mpi.prepare {groups if seed else har} --out {data}"


def told(words: str) -> None:
    named = {f"{setting}, {row}, {epochs} epochs, seed {run.seed}": run for setting, row, epochs, run in CELLS}
    asked = {name: run for name, run in named.items() if all(word in name for word in words.split())}
    if not asked:
        raise UserError(f"--cell is {words}; no cell's name has these words (DPFL's degrees need a result of DPFL)")
    for name, run in asked.items():
        before = f"{prepared(run.data)}\n" if run.data else ""
        print(f"# {name}\n{before}mpirun -n 2 python -m dpfl_mpi {shlex.join(to_flags(changed(run)))}")


@in_a_sentence
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", metavar="DIR", help="write the CSV files of the results that are in this folder")
    parser.add_argument("--cell", metavar="WORDS", default="", help="print the commands of these cells [all]")
    asked = parser.parse_args()
    collect(asked.collect) if asked.collect else told(asked.cell)


if __name__ == "__main__":
    exit_with(main)
