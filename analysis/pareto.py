"""Is it worth its cost? Accuracy against what it took: models received, models evaluated while choosing, gradient steps, seconds.

Curves are over rounds, a point is the end. The accuracy is the mean over clients of their best model by validation so far. Models, evaluations and
steps are means per client, of methods with a server too (one model down, one up per round). Seconds are those of the slowest rank, on whatever
machine the run had: compare only runs of one machine. Fine-tuning adds steps, no models; its seconds are not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _common import SEEDS, TEXT, Drawing, legend, main

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import looks
from _names import text_label
from _tables import markdown, named, repetitions

from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Run

METHODS = ("dpfl", "random_graph", "pairwise", "fedavg", "fedprox", "ditto", "fedrep", "pfedgraph", "local")
ROWS = [*({"method": method} for method in METHODS), {"method": "fedavg", "finetune_epochs": 10}]
RUNS = [Run(dataset="cifar10", **row, seed=seed) for row in ROWS for seed in SEEDS]
COSTS = {
    "models": "models received",
    "evaluations": "models evaluated",
    "steps": "gradient steps",
    "seconds": "seconds",
}


def best_so_far(val: np.ndarray, test: np.ndarray, latest: bool) -> np.ndarray:
    """Return the test accuracy of each client's best model by validation so far, from its scores `[T, N]`; of equal ones the latest, or the earliest."""
    out, best, now = np.empty_like(test), np.full(val.shape[1], np.nan), np.full(val.shape[1], np.nan)
    for t in range(len(val)):
        better = np.isnan(best) & np.isfinite(val[t]) | (val[t] > best) | (latest & (val[t] == best))
        best, now = np.where(better, val[t], best), np.where(better, test[t], now)
        out[t] = now
    return out


def best_of_rounds(result: Result, rounds: slice) -> np.ndarray:
    """Return the test accuracy of each benign client's best model so far after each round, `[T, N]`."""
    if "round/best_test_acc" in result:
        return result["round/best_test_acc"][rounds, result.benign]
    latest = result.run.tie == "latest"  # a result of an earlier version
    val, test = (result[f"round/{part}_acc"][rounds, result.benign] for part in ("val", "test"))
    accuracy = best_so_far(val, test, latest)
    if result.run.drift:  # what was known before it is forgotten
        moved = result.run.drift.round
        accuracy[moved:] = best_so_far(val[moved:], test[moved:], latest)
    best = result["best/test_acc"][result.benign]
    if result.finished and not result.run.finetune_epochs and not np.array_equal(accuracy[-1], best, equal_nan=True):
        print(
            f"warning: {result.path} is of a method that scores twice per round and keeps the second score alone: its curve is not that of "
            "its best models",
            file=sys.stderr,
        )
    return accuracy


def curves(result: Result) -> dict[str, np.ndarray]:
    """Return accuracy, percent, and the costs up to each round, `[T+1]`, and each tuning epoch behind them."""
    rounds, benign = slice(0, result.last_round + 1), result.benign
    clients = len(benign) - (int(result["client/newcomers"].sum()) if "client/newcomers" in result else 0)  # who trains
    out = {
        "accuracy": 100 * np.nanmean(best_of_rounds(result, rounds), 1),
        "models": np.cumsum(result["traffic/models_received"][rounds][:, benign].mean(1)),
        "evaluations": np.cumsum(result["graph/evaluations"][rounds][:, benign].mean(1)),
        "steps": result["round/gradient_steps"][rounds] / clients,
        "seconds": np.cumsum(sum(result[f"seconds/{phase}"][rounds, 2] for phase in PHASES)),
    }
    if "finetune/val_acc" in result:
        scores = (result[f"finetune/{part}_acc"][1:, benign] for part in ("val", "test"))
        tuned = best_so_far(*scores, result.run.tie == "latest")
        more = {"accuracy": 100 * np.nanmean(tuned, 1), "steps": result["finetune/gradient_steps"][1:] / clients}
        same = {name: np.full(len(tuned), out[name][-1]) for name in ("models", "evaluations")}
        more |= same | {"seconds": np.full(len(tuned), np.nan)}
        out = {name: np.concatenate([values, more[name]]) for name, values in out.items()}
    return out


def first_at(curve: dict[str, np.ndarray], accuracy: float) -> dict[str, float]:
    """Return what it cost to reach an accuracy, percent, for the first time; nan where it is not reached."""
    reached = np.flatnonzero(curve["accuracy"] >= accuracy)
    return {name: float(curve[name][reached[0]]) if len(reached) else float("nan") for name in COSTS}


def shown(value: float) -> str:
    """Return a cost as a text."""
    return "-" if np.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def draw(results: Sequence[Result], reach: float = 80.0) -> Drawing:
    """Return the figure, and the table of costs at the end and where `reach` percent is reached first."""
    figure, axes = plt.subplots(1, len(COSTS), figsize=(TEXT, 2.2), sharey=True)
    rows, lines = [], []
    groups = repetitions(results)
    for (where, name, group), look in zip(named(groups), looks([g[0].run.method for g in groups]), strict=True):
        whose = {"setting": where, "method": name}
        each = [curves(r) for r in group]
        shortest = min(len(c["accuracy"]) for c in each)
        mean = {n: np.mean([c[n][:shortest] for c in each], 0) for n in each[0]}
        for panel, (cost, title) in zip(axes, COSTS.items(), strict=True):
            panel.plot(mean[cost], mean["accuracy"], label=text_label(name), **look)
            panel.plot(mean[cost][-1:], mean["accuracy"][-1:], "o", color=look["color"])
            panel.set_xlabel(title)
        rows += [whose | {"point": t, "n": len(group)} | {n: v[t] for n, v in mean.items()} for t in range(shortest)]
        at = [first_at(c, reach) for c in each]
        # nan where one of the repetitions does not reach it
        sure = {n: float(np.mean([a[n] for a in at])) for n in COSTS}
        end = {n: float(np.nanmax(np.append(mean[n], -np.inf))) for n in COSTS}
        lines.append(
            whose
            | {"accuracy": f"{mean['accuracy'][-1]:.2f} ({len(group)})"}
            | {title: shown(end[n]) for n, title in COSTS.items()}
            | {f"{n} to {reach:g} %": shown(sure[n]) for n in COSTS}
        )
    axes[0].set_ylabel("test accuracy, %")
    legend(figure, *axes[0].get_legend_handles_labels(), "outside upper center")
    units = "Accuracy in percent (number of seeds); costs per client, seconds of the slowest rank. -: not reached by all seeds."
    return Drawing(pd.DataFrame(rows), figure, f"{markdown(pd.DataFrame(lines))}\n\n{units}")


REACH = {"type": float, "default": 80.0, "metavar": "X", "help": "accuracy to reach, percent (default: 80)"}

if __name__ == "__main__":
    main("pareto", __doc__, RUNS, draw, {"reach": REACH})
