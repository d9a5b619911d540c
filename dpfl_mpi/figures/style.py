"""How a two-column paper looks: sizes, colours of methods, curves with bands, legends."""

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
from matplotlib.font_manager import get_font_names
from matplotlib.patches import Patch

from dpfl_mpi.figures.names import text_label

COLUMN, TEXT = 3.25, 6.75  # inches: width of a column and of the text

# Okabe and Ito's palette: distinct to colour-blind readers, and in this order also in grey print
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED = "#56B4E9", "#D55E00"
COLOURS = (BLUE, RED, GREEN, ORANGE, PINK, SKY, "#000000")
DARK, GREY, PALE = "#333333", "#8A8A8A", "#D9D9D9"
LINES = ("-", "--", "-.", ":")
MARKS = "osDv^<>pPX*d"
PALEST = 0.55  # share of white in the last of several curves of one method

CJK = {f"Noto Sans CJK {kind}" for kind in ("SC", "TC", "JP", "KR")}  # Chinese, Japanese, Korean
STYLE: Any = {
    # like Times, and part of matplotlib: the same on every machine; then for letters it lacks
    "font.family": ["STIXGeneral", "DejaVu Sans", *(CJK & {*get_font_names()})],
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


def method_look(method: Any) -> tuple[str, str, str]:
    """Return colour, line style and marker of a method, the same in every figure.

    If it declares no `look`, they follow from a hash of its title. The line is then never solid:
    solid lines are those of methods of this package.
    """
    marks = re.escape(MARKS)  # "^" would negate the class
    found = re.fullmatch(rf"(#[0-9A-Fa-f]{{6}})(?: (--|-\.|:|-))?(?: ([{marks}]))?", method.look)
    if found:
        return found[1], found[2] or "-", found[3] or "o"
    i = zlib.crc32(method.title.encode())
    return COLOURS[1 + i % 6], LINES[1 + i // 6 % 3], MARKS[i % len(MARKS)]


def looks(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each line's `plot` keywords; several lines of one method have shades of its colour."""
    by_method = rows.groupby("method")["method"]
    # the number of each line among those of its method, and how many these are
    positions, counts = by_method.cumcount(), by_method.transform("size")
    out = []
    for row, position, count in zip(rows.itertuples(), positions, counts, strict=True):
        white = PALEST * position / max(count - 1, 1)
        red, green, blue = ((1 - white) * channel + white for channel in to_rgb(row.colour))
        shade = to_hex((red, green, blue))
        line = LINES[(LINES.index(row.line) + position) % 4] if count > 1 else row.line
        out.append({"color": shade, "ls": line})
    return out


def marks(rows: pd.DataFrame) -> list[str]:
    """Return a marker for each line of `rows`; later lines of one method have the next ones."""
    positions = rows.groupby("method").cumcount()
    pairs = zip(rows["marker"], positions, strict=True)
    return [MARKS[(MARKS.index(mark) + position) % len(MARKS)] for mark, position in pairs]


def over_repetitions(lines: pd.DataFrame, value: str, by: str = "round") -> pd.DataFrame:
    """Return `mean` and `std` (ddof 1; 0 for a single one) of a column over repetitions, per `by`.

    Only values of `by` that all repetitions have are included; nan where one repetition has nan.
    """
    out = lines.groupby(by)[value].agg(["mean", "std", "size", "count"])
    out = out[out["size"] == out["size"].max()].fillna({"std": 0.0})
    return out.where(out["count"] == out["size"])


def curve(axes: Axes, x: Any, mean: Any, spread: Any, **look: Any) -> None:
    """Draw a mean over repetitions, with a band of one standard deviation if it is not 0."""
    x, mean, spread = map(np.asarray, (x, mean, spread))
    axes.plot(x, mean, **look)
    if np.any(spread > 0):
        band: dict[str, Any] = {"color": look.get("color"), "alpha": 0.18, "lw": 0}
        axes.fill_between(x, mean - spread, mean + spread, **band)


def curves(
    axes: Axes,
    rows: pd.DataFrame,
    lines: pd.DataFrame,
    value: str,
    by: str = "round",
    factor: float = 1,
) -> pd.DataFrame:
    """Draw `factor` times a column of `lines` over `by`, one curve for each of `rows`."""
    # returns the numbers without the factor: `by`, mean, std, setting, method, n
    several, out = rows["setting"].nunique() > 1, []
    axes.locator_params(axis="x", integer=True)
    for line, look in zip(rows.itertuples(), looks(rows), strict=True):
        of_row = lines[(lines["setting"] == line.setting) & (lines["row"] == line.row)]
        means = over_repetitions(of_row, value, by)
        label = text_label(f"{line.setting}, {line.row}" if several else line.row)
        curve(axes, means.index, factor * means["mean"], factor * means["std"], label=label, **look)
        means = means.reset_index(names=by)[[by, "mean", "std"]]
        n = of_row["run"].nunique()
        out.append(means.assign(setting=line.setting, method=line.row, n=n))
    return pd.concat(out, ignore_index=True)


def legend(figure: Figure, of: Axes | Mapping[str, Any], place: str, **look: Any) -> None:
    """Draw a legend outside the axes, of one axes' curves or of handles by name.

    It has as many columns as fit the figure. Beyond two rows the figure grows, so that the axes
    keep their height.
    """
    if isinstance(of, Axes):
        handles, names = of.get_legend_handles_labels()
    else:
        handles, names = list(of.values()), list(of)
    if not handles:
        return
    keywords: dict[str, Any] = {"loc": place, "columnspacing": 1.0, "handlelength": 2.0, **look}
    width, height = figure.get_size_inches()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for columns in range(min(len(handles), 6), 0, -1):
        box = figure.legend(handles, names, ncols=columns, **keywords)
        if columns == 1 or box.get_window_extent(renderer).width <= 0.98 * width * figure.dpi:
            break
        box.remove()
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + max(rows - 2, 0) * 0.14)


def grid(
    count: int, columns: int, height: float, more: float, **keywords: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, at most `columns` in a row.

    It is as wide as a column of the page, or as the text if a row has several panels. Its height
    is `height` inches per row, plus `more`.
    """
    columns = min(count, columns)
    rows = -(-count // columns)
    size = (COLUMN if columns == 1 else TEXT, height * rows + more)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, **keywords)
    for axes in panels.flat[count:]:
        axes.set_axis_off()
    return figure, list(panels.flat[:count])


def patches(
    figure: Figure, colours: dict[str, str], place: str = "outside upper center", **look: Any
) -> None:
    """Draw a legend of coloured boxes by name."""
    boxes = [Patch(color=colour, label=name) for name, colour in colours.items()]
    usual: dict[str, Any] = {"loc": place, "ncols": len(boxes)}
    usual |= {"handlelength": 0.9, "handleheight": 0.9}
    figure.legend(handles=boxes, **usual | look)
