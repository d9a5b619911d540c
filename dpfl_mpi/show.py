"""A run in the terminal, finished or still running: `python -m dpfl_mpi.show RESULT [--compare OTHER] [--cite]`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError, exit_with
from dpfl_mpi.graph import asymmetry, sparsity
from dpfl_mpi.plugins import CODE, find, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import KEPT, curves, outcome, texts
from dpfl_mpi.settings import Resolved, Run
from dpfl_mpi.settings.fields import as_dict, fields

WIDTH = 80  # of a terminal; tables and paths are as wide as they are
OF_CLASSES = {"balanced accuracy": "balanced_accuracy", "macro F1": "macro_f1"}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of right-flush columns."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def folded(text: str, indent: str = "  ", first: str | None = None) -> str:
    """Return a text in lines of the terminal's width, each after `indent`, the first one after `first`."""
    lines = textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(KEPT, " ")


def settings(run: Run) -> str:
    """Return the settings of a run by group of the command line, a setting and its value in one line."""
    groups: dict[str, list[str]] = {}
    for f in fields(run):
        value = getattr(run, f.name)
        if value is not None and value != {}:
            groups.setdefault(f.metadata["group"], []).append(f"{f.name} {value}".replace(" ", KEPT))
    return "\n".join(folded(", ".join(items), " " * 13, f"  {name:10s} ") for name, items in groups.items())


def rounds(result: Result, last: int) -> str:
    """Return a table of the last rounds: means over clients, edges, models received, seconds of the slowest rank."""
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
    rows = list(enumerate(zip(*shown.values(), strict=True)))
    return table(("round", *shown), [(t, *values) for t, values in rows[-last:]])


def clients(result: Result, each: int) -> str:
    """Return a table of the clients with the highest and the lowest test accuracy of their best model by validation."""
    test, counts = result["best/test_acc"], result["client/class_counts"]
    degree = result.chosen(result.last_round).degrees()
    order = np.argsort(-test, kind="stable")
    shown = [*order[:each], *order[max(each, len(order) - each) :]]
    return table(
        ("client", "test %", "val %", "best round", "last %", "train", "test", "collaborators", "classes (samples)"),
        [
            [
                k,
                f"{100 * test[k]:.1f}",
                f"{100 * result['best/val_acc'][k]:.1f}",
                result["best/round"][k],
                f"{100 * result['last/test_acc'][k]:.1f}",
                result["client/n_train"][k],
                result["client/n_test"][k],
                degree[k],
                " ".join(f"{c}({counts[k, c]})" for c in np.argsort(-counts[k], kind="stable") if counts[k, c])[:44],
            ]
            for k in shown
        ],
    )


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
        one_way, pairs = asymmetry(a)
        degree = a.sum(1)
        rows.append(
            [
                name,
                int(a.sum()),
                f"{100 * sparsity(a):.1f}",
                f"{degree.min()} / {degree.mean():.1f} / {degree.max()}",
                f"{100 * one_way:.1f}",
                f"{100 * pairs:.1f}",
            ]
        )
    names = ("graph", "edges", "sparsity %", "collaborators min / mean / max", "edges one way %", "pairs one way %")
    return table(names, rows)


def figures(result: Result) -> dict[str, str]:
    """Return the figures that `--compare` sets side by side, by name; a dash where no client was scored."""
    scores = {f"{what}, %": of_classes(result, metric) for what, metric in OF_CLASSES.items()}
    return {"state": result.state} | texts(outcome(result)) | scores


def of_classes(result: Result, metric: str) -> str:
    """Return the mean over clients of a score of their best models in percent; a dash before the end of the run, and of none."""
    scores = result.score(metric)[result.benign] if "best/confusion" in result else np.empty(0)
    return f"{100 * np.nanmean(scores):.2f}" if np.isfinite(scores).any() else "-"


