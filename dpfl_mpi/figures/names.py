"""Names of Runs and data in figures and tables, and which Runs are repetitions of each other.

A setting is the data and their partition, such as "CIFAR-10 Patho(3)"; a row is the method with its
budget, such as "DPFL (B_c = 0.1N)". Repetitions are results whose Runs differ in the seed alone.
"""

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
from dpfl_mpi.results.result import declared, limit_text
from dpfl_mpi.results.summary import NBSP
from dpfl_mpi.settings import Resolved, Run
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.run import REPEATED
from dpfl_mpi.settings.values import written

Group = list[Result]  # repetitions


def method_name(run: Run) -> str:
    return declared(run).title + ("+FT" if run.finetune_epochs else "")


def row_name(run: Resolved) -> str:
    """Return the name of a table row: the method, and its budget or the name of its given graph.

    The budget is written as the user typed it. With as many clients as in the paper, a budget that
    equals one of the paper's is written as the paper's share of N.
    """
    if not (limit := limit_text(run)):
        return method_name(run)
    share = f"{budget_order(run) / run.clients:.3g}N"
    as_in_paper = run.clients == paper.CLIENTS and share in paper.BUDGETS
    if as_in_paper and not declared(run).given:
        limit = f"B_c = {share}"
    return f"{method_name(run)} ({limit})"


def own_data(run: Resolved) -> bool:
    """Return whether the data are the user's own."""
    if run.dataset not in shipped("dataset"):
        return True
    return getattr(find("dataset", run.dataset), "OWN_DATA", False)


def data_name(run: Resolved) -> str:
    """Return the TITLE of the data set, or the stem of a file of the user's own data."""
    if run.dataset not in shipped("dataset"):
        return str(run.declared.get("dataset", {}).get("title", short(run.dataset)))
    return Path(str(run.data)).stem if own_data(run) else str(find("dataset", run.dataset).TITLE)


def setting(run: Resolved) -> str:
    """Return the name of the data and of the partition, such as "CIFAR-10 Patho(3)"."""
    names = {
        "pathological": f"Patho({run.classes_per_client})",
        "dirichlet": f"Dir({run.dirichlet_alpha})",
    }
    file = Path(str(run.partition).removeprefix("file:")).stem
    return f"{data_name(run)} {names.get(run.partition.kind, file)}"


def setting_names(groups: Iterable[Group]) -> list[str]:
    """Return the setting of each group. A hash is added where the user's own data share a name."""
    pairs = []
    for result, *_ in groups:
        sha = result.fact("data_sha256")[:6] if own_data(result.run) else ""
        pairs.append((setting(result.run), sha))
    uses = Counter(name for name, _ in set(pairs))
    return [f"{name} [{sha}]" if sha and uses[name] > 1 else name for name, sha in pairs]


