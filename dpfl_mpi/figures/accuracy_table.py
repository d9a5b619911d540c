"""Table: test accuracy of every method on every data set, with what is behind the mean.

The first table is the paper's Table 1. A table for each data set follows: the spread over clients, the difference to Local client by client on
the same partition, the clients that are below their own Local, the worst decile, and the last round beside the best by validation.
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
from dpfl_mpi.figures.tables import latex, markdown, number, printed
from dpfl_mpi.results.result import METRICS, mean
from dpfl_mpi.results.summary import fewer
from dpfl_mpi.settings import Run

SETTINGS = (
    {"dataset": "cifar10", "partition": "dirichlet", "dirichlet_alpha": 0.1},
    {"dataset": "cifar10"},
    {"dataset": "cinic10", "partition": "dirichlet", "dirichlet_alpha": 0.1},
    {"dataset": "cinic10"},
    {"dataset": "femnist", "partition": "fedrep", "data": "data/femnist-a-j.h5"},  # what the paper's numbers come from
)
TUNED = {"finetune_epochs": 10}  # 2 tau_train
ROWS: tuple[dict[str, Any], ...] = (
    {"method": "local"},
    {"method": "fedavg"},
    {"method": "fedavg"} | TUNED,
    {"method": "fedprox"},
    {"method": "fedprox"} | TUNED,
    *({"method": method} for method in ("apfl", "perfedavg", "ditto", "fedrep", "knnper", "pfedgraph")),
    *({"method": "dpfl", "budget": budget} for budget in published.BUDGETS),
)
FEMNIST_TUNING = {"finetune_epochs": 4}  # its tau_train is 2


def rows_on(data: dict[str, Any]) -> list[Run]:
    tuning = FEMNIST_TUNING if data["dataset"] == "femnist" else {}
    rows = [data | row | (tuning if "finetune_epochs" in row else {}) for row in ROWS]
    return [Run(**row, seed=seed) for row in rows for seed in SEEDS]


RUNS = [run for data in SETTINGS for run in rows_on(data)]
SCORE = {"choices": tuple(METRICS), "default": "accuracy", "help": "what is scored (default: accuracy)"}
OWN = ("budget", "rounds", "finetune_epochs")  # settings that a row has by its method, or that a column shows
OPTIONS = PAPER | {"score": SCORE}


def measure(frames: Frames, score: str = "accuracy") -> pd.DataFrame:
    """Return one line per setting and row: accuracies (or `score`) in percent, differences in points, means over the seeds."""
    name, column = ("clients", "test_acc") if score == "accuracy" else ("scores", score)
    out = []
    for where, here in frames.rows.groupby("setting", sort=False):
        lines = frames.of(name, where)
        for line, bold in zip(here.itertuples(), tables.unbeaten(lines, list(here["row"]), column), strict=True):
            mine = lines[lines["row"] == line.row].dropna(subset=[column])
            each = [100 * part.to_numpy() for _, part in mine.groupby("run")[column]]  # in which somebody was scored
            values = tables.means(lines, line.row, column)
            group = frames.of("runs", where, line.row)
            last = [a.mean() for r in group["result"] if len(a := r.scored("last/test_acc"))]
            difference = to_local(lines, line, here[here["method"] == "local"], column)
            gain, half = tables.interval(difference) if difference else (np.nan, np.nan)
            theirs = published.table_1(line.paper, line.row) if score == "accuracy" else None
            row = {"setting": where, "method": line.row, "mean": values.mean(), "std": tables.deviation(values)}
            row |= {"n": len(values), "bold": bold, "client_std": mean(np.array([a.std() for a in each]))}
            row |= {"vs_local": gain, "vs_local_half_interval": half}
            row["below_local_percent"] = 100 * np.mean(np.concatenate(difference) < -1e-9) if difference else np.nan
            row["worst_decile"] = mean(np.array([np.sort(a)[: -(-len(a) // 10)].mean() for a in each]))
            row["few"] = "; ".join(sorted({few for result in group["result"] if (few := fewer(result))}))
            row |= {"last_round": mean(np.array(last)), "epochs": line.epochs, "finished": group["finished"].all()}
            out.append(row | {"paper": " ± ".join(theirs or ()), "cell": tables.cell(values)})
    return pd.DataFrame(out)


def to_local(lines: pd.DataFrame, line: Any, alone: pd.DataFrame, score: str) -> tables.Parts:
    """Return a row minus Local client by client, of several rows of Local the one that is most alike: in settings, then in local epochs."""

    def distance(local: Any) -> tuple[int, int]:
        return len(unlike(line.result, local.result, *OWN)), abs(line.epochs - local.epochs)

    near = () if line.method == "local" else sorted(alone.itertuples(), key=distance)
    return next((parts for local in near if (parts := tables.paired(lines, line.row, local.row, score))), [])


def draw(frames: Frames, paper: bool = False, score: str = "accuracy") -> Drawing:
    data = measure(frames, score)
    settings = list(dict.fromkeys(data["setting"]))
    cells = data["cell"] + np.where(data["finished"], "", ", not finished")
    theirs = data["paper"] if paper else [""] * len(data)
    data["cell"] = list(map(printed, cells, data["bold"], theirs))
    table = data.pivot(index="method", columns="setting", values="cell").fillna("-")
    table = table.loc[data["method"].unique(), settings].reset_index()
    parts = [
        markdown(table),
        f"\nTest {METRICS[score]}, %: mean over clients of their best model by validation; mean ± standard deviation over seeds (ddof 1; number of seeds)."
        "\nBold: what the best of its column does not beat (the 95 % interval of the paired difference reaches 0; only runs on common partitions are compared)."
        + ("\nIn brackets: the paper's Table 1." if paper else ""),
    ]
    for where in settings:
        part = data[data["setting"] == where]
        gains = zip(part["vs_local"], part["vs_local_half_interval"], strict=True)
        gain = ["-" if np.isnan(mean) else f"{mean:+.2f} ± {number(half)}" for mean, half in gains]
        details = {
            "method": part["method"],
            METRICS[score]: part["mean"].map(number),
            "std over clients": part["client_std"].map(number),
            "vs Local": gain,
            "below own Local, %": part["below_local_percent"].map(lambda v: number(v, ".0f")),
            "worst decile": part["worst_decile"].map(number),
            "last round" if score == "accuracy" else "last round, accuracy": part["last_round"].map(number),
            "epochs": part["epochs"].map(str),
        }
        parts.append(f"\n{where}\n\n{markdown(pd.DataFrame(details))}")
        by = [f"{e} ({', '.join(same)})" for e, same in part.groupby("epochs")["method"]]
        if len(by) > 1:
            parts.append(f"\nNote: local epochs differ: {'; '.join(by)}.")
        pairs = combinations(frames.rows.loc[frames.rows["setting"] == where, "result"], 2)
        if differ := {name for a, b in pairs if a.run.method != b.run.method for name in unlike(a, b, *OWN)}:
            parts.append(f"\nNote: rows differ in {', '.join(sorted(differ))}, not in the method alone.")
        for line in part[part["few"] != ""].itertuples():
            parts.append(f"\nNote: {line.method} has means over {line.few}.")
        if not part["finished"].all():
            parts.append(f"\nNote: not finished: {', '.join(part[~part['finished']]['method'])}.")
    parts.append(
        "\nvs Local: difference client by client on the same partition, points, with its 95 % interval: over partitions, of one partition over its clients."
        " Of several Local the one whose settings and epochs are nearest."
    )
    return Drawing(data.drop(columns="cell"), text="\n".join(parts), latex=latex(table))
