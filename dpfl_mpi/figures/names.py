"""What Runs, data and classes are called in figures and tables, and which Runs are repetitions of one another."""

import dataclasses
import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpfl_mpi.figures import paper
from dpfl_mpi.plugins import CODE, find, shipped, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import declared
from dpfl_mpi.settings import Resolved, Run
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.run import REPEATED

Group = list[Result]  # the repetitions of one Run under different seeds


def method_name(run: Run) -> str:
    return declared(run).title + ("+FT" if run.finetune_epochs else "")


def row_name(run: Resolved) -> str:
    """Return the name of a table's row: the method, and its budget where it has one. `named` tells Runs apart that differ in more.

    The budget is as it was typed; of as many clients as the paper has it is one of the paper's shares, where it is as large.
    """
    share = f"{budget_order(run) / run.clients:.3g}N"
    budget = share if run.clients == paper.CLIENTS and share in paper.BUDGETS else run.said_budget
    return method_name(run) + (f" (B_c = {budget})" if declared(run).topology == "graph" else "")


def own_data(run: Resolved) -> bool:
    known = run.dataset in shipped("dataset")
    return not known or getattr(find("dataset", run.dataset), "OWN_DATA", False)


def data_name(run: Resolved) -> str:
    """Return the name of the data: TITLE of their file, of an own file that `prepare` made its stem."""
    if run.dataset in shipped("dataset"):
        return Path(str(run.data)).stem if own_data(run) else str(find("dataset", run.dataset).TITLE)
    return str(run.declared.get("dataset", {}).get("title", short(run.dataset)))


def settings(groups: Iterable[Group]) -> list[str]:
    """Return the setting of each group. Own data of one name are told apart by the start of their hash."""
    said = [(setting(g[0].run), g[0].fact("data_sha256")[:6] if own_data(g[0].run) else "") for g in groups]
    several = Counter(name for name, _ in set(said))
    return [f"{name} [{held}]" if held and several[name] > 1 else name for name, held in said]


def setting(run: Resolved) -> str:
    """Return the name of the data and the way they are dealt, such as "CIFAR-10 Patho(3)"."""
    dealt = {"pathological": f"Patho({run.classes_per_client})", "dirichlet": f"Dir({run.dirichlet_alpha})"}
    return f"{data_name(run)} {dealt.get(run.partition.kind, Path(str(run.partition).removeprefix('file:')).stem)}"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def budget_order(run: Run) -> float:
    """Return a resolved run's budget as a number to sort by: of a range its middle, of a file of budgets 0."""
    b = run.budget
    if b.kind == "uniform":
        return float(b.low + b.high) / 2
    return float("inf") if b.kind == "inf" else float(b.fields.get("number", 0))


def rank(run: Run) -> tuple[float, float, int]:
    """Return where a Run stands in tables: methods as in the paper, others before DPFL, budgets descending, then +FT."""
    title = declared(run).title
    place = paper.METHODS.index(title) if title in paper.METHODS else len(paper.METHODS) - 1.5
    return place, -budget_order(run), run.finetune_epochs


def class_names(result: Result) -> list[str]:
    """Return the names of the classes, or their numbers where there are too many for a result to list."""
    classes = result["client/class_counts"].shape[1]
    names = list(map(str, result.listed("class_names")))
    return names if len(names) == classes else list(map(str, range(classes)))


def text_label(name: str) -> str:
    """Return a row's or a curve's name for mathtext, which has no space where a line could break."""
    return re.sub(r"B_c = (inf|[\d.]+N?)", lambda m: f"$B_c={m[1]}$".replace("inf", r"\infty"), name)


def wrapped(name: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text_label(name), width))


def fields(result: Result) -> dict[str, Any]:
    """Return what repetitions have in common: all that a Run sets but its seeds, with the content of its files, and the data."""
    settings = as_dict(result.run) | result.run.contents
    return {k: v for k, v in settings.items() if k not in REPEATED} | {"data_sha256": result.fact("data_sha256")}


def unlike(a: Result, b: Result, *own: str) -> list[str]:
    """Return in which settings two Runs differ that both methods read, without those that are a method's `own`."""
    without = {"method", "options", *a.method.unread, *b.method.unread, *own}
    mine, theirs = fields(a), fields(b)
    return [name for name in mine if name not in without and mine[name] != theirs.get(name)]


def repetitions(results: Iterable[Result]) -> list[Group]:
    """Return the results grouped into repetitions, seeds ascending."""
    groups = defaultdict[str, Group](list)
    for r in sorted(results, key=lambda r: (r.run.seed, r.run.partition_seed)):
        groups[json.dumps(fields(r), sort_keys=True, default=str)].append(r)
    return list(groups.values())


def named(
    groups: Sequence[Group], name: Callable[[Resolved], str] = row_name, without: Sequence[str] = ()
) -> list[tuple[str, str, Group]]:
    """Return (setting, name, group). Where groups of a setting share a name, it says in which fields they differ, but for those `without`."""
    out, usual = [], {f.name: f.default for f in dataclasses.fields(Run)}  # what a Run leaves alone needs no words
    places = settings(groups)
    for place, group in zip(places, groups, strict=True):
        run = group[0].run
        alike = [g[0] for of, g in zip(places, groups, strict=True) if of == place and name(g[0].run) == name(run)]
        values, rivals = [fields(r) for r in alike], [r.run for r in alike]
        told = [f for f in values[0] if f not in without or content(run, f, rivals)]
        differ = [f for f in told if len({json.dumps(v.get(f), default=str) for v in values}) > 1]
        said = [f for f in differ if f not in usual or usual[f] is None or getattr(run, f) != usual[f]]
        said = [f for f in said if getattr(run, f, "other") is not None]
        words = [f"{f} {value_of(group[0], f)}{content(run, f, rivals)}".removeprefix("options ") for f in said]
        out.append((place, ", ".join(filter(None, [name(run), *words])), group))
    return out


def content(run: Run, field: str, rivals: Sequence[Run]) -> str:
    """Return " [HASH]" of a field's file where the file of a rival has the same name and another content, else nothing."""
    held = getattr(run, "contents", {}).get(field, "")
    said = (lambda r: Path(str(r.graphs)).stem) if field == "graphs" else lambda r: str(getattr(r, field, None))
    same = [r for r in rivals if said(r) == said(run)]
    several = len({getattr(r, "contents", {}).get(field) for r in same}) > 1
    return f" [{held[:6]}]" if several and held and not held.startswith(CODE) else ""


def value_of(result: Result, field: str) -> str:
    """Return what a row says of a field: of code that is not shipped its name and the start of its hash, of a result its name, options as words."""
    held: str = getattr(result.run, "contents", {}).get(field, "")
    value: Any = getattr(result.run, field, "other")
    if field == "data_sha256":
        return result.fact(field)[:6]
    if field == "options":
        return ", ".join(f"{name} {chosen}" for name, chosen in value.items())
    if field == "graphs" and value:
        return f"of {Path(value).stem}"
    return f"{short(value)} [{held[5:11]}]" if held.startswith(CODE) else str(value)


def labels(runs: pd.DataFrame) -> list[str]:
    """Return a name for each line of `runs` that tells it from the others: its row, the setting where there are several, the seed where rows are shared."""
    several = runs["setting"].nunique() > 1
    names = runs["row"] + (", " + runs["setting"] if several else "")
    return list(names if names.is_unique else names + ", " + runs["said_seed"])
