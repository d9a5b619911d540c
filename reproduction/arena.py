"""Does the choice of collaborators help? page.py makes the tables of arena.md.

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
SEEDS = (42, 32, 52)  # one partition each
MORE = (1, 2, 3, 4, 5, 6, 7)
GROUPS = "groups:" + ";".join(",".join(map(str, range(g, 100, 4))) for g in range(4))
WITHIN_GROUPS = {"method": "random_graph", "reach": GROUPS}
OWN: dict[str, Any] = {"dataset": str(Path("reproduction/groups.py")), "budget": "0.1N"}
HAR = "HAR, 30 people"
DIRICHLET = {"partition": "dirichlet", "dirichlet_alpha": 0.1}
# the fields of all cells of a setting, and those of its oracle
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "CIFAR-10 Patho(3)": ({"dataset": "cifar10", "budget": "0.1N"}, {}),
    "CIFAR-10 Dir(0.1)": ({"dataset": "cifar10", "budget": "0.1N"} | DIRICHLET, {}),
    "CIFAR-10, labels moved": (OWN | {"data": "data/labels-{seed}.h5"}, WITHIN_GROUPS),
    "CIFAR-10, rotated": (OWN | {"data": "data/rotation-{seed}.h5"}, WITHIN_GROUPS),
    "CIFAR-100, superclasses": (OWN | {"data": "data/superclass-{seed}.h5"}, {}),
    "CIFAR-100 Patho(10)": ({"dataset": "cifar100", "budget": "0.1N"}, {}),
    HAR: (
        {"dataset": "pfllib", "data": "data/har.h5", "budget": 6},
        None,
    ),  # all have the same six classes
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
CHOICE = {"method": "dpfl_choice"}
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
    for name in ("DAC", "FedSim", "pFedSV", "DFedPGP", "Facade", "Sketch", "PENS", "CoBo")
}
SWITCHES = {
    UNDRAWN: {"method": "nearest", "options": {"pool": 1}},
    "Nearest, hubs 0, pool 1": {"method": "nearest", "options": {"hubs": 0.0, "pool": 1}},
    "DPFL, order loss": CHOICE | {"options": {"order": "loss"}},
    "DPFL, neither smaller": CHOICE | {"options": {"neither": "smaller"}},
    "DPFL, neither keep_out": CHOICE | {"options": {"neither": "keep_out"}},
    "DPFL, order loss, neither smaller": CHOICE
    | {"options": {"order": "loss", "neither": "smaller"}},
    "DPFL, forward": CHOICE | {"options": FORWARD},
    "DPFL, forward, tolerance 0.02": CHOICE | {"options": FORWARD | {"tolerance": 0.02}},
    "DPFL, order loss, stop": CHOICE
    | {"options": {"order": "loss", "neither": "smaller", "stop": True}},
    BEST_FORM: CHOICE | {"options": {"order": "loss"}, "omega_period": 5},
    "DPFL, 20 nearest": {"method": "dpfl", "candidates": 20},
    "DPFL, 20 nearest, neither smaller": CHOICE
    | {"options": {"neither": "smaller"}, "candidates": 20},
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


def cells() -> Iterator[tuple[str, str, int, Run]]:
    """Yield (setting, row, local epochs, Run), the central ones first."""
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
    """Return the lines of a CSV file, none if there is no such file."""
    if not file.is_file():
        return pd.DataFrame({"run": []})
    return pd.read_csv(file, dtype={"run": str, "commit": str})


def place(setting: str, row: str, epochs: int, seed: int) -> tuple[int, ...]:
    """Return a cell's key in the order of the file: setting, epochs, row, seed."""
    rows = list(ROWS | RIVALS | SWITCHES)
    return list(SETTINGS).index(setting), epochs, rows.index(row), seed


CELLS = list(cells())
DONE = {place(*line) for line in known(FILE).reindex(columns=KEYS).itertuples(index=False)}


def is_wanted(setting: str, row: str, epochs: int, seed: int) -> bool:
    """Return whether a cell, or one that takes its degrees, is not in arena.csv."""
    rows = (row, DEGREES) if row == "DPFL" else (row,)
    return any(place(setting, name, epochs, seed) not in DONE for name in rows)


RUNS = [run for setting, row, epochs, run in CELLS if is_wanted(setting, row, epochs, run.seed)]


def clients_of(setting: str, result: Result) -> pd.DataFrame:
    """Return a cell's lines of arena-clients.csv."""
    dataset = {"dataset": result.run.dataset} if result.run.contents.get("dataset") else {}
    result.run = with_code(result.run, dataset)
    source, n = source_of(result, None), len(result["client/p"])
    rows, weights = of_classes(result, source, np.arange(n) % GROUP_COUNTS.get(setting, 1))
    accuracy = accuracies(result, source, rows, "test", "cpu", weights)
    columns = {"run": result.path.stem[-8:], "client": np.arange(n)}
    columns |= {"accuracy": accuracy.round(6), "own": result["best/test_acc"].round(6)}
    return pd.DataFrame(columns)


def line_of(run: Run, result: Result) -> dict[str, Any]:
    """Return a cell's costs: per client, but core hours of all."""
    n, start = len(result["client/p"]), result.starts()[-1]
    tuned = result.run.finetune_epochs
    steps = result["finetune/gradient_steps" if tuned else "round/gradient_steps"][-1]
    models = float(result["traffic/models_received"].sum(0).mean())
    searched = "graph/evaluations" in result
    seconds = sum(float(result[f"seconds/{phase}"][:, 1].sum()) for phase in PHASES)
    return {
        "run": result.path.stem[-8:],
        "partition": result.fact("partition_sha256")[:12],
        "models": models,
        "megabytes": 4e-6 * models * int(result.fact("parameters")),
        "evaluations": result["graph/evaluations"].sum() / n if searched else 0.0,
        "steps": steps / n,
        "core_hours": seconds * start["ranks"] / 3600,
        "commit": start["commit"],
        "flags": shlex.join(to_flags(changed(run))),
    }


def collect(folder: str) -> None:
    """Add finished cells that arena.csv lacks; both files are written after each."""
    if not Path(folder).is_dir():
        raise UserError(f"--collect is {folder}; allowed is a folder with results")
    lines, clients = known(FILE).to_dict("records"), known(CLIENTS)
    for setting, row, epochs, run in CELLS:
        if place(setting, row, epochs, run.seed) in DONE:
            continue
        for result in gather([run], folder)[0]:
            if result.finished:
                key = dict(zip(KEYS, (setting, row, epochs, run.seed), strict=True))
                line = key | line_of(run, result)
                lines.append(line)
                others = clients[clients["run"] != line["run"]]
                clients = pd.concat([others, clients_of(setting, result)])
                write(lines, clients)
    print(f"{len(lines)} cells are in {FILE.name}; {len(RUNS)} were missing when this began")


def write(lines: list[dict[str, Any]], clients: pd.DataFrame) -> None:
    lines = sorted(lines, key=lambda line: place(*(line[key] for key in KEYS)))
    runs = pd.DataFrame(lines).round(4)
    clients = runs[["run"]].merge(clients, on="run")
    runs.to_csv(FILE, index=False)
    clients.astype({"client": int}).to_csv(CLIENTS, index=False)  # of an empty file they are floats


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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--collect", metavar="DIR", help="write the CSV files from the results in this folder")
    add("--cell", metavar="WORDS", default="", help="print the commands of these cells (all)")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect)
    else:
        print_commands(args.cell)


if __name__ == "__main__":
    exit_with(main)
