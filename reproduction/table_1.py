"""Table 1 beside the paper's, and the order of methods that the paper claims."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from _tables import comparable, interval, markdown
from accuracy_table import PAPER
from stored import decided, difference, ours, paired, percent, published, read, told, verdict, within

HEADLINE = ("FedAvg", "Local", "FedAvg+FT", "DPFL (B_c = 0.1N)", "Ditto")  # of the project's README
# what the paper claims of the order of its methods
ORDER = (
    ("DPFL (B_c = inf)", "FedAvg+FT"),
    ("DPFL (B_c = 0.2N)", "FedAvg+FT"),
    ("DPFL (B_c = 0.1N)", "FedAvg+FT"),
    ("DPFL (B_c = 0.05N)", "FedAvg+FT"),
    *(
        ("DPFL (B_c = 0.1N)", other)
        for other in ("FedProx+FT", "APFL", "PerFedAvg", "Ditto", "FedRep", "kNN-Per", "pFedGraph")
    ),
    ("DPFL (B_c = inf)", "DPFL (B_c = 0.05N)"),
    ("FedAvg+FT", "Local"),
    ("Local", "FedAvg"),
)


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
                "over clients": "-" if row == "Local" else within(paired(clients, row, "Local")),
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
        found = "holds" if interval(values)[0] > 0 else "**does not hold**"
        pa, pb = published(setting, a), published(setting, b)
        rows.append(
            {
                "claim": f"{a} > {b}",
                "ours": told(values),
                "over clients": within(values),
                "paper": f"{pa[0] - pb[0]:+.2f}" if pa and pb else "-",
                "": found if decided(values) else "not decided",
            }
        )
    return markdown(pd.DataFrame(rows)) if rows else "(not run)"
