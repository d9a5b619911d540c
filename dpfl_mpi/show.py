"""Show a run in the terminal, finished or running: `python -m dpfl_mpi.show RESULT`."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.graph import asymmetry, sparsity, within
from dpfl_mpi.plugins import find, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import METRICS, rounds_text
from dpfl_mpi.results.schema import LAYOUT
from dpfl_mpi.results.summary import (
    NBSP,
    WIDTH,
    entry,
    fold,
    listed,
    name_columns,
    outcome_lines,
    split,
)
from dpfl_mpi.results.table import MAIN, flat_settings, in_folder, in_words, of_runs, texts
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.fields import fields
from dpfl_mpi.storage.files import checkpoints_of, manifests

CLASSES_WIDTH = 53  # columns for the name and the classes of a client
ROUNDS = 8  # the last ones are shown
CLIENTS = 4  # so many of the best, and of the worst, are shown


def table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], room: int = WIDTH, keys: int = 1
) -> str:
    """Return a table as text, in parts no wider than `room` columns."""
    # each part begins with the first `keys` columns, which say what a row is
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [2 + max(map(len, column)) for column in zip(*cells, strict=True)]
    parts = []
    for columns in split(widths, keys, room):
        lines = ["".join(row[i].rjust(widths[i]) for i in columns) for row in cells]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def fixed(values: Iterable[float], decimals: int) -> list[str]:
    return ["-" if math.isnan(value) else f"{value:.{decimals}f}" for value in values]


def percent(values: Iterable[float], decimals: int) -> list[str]:
    return fixed((100 * value for value in values), decimals)


def settings(run: Run) -> str:
    """Return the settings of a run by group of the command line."""
    groups: dict[str, list[str]] = {}
    for f in fields(run):
        value = getattr(run, f.name)
        if value is not None and value != {}:
            text = f"{f.name} {value}".replace(" ", NBSP)  # no line is broken between them
            groups.setdefault(f.metadata["group"], []).append(text)
    lines = []
    for group, given in groups.items():
        lines.append(fold(", ".join(given), " " * 13, f"  {group:10s} "))
    return "\n".join(lines)


def rounds(result: Result) -> str:
    """Return a table of the last rounds; losses and accuracies are means over clients."""
    arrays = result.by_round()
    columns = {
        "epochs": arrays["epochs"],
        "train loss": fixed(arrays["train_loss"], 4),
        "val %": percent(arrays["val_acc"], 2),
        "test %": percent(arrays["test_acc"], 2),
        "edges": arrays["edges"],
        "received": fixed(arrays["models_received"], 1),
        "seconds": fixed(arrays["seconds"], 2),
    }
    if "hours" in arrays:
        columns["hours"] = [f"{hours:.3g}" for hours in arrays["hours"]]
    rows = [(t, *values) for t, values in enumerate(zip(*columns.values(), strict=True))]
    return table(("round", *columns), rows[-ROUNDS:])


def clients(result: Result, room: int) -> str:
    """Return a table of the best and the worst clients by test accuracy."""
    test, names = result["best/test_acc"], result.class_names
    labels, counts = name_columns(result.named()), result["client/class_counts"]
    width = CLASSES_WIDTH - max(map(len, labels.get("name", [""])))
    columns: dict[str, Any] = labels | {
        "test %": percent(test, 1),
        "val %": percent(result["best/val_acc"], 1),
        "best round": result["best/round"],
        "last %": percent(result["last/test_acc"], 1),
        "train": result["client/n_train"],
        "test": result["client/n_test"],
        **({} if result.benign.all() else {"counts": np.where(result.benign, "yes", "no")}),
        "collaborators": result.chosen(result.last_round).degrees(),
    }
    order = np.argsort(-test, kind="stable")
    rows = []
    for k in (*order[:CLIENTS], *order[max(CLIENTS, len(order) - CLIENTS) :]):
        largest = [c for c in np.argsort(-counts[k], kind="stable") if counts[k, c]]
        classes = listed([f"{names[c]}({counts[k, c]})" for c in largest], width)
        rows.append([k, *(column[k] for column in columns.values()), classes])
    header = ("client", *columns, "classes (samples)")
    return table(header, rows, room, keys=2 if "name" in labels else 1)


def graph(result: Result) -> str:
    """Return a table with the figures of Omega, if the method has it, and of the last graph."""
    last, groups = result.last_round, result.groups
    if not len(result["graph/chosen/senders"]):
        return "  no edges: no client chooses whose models it receives"
    graphs = {f"round {last}": last}
    if len(result.omega().senders):
        graphs = {"Omega": 0} | graphs
    rows = []
    for name, t in graphs.items():
        chosen = result.chosen(t)
        degree = chosen.degrees()
        degrees = f"{degree.min()} / {degree.mean():.1f} / {degree.max()}"
        shares = percent([sparsity(chosen), *asymmetry(chosen)], 1)
        inside = [] if groups is None else percent(within(chosen, groups)[:1], 1)
        rows.append([name, len(chosen.senders), shares[0], degrees, *shares[1:], *inside])
    header = ["graph", "edges", "sparsity %", "collaborators", "edges one way %", "pairs one way %"]
    header += [] if groups is None else ["edges inside a group %"]
    return table(header, rows)


def origin(result: Result) -> str:
    """Return where and when the last start computed, and its warning if it has one."""
    (*_, start) = result.starts()
    ranks = f"{start['ranks']} rank" + "s" * (start["ranks"] != 1)
    where = f"{ranks} on {', '.join(start['hosts'])} ({start['device']}, {start['cpu']})"
    out = entry("computed", f"{where}, commit {start['commit'] or 'unknown'}, {start['time']}")
    return f"{out}\n{entry('warning', result.warning)}" if result.warning else out


def show(result: Result, room: int = WIDTH) -> str:
    """Return all that is printed of one result."""
    run, state = result.run, result.state
    rounds_done = f"finished, {rounds_text(result)}"
    progress = rounds_done if result.finished else f"{state} of {run.rounds}"
    lines = [f"{result.path}: {short(run.method)} on {short(run.dataset)}, {progress}"]
    if state.startswith("stopped"):
        has_checkpoint = manifests(checkpoints_of(result.path))
        effect = "goes on" if has_checkpoint else "starts over: there is no checkpoint"
        lines.append(f"  it is not being computed; the same command {effect}")
    outcomes = texts(in_words(result))
    scores = [f"{m} {outcomes[f'{m}, %']} %" for m in list(METRICS.values())[1:]]
    lines += [
        *outcome_lines(result),
        entry("scores by class", ", ".join(scores)),
        origin(result),
        f"\nsettings\n{settings(run)}",
        f"\nlast rounds (means over clients)\n{rounds(result)}",
        f"\nclients, best and worst\n{clients(result, room)}",
        f"\ncollaboration graph (collaborators: min / mean / max)\n{graph(result)}",
    ]
    return "\n".join(lines)


def runs(results: Sequence[Result], room: int = WIDTH) -> str:
    """Return a line per Run, sorted by settings, with mean and std of its clients' accuracy."""
    # settings that are the same in all Runs stand above the table
    columns = of_runs(results)  # settings first, then scores and costs
    same = [n for n in MAIN if n != "method" and len({*map(str, columns[n])}) == 1]
    first_score = list(columns).index("accuracy")
    hidden = {*same, "path", "budget_models", *list(columns)[first_score:]}
    shown = {name: columns[name] for name in columns if name not in hidden}
    shown |= {"test %": percent(columns["accuracy"], 2), "std": percent(columns["std"], 2)}
    shown |= {"received": [f"{models:.0f}" for models in columns["models_received"]]}
    shown |= {"seconds": [f"{seconds:.0f}" for seconds in columns["seconds"]]}
    shown["file"] = [result.path.name for result in results]
    # lines are sorted by budget_models, a number, and not by budget, a text
    keys = [columns[name] for name in MAIN if name != "budget"]
    order = sorted(range(len(results)), key=lambda i: [sortable(values[i]) for values in keys])
    cells = [["-" if v is None else v for v in values] for values in shown.values()]
    rows = [[column[i] for column in cells] for i in order]
    head = f"{results[0].path.parent}: {len(results)} Run{'s' * (len(results) > 1)}"
    head = ", ".join([head, *(f"{n} {columns[n][0]}" for n in same if n != "budget_models")])
    return f"{head}\n{table((*shown,), rows, room)}"