def slug(name: str) -> str:
    """Return a name in lower-case letters, digits and hyphens, for files."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def budget_order(run: Run) -> float:
    """Return a number to sort budgets by: of a range its middle, of a file of budgets 0."""
    budget = run.budget
    if budget.kind == "uniform":
        return float(budget.low + budget.high) / 2
    return float("inf") if budget.kind == "inf" else float(budget.fields.get("number", 0))


def rank(run: Run) -> tuple[float, float, int]:
    """Return a key that sorts Runs as tables show them."""
    # methods are in the paper's order, with others before DPFL; budgets descend; +FT comes last
    title = declared(run).title
    before_dpfl = len(paper.METHODS) - 1.5
    position = paper.METHODS.index(title) if title in paper.METHODS else before_dpfl
    return position, -budget_order(run), run.finetune_epochs


def text_label(name: str) -> str:
    """Return a name with its budget as mathtext, in which a line cannot break."""
    budget = r"B_c = (inf|[\d.]+N?)"
    name = name.replace("$", r"\$")  # the data's own names are no mathtext
    return re.sub(budget, lambda m: f"$B_c={m[1]}$".replace("inf", r"\infty"), name)


def wrapped(name: str, width: int) -> str:
    """Return `text_label(name)` in lines of at most `width` characters."""
    budget = re.sub(r"B_c = \S+", lambda found: found[0].replace(" ", NBSP), name)
    return text_label("\n".join(textwrap.wrap(budget, width)).replace(NBSP, " "))


def fields(result: Result) -> dict[str, Any]:
    """Return what repetitions share: settings but seeds, hashes of files and code, and the data."""
    settings = as_dict(result.run) | result.run.contents
    shared = {name: value for name, value in settings.items() if name not in REPEATED}
    return shared | {"data_sha256": result.fact("data_sha256")}


def unlike(a: Result, b: Result, *ignored: str) -> list[str]:
    """Return the settings, read by both methods and not `ignored`, in which two Runs differ."""
    skipped = {"method", "options", *a.method.unread, *b.method.unread, *ignored}
    of_a, of_b = fields(a), fields(b)
    return [name for name in of_a if name not in skipped and of_a[name] != of_b.get(name)]


def repetitions(results: Iterable[Result]) -> list[Group]:
    """Return the results grouped into repetitions, seeds ascending."""
    groups = defaultdict[str, Group](list)
    for r in sorted(results, key=lambda r: (r.run.seed, r.run.partition_seed)):
        groups[json.dumps(fields(r), sort_keys=True, default=str)].append(r)
    return list(groups.values())


def named(
    groups: Sequence[Group],
    name_of: Callable[[Resolved], str] = row_name,
    without: Sequence[str] = (),
) -> list[tuple[str, str, Group]]:
    """Return (setting, row's name, group) for each group; `name_of` names the row of a Run.

    Where groups of one setting share a name, the fields in which they differ are added to it,
    except for those in `without` and for values that are the default.
    """
    rows = [name_of(group[0].run) for group in groups]
    pairs = [*zip(setting_names(groups), rows, strict=True)]
    out = []
    for (setting, row), group in zip(pairs, groups, strict=True):
        rivals = [groups[i][0] for i, pair in enumerate(pairs) if pair == (setting, row)]
        words = differences(group[0], rivals, without)
        out.append((setting, ", ".join(filter(None, [row, *words])), group))
    return out


def differences(result: Result, rivals: Sequence[Result], without: Sequence[str]) -> list[str]:
    """Return "field value" of each field in which a result differs from rivals and the default."""
    defaults = {f.name: f.default for f in dataclasses.fields(Run)}
    of_rivals, words = [fields(r) for r in rivals], []
    for field in of_rivals[0]:
        value = getattr(result.run, field, "not a field")
        is_default = defaults.get(field) is not None and written(value) == defaults[field]
        differs = len({json.dumps(values.get(field), default=str) for values in of_rivals}) > 1
        is_named = is_file(result, field) or field not in without
        if differs and not is_default and value is not None and is_named:
            words.append(f"{field} {value_of(result, field)}".removeprefix("options "))
    return words


def is_file(result: Result, field: str) -> bool:
    """Return whether a field of a result's Run names a file, whose content is in the key."""
    contents: str = result.run.contents.get(field, "")
    return bool(contents) and not contents.startswith(CODE)


def value_of(result: Result, field: str) -> str:
    """Return a field's value for the name of a row; files and the user's code with their hash."""
    contents: str = result.run.contents.get(field, "")
    value: Any = getattr(result.run, field, "not a field")
    if field == "data_sha256":
        return result.fact(field)[:6]
    if field == "options":
        return ", ".join(f"{name} {chosen}" for name, chosen in value.items())
    if field == "graphs" and value:
        value = f"of {Path(value).stem}"
    if contents.startswith(CODE):
        return f"{short(value)} [{contents[5:11]}]"
    return f"{value} [{contents.split(':')[-1][:6]}]" if contents else str(value)


def labels(runs: pd.DataFrame) -> list[str]:
    """Return a distinct name for each line of `runs`: row, setting if several, seed if needed."""
    several = runs["setting"].nunique() > 1
    names = runs["row"] + (", " + runs["setting"] if several else "")
    return list(names if names.is_unique else names + ", " + runs["seed_text"])
