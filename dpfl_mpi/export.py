"""Export results as CSV: `python -m dpfl_mpi.export RESULT... --format FORMAT`.

csv: a row per client, round and set: client_id,round,set,loss,accuracy
  Accuracy is from 0 to 1, and empty where it is not recorded.
clients: a row per client, of its best model by validation:
    client_id,n_train,n_val,n_test,best_round,val_accuracy,
    accuracy,balanced_accuracy,macro_f1
  The last three are on its test images; balanced accuracy and macro F1, as
  defined by scikit-learn, are empty before the end of the run.

Several results get a first column `run`: their file names, or their paths
if names repeat. They go into runs.csv beside the first one.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.errors import UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import METRICS
from dpfl_mpi.storage.files import check_apart, write_csv

Row = tuple[Any, ...]
ROUND_COLUMNS = ("client_id", "round", "set", "loss", "accuracy")
CLIENT_COLUMNS = ("client_id", "n_train", "n_val", "n_test", "best_round", "val_accuracy", *METRICS)


def text(number: Any) -> str:
    """Return a number as text that reads back to the same bits, "" if it is not finite."""
    return repr(float(number)) if np.isfinite(number) else ""


def of_rounds(result: Result) -> Iterator[Row]:
    """Yield client, round, set, loss and accuracy."""
    rounds = result["round/number"][: result.last_round + 1].tolist()
    absent = np.full((len(rounds), result.run.clients), np.nan)
    names = {f"round/{part}_{what}" for part in PARTS for what in ("loss", "acc")}
    arrays = dict.fromkeys(names, absent)
    arrays |= {name: result[name] for name in names if name in result}
    for i, t in enumerate(rounds):
        for part in PARTS:
            loss, accuracy = (arrays[f"round/{part}_{what}"][i] for what in ("loss", "acc"))
            for k in range(result.run.clients):
                yield k, t, part, text(loss[k]), text(accuracy[k])


def of_clients(result: Result) -> Iterator[Row]:
    """Yield client, sizes, best round, validation accuracy and scores on the test images."""
    sizes = [result[f"client/n_{part}"].tolist() for part in PARTS]
    best_round = result["best/round"].tolist()
    absent = np.full(result.run.clients, np.nan)
    scores = [result["best/val_acc"]]
    for metric in METRICS:
        known = metric == "accuracy" or "best/confusion" in result
        scores.append(result.score(metric) if known else absent)
    for k in range(result.run.clients):
        yield k, *(n[k] for n in sizes), best_round[k], *(text(score[k]) for score in scores)


TABLES: dict[str, tuple[Row, Callable[[Result], Iterator[Row]]]] = {
    "csv": (ROUND_COLUMNS, of_rounds),
    "clients": (CLIENT_COLUMNS, of_clients),
}


def write_table(results: Sequence[Result], out: Path, form: str) -> None:
    columns, rows_of = TABLES[form]
    if len(results) == 1:
        write_csv(out, columns, rows_of(results[0]))
        return
    stems = [result.path.stem for result in results]
    names = {r.path: r.path.stem if stems.count(r.path.stem) == 1 else str(r.path) for r in results}
    write_csv(
        out, ("run", *columns), ((names[r.path], *row) for r in results for row in rows_of(r))
    )


def default_out(paths: Sequence[Path], form: str) -> Path:
    """Return the file to write: NAME.csv beside one result, or runs.csv beside the first."""
    stem = paths[0] if len(paths) == 1 else paths[0].with_name("runs")
    return stem.with_suffix(".csv" if form == "csv" else ".clients.csv")


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dpfl_mpi.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="finished or running results")
    parser.add_argument("--format", choices=TABLES, default="csv")
    parser.add_argument("--out", type=Path, help="file to write")
    args = parser.parse_args(arguments)
    results = [Result(path) for path in dict.fromkeys(args.results)]
    for result in results:
        if result.last_round < 0:
            raise UserError(f"{result.path}: no round is recorded yet")
    paths = [result.path for result in results]
    out = args.out or default_out(paths, args.format)
    check_apart(out, *paths)
    replaced = out.exists()
    write_table(results, out, args.format)
    if replaced:
        complain(f"{out} existed; it was replaced")
    print(out)


if __name__ == "__main__":
    exit_with(main)
