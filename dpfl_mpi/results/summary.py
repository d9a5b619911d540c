"""The summary of a result: the lines of text that a run prints at its end, and `show` always.

The last section lays out text and tables for a terminal; other commands use it, too. Lines are at
most 80 columns wide; only paths may be longer. Rounds are 0 to T: row 0 of an array `[T+1]` is
after preprocessing, before round 1. Benign clients are those that count in averages.
"""

import contextlib
import math
import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import within
from dpfl_mpi.results.result import Result, date_started, title
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Job, Resolved
from dpfl_mpi.storage.files import checkpoints_of
from dpfl_mpi.storage.lock import Lock

WIDTH = 80  # columns of a terminal
MOST_GROUPS = 12  # of clients that are listed one by one
MOST_NAME = 20  # columns of a client's name
# clients that do not count in averages
EXCLUDED = {
    "flipped": "with flipped labels",
    "attackers": "that attack",
    "newcomers": "that came later",
}
NBSP = "\xa0"  # a blank at which no line is broken


def slowest_seconds(result: Result) -> dict[str, np.ndarray]:
    """Return the seconds of the slowest rank by phase, `[T+1]`."""
    rows = result.last_round + 1
    return {phase: result[f"seconds/{phase}"][:rows, 2] for phase in PHASES}


def print_finished(run: Resolved, job: Job) -> bool:
    """Print the summary of a Run's finished result, and return whether there is one.

    Then no ranks need to be started. Anything else, such as a lock, a checkpoint or a damaged file,
    is for `engine.train`: it returns False.
    """
    path = Path(job.out or run.path(job.results))
    if job.fresh or not os.path.isfile(path) or checkpoints_of(path).exists() or Lock(path).taken():
        return False
    with contextlib.suppress(UserError):
        date = date_started(run, run.key(), path, job, has_copy=False)
        if date is not None and not job.quiet:
            print(found(date), summary(path), sep="\n", flush=True)
        return date is not None
    return False


def found(date: str) -> str:
    return f"already finished (started {date or 'at an unknown time'}); --fresh recomputes"


def summary(path: Path) -> str:
    """Return the lines that a run ends with: settings, accuracy, costs, and where the result is."""
    with Result(path) as result:
        lines = [title(result), *outcome_lines(result), f"  results              {path}"]
        script = Path(__file__).resolve().parents[2] / "analysis" / "graph_evolution.py"
        if len(result["graph/chosen/senders"]) and script.is_file():
            command = ["python", os.path.relpath(script), str(path)]
            lines.append(f"  draw the graph       {shlex.join(command)}")
    return "\n".join(lines)


def outcome_lines(result: Result) -> list[str]:
    """Return lines about accuracy, graph, models and bytes sent, controls and seconds."""
    rounds = result.by_round()
    phases = slowest_seconds(result).items()
    seconds = ", ".join(f"{phase}{NBSP}{values.sum():.1f}" for phase, values in phases)
    return [
        *accuracy(result, 100 * rounds["test_acc"][0]),
        *graph(rounds["edges"], rounds["models_received"]),
        *groups(result),
        *sent(result, rounds),
        *controls(result),
        entry("seconds (slowest)", seconds),
    ]


def accuracy(result: Result, before: float) -> list[str]:
    """Return lines about the test accuracies; `before` is the mean in round 0, in percent."""
    test = result.benign_percentages()  # of each client's best model
    if not len(test):
        excluded = "flipped labels, attackers, newcomers and models that diverged do not count"
        return [entry("test accuracy", f"no client was scored ({excluded})")]
    start = "" if math.isnan(before) else f" ({before:.2f} % in round 0)"
    scored = f", of {text}" if (text := coverage(result)) else ""
    spread = f"{test.std():.2f} points (lowest {test.min():.1f} %, highest {test.max():.1f} %)"
    return [
        entry("test accuracy", f"{test.mean():.2f} %, best by validation{start}{scored}"),
        entry("spread over clients", spread),
    ]


def graph(edges: np.ndarray, received: np.ndarray) -> list[str]:
    """Return lines about the edges of each round and the models a client receives, `[T+1]`."""
    lines = []
    if edges.any():
        omega = f"{edges[0]} in Omega, " if edges[0] else ""
        # with --ggc_off_rounds skip, a round without averaging repeats the last graph
        averaged = np.where(received > 0, edges, 0)[1:]
        per_round = averaged.mean() if len(averaged) else edges[0]
        lines.append(entry("edges", f"{omega}{per_round:.1f} kept per round"))
    mean = received[1:].sum() / max(len(received) - 1, 1)
    before = f", {received[0]:.1f} to build Omega" if edges[0] or received[0] else ""
    return [*lines, entry("models received", f"{mean:.2f} per client and round{before}")]


def shown_groups(result: Result) -> dict[str, float]:
    """Return the mean accuracy of each group, of many only the lowest and the highest."""
    # groups without a client that was scored are left out
    means = {group: value for group, value in result.by_group().items() if not math.isnan(value)}
    if len(means) > MOST_GROUPS:
        ascending = sorted(means, key=means.__getitem__)
        return {g: means[g] for g in (ascending[0], ascending[-1])}
    return means


def groups(result: Result) -> list[str]:
    """Return lines about the groups of clients, if the data have any."""
    if not (means := shown_groups(result)):
        return []
    count = len(np.unique(result["client/group"]))
    only_ends = len(means) == 2 and count > MOST_GROUPS
    head = f"of {count} groups: lowest and highest " if only_ends else ""
    texts = (f"{group} {value:.1f} %".replace(" ", NBSP) for group, value in means.items())
    lines = [entry("accuracy by group", head + ", ".join(texts))]
    graph = result.chosen(result.last_round)
    if len(graph.senders):
        of_edges, of_pairs = (100 * share for share in within(graph, result["client/group"]))
        text = f"{of_edges:.1f} % of the edges at the end (of all pairs {of_pairs:.1f} %)"
        lines.append(entry("inside a group", text))
    return lines


