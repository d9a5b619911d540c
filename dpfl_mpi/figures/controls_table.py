"""What the controls of a run found: who overfits what he selects on, who listens to liars, what newcomers get, what early stopping saves.

One row per Run, as in the accuracy table. The gap is validation minus test accuracy of each client's best model, in points, with its 95 % interval,
over partitions or the clients of one (seeds on one partition are averaged first). Liars: the share of liars among all clients, and among those whom
benign clients chose in rounds 1 to T. Backdoor: marked test images of other classes that benign clients' best models take for class 0, and in brackets
the unmarked ones. Newcomers: mean accuracy after 0, 1 and 5 epochs of their own. Comers (--churn): mean accuracy in the round in which they come, and
1 and 5 rounds later; in brackets that of all who are there in the same rounds. Costs are means per client.
"""

import numpy as np
import pandas as pd

from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames, costs
from dpfl_mpi.figures.tables import Parts, interval, latex, markdown, means, number
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import share
from dpfl_mpi.settings.values import ATTACKS

NOWHERE = float("nan"), float("nan")
METHODS = ("dpfl", "pairwise", "random_graph", "fedavg")
RUNS = [
    *cifar10(method=METHODS, search_share=(1.0, 0.5)),
    *cifar10(method=METHODS, attack=tuple(f"{kind}:0.2" for kind in ATTACKS)),
    *cifar10(method=METHODS, newcomers=0.1),
    *cifar10(method=METHODS, patience=10),
]


def gaps(lines: pd.DataFrame) -> Parts:
    """Return validation minus test accuracy of every client's best model, points, for each partition; `lines` are one row's of `clients`."""
    points = lines.assign(gap=100 * (lines["val_acc"] - lines["test_acc"]))
    parts = (part for _, part in points.groupby("partition", sort=False))
    each = (part.pivot(index="client", columns="run", values="gap") for part in parts)
    means = [part.mean(axis=1, skipna=False).dropna().to_numpy() for part in each]
    return [part for part in means if len(part)]


def liar_shares(result: Result) -> tuple[float, float]:
    """Return the share of liars among all clients, and among those whom benign clients chose in rounds 1 to T; nan where there is none."""
    if "client/liars" not in result:
        return NOWHERE
    met = result.met_liars()
    return float(result["client/liars"].mean()), float(met.mean()) if len(met) else float("nan")


def backdoor(result: Result) -> tuple[float, float]:
    """Return the mean over benign clients of how often other classes are taken for class 0, with the mark and without; nan where there is no backdoor."""
    if "attack/success" not in result:
        return NOWHERE
    others = result["best/confusion"][:, 1:]  # true class by predicted class
    clean = share(others[:, :, 0].sum(1), others.sum((1, 2)))
    here = result.benign & np.isfinite(result["attack/success"])
    return (float(result["attack/success"][here].mean()), float(clean[here].mean())) if here.any() else NOWHERE


def newcomers(result: Result) -> np.ndarray:
    """Return the mean accuracy of newcomers after each number of epochs of their own; nothing where there are none."""
    return np.nanmean(result["newcomers/test_acc"], 1) if "newcomers/test_acc" in result else np.zeros(0)


def comers(result: Result) -> pd.DataFrame:
    """Return by age, rounds since a client came (--churn), the mean test accuracy of the models reported, percent, and of all there in the same rounds."""
    there = result["round/there"][: result.last_round + 1] if "round/there" in result else np.zeros((1, 0), bool)
    since, lines = np.zeros(there.shape[1], int), []  # round in which who is there has come
    for t in range(1, len(there)):
        since[there[t] & ~there[t - 1]] = t
        scored = np.where(there[t] & result.benign, 100 * result["round/test_acc"][t], np.nan)
        came = np.flatnonzero(np.isfinite(scored) & (since > 0))
        lines.append(pd.DataFrame({"age": t - since[came], "accuracy": scored[came]}).assign(all=np.nanmean(scored)))
    return pd.concat([pd.DataFrame({"age": [], "accuracy": [], "all": []}), *lines]).groupby("age").mean()


def percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.1f}"


def draw(frames: Frames) -> Drawing:
    rows, texts = [], []
    # in the order of the Runs, a control after the other
    for line in frames.files.sort_values("seed", kind="stable").drop_duplicates(["setting", "row"]).itertuples():
        group = list(frames.of("runs", line.setting, line.row)["result"])
        clients = frames.of("clients", line.setting, line.row)
        mean, half = interval(parts) if (parts := gaps(clients)) else NOWHERE
        all_liars, chosen = np.mean([liar_shares(r) for r in group], 0)
        done = [r for r in group if "best/confusion" in r] or group  # what comes at the end
        opened, unmarked = np.mean([backdoor(r) for r in done], 0)
        came = np.mean([newcomers(r) for r in done], 0)
        spent = pd.DataFrame([costs(r).iloc[-1] for r in group]).mean()
        aged = pd.concat(map(comers, group)).groupby("age").mean().reindex([0, 1, 5]).dropna()
        stopped = [(r["client/stopped_round"] >= 0).mean() for r in group if "client/stopped_round" in r]
        who = {"setting": line.setting, "method": line.row}
        row = {
            "n": len(group),
            "accuracy": float(means(clients, line.row).mean()),
            "gap": mean,
            "gap_half": half,
            "liars": all_liars,
            "liars_chosen": chosen,
            "backdoor": opened,
            "backdoor_unmarked": unmarked,
            **{f"newcomers_{i}": float(value) for i, value in enumerate(came)},
            **{f"comers_{age}": of["accuracy"] for age, of in aged.iterrows()},
            "stopped": float(np.mean(stopped)) if stopped else float("nan"),
            "steps": float(spent["steps"]),
            "models": float(spent["models"]),
        }
        text = {
            "accuracy": f"{number(row['accuracy'])} ({len(group)})",
            "validation - test": f"{number(mean, '+.2f')} ± {number(half)}",
            "liars, % chosen of all": "-" if np.isnan(all_liars) else f"{percent(chosen)} of {percent(all_liars)}",
            "backdoor, %": "-" if np.isnan(opened) else f"{percent(opened)} ({percent(unmarked)})",
            "newcomers, %": " / ".join(map(percent, came)) or "-",
            "comers, % (all)": " / ".join(f"{a:.1f} ({b:.1f})" for a, b in aged.to_numpy()) or "-",
            "stopped, %": percent(row["stopped"]),
            "steps": f"{row['steps']:.0f}",
            "models": f"{row['models']:.0f}",
        }
        rows.append(who | row)
        texts.append(who | text)
    table = pd.DataFrame(texts)
    used = table[[c for c in table if c in ("setting", "method") or (table[c] != "-").any()]]
    return Drawing(pd.DataFrame(rows), text=markdown(used), latex=latex(used))
