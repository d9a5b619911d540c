"""Redraw every table and figure of this folder from its CSV files: `python reproduction/draw.py`.

The tables go between the marks `<!-- NAME -->` and `<!-- /NAME -->` of README.md here and of the project, the pictures beside the CSV files. Neither MPI, torch nor a result is needed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "analysis"), str(HERE.parent)]

from _common import BLUE, DARK, GREY, STYLE, TEXT, curve

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from _looks import looks
from _tables import Parts, comparable, deviation, interval, markdown
from accuracy_table import PAPER, PAPER_COLUMNS
from matplotlib.figure import Figure
from scipy.special import stdtrit

PAPER_SEEDS = 3
HEADLINE = ("FedAvg", "Local", "FedAvg+FT", "DPFL (B_c = 0.1N)")  # of the project's README
CURVES = ("Local", "FedAvg", "Ditto", "DPFL (B_c = inf)", "DPFL (B_c = 0.1N)")  # that a picture shows
# what the paper claims of the order of its methods
ORDER = (
    ("DPFL (B_c = inf)", "FedAvg+FT"),
    ("DPFL (B_c = 0.2N)", "FedAvg+FT"),
    ("DPFL (B_c = 0.1N)", "FedAvg+FT"),
    ("DPFL (B_c = 0.05N)", "FedAvg+FT"),
    ("DPFL (B_c = inf)", "DPFL (B_c = 0.05N)"),
    ("FedAvg+FT", "Local"),
    ("Local", "FedAvg"),
)


def slug(setting: str) -> str:
    """Return the folder of a setting that is named as in the paper's table."""
    return re.sub(r"[^a-z0-9]+", "-", setting.lower()).strip("-")


def method_of(row: str) -> str:
    """Return the method of a row, as `--method` names it: "DPFL (B_c = inf)" is of dpfl."""
    return re.split(r"[ +,]", row)[0].lower()


def read(folder: Path, name: str) -> pd.DataFrame:
    """Return one of the three files, with every Run's row and seed."""
    frame = pd.read_csv(folder / f"{name}.csv", dtype={"run": str})
    if name == "runs":
        return frame
    return frame.merge(read(folder, "runs")[["run", "row", "seed"]], on="run")


def published(setting: str, row: str) -> tuple[float, float] | None:
    """Return the paper's mean and standard deviation over its seeds, None where its Table 1 has none."""
    if setting not in PAPER_COLUMNS or row not in PAPER:
        return None
    numbers = PAPER[row].split()
    at = 2 * PAPER_COLUMNS.index(setting)
    return float(numbers[at]), float(numbers[at + 1])


def paired(clients: pd.DataFrame, a: str, b: str) -> Parts:
    """Return row a minus row b in points for the clients of each seed that both have (empty: none); a seed is a partition of its own."""
    wide = clients.pivot(index=["seed", "client"], columns="row", values="test_acc")
    if a not in wide or b not in wide:
        return []
    difference = (100 * (wide[a] - wide[b])).dropna()
    return [part.to_numpy() for _, part in difference.groupby("seed")]


def difference(clients: pd.DataFrame, a: str, b: str) -> str:
    """Return "+3.45 ± 1.07": the paired difference and its 95 % interval, a dash where there is none."""
    return "-" if a == b else told(paired(clients, a, b))


def told(values: Parts) -> str:
    """Return a mean and its 95 % interval as a text, a dash where there is none."""
    if not comparable(values):
        return "-"
    mean, half = interval(values)
    return f"{mean:+.2f} ± {half:.2f}"


def verdict(values: np.ndarray, paper: tuple[float, float]) -> str:
    """Return whether the mean over our partitions is where the paper's noise lets the mean of as many others fall, with 95 %.

    Student's prediction interval: t(2) * s * sqrt(1/n + 1/3), s the paper's deviation over its three seeds.
    """
    mean, spread = paper
    allowed = stdtrit(PAPER_SEEDS - 1, 0.975) * spread * np.sqrt(1 / len(values) + 1 / PAPER_SEEDS)
    gap = values.mean() - mean
    return (
        f"within ({gap:+.2f}, noise ± {allowed:.2f})"
        if abs(gap) <= allowed
        else f"**off by {gap:+.2f}** (noise ± {allowed:.2f})"
    )


