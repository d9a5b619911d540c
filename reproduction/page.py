"""Redraw every table and picture of this folder and of docs/findings.md from the CSV files: `python reproduction/page.py`.

The tables go between the marks `<!-- NAME -->` and `<!-- /NAME -->` of README.md here and of the project and of findings.md, the pictures beside the
CSV files and into docs/pictures. Neither MPI, torch nor a result is needed.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from dpfl_mpi.figures import findings, omega, recomputed
from dpfl_mpi.figures.frames import Frames, of_folder
from dpfl_mpi.figures.names import slug
from dpfl_mpi.figures.style import STYLE
from dpfl_mpi.figures.tables import Parts
from dpfl_mpi.studies.plan_power import chance_of
from dpfl_mpi.studies.plan_power import needed as partitions

HERE = Path(__file__).resolve().parent
FRONT, PAGE, FINDINGS = HERE.parent / "README.md", HERE / "README.md", HERE.parent / "docs" / "findings.md"


@cache
def folders() -> dict[str, Frames]:
    """Return the frames of every folder by its name: those at the paper's length, then the controls."""
    names = sorted((path.parent.name for path in HERE.glob("*/runs.csv")), key=lambda name: (name == "controls", name))
    return {name: of_folder(HERE / name) for name in names}


def needed(parts: Parts, difference: float) -> tuple[float, float, int]:
    """Return the deviation of clients and of partitions, and how many partitions find a difference with a power of 80 %."""
    chance = chance_of(parts)
    return chance.within, chance.between, partitions(chance, difference, chance.clients, 0.8, 0.05)


def tables() -> dict[Path, dict[str, str]]:
    """Return every page's tables by the names of their marks."""
    full = {name: frames for name, frames in folders().items() if name != "controls"}
    headline = recomputed.headline(full[slug("CIFAR-10 Patho(3)")])
    found = {name: recomputed.text(table(folders()["controls"])) for name, table in findings.TABLES.items()}
    found["power"] = recomputed.text(findings.power(folders()["controls"], needed))
    found["agreement"] = omega.agreement_table(pd.read_csv(HERE / "controls" / "agreement.csv"))
    front = {"headline": recomputed.text(headline), "core hours": recomputed.total(full)}
    return {PAGE: recomputed.tables(folders()), FRONT: front, FINDINGS: found}


def filled(page: str, tables: dict[str, str]) -> str:
    """Return the page with every table between its marks; a table without marks is a mistake."""
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.S)
        if not marks.search(page):
            raise SystemExit(f"the page has no place for the table {name!r}")
        page = marks.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page)
    return page


def pictures() -> Iterator[tuple[Path, Figure]]:
    for name, frames in folders().items():
        if name not in ("controls", "cifar-10-motivation"):
            yield from ((HERE / name / f"{picture}.png", figure) for picture, figure in recomputed.pictures(frames))
    for picture, figure in findings.pictures(folders()["controls"], needed).items():
        if figure:
            yield FINDINGS.parent / "pictures" / f"findings-{picture}.png", figure


def main() -> None:
    for page, its in tables().items():
        page.write_text(filled(page.read_text(), its))
        print(page)
    with plt.rc_context(STYLE):
        for path, figure in pictures():
            figure.savefig(path, dpi=160 if path.parent.name == "pictures" else 200)
            plt.close(figure)
            print(path)


if __name__ == "__main__":
    main()
