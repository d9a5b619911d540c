"""The figures that a run is told by, and the few lines that it ends with, at most 80 columns wide, paths apart."""

import itertools
import math
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpfl_mpi.plugins import short
from dpfl_mpi.results.result import Result
from dpfl_mpi.results.schema import PHASES

WIDTH = 80  # of a terminal; paths are as long as they are
KEPT = "\xa0"  # a blank at which no line ends
TWO = ("test accuracy, %", "std over clients", "last round, %")  # figures with two digits
NONE = ("local epochs", "edges in Omega", "edges at the end")  # the other figures have one


def seconds(result: Result) -> dict[str, np.ndarray]:
    """Return the seconds of the slowest rank in each phase of each recorded round, `[T+1]`."""
    return {phase: result[f"seconds/{phase}"][: result.last_round + 1, 2] for phase in PHASES}


def curves(result: Result) -> dict[str, np.ndarray]:
    """Return by round `[T+1]` means over benign clients of losses and accuracies (0 to 1), and the cost so far; epochs are those of all its models.

    Simulated hours (--network) are those since the start; bytes_sent, means over clients, are there where they are counted.
    """
    if not (rows := result.last_round + 1):
        return {}
    simulated = {}
    if "network/end" in result:
        simulated["hours"] = np.maximum.accumulate(result["network/end"][:rows].max(1)) / 3600
    if "traffic/bytes_sent" in result:
        simulated["bytes_sent"] = result["traffic/bytes_sent"][:rows].mean(1)
    means = {n: result.mean(f"round/{n}") for n in ("train_loss", "val_loss", "val_acc", "test_loss", "test_acc")}
    return {
        "epochs": result.local_epochs()[:rows],
        **means,
        "edges": np.diff(result["graph/chosen/indptr"][:rows], axis=1).sum(1),
        "models_received": result["traffic/models_received"][:rows].mean(1),
        "seconds": sum(result[f"seconds/{phase}"][:rows, 1] for phase in PHASES),  # a rank's, waiting included
        **simulated,
    }


def epochs(result: Result) -> int:
    """Return the local epochs that a client has trained, of all its models together, fine-tuning included."""
    tuned = result.run.finetune_epochs if "finetune/epochs" in result else 0
    return int(result.local_epochs()[result.last_round]) + tuned


def outcome(result: Result) -> dict[str, float]:
    """Return the figures of a run: accuracies in percent of the best models by validation over the clients scored, nan where none is."""
    scored = (result.scored(name) for name in ("best/test_acc", "last/test_acc"))
    best, last = (values if len(values) else np.array([math.nan]) for values in scored)
    over = curves(result)
    return {
        "test accuracy, %": best.mean(),
        "std over clients": best.std(),
        "lowest client, %": best.min(),
        "last round, %": last.mean(),
        "local epochs": epochs(result),
        "edges in Omega": len(result.omega().senders),
        "edges at the end": over["edges"][-1],
        "models received per client": result["traffic/models_received"].sum() / result.run.clients,
        "seconds": over["seconds"].sum(),
    }


def texts(figures: dict[str, float]) -> dict[str, str]:
    """Return figures as texts, a dash for nan."""
    digits = dict.fromkeys(TWO, 2) | dict.fromkeys(NONE, 0)
    return {n: "-" if math.isnan(value) else f"{value:.{digits.get(n, 1)}f}" for n, value in figures.items()}


def summary(path: Path) -> str:
    """Return the lines of a result: its settings, what the clients reached, what it cost, where it lies and how its graph is drawn."""
    with Result(path) as result:
        run, script, over = result.run, graph_script(), curves(result)
        chosen, received = over["edges"], over["models_received"]
        omega = f"{chosen[0]} in Omega, " if chosen[0] else ""
        kept = f"{omega}{chosen[1:].mean() if len(chosen) > 1 else chosen[0]:.1f} kept per round"
        before = f", {received[0]:.1f} to build Omega" if chosen[0] or received[0] else ""
        each = received[1:].sum() / max(len(received) - 1, 1)
        phases = ", ".join(f"{name}{KEPT}{of_rounds.sum():.1f}" for name, of_rounds in seconds(result).items())
        budget = f"B_c = {run.said_budget}, " if result.method.topology == "graph" else ""
        lines = [
            f"{short(run.method)} on {short(run.dataset)}, {run.partition}, {run.clients} clients, {budget}{run.rounds} rounds, seed {run.seed}",
            *accuracy(result, 100 * over["test_acc"][0]),
            *([entry("edges", kept)] if chosen.any() else []),
            entry("models received", f"{each:.2f} per client and round{before}"),
            *sent(result),
            *controlled(result),
            entry("seconds (slowest)", phases),
            f"  results              {path}",
        ]
        if chosen.any() and script:
            lines.append(f"  draw the graph       python {shlex.quote(script)} {shlex.quote(str(path))}")
    return "\n".join(lines)


def folded(text: str, indent: str = "  ", first: str | None = None) -> str:
    """Return a text in lines of the terminal's width, each after `indent`, the first one after `first`."""
    fold = textwrap.TextWrapper(WIDTH, indent if first is None else first, indent)
    fold.break_long_words = fold.break_on_hyphens = False
    return fold.fill(text).replace(KEPT, " ")


