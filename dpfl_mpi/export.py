"""Results in other tools' formats:
`python -m dpfl_mpi.export RESULT... --format csv|clients|pfllib`.

csv: one long table, one row per client, round and set:
    client_id,round,set,loss,accuracy
  Accuracy is from 0 to 1, empty where it is not recorded. With several results
  a first column `run` names them, by their paths where file names repeat, and
  the file is runs.csv beside the first.
clients: one row per client, of its best model by validation:
    client_id,n_train,n_val,n_test,best_round,val_accuracy,
    accuracy,balanced_accuracy,macro_f1
  The last three are on its test images, macro F1 and balanced accuracy as
  scikit-learn defines them, empty before the end of the run.
pfllib: the HDF5 layout that users of PFLlib plot from, one file per result, in
  a folder `pfllib` beside it: `rs_test_acc` [T+1] (test accuracy, 0 to 1),
  `rs_train_loss` [T+1] and `rs_test_auc` (empty: not computed). As there,
  rounds are weighted means over clients by their number of test and training
  samples.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError, exit_with
from dpfl_mpi.results import Result
from dpfl_mpi.results.scores import METRICS
from dpfl_mpi.storage import disk
from dpfl_mpi.storage.files import explained, replacing

SETS = ("train", "val", "test")


def long_rows(result: Result) -> Iterator[tuple[int, int, str, Any, Any]]:
    """Yield (client, round, set, loss, accuracy) of everything recorded; "" where a set has no such number."""
    numbers = result["round/number"][: result.last_round + 1]
    there = {f"{s}_{n}" for s in SETS for n in ("loss", "acc") if f"round/{s}_{n}" in result}
    arrays = {name: result[f"round/{name}"] for name in there}
    for i, t in enumerate(numbers):
        for name in SETS:
            loss, accuracy = arrays.get(f"{name}_loss"), arrays.get(f"{name}_acc")
            for k in range(len(result["client/p"])):
                yield k, int(t), name, value(loss, i, k), value(accuracy, i, k)


def value(array: np.ndarray | None, row: int, client: int) -> Any:
    """Return a number as text that reads back to the same bits, or "" where there is none."""
    return "" if array is None else text(array[row, client])


def text(number: Any) -> str:
    """Return a number as text that reads back to the same bits, or "" where it is not finite."""
    return repr(float(number)) if np.isfinite(number) else ""


def client_rows(result: Result) -> Iterator[tuple[Any, ...]]:
    """Yield (client, training, validation and test samples, best round, validation accuracy, scores on its test images)."""
    counts = [result[f"client/n_{s}"] for s in SETS] + [result["best/round"]]
    nothing = np.full(len(counts[0]), np.nan)
    done = "best/confusion" in result
    scores = [result["best/val_acc"], *(result.score(m) if done or m == "accuracy" else nothing for m in METRICS)]
    for k in range(len(nothing)):
        yield k, *(int(n[k]) for n in counts), *(text(s[k]) for s in scores)


LONG = ("client_id", "round", "set", "loss", "accuracy"), long_rows
CLIENTS = ("client_id", "n_train", "n_val", "n_test", "best_round", "val_accuracy", *METRICS), client_rows


def write_csv(results: Sequence[Result], out: Path, what: Any = LONG) -> None:
    """Write all results as one table: `LONG` or `CLIENTS`, its columns and the function that yields its rows."""
    columns, rows = what
    several, stems = len(results) > 1, [result.path.stem for result in results]
    with open(out, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*(["run"] if several else []), *columns])
        for result, stem in zip(results, stems, strict=True):
            name = stem if stems.count(stem) == 1 else str(result.path)
            for row in rows(result):
                table.writerow([*([name] if several else []), *row])


def weighted(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean over clients of each round, `[T+1]`, weighted, of the finite values (nan where there are none)."""
    finite = np.isfinite(values)
    total = (finite * weights).sum(1)
    sums = (np.where(finite, values, 0) * weights).sum(1)
    return np.divide(sums, total, out=np.full(len(values), np.nan), where=total > 0)


def write_pfllib(result: Result, out: Path) -> None:
    """Write one result in PFLlib's layout."""
    with disk.File(out, "w") as file:
        file["rs_test_acc"] = weighted(result["round/test_acc"], result["client/n_test"] * result.benign)
        file["rs_test_auc"] = np.zeros(0)
        file["rs_train_loss"] = weighted(result["round/train_loss"], result["client/n_train"] * result.benign)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write the files, print their paths, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dpfl_mpi.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result files, finished or running")
    parser.add_argument("--format", choices=("csv", "clients", "pfllib"), default="csv")
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write; of several results with pfllib the folder (default: beside the result, of several runs.csv; with pfllib in pfllib/)",
    )
    args = parser.parse_args(arguments)
    try:
        results = [Result(path) for path in args.results]
        empty = next((r for r in results if r.last_round < 0), None)
        if empty:
            raise UserError(f"{empty.path}: no round is recorded yet")
        if args.format != "pfllib":
            ending = ".csv" if args.format == "csv" else ".clients.csv"
            several = results[0].path.with_name("runs")  # no one Run's name: that file may hold it alone
            pieces = [(results, args.out or (several if len(results) > 1 else results[0].path).with_suffix(ending))]
        elif len(results) == 1:
            pieces = [(results, args.out or beside(results[0]))]
        else:
            pieces = [([r], args.out / beside(r).name if args.out else beside(r)) for r in results]
        outs = [out for _, out in pieces]
        if len(set(outs)) < len(outs):
            raise UserError("two of these results have the same name; export them one by one with --out")
        for part, out in pieces:
            if any(out.exists() and out.samefile(r.path) for r in results):
                raise UserError(f"--out is {out}, which is one of the results; name another file")
            replaced = out.exists()
            with explained(f"--out is {out}; it cannot be written"), replacing(out) as new:
                if args.format == "pfllib":
                    write_pfllib(part[0], new)
                else:
                    write_csv(part, new, LONG if args.format == "csv" else CLIENTS)
            if replaced:
                print(f"{out} was there before; it is replaced", file=sys.stderr)
            print(out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def beside(result: Result) -> Path:
    """Return the default name of a result in PFLlib's layout: in a folder of its own, where `results/*.h5` does not find it."""
    return result.path.parent / "pfllib" / result.path.name


if __name__ == "__main__":
    exit_with(main)
