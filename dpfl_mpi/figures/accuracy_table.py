"""Table: test accuracy of every method on every data set.

The first table is the paper's Table 1. One table per setting (data set and partition) follows, with
the spread over clients, the difference to Local (paired by client, on the same partition), the
clients below their own Local, the worst decile, and the accuracy after the last round. A row is a
method with its budget; its Runs differ in the seed alone. `frames` are the results as data frames.
"""

from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.figures import paper as published
from dpfl_mpi.figures import tables
from dpfl_mpi.figures.command import PAPER, SEEDS, Drawing
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import unlike
from dpfl_mpi.figures.tables import latex, markdown, number
from dpfl_mpi.results.result import METRICS, mean
from dpfl_mpi.results.summary import coverage
from dpfl_mpi.settings import Run

DIRICHLET = {"partition": "dirichlet", "dirichlet_alpha": 0.1}
SETTINGS = (
    {"dataset": "cifar10", **DIRICHLET},
    {"dataset": "cifar10"},
    {"dataset": "cinic10", **DIRICHLET},
    {"dataset": "cinic10"},
    # the source of the paper's numbers
    {"dataset": "femnist", "partition": "fedrep", "data": "data/femnist-a-j.h5"},
)
TUNED, FEMNIST_TUNED = {"finetune_epochs": 10}, {"finetune_epochs": 4}  # 2 tau_train
BASELINES = ("apfl", "perfedavg", "ditto", "fedrep", "knnper", "pfedgraph")
ROWS: tuple[dict[str, Any], ...] = (
    {"method": "local"},
    {"method": "fedavg"},
    {"method": "fedavg"} | TUNED,
    {"method": "fedprox"},
    {"method": "fedprox"} | TUNED,
    *({"method": method} for method in BASELINES),
    *({"method": "dpfl", "budget": budget} for budget in published.BUDGETS),
)


def rows_on(data: dict[str, Any]) -> list[Run]:
    """Return the Runs of all rows and seeds on one data set."""
    tuned = FEMNIST_TUNED if data["dataset"] == "femnist" else TUNED
    rows = [data | row | (tuned if "finetune_epochs" in row else {}) for row in ROWS]
    return [Run(**row, seed=seed) for row in rows for seed in SEEDS]


RUNS = [run for data in SETTINGS for run in rows_on(data)]
SCORES = {"choices": tuple(METRICS), "default": "accuracy", "help": "score to show (accuracy)"}
OPTIONS = PAPER | {"score": SCORES}
SHOWN = ("budget", "rounds", "finetune_epochs")  # settings that a row's name or a column shows


def frame_of(score: str) -> tuple[str, str]:
    """Return the frame and the column of a score."""
    return ("clients", "test_acc") if score == "accuracy" else ("scores", score)


