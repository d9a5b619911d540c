"""Redraw every table and picture of the pages from the CSV files: `python reproduction/page.py`.

Tables go between the marks `<!-- NAME -->` and `<!-- /NAME -->` of the pages; pictures go beside
the CSV files. It needs no results.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import findings
import map as harm_map
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import question
import recomputed
import standings
from arena import known
from csv_files import of_folder
from matplotlib.figure import Figure
from recomputed import Lines

from dpfl_mpi.errors import exit_with
from dpfl_mpi.figures import omega
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.style import STYLE
from dpfl_mpi.figures.tables import Parts, difference_text, interval, number
from dpfl_mpi.settings.command_line import Parser

HERE = Path(__file__).resolve().parent
FRONT = HERE.parent / "README.md"
ANSWER, TABLE_1, TABLES = HERE / "README.md", HERE / "table1.md", HERE / "tables.md"
SHARES = (0.25, 0.5, 1.0)  # of DPFL's costs at which methods are compared


def single_values(values: pd.Series) -> Parts:
    """Return one value per partition as the parts of an interval."""
    return [np.array([value]) for value in values.dropna()]


def at_equal_cost(lines: pd.DataFrame, cost: str) -> Lines:
    """Yield the accuracies of each row of a profile at a quarter, half and all of DPFL's cost.

    Each is a mean over partitions with its interval and their number. A Run that has ended keeps
    its accuracy. The difference to DPFL is at the full cost, on the same partitions.
    """
    rows = list(dict.fromkeys(lines["row"]))
    whole = lines[lines["row"] == "DPFL"].groupby("seed")[cost].max().mean()
    limits, reached = [share * whole for share in SHARES], []
    for limit in limits:
        within = lines[lines[cost] <= 1.000001 * limit]
        last = within.groupby(["row", "seed"])["accuracy"].last()
        reached.append(last.unstack("seed").reindex(rows))
    for row in rows:
        cells = {"method": row}
        for limit, accuracies in zip(limits, reached, strict=True):
            parts = single_values(accuracies.loc[row])
            mean, half = interval(parts) if parts else (np.nan, np.nan)
            text = f"{mean:.2f} ± {half:.2f} ({len(parts)})".replace(" ± nan", "")
            cells[f"{limit:.2f} {cost}"] = text if parts else "-"
        ahead = single_values(reached[-1].loc["DPFL"] - reached[-1].loc[row])
        yield cells | {"DPFL minus it": difference_text(ahead) if row != "DPFL" else "-"}


def changed(lines: pd.DataFrame) -> Lines:
    last = lines.groupby(["network", "row", "seed"])[["accuracy", "gigabytes"]].last()
    accuracy, sent = last["accuracy"].unstack("seed"), last["gigabytes"].unstack("seed")
    for change in ("staleness 1", "staleness 5", "int8", "topk:0.1"):
        for profile in dict.fromkeys(lines["network"]):
            cells = {"change": f"{change}, {profile}"}
            for method in ("DPFL", "Random graph", "Pairwise"):
                with_change = accuracy.loc[(profile, f"{method}, {change}")]
                points = single_values(with_change - accuracy.loc[(profile, method)])
                cells[method] = difference_text(points)
            gigabytes = sent.loc[(profile, f"DPFL, {change}")].mean()
            yield cells | {"GB of DPFL": number(gigabytes)}


def network_tables() -> dict[str, str]:
    lines = pd.read_csv(HERE / "network.csv")
    out = {"changed": recomputed.text(changed(lines))}
    for profile in ("phones", "hospitals"):
        of_profile = lines[lines["network"] == profile]
        for cost in ("hours", "gigabytes"):
            out[f"{profile}, {cost}"] = recomputed.text(at_equal_cost(of_profile, cost))
    return out


@cache
def arena_lines() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the lines of arena.csv, those of its clients, and the differences between rows."""
    texts = {"run": str, "commit": str}
    runs = pd.read_csv(HERE / "arena.csv", dtype=texts)
    clients = pd.read_csv(HERE / "arena-clients.csv", dtype=texts)
    return runs, clients, standings.differences(runs, clients)


