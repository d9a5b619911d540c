"""The program behind `python analysis/NAME.py`: `main` finds results, draws, and writes files.

A figure is a module of this package: its list RUNS says of which Runs it wants results, and its
function `draw` gets these as data frames and returns a `Drawing`. A script in analysis/ calls
`shipped(NAME, __name__)`; the script of a user's own figure calls `main`.
"""

import dataclasses
import importlib
import io
import itertools
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from dpfl_mpi.errors import UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.figures.style import STYLE
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import result_of
from dpfl_mpi.results.summary import WIDTH, coverage, fitted, split
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.settings.files import no_data
from dpfl_mpi.settings.values import is_file
from dpfl_mpi.storage.files import explained, replacing

LISTED = 5  # Runs unavailable for one reason that are named each; more are counted
SEEDS = (32, 42, 52)  # the three repetitions of the paper's tables
KEYS_WIDTH = 66  # most columns of a terminal for the cells that name a row of a table
PANELS = 12  # most panels of a figure with one per result: two pages of a paper
PAPER = {"paper": {"action": "store_true", "help": "add the paper's figures in brackets"}}


def fitted_page(text: str) -> str:
    """Return a text no wider than `WIDTH`: long lines are folded, markdown tables are split."""
    out = []
    for is_table, lines in itertools.groupby(text.split("\n"), lambda line: line.startswith("|")):
        if is_table:
            out.append(fitted_table([re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]))
        else:
            out.append(fitted("\n".join(lines)))
    return "\n".join(out)


def fitted_table(rows: list[list[str]]) -> str:
    """Return a markdown table in parts of `WIDTH`, each with the columns that name a row."""
    # a row is named by the first columns with words below header and rule, if they are narrow
    widths = [len(cell) + 1 for cell in rows[0]]
    in_words = [any(c.isalpha() for row in rows[2:] for c in row[i]) for i in range(len(widths))]
    names = (k for k in range(2, len(widths)) if all(in_words[:k]))
    keys = max((k for k in names if sum(widths[:k]) < KEYS_WIDTH), default=1)
    parts = split(widths, keys, WIDTH - 1)
    tables = [[f"|{'|'.join(row[i] for i in part)}|" for row in rows] for part in parts]
    return "\n\n".join("\n".join(table) for table in tables)


@dataclasses.dataclass
class Drawing:
    """What `draw` returns: the numbers, and a figure or a text that shows them."""

    data: pd.DataFrame  # every number that is shown, written as CSV
    figure: Figure | None = None
    text: str = ""  # printed; for a table it is markdown, which is also written
    latex: str = ""
    html: str = ""


def cifar10(**fields: Any) -> list[Run]:
    """Return the CIFAR-10 Runs of all combinations of the fields; a tuple is several values."""
    values = [value if isinstance(value, tuple) else (value,) for value in fields.values()]
    points = (dict(zip(fields, point, strict=True)) for point in itertools.product(*values))
    return [Run(dataset="cifar10", **point) for point in points]


def command(run: Run) -> str:
    """Return the command line that computes a Run."""
    return shlex.join(["mpirun", "-n", "8", "python", "-m", "dpfl_mpi", *to_flags(changed(run))])


def results_flag(folder: str | Path) -> str:
    return "" if str(folder) == "results" else f" {shlex.quote(f'--results={folder}')}"


def gather(runs: Iterable[Run], folder: str | Path) -> tuple[list[Result], list[str]]:
    """Return the results in a folder, and for each Run without one how to compute it."""
    runs, results, missing = list(runs), [], []
    reasons = defaultdict[str, list[Run]](list)
    for run in runs:
        try:
            resolved = run.resolve()
            if (path := run.path(folder)).is_file():
                results.append(result_of(run.key(), path))
                continue
            if resolved.data and not is_file(resolved.data):
                raise no_data(resolved.dataset, resolved.data)
            missing.append(f"missing: {command(run)}{results_flag(folder)}")
        except UserError as error:
            reasons[str(error)].append(run)
    for reason, of_reason in reasons.items():
        too_many = len(of_reason) > LISTED
        names = [f"{len(of_reason)} of {len(runs)} Runs"] if too_many else map(command, of_reason)
        missing += [f"not available here: {name} ({reason})" for name in names]
    return results, missing