def percent(runs: pd.DataFrame, row: str) -> np.ndarray:
    """Return a row's accuracy in percent, one per seed, seeds ascending."""
    return 100 * runs[runs["row"] == row].sort_values("seed")["test_acc"].to_numpy()


def ours(values: np.ndarray) -> str:
    """Return "83.04 ± 0.98 (3)", a dash where nothing was run."""
    if not len(values):
        return "-"
    return f"{values.mean():.2f}" + (f" ± {deviation(values):.2f}" if len(values) > 1 else "") + f" ({len(values)})"


def table_1(setting: str, folder: Path) -> str:
    """Return a setting's column of Table 1 as a table: ours, the paper's, differences to Local, verdict."""
    runs, clients = read(folder, "runs"), read(folder, "clients")
    local = published(setting, "Local")
    rows = []
    for row in PAPER:
        values, paper = percent(runs, row), published(setting, row)
        rows.append(
            {
                "method": row,
                "ours, %": ours(values),
                "paper, %": f"{paper[0]:.2f} ± {paper[1]:.2f}" if paper else "-",
                "to Local, paired": difference(clients, row, "Local"),
                "paper, to Local": f"{paper[0] - local[0]:+.2f}" if paper and local and row != "Local" else "-",
                "verdict": verdict(values, paper) if len(values) and paper else "-",
            }
        )
    return markdown(pd.DataFrame(rows))


def headline(setting: str, folder: Path) -> str:
    """Return the methods on which the paper's order rests, side by side."""
    runs, clients = read(folder, "runs"), read(folder, "clients")
    local = published(setting, "Local")
    lines = {"": [], "here": [], "the paper": [], "to Local, here": [], "to Local, the paper": []}  # type: dict[str, list[str]]
    for row in HEADLINE:
        paper = published(setting, row)
        assert paper and local
        lines[""].append(row)
        lines["here"].append(ours(percent(runs, row)))
        lines["the paper"].append(f"{paper[0]:.2f} ± {paper[1]:.2f}")
        lines["to Local, here"].append(difference(clients, row, "Local"))
        lines["to Local, the paper"].append("-" if row == "Local" else f"{paper[0] - local[0]:+.2f}")
    return markdown(pd.DataFrame(lines))