def sortable(value: Any) -> tuple[bool, bool, Any]:
    """Return a key that sorts None before numbers, and numbers before texts."""
    return value is not None, isinstance(value, str), value or 0


def compare(a: Result, b: Result, room: int = WIDTH) -> str:
    """Return what differs between two runs: settings, outcome and accuracy by client."""
    settings_a, settings_b = flat_settings(a), flat_settings(b)
    rows = []
    for name in dict.fromkeys([*settings_a, *settings_b]):
        values = ("-" if s.get(name) is None else s[name] for s in (settings_a, settings_b))
        rows.append([name, *values])
    rows = [row for row in rows if row[1] != row[2]]
    out = [f"A  {a.path}", f"B  {b.path}"]
    if rows:
        out += ["\nsettings that differ", table(("", "A", "B"), rows, room)]
    else:
        out.append("\nthe settings are the same")
    of_a, of_b = ({"state": r.state} | texts(in_words(r)) for r in (a, b))
    rows = [[name, of_a[name], of_b[name]] for name in of_a]
    out += ["\noutcome", table(("", "A", "B"), rows)]
    if any(a.fact(name) != b.fact(name) for name in ("data_sha256", "partition_sha256")):
        out.append("\nnot compared client by client: the data or the partition differ")
        return "\n".join(out)
    difference = 100 * (b["best/test_acc"] - a["best/test_acc"])[a.benign & b.benign]
    mean = "no client was scored in both"
    if np.isfinite(difference).any():
        mean = f"{np.nanmean(difference):+.2f} points"
    better, equal, worse = ((np.sign(difference) == sign).sum() for sign in (1, 0, -1))
    counts = f"B is better for {better}, equal for {equal}, worse for {worse}"
    by_client = f"client by client (same partition), B - A: {mean}; {counts}"
    bits = "all recorded numbers are equal to the bit"
    if arrays := Result.differences(a, b):
        bits = f"arrays that differ: {', '.join(arrays)}"
    return "\n".join([*out, "", fold(by_client), fold(bits)])


