"""Results for other tools: `python -m dpfl_mpi.export RESULT... --format FORMAT`.

csv: a row per client, round and set: client_id,round,set,loss,accuracy
  Accuracy is from 0 to 1, empty where it is not recorded. Several results have
  a first column `run`, paths where file names repeat, in runs.csv by the first.
clients: a row per client, of its best model by validation:
    client_id,n_train,n_val,n_test,best_round,val_accuracy,
    accuracy,balanced_accuracy,macro_f1
  The last three are on its test images, macro F1 and balanced accuracy as
  scikit-learn defines them, empty before the end of the run.
pfllib: the HDF5 layout that users of PFLlib plot from, one file per result, in
  a folder `pfllib` beside it: `rs_test_acc` [T+1] (test accuracy, 0 to 1),
  `rs_train_loss` [T+1] and `rs_test_auc` (empty: not computed): means over
  clients, weighted by their number of test and training samples.
"""

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.errors import UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import METRICS, mean
from dpfl_mpi.storage.files import check_apart, explained, write, write_csv


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


def write_pfllib(result: Result, out: Path) -> None:
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file["rs_test_acc"] = mean(result["round/test_acc"], result["client/n_test"] * result.benign)
        file["rs_test_auc"] = np.zeros(0)
        file["rs_train_loss"] = mean(result["round/train_loss"], result["client/n_train"] * result.benign)
    with explained(f"--out is {out}; it cannot be written"):
        write(out, image.getvalue())


def places(results: Sequence[Result], form: str, out: Path | None) -> list[Path]:
    """Return the file to write, with pfllib one for each result; those in a folder of their own, where `results/*.h5` does not find them."""
    paths = [result.path for result in results]
    if form != "pfllib":
        alone = paths[0] if len(paths) == 1 else paths[0].with_name("runs")  # no one Run's name: it may hold that alone
        return [out or alone.with_suffix(".csv" if form == "csv" else ".clients.csv")]
    if out and len(paths) == 1:
        return [out]
    return [(out or path.parent / "pfllib") / path.name for path in paths]


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser("python -m dpfl_mpi.export", description=__doc__, **how)
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result files, finished or running")
    parser.add_argument("--format", choices=("csv", "clients", "pfllib"), default="csv")
    text = "file to write; of several results with pfllib the folder (default: beside the result, of several runs.csv; with pfllib in pfllib/)"
    parser.add_argument("--out", type=Path, help=text)
    args = parser.parse_args(arguments)
    results = [Result(path) for path in dict.fromkeys(args.results)]
    if empty := next((r for r in results if r.last_round < 0), None):
        raise UserError(f"{empty.path}: no round is recorded yet")
    outs = places(results, args.format, args.out)
    if len(set(outs)) < len(outs):
        raise UserError("two of these results have the same name; export them one by one with --out")
    for i, out in enumerate(outs):
        check_apart(out, *(result.path for result in results))
        replaced = out.exists()
        if args.format == "pfllib":
            write_pfllib(results[i], out)
        else:
            write_table(results, out, args.format)
        if replaced:
            complain(f"{out} was there before; it is replaced")
        print(out)


if __name__ == "__main__":
    exit_with(main)
