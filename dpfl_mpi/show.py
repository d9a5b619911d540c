"""A run in the terminal, finished or still running: `python -m dpfl_mpi.show RESULT [--compare A B] [--cite] [--layout]`."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.graph import asymmetry, sparsity
from dpfl_mpi.plugins import CODE, find, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import METRICS
from dpfl_mpi.results.schema import LAYOUT
from dpfl_mpi.results.summary import (
    KEPT,
    WIDTH,
    curves,
    fewer,
    folded,
    outcome,
    pieces,
    sent,
    texts,
)
from dpfl_mpi.settings import Resolved, Run
from dpfl_mpi.settings.fields import as_dict, fields
from dpfl_mpi.storage.files import checkpoints_of, manifests


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], room: int = WIDTH) -> str:
    """Return the lines of a table; where it is wider than `room`, of several, each with the first column."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [2 + max(len(row[i]) for row in cells) for i in range(len(header))]
    tables = pieces(widths, 1, room)
    return "\n\n".join("\n".join("".join(row[i].rjust(widths[i]) for i in few) for row in cells) for few in tables)


def settings(run: Run) -> str:
    """Return the settings of a run by group of the command line, a setting and its value in one line."""
    groups: dict[str, list[str]] = {}
    for f in fields(run):
        value = getattr(run, f.name)
        if value is not None and value != {}:
            groups.setdefault(f.metadata["group"], []).append(f"{f.name} {value}".replace(" ", KEPT))
    return "\n".join(folded(", ".join(items), " " * 13, f"  {name:10s} ") for name, items in groups.items())


def rounds(result: Result, last: int) -> str:
    """Return a table of the last rounds: means over clients, edges, models received, seconds of a rank, simulated hours so far."""
    over = curves(result)
    shown = {
        "epochs": over["epochs"],
        "train loss": [f"{loss:.4f}" for loss in over["train_loss"]],
        "val %": [f"{100 * mean:.2f}" for mean in over["val_acc"]],
        "test %": [f"{100 * mean:.2f}" for mean in over["test_acc"]],
        "edges": over["edges"],
        "received": [f"{models:.1f}" for models in over["models_received"]],
        "seconds": [f"{total:.2f}" for total in over["seconds"]],
    }
    if "hours" in over:
        shown["hours"] = [f"{hours:.3g}" for hours in over["hours"]]
    rows = [(t, *values) for t, values in enumerate(zip(*shown.values(), strict=True))]
    return table(("round", *shown), rows[-last:])


def clients(result: Result, each: int, room: int) -> str:
    """Return a table of the clients with the highest and the lowest test accuracy of their best model by validation."""
    test = result["best/test_acc"]
    most = [
        " ".join(f"{c}({of[c]})" for c in np.argsort(-of, kind="stable") if of[c])[:44]
        for of in result["client/class_counts"]
    ]
    shown: dict[str, Any] = {
        "test %": [f"{100 * accuracy:.1f}" for accuracy in test],
        "val %": [f"{100 * accuracy:.1f}" for accuracy in result["best/val_acc"]],
        "best round": result["best/round"],
        "last %": [f"{100 * accuracy:.1f}" for accuracy in result["last/test_acc"]],
        "train": result["client/n_train"],
        "test": result["client/n_test"],
        "collaborators": result.chosen(result.last_round).degrees(),
        "classes (samples)": most,
    }
    order = np.argsort(-test, kind="stable")
    few = (*order[:each], *order[max(each, len(order) - each) :])
    return table(("client", *shown), [[k, *(of_all[k] for of_all in shown.values())] for k in few], room)


def graph(result: Result) -> str:
    """Return the figures of Omega, where the method has one, and of the last graph, or a sentence where it has no graph."""
    last = result.last_round
    if not len(result["graph/chosen/senders"]):
        return "  no edges: no client chooses whose models it receives"
    rows = []
    # some methods choose anew in each round and have no Omega
    omega = [("Omega", 0)] if len(result.omega().senders) else []
    for name, t in (*omega, (f"round {last}", last)):
        a = result.graph(t)
        one_way, pairs = (f"{100 * share:.1f}" for share in asymmetry(a))
        degree = a.sum(1)
        spread = f"{degree.min()} / {degree.mean():.1f} / {degree.max()}"
        rows.append([name, a.sum(), f"{100 * sparsity(a):.1f}", spread, one_way, pairs])
    return table(("graph", "edges", "sparsity %", "collaborators", "edges one way %", "pairs one way %"), rows)


def figures(result: Result) -> dict[str, str]:
    """Return the figures that `--compare` sets side by side, by name; a dash where no client was scored, or not yet."""
    found = {"state": result.state} | texts(outcome(result))
    for metric in ("balanced_accuracy", "macro_f1"):
        scores = result.score(metric)[result.benign] if "best/confusion" in result else np.empty(0)
        found[f"{METRICS[metric]}, %"] = f"{100 * np.nanmean(scores):.2f}" if np.isfinite(scores).any() else "-"
    return found


def accuracy(result: Result, head: dict[str, str]) -> list[str]:
    """Return the lines of the test scores, `head` being the figures of the result."""
    if not len(result.scored()):
        return ["  no client was scored"]
    spread = f"std over clients {head['std over clients']}, lowest {head['lowest client, %']} %"
    balanced = f"balanced accuracy {head['balanced accuracy, %']} %, macro F1 {head['macro F1, %']} %"
    few = fewer(result)
    scored = f"{few}," if few else f"{result.benign.sum()} clients"
    mean = f"test accuracy {head['test accuracy, %']} % (mean over {scored} of their best model by validation)"
    return [folded(f"{mean}, {spread}"), folded(f"{balanced} (of the same models, over classes, then clients)")]


