"""What `python analysis/NAME.py` does: it finds results, makes data frames of them, draws, and writes NAME.{pdf,png,csv,md,tex,html}."""

import argparse
import contextlib
import dataclasses
import importlib
import io
import itertools
import shlex
import shutil
import sys
import textwrap
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
from dpfl_mpi.plugins import find, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import result_of
from dpfl_mpi.results.summary import fewer, fitted
from dpfl_mpi.settings import NUMERICS, Run
from dpfl_mpi.settings.fields import as_dict, changed, to_flags
from dpfl_mpi.settings.files import no_data
from dpfl_mpi.settings.values import is_file
from dpfl_mpi.storage.files import explained, replacing

LISTED = 5  # of Runs that cannot be had for one reason so many are named, and more are counted
SEEDS = (32, 42, 52)  # the three repetitions of the paper's tables
PANELS = 12  # results that a figure with a panel for each draws: two pages of a paper
PAPER = {"paper": {"action": "store_true", "help": "add the paper's figures in brackets"}}


@dataclasses.dataclass
class Drawing:
    """What `draw` makes: the numbers, and a figure or a text that shows them."""

    data: pd.DataFrame  # every number that is shown, one row per entity; written as CSV
    figure: Figure | None = None
    text: str = ""  # printed; of a table the markdown, which is written too
    latex: str = ""
    html: str = ""


def cifar10(**fields: Any) -> list[Run]:
    """Return a Run on CIFAR-10 for each combination of the fields' values, the last changing first; several values are a tuple."""
    values = [value if isinstance(value, tuple) else (value,) for value in fields.values()]
    return [Run(dataset="cifar10", **dict(zip(fields, each, strict=True))) for each in itertools.product(*values)]


def command(run: Run) -> str:
    return shlex.join(["mpirun", "-n", "8", "python", "-m", "dpfl_mpi", *to_flags(changed(run))])


def elsewhere(folder: str | Path) -> str:
    return "" if str(folder) == "results" else f" {shlex.quote(f'--results={folder}')}"


def gather(runs: Iterable[Run], folder: str | Path) -> tuple[list[Result], list[str]]:
    """Return the results that are there, and sentences on the Runs that are not: how each is computed, or why some cannot be."""
    runs, results, missing, reasons = list(runs), [], [], defaultdict[str, list[Run]](list)
    for run in runs:
        try:
            result = found(run, folder)
            if not result and (asked := run.resolve()).data and not is_file(asked.data):
                raise no_data(asked.dataset, asked.data)  # nothing here computes the Run
        except UserError as error:
            reasons[str(error)].append(run)
            continue
        if result:
            results.append(result)
        else:
            missing.append(f"missing: {command(run)}{elsewhere(folder)}")
    for why, some in reasons.items():
        told = [f"{len(some)} of {len(runs)} Runs"] if len(some) > LISTED else map(command, some)
        missing += [f"not available here: {each} ({why})" for each in told]
    return results, missing


def found(run: Run, folder: str | Path) -> Result | None:
    """Return the result of a Run in a folder, None where there is none.

    A laptop that has only results does not have the files that a Run names: there the one result counts that is of files of these names.

    Raises:
        UserError: there can be no such result, or there are several.
    """
    reason = None
    try:
        path = run.path(folder)
        for named in (path, *sorted(Path(folder).glob(f"*-s{run.seed}-{path.stem[-8:]}.h5"))):  # names had -B1 once
            if named.is_file():
                return result_of(run, named)
    except UserError as error:
        reason = error
    results = []
    for path in sorted(Path(folder).glob(f"{short(run.dataset)}-*-{short(run.method)}-*s{run.seed}-*.h5")):
        with contextlib.suppress(UserError):
            results += [result] if answers(result := Result(path), run) else []
    if len(results) > 1:
        names = " and ".join(str(result.path) for result in results)
        raise UserError(f"{names} are of different files of one name: name the one to draw")
    if reason and not results:
        raise reason
    return next(iter(results), None)


def answers(result: Result, run: Run) -> bool:
    """Return whether a result is that of a Run of which some files are not here: these count by their names."""
    mine, asked = as_dict(result.run), as_dict(run)
    asked["data"] = asked["data"] or find("dataset", run.dataset).DATA
    held = result.run.contents
    gone = {name: held[name] for name in held if not is_file(str(asked[name]).removeprefix("file:"))}
    if not gone or any(Path(str(asked[name])).name != Path(str(mine[name])).name for name in gone):
        return False
    if "partition" in gone:
        asked["clients"] = asked["clients"] or mine["clients"]
    return Run(**asked).resolve(gone).key() == result.key and result.fact("numerics") == str(NUMERICS)