def cite(results: Sequence[Result]) -> str:
    """Return the BibTeX of DPFL and of the methods that the results used, each once."""
    entries = [find("method", "dpfl").citation, *(r.method.citation for r in results)]
    return "\n\n".join(dict.fromkeys(entry.strip() for entry in entries if entry.strip()))


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m dpfl_mpi.show", description=__doc__)
    add = parser.add_argument
    add("results", nargs="*", metavar="RESULT", help="results, finished or running, or folders")
    add("--compare", nargs=2, metavar=("A", "B"), help="show what differs between two results")
    add("--cite", action="store_true", help="print only the BibTeX of the methods used")
    add("--layout", action="store_true", help="print only what a result file holds")
    add("--wide", action="store_true", help="do not split tables at 80 columns")
    args = parser.parse_args(arguments)
    if args.layout:
        print(LAYOUT, end="")
        return
    if not args.results and not args.compare:
        parser.error("name a RESULT, or two with --compare")
    room = 10**6 if args.wide else WIDTH
    folders = [path for path in args.results if os.path.isdir(path)]
    results = [Result(path) for path in args.results if path not in folders]
    pair = [Result(path) for path in args.compare or ()]
    if args.cite:
        of_folders = [result for folder in folders for result in in_folder(Path(folder))]
        print(cite([*results, *of_folders, *pair]))
        return
    for result in (*results, *pair):
        result.check_begun()
    parts = [runs(in_folder(Path(folder)), room) for folder in folders]
    parts += [show(result, room) for result in results]
    if pair:
        parts.append(compare(pair[0], pair[1], room))
    print("\n\n".join(parts))


if __name__ == "__main__":
    exit_with(main)
