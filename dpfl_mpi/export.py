"""Results in other tools' formats: `python -m dpfl_mpi.export RESULT... --format csv|pfllib`.

csv: one long table, a row a client, round and set: `client_id,round,set,loss,accuracy`; accuracy from 0 to 1, empty where it is not recorded;
with several results a first column `run` names them.
pfllib: the HDF5 layout that users of PFLlib plot from, a file a result: `rs_test_acc` [T+1] (test accuracy, 0 to 1), `rs_train_loss` [T+1] and
`rs_test_auc` (empty: not computed); as there, rounds are weighted means over clients by their number of test and training samples.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.storage import disk
from dpfl_mpi.storage.files import explained

SETS = ("train", "val", "test")


def long_rows(result: Result) -> Iterator[tuple[int, int, str, Any, Any]]:
    """Yield (client, round, set, loss, accuracy) of everything recorded; "" where a set has no such number."""
    numbers = result["round/number"]
    there = {f"{s}_{n}" for s in SETS for n in ("loss", "acc") if f"round/{s}_{n}" in result}
    arrays = {name: result[f"round/{name}"] for name in there}
    for i, t in enumerate(numbers):
        for name in SETS:
            loss, accuracy = arrays.get(f"{name}_loss"), arrays.get(f"{name}_acc")
            for k in range(len(result["client/p"])):
                yield k, int(t), name, value(loss, i, k), value(accuracy, i, k)


def value(array: np.ndarray | None, row: int, client: int) -> Any:
    """Return a number as text that reads back to the same bits, or "" where there is none."""
    return "" if array is None or not np.isfinite(array[row, client]) else repr(float(array[row, client]))


def write_csv(results: Sequence[Result], out: Path) -> None:
    """Write all results as one table."""
    several = len(results) > 1
    with open(out, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*(["run"] if several else []), "client_id", "round", "set", "loss", "accuracy"])
        for result in results:
            for row in long_rows(result):
                table.writerow([*([result.path.stem] if several else []), *row])


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
    parser.add_argument("--format", choices=("csv", "pfllib"), default="csv")
    parser.add_argument(
        "--out", type=Path, help="file to write; of several results with pfllib the folder (default: beside the result)"
    )
    args = parser.parse_args(arguments)
    try:
        results = [Result(path) for path in args.results]
        empty = next((r for r in results if r.last_round < 0), None)
        if empty:
            raise UserError(f"{empty.path}: no round is recorded yet")
        if args.format == "csv":
            pieces = [(results, args.out or results[0].path.with_suffix(".csv"))]
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
            with explained(f"--out is {out}; it cannot be written"):
                out.parent.mkdir(parents=True, exist_ok=True)
                write_csv(part, out) if args.format == "csv" else write_pfllib(part[0], out)
            print(out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def beside(result: Result) -> Path:
    """Return the default name of a result in PFLlib's layout."""
    return result.path.with_name(f"{result.path.stem}-pfllib.h5")


if __name__ == "__main__":
    sys.exit(main())
