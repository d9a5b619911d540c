"""Table: overfitting to the validation set, attackers, newcomers and early stopping.

A row is a setting (data and partition) and a method, a mean over seeds. Its columns:

validation - test: validation minus test accuracy of each client's best model, points, with its 95 %
interval over partitions, or over the clients of a single one (seeds on one partition are averaged
first). attackers: the share of attackers among those whom benign clients chose in rounds 1 to T,
and among all clients. backdoor: the share of marked test images of other classes that benign
clients' best models take for class 0; in brackets: the same share for images without the mark.
newcomers: mean accuracy after 0, 1 and 5 epochs of their own. arrived (--churn): mean accuracy of
clients in the round in which they arrive, and 1 and 5 rounds later; in brackets the mean of all
clients that are present then. Costs are means per client.
"""

import numpy as np
import pandas as pd

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames, costs
from dpfl_mpi.figures.tables import Parts, interval, latex, markdown, means, number
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import mean, ratio
from dpfl_mpi.settings.values import ATTACKS

NO_PAIR = float("nan"), float("nan")
METHODS = ("dpfl", "pairwise", "random_graph", "fedavg")
RUNS = [
    *cifar10(method=METHODS, search_share=(1.0, 0.5)),
    *cifar10(method=METHODS, attack=tuple(f"{kind}:0.2" for kind in ATTACKS)),
    *cifar10(method=METHODS, newcomers=0.1),
    *cifar10(method=METHODS, patience=10),
]


def gaps(lines: pd.DataFrame) -> Parts:
    """Return validation minus test accuracy of one row's best models, points.

    `lines` has a line per Run and client. There is an array for each partition, with a value per
    client.
    """
    points = lines.assign(gap=100 * (lines["val_acc"] - lines["test_acc"]))
    out = []
    for _, part in points.groupby("partition", sort=False):
        by_client = part.pivot(index="client", columns="run", values="gap")
        out.append(by_client.mean(axis=1, skipna=False).dropna().to_numpy())
    return [part for part in out if len(part)]


def attacker_shares(result: Result) -> tuple[float, float]:
    """Return the share of attackers among all clients, and among those chosen; nan without any."""
    if "client/attackers" not in result:
        return NO_PAIR
    chosen = result.attackers_chosen()
    among_chosen = float(chosen.mean()) if len(chosen) else float("nan")
    return float(result["client/attackers"].mean()), among_chosen


def backdoor(result: Result) -> tuple[float, float]:
    """Return how often benign clients take other classes for class 0, with the mark and without."""
    # means over clients, 0 to 1; nan where there is no backdoor
    if "attack/success" not in result:
        return NO_PAIR
    others = result["best/confusion"][:, 1:]  # true class by predicted class
    unmarked = ratio(others[:, :, 0].sum(1), others.sum((1, 2)))
    scored = result.benign & np.isfinite(result["attack/success"])
    if not scored.any():
        return NO_PAIR
    return float(result["attack/success"][scored].mean()), float(unmarked[scored].mean())


def newcomers(result: Result) -> np.ndarray:
    """Return the mean accuracy of newcomers after each number of epochs; empty without any."""
    return np.array([mean(values) for values in result.of_newcomers().values()])


def arrivals(result: Result) -> pd.DataFrame:
    """Return by `age`, rounds since clients came (--churn), their accuracy and `all` clients'."""
    # test accuracies, percent, of the models reported; `all` are those present in the same rounds
    lines = [pd.DataFrame({"age": [], "accuracy": [], "all": []})]  # one frame per round
    if "round/there" in result:
        present = result["round/there"][: result.last_round + 1]
        since = np.zeros(present.shape[1], int)  # round in which a client came, 0 for the first
        for t in range(1, len(present)):
            since[present[t] & ~present[t - 1]] = t
            benign = present[t] & result.benign
            accuracy = np.where(benign, 100 * result["round/test_acc"][t], np.nan)
            new = np.flatnonzero(np.isfinite(accuracy) & (since > 0))
            columns = pd.DataFrame({"age": t - since[new], "accuracy": accuracy[new]})
            lines.append(columns.assign(all=np.nanmean(accuracy)))
    return pd.concat(lines).groupby("age").mean()


def percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.1f}"


def measure(group: list[Result], clients: pd.DataFrame, row: str) -> dict[str, float]:
    """Return the numbers of a row, means over its Runs: `group` are their results."""
    gap, half = interval(parts) if (parts := gaps(clients)) else NO_PAIR
    attackers, attackers_chosen = np.mean([attacker_shares(r) for r in group], 0)
    # only finished Runs have confusion matrices, which the backdoor needs
    ended = [r for r in group if "best/confusion" in r] or group
    marked, unmarked = np.mean([backdoor(r) for r in ended], 0)
    by_epochs = np.mean([newcomers(r) for r in ended], 0)
    by_age = pd.concat(map(arrivals, group)).groupby("age").mean().reindex([0, 1, 5]).dropna()
    rounds = [r["client/stopped_round"] for r in group if "client/stopped_round" in r]
    spent = pd.DataFrame([costs(r).iloc[-1] for r in group]).mean()
    return {
        "n": len(group),
        "accuracy": float(means(clients, row).mean()),
        "gap": gap,
        "gap_half": half,
        "attackers": attackers,
        "attackers_chosen": attackers_chosen,
        "backdoor": marked,
        "backdoor_unmarked": unmarked,
        **{f"newcomers_{i}": float(value) for i, value in enumerate(by_epochs)},
        **{f"arrived_{age}": line["accuracy"] for age, line in by_age.iterrows()},
        **{f"arrived_all_{age}": line["all"] for age, line in by_age.iterrows()},
        "stopped": float(np.mean([(r >= 0).mean() for r in rounds])) if rounds else float("nan"),
        "steps": float(spent["steps"]),
        "models": float(spent["models"]),
    }


def texts(row: dict[str, float]) -> dict[str, str]:
    """Return the cells of a row, by the names of their columns."""
    attackers = f"{percent(row['attackers_chosen'])} of {percent(row['attackers'])}"
    backdoor = f"{percent(row['backdoor'])} ({percent(row['backdoor_unmarked'])})"
    ages = [name.removeprefix("arrived_all_") for name in row if name.startswith("arrived_all_")]
    pairs = [(row[f"arrived_{age}"], row[f"arrived_all_{age}"]) for age in ages]
    new = [value for name, value in row.items() if name.startswith("newcomers_")]
    return {
        "accuracy": f"{number(row['accuracy'])} ({row['n']})",
        "validation - test": f"{number(row['gap'], '+.2f')} ± {number(row['gap_half'])}",
        "attackers, % chosen of all": "-" if np.isnan(row["attackers"]) else attackers,
        "backdoor, %": "-" if np.isnan(row["backdoor"]) else backdoor,
        "newcomers, %": " / ".join(map(percent, new)) or "-",
        "arrived, % (all)": " / ".join(f"{a:.1f} ({b:.1f})" for a, b in pairs) or "-",
        "stopped, %": percent(row["stopped"]),
        "steps": f"{row['steps']:.0f}",
        "models": f"{row['models']:.0f}",
    }


def draw(frames: Frames) -> Drawing:
    data, cells = [], []
    # in the order of the files, in which the Runs of one experiment lie together
    first = frames.files.sort_values("seed", kind="stable").drop_duplicates(["setting", "row"])
    for line in first.itertuples():
        group = list(frames.of("runs", line.setting, line.row)["result"])
        row = measure(group, frames.of("clients", line.setting, line.row), line.row)
        names = {"setting": line.setting, "method": line.row}
        data.append(names | row)
        cells.append(names | texts(row))
    table = pd.DataFrame(cells)
    used = [c for c in table if c in ("setting", "method") or (table[c] != "-").any()]
    return Drawing(pd.DataFrame(data), text=markdown(table[used]), latex=latex(table[used]))
