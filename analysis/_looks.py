"""Names and colours of curves: a method has one colour in every figure, and curves that differ have names that say in what."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from _common import BLUE, GREEN, ORANGE, PINK, RED, SKY

from _names import budget_label, has_budget, method_name, setting
from _tables import Group, named, repetitions, row_name
from matplotlib.colors import to_hex, to_rgb

from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

STYLES = ("-", "--", "-.", ":")
OTHERS = (RED, GREEN, ORANGE, PINK, SKY, "#000000")  # DPFL alone is blue
# the order decides the colours: a new method goes to the end, so that the others keep theirs
METHODS = (
    "local",
    "fedavg",
    "ditto",
    "fedprox",
    "perfedavg",
    "random_graph",
    "apfl",
    "fedrep",
    "knnper",
    "pfedgraph",
    "fedper",
    "scaffold",
    "pfedme",
    "fedala",
    "cobo",
    "pens",
    "fedbn",
    "pairwise",
    "oracle",
    "replay",
)
PANELS = 12  # results that a figure with a panel for each draws: two pages of a paper
PALEST = 0.55  # share of white in the last of several curves of one method


def look(method: str) -> tuple[str, str]:
    """Return (colour, line style) of a method; one that is not in the list has those that its name comes to, the same in every figure."""
    if method == "dpfl":
        return BLUE, "-"
    if method in METHODS:
        i = METHODS.index(method)
        return OTHERS[i % len(OTHERS)], STYLES[i // len(OTHERS) % len(STYLES)]
    i = zlib.crc32(method.encode())  # a broken line: a whole one of this colour is a known method's
    return OTHERS[i % len(OTHERS)], STYLES[1 + i // len(OTHERS) % (len(STYLES) - 1)]


def looks(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return colour and line style of a curve of each method as keywords of `plot`: several of a method are shades of its colour."""
    out, names = [], [short(method) for method in methods]
    for i, name in enumerate(names):
        mine = [j for j, other in enumerate(names) if other == name]
        place = mine.index(i)
        colour, style = look(name)
        pale = PALEST * place / max(len(mine) - 1, 1)
        mixed = to_hex([(1 - pale) * c + pale for c in to_rgb(colour)])
        out.append({"color": mixed, "ls": style if len(mine) == 1 else STYLES[(STYLES.index(style) + place) % 4]})
    return out


def labels(groups: Sequence[Group]) -> list[str]:
    """Return a short name for each group, for mathtext: its budget, and whatever else tells the groups apart.

    That is the method, the data and how they are dealt, the other settings in which like ones differ, and the seed where groups are single
    runs of several seeds.
    """
    runs = [g[0].run for g in groups]
    differs = {part: several(runs, of) for part, of in (("method", method_name), ("setting", setting))}
    methods = differs["method"] or not all(map(has_budget, runs))
    parts = [[*([method_name(r)] if methods else []), *([budget_label(r)] if has_budget(r) else [])] for r in runs]
    for out, group, (where, name, _) in zip(parts, groups, named(groups, distinct), strict=True):
        out += [where] if differs["setting"] else []
        out += [name.removeprefix(distinct(group[0].run)).removeprefix(", ")]
    names = [", ".join(filter(None, out)) for out in parts]
    if len(set(names)) < len(names):
        seeds = [
            f"seed {r.seed}" + (f" (partition {r.partition_seed})" if r.partition_seed != r.seed else "") for r in runs
        ]
        names = [f"{name}, {seed}" for name, seed in zip(names, seeds, strict=True)]
    return names


def distinct(run: Run) -> str:
    """Return the method and the budget, as a number and as a share."""
    return f"{row_name(run)} {run.budget}"


def several(runs: Sequence[Run], of: Callable[[Run], Hashable]) -> bool:
    """Return whether the runs differ in this."""
    return len({of(run) for run in runs}) > 1


def few(results: Sequence[Result]) -> tuple[list[Result], str]:
    """Return what a figure with a panel per result draws, and a sentence on what it leaves out ("": nothing).

    Up to `PANELS` results are all drawn; of more the first seed of each Run, and no more than `PANELS`.
    """
    if len(results) <= PANELS:
        return list(results), ""
    first = {group[0].path for group in repetitions(results)}
    kept = [r for r in results if r.path in first][:PANELS]
    return kept, f"{len(kept)} of {len(results)} results are drawn, a seed of each Run; name the files to draw others"


def singles(results: Sequence[Result]) -> list[Group]:
    """Return each result as a group of its own, for figures that do not average."""
    return [[r] for r in results]
