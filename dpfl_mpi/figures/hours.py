"""Accuracy over simulated hours and over bytes, the time to an accuracy, and waiting (--network).

At each time a client counts with the rounds it has ended by its own clock. Accuracy is the mean
over clients of their best model by validation so far; bytes are those of all clients. Curves are
means over seeds, bands one standard deviation; 10 points below the best are shown. The third panel
shows the share of all waiting that is for the first clients, those most waited for first.
Fine-tuning is not timed.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import pareto
from dpfl_mpi.figures.command import Drawing, cifar10
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import labels, text_label
from dpfl_mpi.figures.style import TEXT, curve, legend, looks
from dpfl_mpi.figures.tables import markdown, number
from dpfl_mpi.figures.variance import REACH
from dpfl_mpi.results import Result

RUNS = cifar10(network=("phones", "hospitals"), method=pareto.METHODS)
PANELS = {"hours": "simulated hours", "gigabytes": "gigabytes sent"}
OPTIONS = pareto.OPTIONS
SECONDS_PER_HOUR = 3600


def measure(result: Result) -> pd.DataFrame:
    """Return accuracy (percent), simulated hours and gigabytes so far, at evenly spaced times.

    There are as many times as rounds; the first is when every client has ended round 0. At a time,
    a client that waits for nobody may be rounds ahead of others.
    """
    rounds = slice(0, result.last_round + 1)
    end = np.maximum.accumulate(result["network/end"][rounds], 0) / SECONDS_PER_HOUR
    hours = np.linspace(end[0].max(), end.max(), len(end))
    # how many rounds each client has ended at each of these times, [times, N]
    ended = (end[None] <= hours[:, None, None]).sum(1)
    best = np.take_along_axis(result["round/best_test_acc"][rounds], ended - 1, 0)
    sent = result["traffic/bytes_sent"][rounds].cumsum(0) / 1e9
    columns = {
        "point": np.arange(len(hours)),
        "accuracy": 100 * np.nanmean(best[:, result.benign], 1),
        "hours": hours,
        "gigabytes": np.take_along_axis(sent, ended - 1, 0).sum(1),
    }
    return pd.DataFrame(columns)


def waits(result: Result) -> np.ndarray:
    """Return the hours that others waited for each client, the last to send them a model, `[N]`."""
    seconds, client = result["network/wait"], result["network/waited_for"]
    waited = client >= 0
    return np.bincount(client[waited], seconds[waited], seconds.shape[1]) / SECONDS_PER_HOUR


def row_of(result: Result, lines: pd.DataFrame, target: float) -> dict[str, float]:
    """Return a Run's line of the table; `lines` are those of `measure`."""
    # `target` is the accuracy, in percent, to which the time is told
    reached, hours, last = lines[lines["accuracy"] >= target], waits(result), lines.iloc[-1]
    rounds = slice(0, len(lines))
    end, waited_for = result["network/end"][rounds], result["network/waited_for"][rounds]
    path = np.bincount(critical_path(end, waited_for))
    spent = sum(result[f"network/{part}"].sum() for part in ("train", "choose", "wait"))
    first = {name: reached[name].iloc[0] if len(reached) else np.nan for name in PANELS}
    return {
        **{name: last[name] for name in ("accuracy", *PANELS)},
        **{f"{name} to {target:g} %": value for name, value in first.items()},
        "waiting, %": 100 * result["network/wait"].sum() / spent,
        "longest": 100 * hours.max() / max(hours.sum(), 1e-9),
        "critical": 100 * path.max() / path.sum(),
    }


def draw(frames: Frames, target: float = 80.0) -> Drawing:
    timed = ["network/end" in result for result in frames.runs["result"]]
    if not any(timed):
        raise UserError("none of these results has a simulated time; compute some with --network")
    frames = frames.where(timed)
    figure, panels = plt.subplots(1, 3, figsize=(TEXT, 2.2))
    parts, table = [], []
    rows = zip(frames.rows.itertuples(), looks(frames.rows), labels(frames.rows), strict=True)
    for line, look, label in rows:
        results = list(frames.of("runs", line.setting, line.row)["result"])
        measured = [measure(result) for result in results]
        # two panels: accuracy over hours and over gigabytes
        mean = pareto.mean_curve(pd.concat(measured), ["accuracy", *PANELS])
        for axes, name in zip(panels[:2], PANELS, strict=True):
            of_row = look | {"label": text_label(label)}
            curve(axes, mean[name], mean["accuracy"], mean["std"], **of_row)
        # the third: the share of waiting that is for the first clients
        waited = [hours for hours in map(waits, results) if hours.any()]
        if shares := [np.sort(hours)[::-1].cumsum() / hours.sum() for hours in waited]:
            clients = np.arange(1, len(shares[0]) + 1)
            curve(panels[2], clients, 100 * np.mean(shares, 0), [0], **look)
        parts.append(mean.assign(setting=line.setting, method=line.row, n=len(measured)))
        cells = [row_of(r, part, target) for r, part in zip(results, measured, strict=True)]
        forms = dict.fromkeys(cells[0], ".3g") | {"accuracy": ".4g"}
        means = pd.DataFrame(cells).mean(skipna=False).items()
        names = {"setting": line.setting, "method": line.row}
        table.append(names | {name: number(value, forms[name]) for name, value in means})
    ends = [part["accuracy"].iloc[-1] for part in parts]
    best = max(filter(np.isfinite, ends), default=100.0)
    for axes, cost in zip(panels[:2], PANELS.values(), strict=True):
        shown = (best - REACH, min(101, best + 1))
        axes.set(xlabel=cost, ylabel="test accuracy, %", ylim=shown)
        axes.locator_params(axis="x", nbins=4)
    panels[2].set(xlabel="clients, most waited for first", ylabel="share of all waiting, %")
    panels[2].set_ylim(0, 102)
    panels[2].locator_params(axis="x", nbins=5, integer=True)
    legend(figure, panels[0], "outside upper center")
    text = (
        "waiting: share of all clients' time. longest: share of all waiting that is for one "
        "client. critical: share of the critical path's rounds that are one client's."
    )
    if others := len(timed) - sum(timed):
        text += f" Left out, without --network: {others}."
    if any(result.run.finetune_epochs for result in frames.runs["result"]):
        text += " Rows +FT end before fine-tuning, which is not timed."
    data = pd.concat(parts, ignore_index=True)
    return Drawing(data, figure, f"{markdown(pd.DataFrame(table))}\n\n{text}")


def critical_path(end: np.ndarray, waited_for: np.ndarray) -> list[int]:
    """Return for rounds 0 to T the client on which the end of the run depended.

    The path goes back from the client that ended last: to the one it waited for, else to itself.
    When a client ended each round, and for whom it waited (-1: nobody), are `[T+1, N]`.
    """
    client, path = int(end[-1].argmax()), []
    for senders in waited_for[::-1]:
        client = int(senders[client]) if senders[client] >= 0 else client
        path.append(client)
    return path[::-1]
