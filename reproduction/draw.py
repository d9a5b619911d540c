"""Redraw every table and figure of this folder from its CSV files: `python reproduction/draw.py`.

The tables go between the marks `<!-- NAME -->` and `<!-- /NAME -->` of README.md here and of the project, the pictures beside the CSV files.
Neither MPI, torch nor a result is needed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "analysis"), str(HERE.parent)]

from _common import STYLE

import matplotlib.pyplot as plt
from accuracy_table import PAPER_COLUMNS
from costs import measured, spent, total
from experiments import EXPERIMENTS
from pictures import PICTURES
from stored import slug
from table_1 import headline, order, table_1

SETTINGS = (*PAPER_COLUMNS, "FEMNIST natural")  # the last as the paper's text has it, without numbers of its own


def blocks(where: Path = HERE) -> dict[str, str]:
    """Return every table of the page by the name of its mark."""
    out = {}
    for setting in SETTINGS:
        if ((folder := where / slug(setting)) / "runs.csv").exists():
            out[f"table 1 {folder.name}"] = table_1(setting, folder)
            out[f"order {folder.name}"] = order(setting, folder)
    for name, tables in EXPERIMENTS.items():
        if (where / name / "runs.csv").exists():
            out |= {f"{mark} {name}": table(where / name) for mark, table in tables.items()}
    full = full_length(where)
    return out | {"spent": spent([*full, where / "controls"]), "measured": measured(full)}


def full_length(where: Path) -> list[Path]:
    """Return the folders of the Runs at the paper's length: the controls are shorter."""
    return sorted(p.parent for p in where.glob("*/runs.csv") if p.parent.name != "controls")


def front() -> dict[str, str]:
    """Return what the project's README says of the results, by the name of its mark."""
    setting = "CIFAR-10 Patho(3)"
    return {"headline": headline(setting, HERE / slug(setting)), "core hours": total(full_length(HERE))}


def filled(page: str, tables: dict[str, str]) -> str:
    """Return the page with every table between its marks; a table without marks is a mistake."""
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.S)
        if not marks.search(page):
            raise SystemExit(f"the page has no place for the table {name!r}")
        page = marks.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page)
    return page


def main() -> None:
    """Fill the page, draw the pictures, print their paths."""
    for page, tables in ((HERE / "README.md", blocks()), (HERE.parent / "README.md", front())):
        page.write_text(filled(page.read_text(), tables))
        print(page)
    for setting in SETTINGS:
        folder = HERE / slug(setting)
        if not (folder / "runs.csv").exists():
            continue
        for name, picture in PICTURES.items():
            with plt.rc_context(STYLE):
                if figure := picture(setting, folder):
                    figure.savefig(path := folder / f"{name}.png", dpi=200)
                    plt.close(figure)
                    print(path)


if __name__ == "__main__":
    main()