def coverage(result: Result) -> str:
    """Return over which clients a mean is: "7 of 8 clients, 1 diverged"; "" if over all."""
    benign, scored = result.benign, np.isfinite(result["best/test_acc"])
    if (benign & scored).all():
        return ""
    others = {name: result[f"client/{name}"] for name in EXCLUDED if f"client/{name}" in result}
    others["diverged"] = benign & ~scored & (result["client/diverged_round"] >= 0)
    counts = {name: int(are.sum()) for name, are in others.items()}
    counts["absent"] = int((benign & ~scored).sum()) - counts["diverged"]
    parts = [f"{(benign & scored).sum()} of {len(benign)} clients"]
    absent = "not scored since the drift" if result.run.drift else "took no part"
    words = EXCLUDED | {"diverged": "diverged", "absent": absent}
    return ", ".join(parts + [f"{counts[name]} {words[name]}" for name in counts if counts[name]])


def sent(result: Result, rounds: Mapping[str, np.ndarray]) -> list[str]:
    """Return lines about bytes sent, the age of models, and simulated time, if simulated."""
    run, lines = result.run, []
    if "bytes_sent" in rounds:
        first, *later = rounds["bytes_sent"] / 1e3
        mean = sum(later) / max(len(later), 1)
        flags = [f"--{n} {value}" for n in ("codec", "send") if (value := getattr(run, n))]
        in_brackets = f" ({', '.join(flags)})" if flags else ""
        text = f"{mean:.4g} kB per client and round, {first:.4g} kB before{in_brackets}"
        lines.append(entry("sent", text))
    if "hours" in rounds:
        age = ""
        if run.staleness:
            received = result["traffic/models_received"][1:].sum()
            mean = result["network/age"].sum() / max(received, 1)
            age = f"; models were {mean:.2f} rounds old (--staleness {run.staleness})"
        hours = rounds["hours"][-1]
        took = f"{hours:.3g} h" if hours >= 1 else f"{60 * hours:.3g} min"
        lines.append(entry("simulated time", f"{took} (--network {run.network}){age}"))
    return lines


def controls(result: Result) -> list[str]:
    """Return lines about newcomers, attackers, a backdoor and clients that stopped early."""
    lines = []
    if means := [
        f"{100 * test.mean():.2f} % after {epochs}"
        for epochs, test in result.of_newcomers().items()
        if len(test)
    ]:
        lines.append(entry("newcomers", ", ".join(means)))
    if "client/attackers" in result:
        attackers, chosen = result["client/attackers"], result.attackers_chosen()
        share = f"; {100 * chosen.mean():.1f} % of benign clients' choices" if len(chosen) else ""
        lines.append(entry("attackers", f"{attackers.sum()} of {len(attackers)} clients{share}"))
    if "attack/success" in result:
        success = result.benign_percentages("attack/success")
        if len(success):
            lines.append(entry("backdoor", f"opens on {success.mean():.1f} % of marked images"))
    if "client/stopped_round" in result:
        stopped = result["client/stopped_round"]
        text = f"{(stopped >= 0).sum()} of {len(stopped)} clients"
        lines.append(entry("stopped early", text))
    return lines


# the layout of text and tables in a terminal ------------------------------------------------------
def entry(name: str, text: str) -> str:
    """Return a name and its text as two columns."""
    return fold(text, " " * 23, f"  {name:<21}")


def fold(text: str, indent: str = "  ", first: str = "") -> str:
    """Return a text in lines of at most `WIDTH`, each after `indent`, but the first after `first`.

    Lines are not broken at an NBSP, which becomes a blank.
    """
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = first, indent
    return wrapper.fill(text).replace(NBSP, " ")


def listed(words: Sequence[str], room: int) -> str:
    """Return as many whole words as fit into `room` columns, and "..." for the others."""
    text = " ".join(word.replace(" ", NBSP) for word in words)
    how: Any = {"break_long_words": False, "break_on_hyphens": False, "placeholder": " ..."}
    return textwrap.fill(text, max(room, 3), max_lines=1, **how).replace(NBSP, " ")


def name_columns(named: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the columns "name" and "group" of a table of clients, as far as `named` has them."""
    # A long text ends in "...". Groups are left out if each client's name begins with its group.

    def shortened(text: str) -> str:
        return text if len(text) <= MOST_NAME else f"{text[: MOST_NAME - 3]}..."

    columns = {what: list(map(shortened, texts)) for what, texts in named.items()}
    if len(columns) == 2 and all(map(str.startswith, named["name"], named["group"])):
        del columns["group"]
    return columns


def split(widths: Sequence[int], keys: int, room: int) -> list[list[int]]:
    """Return the columns of each part of a table, which is split where it is wider than `room`.

    Each part begins with the first `keys` columns, which say what a row is.
    """
    parts: list[list[int]] = [[]]
    for i in range(keys, len(widths)):
        if parts[-1] and sum(widths[j] for j in (*range(keys), *parts[-1], i)) > room:
            parts.append([])
        parts[-1].append(i)
    return [[*range(keys), *columns] for columns in parts]


def fitted(text: str) -> str:
    """Return a text no wider than `WIDTH`."""
    # a long line "name  text" goes on below its text
    out = []
    for line in text.split("\n"):
        name = re.match(r" *(\S+( \S+)? {2,})?", line)
        indent = " " * (name.end() if name else 0)
        out.append(fold(line, indent) if len(line) > WIDTH else line)
    return "\n".join(out)
