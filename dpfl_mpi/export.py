"""Export results as CSV: `python -m dpfl_mpi.export RESULT... --format FORMAT`.

csv: a row per client, round and set: client_id,round,set,loss,accuracy
  Accuracy is from 0 to 1, and empty where it is not recorded.
clients: a row per client, of its best model by validation:
    client_id,name,group,n_train,n_val,n_test,best_round,val_accuracy,
    accuracy,balanced_accuracy,macro_f1,auc
  The last four are on its test images; those after accuracy, as defined by
  scikit-learn, are empty before the end of the run. AUC is of a class against
  the rest, mean over the classes of the client's test images.

runs: a row per Run: the settings that matter most or differ, B_c as text and as
  a number, scores from 0 to 1, and costs, as `dpfl_mpi.table` returns them.

A folder stands for the results in it. Several share one file, runs.csv beside
the first one. Its first column, `run`, has their file names, or their paths if
names repeat.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.errors import complain, exit_with, in_a_sentence
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import METRICS
from dpfl_mpi.results.table import of_runs, opened
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.storage.files import check_apart, write_csv

Row = tuple[Any, ...]
ROUND_COLUMNS = ("client_id", "round", "set", "loss", "accuracy")
CLIENT_COLUMNS = (
    *("client_id", "name", "group", "n_train", "n_val", "n_test"),
    *("best_round", "val_accuracy", *METRICS),
)


def text(number: Any) -> str:
    """Return a number as text that reads back to the same bits, "" if it is not finite."""
    return repr(float(number)) if np.isfinite(number) else ""


def of_rounds(result: Result) -> Iterator[Row]:
    rounds = result["round/number"][: result.last_round + 1].tolist()
    scores = [f"round/{part}_{what}" for part in PARTS for what in ("loss", "acc")]
    arrays = {name: result[name] for name in scores if name in result}
    absent = np.full(result.run.clients, np.nan)
    for i, t in enumerate(rounds):
        for part in PARTS:
            names = (f"round/{part}_loss", f"round/{part}_acc")
            loss, accuracy = (arrays[name][i] if name in arrays else absent for name in names)
            for k in range(result.run.clients):
                yield k, t, part, text(loss[k]), text(accuracy[k])


def of_clients(result: Result) -> Iterator[Row]:
    absent_text = np.full(result.run.clients, "")
    names = [result.named().get(what, absent_text) for what in ("name", "group")]
    sizes = [result[f"client/n_{part}"] for part in PARTS]
    best_round = result["best/round"].tolist()
    absent = np.full(result.run.clients, np.nan)
    ended = "best/confusion" in result
    known = [result.score(m) if ended or m == "accuracy" else absent for m in METRICS]
    scores = [result["best/val_acc"], *known]
    for k in range(result.run.clients):
        yield (
            k,
            *(values[k] for values in (*names, *sizes)),
            best_round[k],
            *(text(score[k]) for score in scores),
        )


# columns, function that yields the rows, end of the file's name
TABLES: dict[str, tuple[Row, Callable[[Result], Iterator[Row]], str]] = {
    "csv": (ROUND_COLUMNS, of_rounds, ".csv"),
    "clients": (CLIENT_COLUMNS, of_clients, ".clients.csv"),
}


def table(results: Sequence[Result], form: str) -> tuple[Row, Iterable[Row]]:
    """Return the columns and the rows of a CSV file."""
    if form == "runs":
        found = of_runs(results)
        known = lambda value: "" if value is None or value != value else value  # noqa: E731
        return (*found,), zip(*(map(known, values) for values in found.values()), strict=True)
    columns, rows_of, _ = TABLES[form]
    if len(results) == 1:
        return columns, rows_of(results[0])
    paths = [result.path for result in results]
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    rows = ((n, *row) for n, r in zip(names, results, strict=True) for row in rows_of(r))
    return ("run", *columns), rows


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m dpfl_mpi.export", description=__doc__)
    parser.add_argument("results", nargs="+", metavar="RESULT", help="finished or running results")
    parser.add_argument("--format", choices=[*TABLES, "runs"], default="csv", help="default: csv")
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV file to write")
    args = parser.parse_args(arguments)
    results = opened(dict.fromkeys(args.results))
    for result in results:
        result.check_begun()
    paths = [result.path for result in results]
    stem = paths[0] if len(paths) == 1 else paths[0].with_name("runs")
    suffix = TABLES[args.format][2] if args.format in TABLES else ".table.csv"
    out = args.out or stem.with_suffix(suffix)
    check_apart(out, *paths)
    replaced = out.exists()
    write_csv(out, *table(results, args.format))
    if replaced:
        complain(f"{out} existed; it was replaced")
    print(out)


if __name__ == "__main__":
    exit_with(main)