def order(setting: str, folder: Path) -> str:
    """Return the differences on which the paper's order rests, ours paired by client."""
    clients = read(folder, "clients")
    rows = []
    for a, b in ORDER:
        values = paired(clients, a, b)
        if not comparable(values):
            continue
        mean, half = interval(values)
        found = "not decided" if abs(mean) <= half else ("holds" if mean > 0 else "**does not hold**")
        pa, pb = published(setting, a), published(setting, b)
        rows.append(
            {
                "claim": f"{a} > {b}",
                "ours": told(values),
                "paper": f"{pa[0] - pb[0]:+.2f}" if pa and pb else "-",
                "": found,
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(not run)"


def other_rows(folder: Path) -> str:
    """Return the rows that are not in Table 1 (ablations, random graph, label flips), with the difference to the row without the change."""
    runs, clients = read(folder, "runs"), read(folder, "clients")
    rows = []
    for row in sorted(set(runs["row"]) - set(PAPER)):
        base = row.split(", ")[0]
        base = base if base in PAPER else "DPFL (B_c = 0.1N)"
        rows.append(
            {
                "run": row,
                "accuracy, %": ours(percent(runs, row)),
                "to its row in Table 1, or to DPFL (B_c = 0.1N)": difference(clients, row, base),
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(none yet)"


def spent(folders: list[Path]) -> str:
    """Return what the Runs cost, by setting."""
    rows = []
    for folder in folders:
        runs = read(folder, "runs")
        runs = runs[~runs["row"].str.contains("+FT", regex=False)]  # their rounds are those of the row without
        rows.append(
            {
                "setting": folder.name,
                "Runs": f"{len(runs)}",
                "core hours": f"{runs['core_hours'].sum():.1f}",
                "starts": f"{runs['starts'].sum()}",
                "computed by": ", ".join(sorted(set(runs["cpu"] + ", " + runs["kernels"] + " kernels"))),
            }
        )
    return markdown(pd.DataFrame(rows))


def measured(folders: list[Path]) -> str:
    """Return the mean Run of each row whose seconds are known: core minutes, what a step and an evaluation took, size of the result."""
    rows = []
    for folder in folders:
        runs = read(folder, "runs")
        runs = runs[~runs["row"].str.contains("+FT", regex=False)].dropna(subset=["train_seconds"])
        for row, part in runs.groupby("row"):
            evaluations, graph = part["evaluations"].sum(), part["graph_seconds"].sum()
            rows.append(
                {
                    "setting": folder.name,
                    "row": row,
                    "Runs": f"{len(part)}",
                    "core minutes per Run": f"{60 * part['core_hours'].mean():.1f}",
                    "training": f"{part['train_seconds'].mean() / 60:.1f}",
                    "ms per step": f"{1e3 * part['train_seconds'].sum() / part['gradient_steps'].sum():.2f}",
                    "choosing": f"{part['graph_seconds'].mean() / 60:.1f}" if evaluations else "-",
                    "ms per evaluation": f"{1e3 * graph / evaluations:.2f}" if evaluations else "-",
                    "MB": f"{part['megabytes'].mean():.1f}",
                }
            )
    return markdown(pd.DataFrame(rows)) if rows else "(not known)"


def picture(setting: str, folder: Path) -> Figure:
    """Return differences to Local beside the paper's, and accuracy over local epochs."""
    clients, curves = read(folder, "clients"), read(folder, "curves")
    local = published(setting, "Local")
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.9), width_ratios=(1.25, 1))
    rows = [r for r in PAPER if r != "Local" and comparable(paired(clients, r, "Local"))]
    for y, row in enumerate(rows):
        mean, half = interval(paired(clients, row, "Local"))
        left.errorbar(mean, y, xerr=half, fmt="o", color=BLUE, capsize=2, label="ours, 95 %" if y == 0 else None)
        paper = published(setting, row)
        if paper and local:
            left.plot(paper[0] - local[0], y, "D", mfc="none", color=DARK, label="paper" if y == 0 else None)
    left.axvline(0, color=GREY, lw=0.6)
    left.set_yticks(range(len(rows)), rows)
    left.invert_yaxis()
    left.set_xlabel("difference to Local, points")
    left.legend(loc="lower left")
    shown = [row for row in CURVES if row in set(curves["row"])]
    for row, look in zip(shown, looks([method_of(row) for row in shown]), strict=True):
        epochs = curves[curves["row"] == row].groupby("epochs")["test_acc"]
        mean, spread = 100 * epochs.mean(), 100 * epochs.std().fillna(0)
        curve(right, mean.index.to_numpy(), mean.to_numpy(), spread.to_numpy(), label=row, **look)
    right.set_xlabel("local epochs")
    right.set_ylabel("test accuracy, %")
    right.legend(loc="lower right")
    return figure


def blocks(where: Path = HERE) -> dict[str, str]:
    """Return every table of the page by the name of its mark."""
    settings = {s: where / slug(s) for s in PAPER_COLUMNS if (where / slug(s) / "runs.csv").exists()}
    out = {}
    for setting, folder in settings.items():
        out[f"table 1 {folder.name}"] = table_1(setting, folder)
        out[f"order {folder.name}"] = order(setting, folder)
        out[f"others {folder.name}"] = other_rows(folder)
    folders = sorted(p.parent for p in where.glob("*/runs.csv"))
    return out | {"spent": spent(folders), "measured": measured([p for p in folders if p.name != "controls"])}


def front() -> dict[str, str]:
    """Return the table of the project's README by the name of its mark."""
    setting = "CIFAR-10 Patho(3)"
    return {"headline": headline(setting, HERE / slug(setting))}


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
    for setting in PAPER_COLUMNS:
        folder = HERE / slug(setting)
        if (folder / "runs.csv").exists():
            with plt.rc_context(STYLE):
                picture(setting, folder).savefig(path := folder / "accuracy.png", dpi=200)
            print(path)


if __name__ == "__main__":
    main()