def few(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the lines of `runs` that a figure with a panel per result draws, and a sentence on what it leaves out, or none.

    Up to `PANELS` are all drawn; of more the first seed of each row, and no more than `PANELS`.
    """
    if len(runs) <= PANELS:
        return runs, []
    kept = runs.sort_values("seed", kind="stable").drop_duplicates(["setting", "row"])
    kept = runs.loc[runs.index.intersection(kept.index)][:PANELS]
    return kept, [f"{len(kept)} of {len(runs)} results are drawn, a seed of each Run; name the files to draw others"]


def has_rounds(result: Result) -> bool:
    """Return whether a result has a recorded round, and say so on stderr where it has none, or not all."""
    if (done := result.last_round) < 0:
        complain(f"{result.path}: no round is recorded yet")
    elif not result.finished:
        complain(f"{result.path} is {result.state} of {result.run.rounds}: drawn as far as it is")
    elif some := fewer(result):
        complain(f"{result.path}: means are over {some}")
    return done >= 0


def main(
    name: str, doc: str | None, runs: Sequence[Run], draw: Callable[..., Drawing], options: dict[str, Any] | None = None
) -> NoReturn:
    """Read the results that are there, draw them, write the files `name`.*, print their paths, and end the process: with code 2 on a mistake.

    `draw` takes the `Frames` of the results, and `options` as keywords: further flags by name, as keywords of `argparse.add_argument`.
    """
    width, options = shutil.get_terminal_size().columns - 2, options or {}
    texts = [part if "    " in part else textwrap.fill(part, width) for part in (doc or "").strip().split("\n\n")]
    how = argparse.RawDescriptionHelpFormatter  # paragraphs, and lists as they are
    parser = argparse.ArgumentParser(description="\n\n".join(texts), formatter_class=how)
    parser.add_argument("files", nargs="*", metavar="RESULT", help="result files to draw, instead of RUNS of this file")
    parser.add_argument("--results", default="results", metavar="DIR", help="folder of the results (default: results)")
    parser.add_argument("--out", default="figures", metavar="DIR", help="folder for what is drawn (default: figures)")
    parser.add_argument("--wide", action="store_true", help="print lines as wide as they are, not of 80 columns")
    for flag, keywords in options.items():
        parser.add_argument(f"--{flag}", **keywords)

    @in_a_sentence
    def work() -> None:
        args = parser.parse_args()
        results, missing = ([Result(f) for f in args.files], []) if args.files else gather(runs, args.results)
        for line in missing:
            complain(line)
        if any(line.startswith("missing: ") for line in missing):
            sweep = f"python -m dpfl_mpi.sweep {shlex.quote(sys.argv[0])}{elsewhere(args.results)}"
            complain(f"all of them at once: {sweep}")
        if not (results := [r for r in results if has_rounds(r)]):
            raise UserError("there is nothing to draw: no result of this figure has a recorded round yet")
        with plt.rc_context(STYLE):
            drawing = draw(of_results(results), **{flag: getattr(args, flag) for flag in options})
            if not isinstance(drawing, Drawing):
                raise UserError(f"draw returned a {type(drawing).__name__}; it must return a Drawing")
            paths = save(drawing, name, Path(args.out))
        print(*filter(None, (drawing.text if args.wide else fitted(drawing.text), *paths)), sep="\n")

    exit_with(work)


def shipped(name: str, caller: str) -> list[Run]:
    """Return the `RUNS` of a figure of this folder; where its caller is the program that was started, do what `main` does."""
    figure = importlib.import_module(f"dpfl_mpi.figures.{name}")
    if caller == "__main__":
        main(name, figure.__doc__, figure.RUNS, figure.draw, getattr(figure, "OPTIONS", {}))
    return list(figure.RUNS)


def save(drawing: Drawing, name: str, out: Path) -> list[Path]:
    """Write a drawing as NAME.{pdf,png,csv,md,tex,html}, as far as it has them, and return the paths. A full disk leaves no half of a file."""
    files, figure = dict[str, bytes](), drawing.figure
    if figure:
        numbers = {"Description": drawing.text}  # what it shows in numbers, for who meets the picture alone
        try:
            for ending, metadata in (("pdf", {"CreationDate": None}), ("png", numbers)):
                image = io.BytesIO()  # on a full disk matplotlib's writers end with errors of their own
                figure.savefig(image, format=ending, metadata=metadata)
                files[ending] = image.getvalue()
        finally:
            plt.close(figure)
    files["csv"] = drawing.data.to_csv(index=False, float_format="%.10g").encode()
    texts = {"md": drawing.text if drawing.latex else "", "tex": drawing.latex, "html": drawing.html}
    files |= {ending: f"{text}\n".encode() for ending, text in texts.items() if text}
    for ending, content in files.items():
        with explained(f"--out is {out}, where nothing can be written"), replacing(out / f"{name}.{ending}") as new:
            new.write_bytes(content)
    return [out / f"{name}.{ending}" for ending in files]