def limit_panels(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return at most `PANELS` lines of `runs`, and a sentence if some are left out."""
    if len(runs) <= PANELS:
        return runs, []
    firsts = runs.sort_values("seed", kind="stable").drop_duplicates(["setting", "row"])
    shown = runs.loc[runs.index.intersection(firsts.index)][:PANELS]
    counts = f"{len(shown)} of {len(runs)} results are drawn, one seed of each Run"
    return shown, [f"{counts}; to draw others, name their files"]


def has_rounds(result: Result) -> bool:
    """Return whether a result has a recorded round; a note on stderr says if it is not complete."""
    if result.last_round < 0:
        complain(f"{result.path}: no round is recorded yet")
    elif not result.finished:
        complain(f"{result.path} is {result.state} of {result.run.rounds}: drawn up to there")
    elif some := coverage(result):
        complain(f"{result.path}: means are over {some}")
    return result.last_round >= 0


def main(
    name: str,
    doc: str | None,
    runs: Sequence[Run],
    draw: Callable[..., Drawing],
    options: dict[str, Any] | None = None,
) -> NoReturn:
    """Draw the results that exist, write the files NAME.*, print their paths, and exit.

    `draw` gets the `Frames` of the results, and `options` as keywords: further flags by name, with
    the keywords of `argparse.add_argument`. A user's mistake exits with code 2.
    """
    options = options or {}
    parser = Parser(description=doc)
    add = parser.add_argument
    add("files", nargs="*", metavar="RESULT", help="results to draw (default: RUNS of this file)")
    add("--results", default="results", metavar="DIR", help="folder of the results (results)")
    add("--out", default="figures", metavar="DIR", help="folder for the drawn files (figures)")
    add("--wide", action="store_true", help="do not fold wide tables to 80 columns")
    for flag, keywords in options.items():
        add(f"--{flag}", **keywords)

    @in_a_sentence
    def work() -> None:
        args = parser.parse_args()
        if args.files:
            results, missing = [Result(file) for file in args.files], list[str]()
        else:
            results, missing = gather(runs, args.results)
        for line in missing:
            complain(line)
        if any(line.startswith("not available here: ") for line in missing):
            complain("results that were copied here are drawn by naming their files")
        if any(line.startswith("missing: ") for line in missing):
            program = shlex.quote(sys.argv[0])
            sweep = f"python -m dpfl_mpi.sweep {program}{results_flag(args.results)}"
            complain(f"all of them at once: {sweep}")
        results = [result for result in results if has_rounds(result)]
        if not results:
            reason = "no result of this figure has a recorded round yet"
            raise UserError(f"there is nothing to draw: {reason}")
        with plt.rc_context(STYLE):
            drawing = draw(of_results(results), **{flag: getattr(args, flag) for flag in options})
            if not isinstance(drawing, Drawing):
                kind = type(drawing).__name__
                raise UserError(f"draw returned a {kind}; it must return a Drawing")
            paths = save(drawing, name, Path(args.out))
        text = drawing.text if args.wide else fitted_page(drawing.text)
        print(*filter(None, (text, *paths)), sep="\n")

    exit_with(work)


def shipped(name: str, caller: str) -> list[Run]:
    """Return the `RUNS` of a shipped figure; if its caller is the program started, run `main`."""
    figure = importlib.import_module(f"dpfl_mpi.figures.{name}")
    if caller == "__main__":
        main(name, figure.__doc__, figure.RUNS, figure.draw, getattr(figure, "OPTIONS", {}))
    return list(figure.RUNS)


def save(drawing: Drawing, name: str, out: Path) -> list[Path]:
    """Write NAME.{pdf,png,csv,md,tex,html}, each complete or unchanged; return the paths."""
    files = dict[str, bytes]()
    if figure := drawing.figure:
        description = {"Description": drawing.text}  # for readers who have only the picture
        for ending, metadata in (("pdf", {"CreationDate": None}), ("png", description)):
            image = io.BytesIO()  # on a full disk, matplotlib would raise errors of its own
            figure.savefig(image, format=ending, metadata=metadata)
            files[ending] = image.getvalue()
        plt.close(figure)
    files["csv"] = drawing.data.to_csv(index=False, float_format="%.10g").encode()
    table = drawing.text if drawing.latex else ""
    for ending, text in (("md", table), ("tex", drawing.latex), ("html", drawing.html)):
        if text:
            files[ending] = f"{text}\n".encode()
    refusal = f"--out is {out}, where nothing can be written"
    for ending, content in files.items():
        with explained(refusal), replacing(out / f"{name}.{ending}") as new:
            new.write_bytes(content)
    return [out / f"{name}.{ending}" for ending in files]
