"""How a two-column paper looks: sizes, colours of methods, curves with bands, legends that stay in the picture."""

import re
import zlib
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpfl_mpi.figures.names import text_label
from dpfl_mpi.methods import Method
from dpfl_mpi.results.result import Declared

COLUMN, TEXT = 3.25, 6.75  # inches: width of a column and of the text

# Okabe and Ito's palette: told apart with every common colour vision, and in this order also in grey print
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED = "#56B4E9", "#D55E00"
COLOURS = (BLUE, RED, GREEN, ORANGE, PINK, SKY, "#000000")
DARK, GREY, PALE = "#333333", "#8A8A8A", "#D9D9D9"
LINES = ("-", "--", "-.", ":")
MARKS = "oosDv^<>pPX*d"
PALEST = 0.55  # share of white in the last of several curves of one method

STYLE: Any = {
    "font.family": "STIXGeneral",  # Times-like and part of matplotlib: the same letters on every machine
    "mathtext.fontset": "stix",
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    "axes.edgecolor": DARK,
    "axes.prop_cycle": cycler(color=COLOURS),
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # TrueType: conference systems refuse Type 3 fonts
}


def look(method: Method | Declared) -> tuple[str, str, str]:
    """Return colour, line style and marker of a method: those of its file, else hashed from its name, the same in every figure."""
    if re.fullmatch(r"#[0-9A-Fa-f]{6}", method.colour) and method.line in LINES and method.marker in MARKS:
        return method.colour, method.line, method.marker
    i = zlib.crc32(method.title.encode())  # a broken line: a whole one of this colour is a shipped method's
    return COLOURS[1 + i % 6], LINES[1 + i // 6 % 3], MARKS[i % len(MARKS)]


def looks(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return colour and line style of a curve for each line of `rows` as keywords of `plot`: several of a method are shades of its colour."""
    out, by_method = [], rows.groupby("method")["method"]
    for row, place, more in zip(rows.itertuples(), by_method.cumcount(), by_method.transform("size") - 1, strict=True):
        pale = PALEST * place / max(more, 1)
        red, green, blue = ((1 - pale) * c + pale for c in to_rgb(row.colour))
        line = LINES[(LINES.index(row.line) + place) % 4] if more else row.line
        out.append({"color": to_hex((red, green, blue)), "ls": line})
    return out


def marks(rows: pd.DataFrame) -> list[str]:
    """Return a marker for each line of `rows`: its method's, and of several lines of one method those that follow it."""
    places = rows.groupby("method").cumcount()
    return [MARKS[(MARKS.rindex(m) + place) % len(MARKS)] for m, place in zip(rows["marker"], places, strict=True)]


def over(lines: pd.DataFrame, value: str, by: str = "round") -> pd.DataFrame:
    """Return `mean` and `std` (ddof 1, 0 of one) of a column over repetitions, by round or another column, as far as all repetitions are; nan where one has none."""
    each = lines.groupby(by)[value].agg(["mean", "std", "size", "count"])
    each = each[each["size"] == each["size"].max()].fillna({"std": 0.0})
    return each.where(each["count"] == each["size"])


def curve(axes: Axes, x: Any, mean: Any, spread: Any, **look: Any) -> None:
    """Draw a mean over repetitions with a band of one standard deviation, where there is more than one."""
    x, mean, spread = map(np.asarray, (x, mean, spread))
    axes.plot(x, mean, **look)
    if np.any(spread > 0):
        axes.fill_between(x, mean - spread, mean + spread, color=look.get("color"), alpha=0.18, lw=0)


def curves(
    axes: Axes, rows: pd.DataFrame, lines: pd.DataFrame, value: str, by: str = "round", factor: float = 1
) -> pd.DataFrame:
    """Draw a column of `lines` over rounds or epochs, a curve for each of `rows`; return the numbers, not multiplied by `factor`."""
    several, out = rows["setting"].nunique() > 1, []
    axes.locator_params(axis="x", integer=True)
    for line, look in zip(rows.itertuples(), looks(rows), strict=True):
        mine = lines[(lines["setting"] == line.setting) & (lines["row"] == line.row)]
        each = over(mine, value, by)
        text = text_label(f"{line.setting}, {line.row}" if several else line.row)
        curve(axes, each.index, factor * each["mean"], factor * each["std"], label=text, **look)
        each = each.reset_index(names=by)[[by, "mean", "std"]]
        out.append(each.assign(setting=line.setting, method=line.row, n=mine["run"].nunique()))
    return pd.concat(out, ignore_index=True)


def legend(figure: Figure, of: Axes | Mapping[str, Any], place: str, **look: Any) -> None:
    """Draw a legend outside the axes, of what is drawn in one of them or of handles by name, in as many columns as fit beside one another: it does not leave the picture.

    The figure grows by the height of the rows that it takes beyond two, so that the axes keep theirs.
    """
    handles, names = of.get_legend_handles_labels() if isinstance(of, Axes) else (list(of.values()), list(of))
    if not handles:
        return
    how: dict[str, Any] = {"loc": place, "columnspacing": 1.0, "handlelength": 2.0, **look}
    width, height = figure.get_size_inches()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for columns in range(min(len(handles), 6), 0, -1):
        drawn = figure.legend(handles, names, ncols=columns, **how)
        if columns == 1 or drawn.get_window_extent(renderer).width <= 0.98 * width * figure.dpi:
            break
        drawn.remove()
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + max(rows - 2, 0) * 0.14)


def grid(count: int, columns: int, height: float, more: float, **how: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, at most so many beside one another, a column of the page wide or the text; `height` inches a row, and `more`."""
    columns = min(count, columns)
    size = (COLUMN if columns == 1 else TEXT, height * -(-count // columns) + more)
    figure, panels = plt.subplots(-(-count // columns), columns, figsize=size, squeeze=False, **how)
    for axes in panels.flat[count:]:
        axes.set_axis_off()
    return figure, list(panels.flat[:count])


def patches(figure: Figure, colours: dict[str, str], place: str = "outside upper center", **how: Any) -> None:
    boxes = [Patch(color=colour, label=name) for name, colour in colours.items()]
    look: dict[str, Any] = {"loc": place, "ncols": len(boxes), "handlelength": 0.9, "handleheight": 0.9}
    figure.legend(handles=boxes, **look | how)