def arena_tables() -> dict[str, str]:
    runs, clients, found = arena_lines()
    parts = []
    for (setting, epochs), of_setting in runs.groupby(["setting", "epochs"], sort=False):
        here = found[(found["setting"] == setting) & (found["epochs"] == epochs)]
        table = recomputed.text(standings.table(of_setting, clients, here))
        parts.append(f"#### {setting}, {epochs} epochs\n\n{table}\n")
    return {"arena": "\n".join(parts)}


@cache
def folders() -> dict[str, Frames]:
    """Return the frames of each folder with CSV files, `controls` last."""
    names = [path.parent.name for path in HERE.glob("*/runs.csv")]
    names.sort(key=lambda name: (name == "controls", name))
    return {name: of_folder(HERE / name) for name in names}


def tables() -> dict[Path, dict[str, str]]:
    """Return every page's tables by the names of their marks."""
    controls = folders()["controls"]
    found = {name: recomputed.text(table(controls)) for name, table in findings.TABLES.items()}
    pairs = pd.read_csv(HERE / "controls" / "agreement.csv")
    found["agreement"] = omega.agreement_table(pairs)
    runs, _, differences = arena_lines()
    verdicts = question.table(known(question.RUNS_FILE), known(question.CLIENTS_FILE))
    of_map = {name: recomputed.text(table) for name, table in harm_map.tables().items()}
    more = {name: of_map.pop(name) for name in ("map", "rivals")}
    more |= {
        "verdicts": recomputed.text(verdicts),
        "tuned": recomputed.text(pd.read_csv(HERE / "tuned.csv")),
    }
    return {
        FRONT: {"answer": recomputed.text(standings.answer(runs, differences))},
        ANSWER: of_map,
        TABLE_1: recomputed.page_tables(folders()) | {"core hours": core_hours()},
        TABLES: arena_tables() | found | network_tables() | more,
    }


def core_hours() -> str:
    """Return the sentence that says what each part cost so far."""
    files = {
        "this page": recomputed.finished(folders()),
        "[the arena](tables.md#the-arena)": arena_lines()[0],
        "[the map](tables.md#the-map)": known(harm_map.FILE),
        "[the question](question.md)": known(question.RUNS_FILE),
    }
    costs = [
        f"{name} {len(runs)} Runs and {runs['core_hours'].sum():.0f} core hours"
        for name, runs in files.items()
    ]
    return f"In all so far: {'; '.join(costs)}."


def filled(page: str, tables: dict[str, str]) -> str:
    """Return the page with every table between its marks; a table without marks is a mistake."""
    for name, table in tables.items():
        mark = re.escape(name)
        marks = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.S)
        if not marks.search(page):
            raise SystemExit(f"the page has no place for the table {name!r}")
        page = marks.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page)
    return page


def pictures() -> Iterator[tuple[Path, Figure | None]]:
    for name, frames in folders().items():
        if name not in ("controls", "cifar-10-motivation"):
            for picture, figure in recomputed.pictures(frames):
                yield HERE / name / f"{picture}.png", figure
    of_question = known(question.RUNS_FILE), known(question.CLIENTS_FILE)
    yield HERE / "forest.png", question.forest(*of_question)
    cells = known(harm_map.FILE)
    yield HERE / "map.png", harm_map.draw_map(cells)
    yield HERE / "sizes.png", harm_map.draw_sizes(cells)
    yield HERE / "undone.png", harm_map.draw_undone(cells, known(harm_map.ROUNDS))


def main() -> None:
    Parser(description=__doc__).parse_args()
    for page, texts in tables().items():
        page.write_text(filled(page.read_text(), texts))
        print(page)
    with plt.rc_context(STYLE):
        for path, figure in pictures():
            assert figure
            figure.savefig(path, dpi=200)
            plt.close(figure)
            print(path)


if __name__ == "__main__":
    exit_with(main)