def pieces(widths: Sequence[int], keys: int, room: int) -> list[list[int]]:
    """Return the columns of the tables that one of these widths is split into where it is wider than `room`, each behind the first `keys`."""
    out: list[list[int]] = [[]]
    for i in range(keys, len(widths)):
        if out[-1] and sum(widths[j] for j in (*range(keys), *out[-1], i)) > room:
            out.append([])
        out[-1].append(i)
    return [[*range(keys), *columns] for columns in out]


def fitted(text: str) -> str:
    """Return a text no wider than the terminal: lines are folded below where they begin behind their name, markdown tables are split by columns."""
    out = []
    for of_table, lines in itertools.groupby(text.split("\n"), lambda line: line.startswith("|")):
        if not of_table:
            begin = re.compile(r" *(\S+( \S+)? {2,})?")
            out += [folded(ln, " " * begin.match(ln).end(), "") if len(ln) > WIDTH else ln for ln in lines]  # type: ignore[union-attr]
            continue
        rows = [line.strip("|").split("|") for line in lines]
        widths = [len(cell) + 1 for cell in rows[0]]
        named = [any(c.isalpha() for c in "".join(row[i] for row in rows[2:])) for i in range(len(widths))]
        keys = max([1, *(k for k in range(len(widths)) if all(named[:k]) and sum(widths[:k]) < 66)])
        tables = [[f"|{'|'.join(row[i] for i in few)}|" for row in rows] for few in pieces(widths, keys, WIDTH - 1)]
        out.append("\n\n".join("\n".join(table) for table in tables))
    return "\n".join(out)


def entry(name: str, text: str) -> str:
    return folded(text, " " * 23, f"  {name:<21}")


def fewer(result: Result) -> str:
    """Return of which benign clients the scores are, and what became of the others: "7 of 8 clients, 1 diverged"; "" where they are of all."""
    unscored = result.benign & ~np.isfinite(result["best/test_acc"])
    lost, many = int(unscored.sum()), int(result.benign.sum())
    if not lost:
        return ""
    diverged = int((result["client/diverged_round"][unscored] >= 0).sum())
    why = f", {diverged} diverged" * (diverged > 0) + f", {lost - diverged} took no part" * (lost > diverged)
    return f"{many - lost} of {many} clients{why}"


def accuracy(result: Result, before: float) -> list[str]:
    """Return lines about the test accuracies of the clients that were scored, in percent, `before` being their mean in round 0."""
    test, few = result.scored(), fewer(result)
    if not len(test):
        none = "no client was scored (flipped labels, liars, newcomers and models that diverged do not count)"
        return [entry("test accuracy", none)]
    start = "" if before != before else f" ({before:.2f} % in round 0)"  # nan: nobody was scored in it
    spread = f"{test.std():.2f} points (lowest {test.min():.1f} %, highest {test.max():.1f} %)"
    mean = f"{test.mean():.2f} %, best by validation{start}" + f", of {few}" * bool(few)
    return [entry("test accuracy", mean), entry("spread over clients", spread)]


def sent(result: Result) -> list[str]:
    """Return lines about what a network would have carried, how old it was, and the simulated time; none without --network, --codec and --send."""
    run, over, lines = result.run, curves(result), []
    if "bytes_sent" in over:
        first, *later = over["bytes_sent"] / 1e3
        each = f"{sum(later) / max(len(later), 1):.4g} kB per client and round, {first:.4g} kB before"
        how = ", ".join(f"--{name} {value}" for name in ("codec", "send") if (value := getattr(run, name)))
        lines.append(entry("sent", each + f" ({how})" * bool(how)))
    if "hours" in over:
        late = ""
        if run.staleness:
            age = result["network/age"].sum() / max(result["traffic/models_received"][1:].sum(), 1)
            late = f"; models were {age:.2f} rounds old (--staleness {run.staleness})"
        hours = over["hours"][-1]
        took = f"{hours:.3g} h" if hours >= 1 else f"{60 * hours:.3g} min"
        lines.append(entry("simulated time", f"{took} (--network {run.network}){late}"))
    return lines


def controlled(result: Result) -> list[str]:
    """Return lines about who came later, who lied and who stopped early; none where nobody did."""
    lines = []
    if "newcomers/test_acc" in result:
        after = zip(result["newcomers/epochs"], result["newcomers/test_acc"], strict=True)
        means = [f"{100 * np.nanmean(a):.2f} % after {e}" for e, a in after if np.isfinite(a).any()]
        lines += [entry("newcomers", ", ".join(means))] if means else []
    if "client/liars" in result:
        liars, met = result["client/liars"], result.met_liars()
        share = f"; {100 * met.mean():.1f} % of whom the benign chose" if len(met) else ""
        lines.append(entry("liars", f"{liars.sum()} of {len(liars)} clients{share}"))
    if "attack/success" in result and len(opens := result.scored("attack/success")):
        lines.append(entry("backdoor", f"opens on {opens.mean():.1f} % of marked images"))
    if "client/stopped_round" in result:
        stopped = result["client/stopped_round"]
        lines.append(entry("stopped early", f"{(stopped >= 0).sum()} of {len(stopped)} clients"))
    return lines


def graph_script() -> str:
    """Return the path of the script that draws the graph, as it is reached from here; nothing where the checkout is not there."""
    checkout = Path(__file__).resolve().parents[2]
    script = checkout / "analysis" / "graph_evolution.py"
    return "" if not script.is_file() else str(script.relative_to(checkout) if Path.cwd() == checkout else script)
