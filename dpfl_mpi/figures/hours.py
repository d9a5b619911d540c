"""Accuracy over simulated hours and over bytes, the time to an accuracy, and who waits for whom (--network).

At a time each client counts with the rounds that it has ended by its own clock. The accuracy is the mean over clients of their best model by validation so
far, bytes are those of all clients; curves are means over seeds, bands one standard deviation, shown are the 10 points below the best. Right: which share of all waiting is for how many clients, those that are
most waited for first. Fine-tuning is not timed. With --churn a fourth panel has the accuracy of the models of those who came, by the rounds since then,
and dotted that of all who are there in the same rounds.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import pareto
from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.controls_table import comers
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import labels, text_label
from dpfl_mpi.figures.style import TEXT, curve, legend, looks, over
from dpfl_mpi.figures.tables import markdown, number
from dpfl_mpi.figures.variance import REACH
from dpfl_mpi.results import Result

RUNS = cifar10(network=("phones", "hospitals"), method=pareto.METHODS)
PANELS = {"hours": "simulated hours", "gigabytes": "gigabytes sent"}
OPTIONS = pareto.OPTIONS


def measure(result: Result) -> pd.DataFrame:
    """Return accuracy of the best models so far, percent, simulated hours and gigabytes since the start, at as many even times as there are rounds.

    The first is when every client has ended round 0. A client that waits for nobody is then rounds ahead of others.
    """
    if "network/end" not in result:
        raise UserError(f"{result.path} has no simulated time; compute it with --network")
    rounds = slice(0, result.last_round + 1)
    end = np.maximum.accumulate(result["network/end"][rounds], 0) / 3600
    hours = np.linspace(end[0].max(), end.max(), len(end))
    ended = (end[None] <= hours[:, None, None]).sum(1)  # rounds, by time and client
    best, sent = result["round/best_test_acc"][rounds], result["traffic/bytes_sent"][rounds].cumsum(0) / 1e9
    accuracy = 100 * np.nanmean(np.take_along_axis(best, ended - 1, 0)[:, result.benign], 1)
    gigabytes = np.take_along_axis(sent, ended - 1, 0).sum(1)
    return pd.DataFrame({"point": np.arange(len(hours)), "accuracy": accuracy, "hours": hours, "gigabytes": gigabytes})


def waits(result: Result) -> np.ndarray:
    """Return how many hours the others waited for each client, `[N]`: for whom a client waits is whose model came last."""
    waited, whom = result["network/wait"], result["network/waited_for"]
    return np.bincount(whom[whom >= 0], waited[whom >= 0], waited.shape[1]) / 3600


def row_of(result: Result, lines: pd.DataFrame, reach: float) -> dict[str, float]:
    there, hours = lines[lines["accuracy"] >= reach], waits(result)
    end, whom = result["network/end"][: len(lines)], result["network/waited_for"][: len(lines)]
    spent = sum(result[f"network/{part}"].sum() for part in ("train", "choose", "wait"))
    path = np.bincount(critical_path(end, whom))
    first = {name: there[name].iloc[0] if len(there) else np.nan for name in PANELS}
    last = {name: lines[name].iloc[-1] for name in ("accuracy", *PANELS)}
    waiting = {"waiting, %": 100 * result["network/wait"].sum() / spent}
    waiting |= {"longest": 100 * hours.max() / max(hours.sum(), 1e-9), "critical": 100 * path.max() / path.sum()}
    return last | {f"{name} to {reach:g} %": value for name, value in first.items()} | waiting


def draw(frames: Frames, reach: float = 80.0) -> Drawing:
    churned = any(result.run.churn for result in frames.runs["result"])
    figure, panels = plt.subplots(1, 3 + churned, figsize=(TEXT, 2.2))
    parts, rows = [], []
    for line, look, label in zip(frames.rows.itertuples(), looks(frames.rows), labels(frames.rows), strict=True):
        results = list(frames.of("runs", line.setting, line.row)["result"])
        each = [measure(result) for result in results]
        spread = over(pd.concat(each), "accuracy", "point")["std"]  # as far as all repetitions are
        means = pd.concat(each).groupby("point").agg(lambda column: column.mean(skipna=False))
        mean = means.join(spread, how="right").reset_index()
        for axes, name in zip(panels[:2], PANELS, strict=True):
            curve(axes, mean[name], mean["accuracy"], mean["std"], label=text_label(label), **look)
        if shares := [np.sort(hours)[::-1].cumsum() / hours.sum() for hours in map(waits, results) if hours.any()]:
            curve(panels[2], np.arange(1, len(shares[0]) + 1), 100 * np.mean(shares, 0), [0], **look)
        if len(aged := pd.concat(map(comers, results)).groupby("age").mean()):
            curve(panels[3], aged.index, aged["accuracy"], [0], **look)
            curve(panels[3], aged.index, aged["all"], [0], **look | {"ls": ":", "marker": ""})
            panels[3].set(xlabel="rounds since they came", ylabel="accuracy of comers, %")
            panels[3].locator_params(axis="x", integer=True, nbins=4)
        parts.append(mean.assign(setting=line.setting, method=line.row, n=len(each)))
        cells = pd.DataFrame([row_of(r, lines, reach) for r, lines in zip(results, each, strict=True)])
        ends = cells.mean(skipna=False).items()
        told = {name: number(value, ".4g" if name == "accuracy" else ".3g") for name, value in ends}
        rows.append({"setting": line.setting, "method": line.row} | told)
    best = max((last for part in parts if np.isfinite(last := part["accuracy"].iloc[-1])), default=100.0)
    for axes, cost in zip(panels[:2], PANELS.values(), strict=True):
        axes.set(xlabel=cost, ylabel="test accuracy, %", ylim=(best - REACH, min(101, best + 1)))
        axes.locator_params(axis="x", nbins=4)
    panels[2].locator_params(axis="x", nbins=5, integer=True)
    panels[2].set(xlabel="clients, most waited for first", ylabel="share of all waiting, %", ylim=(0, 102))
    legend(figure, panels[0], "outside upper center")
    said = "Waiting: of the time of all clients; longest: of all waiting, for one client; critical: of the rounds, on the way of the last, one client."
    if any(result.run.finetune_epochs for result in frames.runs["result"]):
        said += " Rows +FT end before it: it is not timed."
    return Drawing(pd.concat(parts, ignore_index=True), figure, f"{markdown(pd.DataFrame(rows))}\n\n{said}")


def critical_path(end: np.ndarray, waited_for: np.ndarray) -> list[int]:
    """Return for rounds 0 to T the client on which the end of the run depended, from ends and waits `[T+1, N]`.

    The path goes back from the client that ended last: to the one it waited for in a round, else to itself.
    """
    client, path = int(end[-1].argmax()), []
    for senders in waited_for[::-1]:
        client = int(senders[client]) if senders[client] >= 0 else client
        path.append(client)
    return path[::-1]
