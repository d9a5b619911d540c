"""Export results as CSV: `python -m dpfl_mpi.export RESULT... --format FORMAT`.

csv: a row per client, round and set: client_id,round,set,loss,accuracy, and
    before loss the client's name, if it has one
  Accuracy is from 0 to 1, and empty where it is not recorded.
clients: a row per client, of its best model by validation, with the columns of
    `Result.to_pandas`: name, group, n_train, best_test_acc and others
  Scores are from 0 to 1. balanced_accuracy, macro_f1 and best_test_auc, as
  defined by scikit-learn, are there after the end of the run. AUC is of a class
  against the rest, mean over the classes of the client's test images.

runs: a row per Run: its path, the settings that matter most or differ, B_c as
    text and as a number, scores from 0 to 1, and costs, as `dpfl_mpi.table`
    returns them

A folder stands for the results in it. The file is beside the first result: its
name with .csv, .clients.csv or .table.csv; of several results runs.csv,
runs.clients.csv or runs.table.csv. Of several, csv and clients begin with a
column `run`: the result's name, or its path if names repeat.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.errors import complain, exit_with, in_a_sentence
from dpfl_mpi.results import Result
from dpfl_mpi.results.table import of_runs, opened
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.storage.files import check_apart, write_csv

Columns = dict[str, Any]  # values of one length, by name
ENDINGS = {"csv": ".csv", "clients": ".clients.csv", "runs": ".table.csv"}  # by --format


def of_rounds(result: Result) -> Columns:
    """Return the columns of format csv: a row per client, round and set."""
    rounds, n = result.last_round + 1, result.run.clients
    t, part, k = np.indices((rounds, len(PARTS), n)).reshape(3, -1)
    out = {"client_id": k, "round": result["round/number"][t], "set": np.array(PARTS)[part]}
    if "client/name" in result:
        out["name"] = result.names[k]
    not_recorded = np.full((rounds, n), np.nan)
    for column, suffix in (("loss", "loss"), ("accuracy", "acc")):
        arrays = [f"round/{part}_{suffix}" for part in PARTS]
        of_parts = [result[a][:rounds] if a in result else not_recorded for a in arrays]
        out[column] = np.stack(of_parts, 1).ravel()  # from [rounds, sets, N]
    return out


def of_clients(result: Result) -> Columns:
    return {"client_id": np.arange(result.run.clients)} | result.by_client()


def table(results: Sequence[Result], form: str) -> Columns:
    """Return the columns of a CSV file of format `form`; what one of the results lacks is empty."""
    if form == "runs":
        return of_runs(results)
    tables, stems = [], [result.path.stem for result in results]
    for result in results:
        columns = of_rounds(result) if form == "csv" else of_clients(result)
        if len(results) > 1:  # the first column says which result a row is from
            name = result.path if stems.count(result.path.stem) > 1 else result.path.stem
            columns = {"run": [name] * len(columns["client_id"])} | columns
        tables.append(columns)
    out: Columns = {name: [] for columns in tables for name in columns}
    for columns in tables:
        empty = [""] * len(columns["client_id"])
        for name, values in out.items():
            values.extend(columns.get(name, empty))
    return out


def text(value: Any) -> Any:
    """Return a value for CSV: numbers with all digits, and "" for None and nan."""
    if value is None or value != value:
        return ""
    return repr(float(value)) if isinstance(value, float | np.floating) else value


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m dpfl_mpi.export", description=__doc__)
    parser.add_argument("results", nargs="+", metavar="RESULT", help="finished or running results")
    parser.add_argument("--format", choices=ENDINGS, default="csv", help="default: csv")
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV file to write")
    args = parser.parse_args(arguments)
    results = opened(dict.fromkeys(args.results))
    for result in results:
        result.check_begun()
    paths = [result.path for result in results]
    stem = paths[0] if len(paths) == 1 else paths[0].with_name("runs")
    out = args.out or stem.with_name(stem.name.removesuffix(".h5") + ENDINGS[args.format])
    check_apart(out, *paths)
    replaced = out.exists()
    columns = table(results, args.format)
    rows = zip(*columns.values(), strict=True)
    write_csv(out, columns, (map(text, row) for row in rows))
    if replaced:
        complain(f"{out} existed; it was replaced")
    print(out)


if __name__ == "__main__":
    exit_with(main)
