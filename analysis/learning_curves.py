"""Test accuracy and validation loss over local epochs: the mean over clients of every method (CIFAR-10, Patho(3))."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _common import TEXT, Drawing, curve, legend, main, over_rounds

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import looks
from _names import text_label
from _tables import Group, named, repetitions
from accuracy_table import ROWS, rank
from matplotlib.axes import Axes

from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [Run(dataset="cifar10", **row) for row in ROWS if "finetune_epochs" not in row]


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure: epochs of all of a client's models on the x axis, so that methods with preprocessing or two models line up."""
    entries = named(sorted(repetitions(results), key=lambda g: rank(g[0].run)))
    settings = list(dict.fromkeys(w for w, _, _ in entries))
    names = list(dict.fromkeys(n for _, n, _ in entries))
    figure, grid = plt.subplots(len(settings), 2, figsize=(TEXT, 2.2 * len(settings) + 0.4), squeeze=False)
    styles = dict(zip(names, looks([first(entries, n)[0].run.method for n in names]), strict=True))
    rows, handles = [], {}
    for where, name, group in entries:
        panels, look = grid[settings.index(where)], styles[name] | {"label": text_label(name)}
        untuned = group[0].run.untuned().key()
        based = any(g[0].key == untuned for _, _, g in entries if g is not group)  # its rounds are that curve
        drawn = [
            *of_rounds(None if based else panels[0], group, "round/test_acc", 100, look),
            *of_rounds(None if based else panels[1], group, "round/val_loss", 1, look),
            *(of_tuning(panels[0], group, look) if group[0].run.finetune_epochs else []),
        ]
        rows += [{"setting": where, "method": name} | row for row in drawn]
        handles[name] = panels[0].lines[-1]
    for panels, where in zip(grid, settings, strict=True):
        for axes, text in zip(panels, ("test accuracy, %", "validation loss"), strict=True):
            axes.set_xlabel("local epochs")
            axes.set_ylabel(text)
            axes.set_title(where)
    legend(figure, [handles[n] for n in names], [text_label(n) for n in names], "outside lower center")
    data = pd.DataFrame(rows)
    last = data[data["measure"] != "round/val_loss"].groupby(["setting", "method"], sort=False).tail(1)
    text = [
        f"{r.setting}, {r.method}: {r['mean']:.2f} % after {r.epochs} epochs (round {r['round']})"
        for _, r in last.iterrows()
    ]
    return Drawing(data, figure, "\n".join(text))


def of_rounds(
    axes: Axes | None, group: Sequence[Result], measure: str, factor: int, look: dict[str, Any]
) -> list[dict[str, Any]]:
    """Draw a measure over the rounds, on no axes where another curve is the same; return it, a row per round."""
    x, mean, spread = over_rounds(group, lambda r: factor * r.mean(measure))
    epochs = group[0].local_epochs()[: len(x)]
    trained = epochs > 0  # the untrained models' chance level would press all curves together
    if axes is not None:
        curve(axes, epochs[trained], mean[trained], spread[trained], **look)
    return [
        {"measure": measure, "round": t, "epochs": e, "mean": m, "std": s}
        for t, e, m, s in zip(x, epochs, mean, spread, strict=True)
    ]


def of_tuning(axes: Axes, group: Sequence[Result], look: dict[str, Any]) -> list[dict[str, Any]]:
    """Draw the test accuracy over the epochs of fine-tuning, which goes on from the best models; return it, a row per epoch."""
    x, mean, spread = over_rounds(group, lambda r: 100 * np.nanmean(r["finetune/test_acc"][:, r.benign], axis=1))
    epochs = group[0].local_epochs()[-1] + group[0]["finetune/epochs"] - group[0]["finetune/epochs"][0]
    curve(axes, epochs, mean, spread, **look)
    rounds = group[0].run.rounds + x
    return [
        {"measure": "finetune/test_acc", "round": t, "epochs": e, "mean": m, "std": s}
        for t, e, m, s in zip(rounds, epochs, mean, spread, strict=True)
    ]


def first(entries: Sequence[tuple[str, str, Group]], name: str) -> Group:
    """Return the first group of this name."""
    return next(group for _, n, group in entries if n == name)


if __name__ == "__main__":
    main("learning_curves", __doc__, RUNS, draw)
