"""Test accuracy and validation loss over local epochs, of every method.

A round is the mean over the clients that took part in it; one that stopped early keeps its last.

CIFAR-10, Patho(3).
"""

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpfl_mpi.figures.accuracy_table import ROWS
from dpfl_mpi.figures.command import Drawing
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.names import text_label
from dpfl_mpi.figures.style import TEXT, curve, legend, looks, over_repetitions
from dpfl_mpi.figures.tables import number
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [Run(dataset="cifar10", **row) for row in ROWS if "finetune_epochs" not in row]
MEASURES = {"round/test_acc": ("test accuracy, %", 100), "round/val_loss": ("validation loss", 1)}


def tuning(results: Iterable[Result], curves: pd.DataFrame) -> pd.DataFrame:
    """Return the test accuracy, percent, of each Run's fine-tuning, which follows its rounds."""
    out = []
    for r in results:
        values = 100 * np.nanmean(r["finetune/test_acc"][:, r.benign], axis=1)
        before = curves[curves["run"] == str(r.path)]["models_epochs"].max()
        epochs = before + r["finetune/epochs"] - r["finetune/epochs"][0]
        rounds = r.run.rounds + np.arange(len(epochs))
        columns = {"run": str(r.path), "round": rounds, "models_epochs": epochs, "value": values}
        out.append(pd.DataFrame(columns))
    return pd.concat(out, ignore_index=True)


def draw_curve(axes: Axes | None, lines: pd.DataFrame, measure: str, **look: Any) -> pd.DataFrame:
    """Draw the column `value` over epochs (not without axes); return its numbers by round."""
    each = over_repetitions(lines, "value")
    each["epochs"] = lines.drop_duplicates("round").set_index("round")["models_epochs"]
    trained = each[each["epochs"] > 0]  # untrained models would press all curves together
    if axes is not None:
        curve(axes, trained["epochs"], trained["mean"], trained["std"], **look)
    return each.reset_index()[["round", "epochs", "mean", "std"]].assign(measure=measure)


def draw(frames: Frames) -> Drawing:
    """Return the figure. Epochs are those of all of a client's models, so that methods line up."""
    settings = list(dict.fromkeys(frames.rows["setting"]))
    size = (TEXT, 2.2 * len(settings) + 0.4)
    figure, grid = plt.subplots(len(settings), 2, figsize=size, squeeze=False)
    kinds = frames.rows.drop_duplicates("row")
    styles = dict(zip(kinds["row"], looks(kinds), strict=True))
    rows, handles = [], {}
    for line in frames.rows.itertuples():
        panels = grid[settings.index(line.setting)]
        look = styles[line.row] | {"label": text_label(line.row)}
        curves = frames.of("curves", line.setting, line.row)
        untuned = line.result.run.untuned().key()
        others = [r for r in frames.rows["result"] if r is not line.result]
        same_rounds = any(r.key == untuned for r in others)  # the row without +FT has this curve
        parts = []
        for axes, (measure, (_, factor)) in zip(panels, MEASURES.items(), strict=True):
            values = curves.assign(value=factor * curves[measure.removeprefix("round/")])
            parts.append(draw_curve(None if same_rounds else axes, values, measure, **look))
        results = frames.of("runs", line.setting, line.row)["result"]
        tuned = [r for r in results if "finetune/test_acc" in r]
        if tuned:
            values = tuning(tuned, curves)
            parts.append(draw_curve(panels[0], values, "finetune/test_acc", **look))
        rows += [part.assign(setting=line.setting, method=line.row) for part in parts]
        if tuned or not same_rounds:
            handles[text_label(line.row)] = panels[0].lines[-1]
    for panels, where in zip(grid, settings, strict=True):
        for axes, (name, _) in zip(panels, MEASURES.values(), strict=True):
            axes.set(xlabel="local epochs", ylabel=name, title=text_label(where))
            axes.locator_params(axis="x", integer=True)
    legend(figure, handles, "outside lower center")
    data = pd.concat(rows, ignore_index=True)
    accuracies = data[data["measure"] != "round/val_loss"]
    text = []
    for line in accuracies.groupby(["setting", "method"], sort=False).tail(1).itertuples():
        when = f"after {line.epochs} epochs (round {line.round})"
        text.append(f"{line.setting}, {line.method}: {number(line.mean)} % {when}")
    return Drawing(data, figure, "\n".join(text))