def show(result: Result, last: int, each: int) -> str:
    """Return all that is shown of one run."""
    start = (
        {"hosts": [], "commit": ""}
        | dict.fromkeys(("ranks", "device", "cpu", "time"), "unknown")
        | (result.starts() or [{}])[-1]
    )
    run, head = result.run, figures(result)
    few, many = len(result.scored()), int(result.benign.sum())
    scored = f"{many} clients" if few == many else f"{few} of {many} clients, the others diverged,"
    progress = f"finished, {run.rounds} rounds" if result.finished else f"{result.state} of {run.rounds}"
    return "\n".join(
        [
            f"{result.path}: {short(run.method)} on {short(run.dataset)}, {progress}",
            *(
                [
                    folded(
                        f"test accuracy {head['test accuracy, %']} % (mean over {scored} of their best model by validation), "
                        f"std over clients {head['std over clients']}, lowest {head['lowest client, %']} %"
                    ),
                    folded(
                        f"balanced accuracy {head['balanced accuracy, %']} %, macro F1 {head['macro F1, %']} % (of the same models, over classes, then clients)"
                    ),
                ]
                if len(result.scored())
                else ["  no client was scored"]
            ),
            folded(
                f"{start['ranks']} ranks on {', '.join(map(str, start['hosts']))} ({start['device']}, {start['cpu']}), commit {start['commit'] or 'unknown'}, "
                f"{start['time']}, {head['seconds']} s"
            ),
            "\nsettings",
            settings(run),
            "\nlast rounds (means over clients)",
            rounds(result, last),
            "\nclients, best and worst",
            clients(result, each),
            "\ncollaboration graph",
            graph(result),
        ]
    )


def with_content(run: Resolved, name: str) -> Any:
    """Return a setting; of a file the start of its SHA-256, too."""
    held = run.contents.get(name, "").removeprefix("file:").removeprefix(CODE)[:12]
    return f"{getattr(run, name)} ({held})" if held else getattr(run, name)


def compare(a: Result, b: Result) -> str:
    """Return what differs between two runs, in settings, outcome and, client by client, accuracy."""
    x, y = ({n: with_content(r.run, n) for n in as_dict(r.run)} for r in (a, b))
    rows = [[n, x[n], y[n]] for n in x if x[n] != y[n]]
    mine, theirs = figures(a), figures(b)
    out = [f"A  {a.path}", f"B  {b.path}", "\nsettings that differ" if rows else "\nthe settings are the same"]
    out += [table(("", "A", "B"), rows)] if rows else []
    out += ["\noutcome", table(("", "A", "B"), [[n, mine[n], theirs[n]] for n in mine])]
    meta = [{n: r.fact(n) for n in ("data_sha256", "partition_sha256")} for r in (a, b)]
    if meta[0] != meta[1]:
        out.append("\nnot compared client by client: the data or the partition differ")
        return "\n".join(out)
    difference = 100 * (b["best/test_acc"] - a["best/test_acc"])[a.benign & b.benign]
    both = f"{np.nanmean(difference):+.2f} points" if np.isfinite(difference).any() else "no client was scored in both"
    differing = Result.differences(a, b)
    said = (
        f"client by client (same partition), B - A: {both}; B is better for {int((difference > 0).sum())}, equal for "
        f"{int((difference == 0).sum())}, worse for {int((difference < 0).sum())}"
    )
    same = "all recorded numbers are the same to the last bit"
    arrays = f"arrays that differ: {', '.join(differing)}" if differing else same
    return "\n".join([*out, f"\n{folded(said, first='')}", folded(arrays, first="")])


def cite(results: Sequence[Result]) -> str:
    """Return the BibTeX of the methods used, DPFL's own paper (this program's subject) first."""
    texts = [find("method", "dpfl").citation, *(r.method.citation for r in results)]
    return "\n\n".join(dict.fromkeys(text.strip() for text in texts if text.strip()))


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dpfl_mpi.show", description=__doc__, allow_abbrev=False)
    parser.add_argument("results", nargs="*", metavar="RESULT", help="result files, finished or running")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="say what differs between two results")
    parser.add_argument("--cite", action="store_true", help="print the BibTeX of the methods used, instead")
    parser.add_argument("--last", type=int, default=8, metavar="R", help="rounds to show (default 8)")
    parser.add_argument("--clients", type=int, default=4, metavar="K", help="clients to show at either end (default 4)")
    args = parser.parse_args(arguments)
    if not args.results and not args.compare:
        parser.error("name a RESULT, or two with --compare")
    if args.last < 1 or args.clients < 1:
        parser.error("--last and --clients take whole numbers of at least 1")
    try:
        results = [Result(path) for path in (args.results or args.compare)]
        if args.cite:
            print(cite(results))
            return 0
        empty = next((r for r in results if r.last_round < 0), None)
        if empty:
            raise UserError(f"{empty.path} is running; no round is recorded yet")
        print("\n\n".join(show(r, args.last, args.clients) for r in results) if args.results else compare(*results))
        if args.results and args.compare:
            print("\n" + compare(*(Result(path) for path in args.compare)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into head
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    exit_with(main)
