"""Results for other tools: `python -m dpfl_mpi.export RESULT... --format FORMAT`.

csv: a row per client, round and set: client_id,round,set,loss,accuracy
  Accuracy is from 0 to 1, empty where it is not recorded. Several results have
  a first column `run`, paths where file names repeat, in runs.csv by the first.
clients: a row per client, of its best model by validation:
    client_id,n_train,n_val,n_test,best_round,val_accuracy,
    accuracy,balanced_accuracy,macro_f1
  The last three are on its test images, macro F1 and balanced accuracy as
  scikit-learn defines them, empty before the end of the run.
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


def text(number: Any) -> str:
    """Return a number as text that reads back to the same bits, or "" where it is not finite."""
    return repr(float(number)) if np.isfinite(number) else ""


def of_rounds(result: Result) -> Iterator[tuple[Any, ...]]:
    """Yield client, round, set, loss and accuracy of everything recorded."""
    rounds = result["round/number"][: result.last_round + 1].tolist()
    none = np.full((len(rounds), result.run.clients), np.nan)
    names = {f"round/{part}_{what}" for part in PARTS for what in ("loss", "acc")} & set(result.names())
    arrays = {name: result[name] for name in names}
    for i, t in enumerate(rounds):
        for part in PARTS:
            loss, accuracy = (arrays.get(f"round/{part}_{what}", none) for what in ("loss", "acc"))
            for k in range(result.run.clients):
                yield k, t, part, text(loss[i, k]), text(accuracy[i, k])


def of_clients(result: Result) -> Iterator[tuple[Any, ...]]:
    """Yield client, training, validation and test samples, best round, validation accuracy and scores on its test images."""
    counts = [result[f"client/n_{part}"].tolist() for part in PARTS] + [result["best/round"].tolist()]
    none = np.full(result.run.clients, np.nan)
    done = "best/confusion" in result
    scores = [result["best/val_acc"], *(result.score(m) if done or m == "accuracy" else none for m in METRICS)]
    for k in range(result.run.clients):
        yield k, *(of_all[k] for of_all in counts), *(text(of_all[k]) for of_all in scores)


TABLES: dict[str, tuple[tuple[str, ...], Callable[[Result], Iterator[tuple[Any, ...]]]]] = {
    "csv": (("client_id", "round", "set", "loss", "accuracy"), of_rounds),
    "clients": (("client_id", "n_train", "n_val", "n_test", "best_round", "val_accuracy", *METRICS), of_clients),
}


def write_table(results: Sequence[Result], out: Path, form: str) -> None:
    columns, rows_of = TABLES[form]
    if len(results) == 1:
        write_csv(out, columns, rows_of(results[0]))
        return
    stems = [result.path.stem for result in results]
    names = {r.path: stem if stems.count(stem) == 1 else str(r.path) for r, stem in zip(results, stems, strict=True)}
    write_csv(out, ("run", *columns), ((names[r.path], *row) for r in results for row in rows_of(r)))


def default_out(paths: Sequence[Path], form: str) -> Path:
    """Return the file to write: NAME.csv beside one result, runs.csv beside the first of several."""
    stem = paths[0] if len(paths) == 1 else paths[0].with_name("runs")
    return stem.with_suffix(".csv" if form == "csv" else ".clients.csv")


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser("python -m dpfl_mpi.export", description=__doc__, **how)
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result files, finished or running")
    parser.add_argument("--format", choices=("csv", "clients"), default="csv")
    default = "default: beside the result; of several results, runs.csv"
    parser.add_argument("--out", type=Path, help=f"file to write ({default})")
    args = parser.parse_args(arguments)
    results = [Result(path) for path in dict.fromkeys(args.results)]
    for result in results:
        if result.last_round < 0:
            raise UserError(f"{result.path}: no round is recorded yet")
    out = args.out or default_out([result.path for result in results], args.format)
    check_apart(out, *(result.path for result in results))
    replaced = out.exists()
    write_table(results, out, args.format)
    if replaced:
        complain(f"{out} was there before; it is replaced")
    print(out)


if __name__ == "__main__":
    exit_with(main)