def measure(frames: Frames, score: str = "accuracy") -> pd.DataFrame:
    """Return one line per setting and row: scores in percent, differences in points."""
    frame, column = frame_of(score)
    out = []
    for setting, rows in frames.rows.groupby("setting", sort=False):
        lines = frames.of(frame, setting)  # a line per Run and client
        bold = tables.unbeaten(lines, list(rows["row"]), column)
        for row, is_bold in zip(rows.itertuples(), bold, strict=True):
            runs = frames.of("runs", setting, row.row)
            means = tables.means(lines, row.row, column)  # of each Run over its clients
            in_paper = published.table_1(row.paper, row.row) if score == "accuracy" else None
            last = [r.benign_percentages("last/test_acc") for r in runs["result"]]
            notes = sorted({note for r in runs["result"] if (note := coverage(r))})
            # the scores of each Run's clients, and the mean of the lowest tenth of them
            scored = lines[lines["row"] == row.row].dropna(subset=[column])
            of_runs = [100 * part.to_numpy() for _, part in scored.groupby("run")[column]]
            worst = [np.sort(scores)[: -(-len(scores) // 10)].mean() for scores in of_runs]
            out.append({
                "setting": setting, "method": row.row,
                "mean": means.mean(), "std": tables.deviation(means), "n": len(means),
                "bold": is_bold,
                "client_std": mean(np.array([scores.std() for scores in of_runs])),
                "worst_decile": mean(np.array(worst)),
                **against_local(lines, row, rows[rows["method"] == "local"], column),
                "few": "; ".join(notes),
                "last_round": mean(np.array([scores.mean() for scores in last if len(scores)])),
                "epochs": row.epochs, "finished": runs["finished"].all(),
                "paper": " ± ".join(in_paper or ()),
                "cell": tables.mean_text(means),
            })  # fmt: skip
    return pd.DataFrame(out)


def against_local(
    lines: pd.DataFrame, row: Any, local: pd.DataFrame, column: str
) -> dict[str, Any]:
    """Return a row's difference to Local, points, and the share of clients below it, percent.

    `lines` has the scores of clients, `local` the rows of the method Local. Of several such rows on
    the row's partition the most similar one is used.
    """

    def distance(other: Any) -> tuple[int, int]:
        return len(unlike(row.result, other.result, *SHOWN)), abs(row.epochs - other.epochs)

    others = sorted(local.itertuples(), key=distance) if row.method != "local" else []
    differences = (tables.paired(lines, row.row, other.row, column) for other in others)
    parts = next(filter(None, differences), [np.array([np.nan])])
    gain, half = tables.interval(parts)
    below = 100 * np.mean(np.concatenate(parts) < -1e-9) if np.isfinite(gain) else np.nan
    return {"vs_local": gain, "vs_local_half_interval": half, "below_local_percent": below}


def details(part: pd.DataFrame, score: str) -> pd.DataFrame:
    """Return the table of one setting; `part` are its lines of `measure`."""
    pairs = zip(part["vs_local"], part["vs_local_half_interval"], strict=True)
    gains = ["-" if np.isnan(gain) else f"{gain:+.2f} ± {number(half)}" for gain, half in pairs]
    last = "last round" if score == "accuracy" else "last round, accuracy"
    return pd.DataFrame({
        "method": part["method"],
        METRICS[score]: part["mean"].map(number),
        "std over clients": part["client_std"].map(number),
        "vs Local": gains,
        "below own Local, %": part["below_local_percent"].map(lambda v: number(v, ".0f")),
        "worst decile": part["worst_decile"].map(number),
        last: part["last_round"].map(number),
        "epochs": part["epochs"].map(str),
    })  # fmt: skip


def by_group(lines: pd.DataFrame, column: str) -> list[str]:
    """Return a table of the mean score of each row and group of clients, if there are groups."""
    if "group" not in lines or not lines["group"].notna().any():
        return []
    table = lines.pivot_table(column, "row", "group", sort=False, aggfunc="mean")
    table = (100 * table[sorted(table)]).map(number).rename_axis("method").reset_index()
    return [f"\nby group of clients\n\n{markdown(table)}"]


def by_class(frames: Frames, where: str) -> list[str]:
    """Return a table of the scores that count classes alike, if all Runs are finished."""
    if not all("best/confusion" in result for result in frames.runs["result"]):
        return []
    lines = frames.of("scores", where)
    rows = frames.rows.loc[frames.rows["setting"] == where, "row"]
    columns = {}
    for metric, name in list(METRICS.items())[1:]:  # but accuracy
        columns[name] = [number(tables.means(lines, row, metric).mean()) for row in rows]
    return [f"\n{markdown(pd.DataFrame({'method': list(rows)} | columns))}"]


def notes(part: pd.DataFrame, results: pd.Series) -> list[str]:
    """Return notes on what makes the rows of one setting less comparable."""
    # `part` are its lines of `measure`, and `results` one result of each row
    out = []
    by_epochs = [f"{n} ({', '.join(m)})" for n, m in part.groupby("epochs")["method"]]
    if len(by_epochs) > 1:
        out.append(f"local epochs differ: {'; '.join(by_epochs)}.")
    pairs = [(a, b) for a, b in combinations(results, 2) if a.run.method != b.run.method]
    if differ := {name for a, b in pairs for name in unlike(a, b, *SHOWN)}:
        out.append(f"rows differ in {', '.join(sorted(differ))}, not in the method alone.")
    few = part[part["few"] != ""]
    out += [f"{line.method} has means over {line.few}." for line in few.itertuples()]
    if not part["finished"].all():
        out.append(f"not finished: {', '.join(part[~part['finished']]['method'])}.")
    return [f"\nNote: {note}" for note in out]


def draw(frames: Frames, paper: bool = False, score: str = "accuracy") -> Drawing:
    data = measure(frames, score)
    # the first table: a row per method, a column per setting
    settings = list(dict.fromkeys(data["setting"]))
    cells = data["cell"] + np.where(data["finished"], "", ", not finished")
    in_paper = data["paper"] if paper else [""] * len(data)
    data["cell"] = list(map(tables.cell_text, cells, data["bold"], in_paper))
    table = data.pivot(index="method", columns="setting", values="cell").fillna("-")
    table = table.loc[data["method"].unique(), settings].reset_index()
    parts = [
        markdown(table),
        f"\nTest {METRICS[score]}, %: mean over clients of their best model by validation; "
        "mean ± standard deviation over seeds (ddof 1; number of seeds).\n"
        "Bold: not beaten by the best of its column (the 95 % interval of the paired difference "
        "reaches 0; only runs on common partitions are compared).",
    ]
    if paper:
        parts[-1] += "\nIn brackets: the paper's Table 1."
    for where in settings:
        part = data[data["setting"] == where]
        parts.append(f"\n{where}\n\n{markdown(details(part, score))}")
        parts += by_class(frames, where) if score == "accuracy" else []
        frame, column = frame_of(score)
        parts += by_group(frames.of(frame, where), column)
        parts += notes(part, frames.rows.loc[frames.rows["setting"] == where, "result"])
    parts.append(
        "\nvs Local: difference paired by client on the same partition, in points, with its 95 % "
        "interval (over partitions, or over the clients of a single one). Of several Local Runs "
        "the most similar one is used."
    )
    return Drawing(data.drop(columns="cell"), text="\n".join(parts), latex=latex(table))