def show(result: Result, last: int, each: int, room: int = WIDTH) -> str:
    """Return all that is shown of one run."""
    start: dict[str, Any] = dict.fromkeys(("ranks", "device", "cpu", "commit", "time"), "unknown") | {"hosts": []}
    start |= {name: value for name, value in (result.starts() or [{}])[-1].items() if value}
    run, head = result.run, figures(result)
    progress = f"finished, {run.rounds} rounds" if result.finished else f"{result.state} of {run.rounds}"
    ranks = f"{start['ranks']} rank{'s' * (start['ranks'] != 1)}"
    kept = manifests(checkpoints_of(result.path))
    again = "goes on" if kept else "starts over: no checkpoint was kept"
    where = f"{ranks} on {', '.join(map(str, start['hosts']))} ({start['device']}, {start['cpu']})"
    lines = [
        f"{result.path}: {short(run.method)} on {short(run.dataset)}, {progress}",
        *([f"  nobody computes it now; the same command {again}"] if result.state.startswith("stopped") else []),
        *accuracy(result, head),
        *sent(result),
        folded(f"{where}, commit {start['commit']}, {start['time']}, {head['seconds']} s"),
        f"\nsettings\n{settings(run)}",
        f"\nlast rounds (means over clients)\n{rounds(result, last)}",
        f"\nclients, best and worst\n{clients(result, each, room)}",
        f"\ncollaboration graph (collaborators: min / mean / max)\n{graph(result)}",
    ]
    return "\n".join(lines)


def with_content(run: Resolved, name: str) -> Any:
    """Return a setting; of a file the start of its SHA-256, too."""
    held, value = run.contents.get(name, ""), getattr(run, name)
    said = short(value) if held.startswith(CODE) else value
    return f"{said} ({held.removeprefix('file:').removeprefix(CODE)[:12]})" if held else value


def compare(a: Result, b: Result, room: int = WIDTH) -> str:
    """Return what differs between two runs, in settings, outcome and, client by client, accuracy."""
    x, y = ({n: with_content(r.run, n) for n in as_dict(r.run)} for r in (a, b))
    rows = [[n, x[n], y[n]] for n in x if x[n] != y[n]]
    mine, theirs = figures(a), figures(b)
    out = [f"A  {a.path}", f"B  {b.path}", "\nsettings that differ" if rows else "\nthe settings are the same"]
    out += [table(("", "A", "B"), rows, room)] if rows else []
    out += ["\noutcome", table(("", "A", "B"), [[n, mine[n], theirs[n]] for n in mine])]
    if any(a.fact(name) != b.fact(name) for name in ("data_sha256", "partition_sha256")):
        return "\n".join([*out, "\nnot compared client by client: the data or the partition differ"])
    difference = 100 * (b["best/test_acc"] - a["best/test_acc"])[a.benign & b.benign]
    both = f"{np.nanmean(difference):+.2f} points" if np.isfinite(difference).any() else "no client was scored in both"
    better, equal, worse = ((np.sign(difference) == sign).sum() for sign in (1, 0, -1))
    counts = f"B is better for {better}, equal for {equal}, worse for {worse}"
    differing = ", ".join(Result.differences(a, b))
    arrays = f"arrays that differ: {differing}" if differing else "all recorded numbers are the same to the last bit"
    said = folded(f"client by client (same partition), B - A: {both}; {counts}", first="")
    return "\n".join([*out, f"\n{said}", folded(arrays, first="")])


def cite(results: Sequence[Result]) -> str:
    """Return the BibTeX of the methods used, DPFL's own paper (this program's subject) first."""
    texts = [find("method", "dpfl").citation, *(r.method.citation for r in results)]
    return "\n\n".join(dict.fromkeys(text.strip() for text in texts if text.strip()))


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dpfl_mpi.show", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("results", nargs="*", metavar="RESULT", help="result files, finished or running")
    add("--compare", nargs=2, metavar=("A", "B"), help="say what differs between two results")
    add("--cite", action="store_true", help="print the BibTeX of the methods used, instead")
    add("--layout", action="store_true", help="print what a result file holds, instead")
    add("--last", type=int, default=8, metavar="R", help="rounds to show (default 8)")
    add("--clients", type=int, default=4, metavar="K", help="clients to show at either end (default 4)")
    add("--wide", action="store_true", help="tables as wide as they are, not split at 80 columns")
    args = parser.parse_args(arguments)
    if args.layout:
        print(LAYOUT, end="")
        return
    if not args.results and not args.compare:
        parser.error("name a RESULT, or two with --compare")
    if args.last < 1 or args.clients < 1:
        parser.error("--last and --clients take whole numbers of at least 1")
    results, compared = ([Result(path) for path in paths or ()] for paths in (args.results, args.compare))
    if args.cite:
        print(cite(results or compared))
        return
    for result in (*results, *compared):
        if result.last_round < 0:
            stopped = "was stopped; the same command starts it again"
            how = "is running" if result.state.startswith("running") else stopped
            raise UserError(f"{result.path} {how}: no round is recorded yet")
    room = 10**6 if args.wide else WIDTH
    shown = [show(result, args.last, args.clients, room) for result in results]
    print("\n\n".join([*shown, *([compare(compared[0], compared[1], room)] if compared else [])]))


if __name__ == "__main__":
    exit_with(main)
