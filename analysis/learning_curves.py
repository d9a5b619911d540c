"""Test accuracy and validation loss over local epochs: the mean over clients of every method (CIFAR-10, Patho(3))."""

from __future__ import annotations

from collections.abc import Sequence

from _common import TEXT, Drawing, curve, legend, main, over_rounds

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import looks
from _names import text_label
from _tables import Group, named, repetitions
from accuracy_table import ROWS, rank

from dpfl_mpi.config import Run
from dpfl_mpi.methods import local_epochs
from dpfl_mpi.results import Result

RUNS = [Run(dataset="cifar10", **row) for row in ROWS if "finetune_epochs" not in row]


def draw(results: Sequence[Result]) -> Drawing:
    """Return the figure: epochs of all of a client's models on the x axis, so that methods with preprocessing or two models line up."""
    groups = sorted(repetitions(results), key=lambda g: rank(g[0].run))
    entries = named(groups)
    settings = list(dict.fromkeys(w for w, _, _ in entries))
    figure, grid = plt.subplots(len(settings), 2, figsize=(TEXT, 2.2 * len(settings) + 0.4), squeeze=False)
    rows, handles = [], {}
    names = list(dict.fromkeys(n for _, n, _ in entries))
    styles = dict(zip(names, looks([first(entries, n)[0].run.method for n in names]), strict=True))
    for where, name, group in entries:
        look = styles[name]
        untuned = group[0].run.untuned().key()
        based = any(g[0].key == untuned for _, _, g in entries if g is not group)  # its rounds are that curve
        tuning: list[tuple[int, int, float]] = []  # round, epochs, accuracy
        epochs = local_epochs(group[0])
        for axes, array, factor in zip(
            grid[settings.index(where)], ("round/test_acc", "round/val_loss"), (100, 1), strict=True
        ):
            x, mean, spread = over_rounds(group, lambda r, array=array: r.mean(array))
            trained = epochs[: len(x)] > 0  # the untrained models' chance level would press all curves together
            if not based:
                shown = epochs[: len(x)][trained], factor * mean[trained], factor * spread[trained]
                curve(axes, *shown, label=text_label(name), **look)
            if array == "round/test_acc" and group[0].run.finetune_epochs:  # goes on from the best models
                _, tuned, tuned_spread = over_rounds(
                    group, lambda r: np.nanmean(r["finetune/test_acc"][:, r.benign], axis=1)
                )
                after = epochs[-1] + group[0]["finetune/epochs"] - group[0]["finetune/epochs"][0]
                curve(axes, after, factor * tuned, factor * tuned_spread, label=text_label(name), **look)
                tuning = [(len(x) - 1 + i, e, factor * m) for i, (e, m) in enumerate(zip(after, tuned, strict=True))]
            rows += [
                {
                    "setting": where,
                    "method": name,
                    "measure": array,
                    "round": t,
                    "epochs": e,
                    "mean": factor * m,
                    "std": factor * s,
                }
                for t, e, m, s in zip(x, epochs, mean, spread, strict=False)
            ]
        rows += [
            {"setting": where, "method": name, "measure": "finetune/test_acc", "round": t, "epochs": e, "mean": m}
            for t, e, m in tuning
        ]
        handles[name] = grid[settings.index(where), 0].lines[-1]
    for axes_pair, where in zip(grid, settings, strict=True):
        for axes, text in zip(axes_pair, ("test accuracy, %", "validation loss"), strict=True):
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


def first(entries: Sequence[tuple[str, str, Group]], name: str) -> Group:
    """Return the first group of this name."""
    return next(group for _, n, group in entries if n == name)


if __name__ == "__main__":
    main("learning_curves", __doc__, RUNS, draw)
