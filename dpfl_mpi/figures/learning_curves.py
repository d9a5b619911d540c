"""Test accuracy and validation loss over local epochs: the mean over clients of every method (CIFAR-10, Patho(3))."""

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
from dpfl_mpi.figures.style import TEXT, curve, legend, looks, over
from dpfl_mpi.figures.tables import number
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

RUNS = [Run(dataset="cifar10", **row) for row in ROWS if "finetune_epochs" not in row]
MEASURES = {"round/test_acc": ("test accuracy, %", 100), "round/val_loss": ("validation loss", 1)}


def tuning(results: Iterable[Result], curves: pd.DataFrame) -> pd.DataFrame:
    """Return the test accuracy in percent of each epoch of fine-tuning, which goes on from the best models, by run, round and epoch."""
    out = []
    for r in results:
        values = 100 * np.nanmean(r["finetune/test_acc"][:, r.benign], axis=1)
        before = curves[curves["run"] == str(r.path)]["models_epochs"].max()
        at = before + r["finetune/epochs"] - r["finetune/epochs"][0]
        rounds = r.run.rounds + np.arange(len(at))
        out.append(pd.DataFrame({"run": str(r.path), "round": rounds, "models_epochs": at, "value": values}))
    return pd.concat(out, ignore_index=True)


def drawn(axes: Axes | None, lines: pd.DataFrame, measure: str, **look: Any) -> pd.DataFrame:
    """Draw the column `value` over epochs, on no axes where another curve is the same; return it, a line per round."""
    each = over(lines, "value")
    each["epochs"] = lines.drop_duplicates("round").set_index("round")["models_epochs"]
    trained = each[each["epochs"] > 0]  # the untrained models' chance level would press all curves together
    if axes is not None:
        curve(axes, trained["epochs"], trained["mean"], trained["std"], **look)
    return each.reset_index()[["round", "epochs", "mean", "std"]].assign(measure=measure)


def draw(frames: Frames) -> Drawing:
    """Return the figure: epochs of all of a client's models on the x axis, so that methods with preprocessing or two models line up."""
    settings = list(dict.fromkeys(frames.rows["setting"]))
    figure, grid = plt.subplots(len(settings), 2, figsize=(TEXT, 2.2 * len(settings) + 0.4), squeeze=False)
    kinds = frames.rows.drop_duplicates("row")
    styles = dict(zip(kinds["row"], looks(kinds), strict=True))
    rows, handles = [], {}
    for line in frames.rows.itertuples():
        panels, group = grid[settings.index(line.setting)], frames.of("runs", line.setting, line.row)["result"]
        look = styles[line.row] | {"label": text_label(line.row)}
        curves = frames.of("curves", line.setting, line.row)
        untuned = line.result.run.untuned().key()
        # its rounds are that curve
        based = any(r.key == untuned for r in frames.rows["result"] if r is not line.result)
        parts = []
        for axes, (measure, (_, factor)) in zip(panels, MEASURES.items(), strict=True):
            values = curves.assign(value=factor * curves[measure.removeprefix("round/")])
            parts.append(drawn(None if based else axes, values, measure, **look))
        if tuned := [r for r in group if "finetune/test_acc" in r]:
            parts.append(drawn(panels[0], tuning(tuned, curves), "finetune/test_acc", **look))
        rows += [part.assign(setting=line.setting, method=line.row) for part in parts]
        if tuned or not based:
            handles[text_label(line.row)] = panels[0].lines[-1]
    for panels, where in zip(grid, settings, strict=True):
        for axes, (name, _) in zip(panels, MEASURES.values(), strict=True):
            axes.set(xlabel="local epochs", ylabel=name, title=where)
            axes.locator_params(axis="x", integer=True)
    legend(figure, handles, "outside lower center")
    data = pd.concat(rows, ignore_index=True)
    last = data[data["measure"] != "round/val_loss"].groupby(["setting", "method"], sort=False).tail(1)
    text = "{setting}, {method}: {accuracy} % after {epochs} epochs (round {round})"
    lines = (text.format(**line, accuracy=number(line["mean"])) for line in last.to_dict("records"))
    return Drawing(data, figure, "\n".join(lines))
