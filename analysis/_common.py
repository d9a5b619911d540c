"""What the figures and tables share: which results to read, where to write, and how a two-column paper looks.

A file of this folder is one table or figure. It has `RUNS`, the runs it needs, and `draw(results)`, which returns a `Drawing`; `main` does the
rest. Nothing here imports torch or MPI: it runs where there are only the libraries of `pip install '.[analysis]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import _needed  # noqa: F401  # before what it looks for

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a laptop has the checkout, not the installed package

import matplotlib

matplotlib.use("Agg")  # a login node has no display

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _find import check_data, found
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpfl_mpi.errors import UserError, exit_with
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.storage.files import replacing

LISTED = 5  # of Runs that cannot be had for one reason so many are named, and more are counted
COLUMN, TEXT = 3.25, 6.75  # inches: width of a column and of the text
SEEDS = (32, 42, 52)  # the three repetitions of the paper's tables

# Okabe and Ito's palette: told apart with every common colour vision, and in this order also in grey print
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
)
COLOURS = (BLUE, RED, GREEN, ORANGE, PINK, SKY, "#000000")
DARK, GREY, PALE = "#333333", "#8A8A8A", "#D9D9D9"

STYLE = {
    "font.family": "STIXGeneral",  # Times-like and part of matplotlib: the same letters on every machine
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": DARK,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # TrueType: conference systems refuse Type 3 fonts
}


@dataclasses.dataclass
class Drawing:
    """What a file of this folder makes: the numbers, and a figure or a text that shows them."""

    data: pd.DataFrame  # every number that is shown, one row per entity; written as CSV
    figure: Figure | None = None
    text: str = ""  # printed; of a table the markdown, which is written too
    latex: str = ""
    html: str = ""


# -- which results ------------------------------------------------------------------------------------------------------------------------


def command(run: Run, ranks: int = 8) -> str:
    """Return the command line that computes a Run."""
    return shlex.join(["mpirun", "-n", str(ranks), "python", "-m", "dpfl_mpi", *to_flags(changed(run))])


def gather(runs: Iterable[Run], folder: str | Path) -> tuple[list[Result], list[str]]:
    """Return the results that are there, and sentences on the Runs that are not: how each is computed, or why some cannot be."""
    runs = list(runs)
    results, missing = [], []
    reasons: dict[str, list[Run]] = {}
    for run in runs:
        try:
            path = found(run, folder)
            if not path:
                check_data(run)
        except UserError as error:
            reasons.setdefault(str(error), []).append(run)
            continue
        if path:
            results.append(Result(path))
        else:
            missing.append(f"missing: {command(run)}" + ("" if str(folder) == "results" else f" --results={folder}"))
    for why, some in reasons.items():
        if len(some) > LISTED:
            missing.append(f"not available here: {len(some)} of {len(runs)} Runs ({why})")
        else:
            missing += [f"not available here: {command(run)} ({why})" for run in some]
    return results, missing


class Paragraphs(argparse.HelpFormatter):
    """A docstring as the text above the flags, as wide as the terminal: paragraphs, and indented lists of a name and what it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Return the text in lines of at most `width` characters."""
        filled = []
        for paragraph in text.split("\n\n"):
            for entry in re.split(r"\n(?=    \S)", paragraph):  # what goes on is indented further
                name, gap, rest = re.match(r"(    \S+)?(\s*)(.*)", entry, re.DOTALL).groups()  # type: ignore[union-attr]
                head = f"{name or ''}{gap}"
                filled += textwrap.wrap(
                    " ".join(rest.split()), width, initial_indent=head, subsequent_indent=" " * len(head)
                )
            filled.append("")
        return "\n".join(filled[:-1])


def main(
    name: str,
    doc: str | None,
    runs: Sequence[Run],
    draw: Callable[..., Drawing],
    options: Mapping[str, dict] | None = None,
) -> NoReturn:
    """Read the results that are there, draw them, write the files, print their paths, and end the process: with code 2 on a mistake.

    Args:
        name: file name of what is written, without folder and ending.
        options: further flags by name, as keywords of `argparse.add_argument`; `draw` gets them as keywords.
    """
    exit_with(lambda: drawn(name, doc, runs, draw, options or {}))


def drawn(
    name: str, doc: str | None, runs: Sequence[Run], draw: Callable[..., Drawing], options: Mapping[str, dict]
) -> int:
    """Do the work of `main` and return the exit code."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=Paragraphs)
    parser.add_argument("files", nargs="*", metavar="RESULT", help="result files to draw, instead of RUNS of this file")
    parser.add_argument("--results", default="results", metavar="DIR", help="folder of the results (default: results)")
    parser.add_argument("--out", default="figures", metavar="DIR", help="folder for what is drawn (default: figures)")
    for flag, keywords in options.items():
        parser.add_argument(f"--{flag}", **keywords)
    args = parser.parse_args()
    try:
        results, missing = ([Result(f) for f in args.files], []) if args.files else gather(runs, args.results)
        for line in missing:
            print(line, file=sys.stderr)
        if any(line.startswith("missing: ") for line in missing):
            print(f"all of them at once: python -m dpfl_mpi.sweep {shlex.quote(sys.argv[0])}", file=sys.stderr)
        results = [r for r in results if has_rounds(r)]
        if not results:
            raise UserError("there is nothing to draw: no result of this figure has a recorded round yet")
        with plt.rc_context(STYLE):
            drawing = draw(results, **{flag: getattr(args, flag) for flag in options})
            if not isinstance(drawing, Drawing):
                raise UserError(f"draw returned a {type(drawing).__name__}; it must return a Drawing")
            paths = save(drawing, name, Path(args.out))
        if drawing.text:
            print(drawing.text)
        for path in paths:
            print(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def save(drawing: Drawing, name: str, out: Path) -> list[Path]:
    """Write a drawing as NAME.{pdf,png,csv,md,tex,html}, as far as it has them, and return the paths."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = []
        if drawing.figure:
            for ending in ("pdf", "png"):
                paths.append(out / f"{name}.{ending}")
                metadata = {"CreationDate": None} if ending == "pdf" else None
                with replacing(paths[-1]) as new:  # a full disk leaves no half of a file
                    drawing.figure.savefig(new, format=ending, metadata=metadata)
            plt.close(drawing.figure)
        paths.append(out / f"{name}.csv")
        with replacing(paths[-1]) as new:
            drawing.data.to_csv(new, index=False, float_format="%.10g")
        for ending, text in (
            ("md", drawing.text if drawing.latex else ""),
            ("tex", drawing.latex),
            ("html", drawing.html),
        ):
            if text:
                paths.append(out / f"{name}.{ending}")
                with replacing(paths[-1]) as new:
                    new.write_text(text + "\n")
        return paths
    except OSError as error:
        raise UserError(f"--out is {out}, where nothing can be written: {error.strerror or error}") from None


# -- what a result says -------------------------------------------------------------------------------------------------------------------


def has_rounds(result: Result) -> bool:
    """Return whether a result has a recorded round, and say so on stderr where it has none, or not all."""
    done = result.last_round
    if done < 0:
        print(f"{result.path}: no round is recorded yet", file=sys.stderr)
    elif not result.finished:
        print(f"{result.path} is {result.state} of {result.run.rounds}: drawn as far as it is", file=sys.stderr)
    return done >= 0


def has_graph(result: Result) -> bool:
    """Return whether any client has chosen whose model it receives: before round 1, or in a round."""
    return len(result["graph/chosen/senders"]) > 0


def first_graph(result: Result) -> int:
    """Return the first round that has a graph: 0 is Omega, 1 of a method that chooses in each round alone."""
    return int(not len(result.chosen(0).senders) and result.last_round > 0)


def omega_until(result: Result) -> int:
    """Return the first round whose Omega is not the recorded one, as it is searched anew (--omega_period); beyond the last where there is none."""
    return int(min(result.run.omega_period, result.last_round + 1))


def graphs(results: Sequence[Result]) -> list[Result]:
    """Return the results with a collaboration graph.

    Raises:
        UserError: none has one.
    """
    out = [r for r in results if has_graph(r)]
    if not out:
        raise UserError("none of these results has a collaboration graph (their clients receive from nobody)")
    return out


def over_rounds(
    group: Sequence[Result], values: Callable[[Result], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (round numbers, mean, standard deviation with ddof 1) of a number per round over repetitions, as far as all of them are."""
    rows = [values(r) for r in group]
    shortest = min(len(row) for row in rows)
    stack = np.array([row[:shortest] for row in rows])
    spread = stack.std(0, ddof=1) if len(stack) > 1 else np.zeros(shortest)
    return np.arange(shortest), stack.mean(0), spread


def curve(axes: Axes, x: np.ndarray, mean: np.ndarray, spread: np.ndarray, **look: Any) -> None:
    """Draw a mean over repetitions with a band of one standard deviation, where there is more than one."""
    axes.plot(x, mean, **look)
    if np.any(spread > 0):
        axes.fill_between(x, mean - spread, mean + spread, color=look.get("color"), alpha=0.18, lw=0)


def legend(figure: Figure, handles: Sequence[Any], names: Sequence[str], place: str, **look: Any) -> None:
    """Draw a legend outside the axes, in as many columns as fit beside one another: it does not leave the picture.

    The figure grows by the height of the rows that it takes beyond two, so that the axes keep theirs.
    """
    if not handles:
        return
    how = {"columnspacing": 1.0, "handlelength": 2.0, **look}
    width, height = figure.get_size_inches()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for columns in range(min(len(handles), 6), 0, -1):
        drawn = figure.legend(handles, names, loc=place, ncols=columns, **how)
        if columns == 1 or drawn.get_window_extent(renderer).width <= 0.98 * width * figure.dpi:
            break
        drawn.remove()
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + max(rows - 2, 0) * 0.14)


def dominant_class(result: Result) -> np.ndarray:
    """Return each client's most frequent class, int `[N]`."""
    return result["client/class_counts"].argmax(1)


def client_order(result: Result) -> np.ndarray:
    """Return the clients, int `[N]`, ordered by their most frequent class, then their second, and so on: groups become blocks."""
    counts = result["client/class_counts"]
    ranked = np.argsort(-counts, axis=1, kind="stable")
    held = np.take_along_axis(counts, ranked, axis=1) > 0
    return np.lexsort(np.where(held, ranked, -1).T[::-1])


def accuracy(result: Result, metric: str = "accuracy") -> np.ndarray:
    """Return each client's test accuracy, or another of `metrics.METRICS`, 0 to 1, `[N]`: that of its best model by validation.

    Fine-tuned where the run tunes; nan for clients with flipped labels, liars and newcomers, which no average is over.
    """
    return np.where(result.benign, result.score(metric), np.nan)
