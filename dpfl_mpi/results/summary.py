"""The few lines that a run ends with, at most 80 columns wide, paths apart."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path

import numpy as np

from dpfl_mpi.methods import declared
from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES

KEPT = "\xa0"  # a blank at which no line ends


def summary(path: Path) -> str:
    """Return the lines of a result: its settings, what the clients reached, what it cost, where it lies and how its graph is drawn."""
    with Result(path) as result:
        run, script = result.run, graph_script()
        chosen = np.diff(result["graph/chosen/indptr"], axis=1).sum(1)
        received = result["traffic/models_received"]
        rounds = max(len(received) - 1, 1)
        omega = f"{chosen[0]} in Omega, " if chosen[0] else ""
        kept = f"{omega}{chosen[1:].mean() if len(chosen) > 1 else chosen[0]:.1f} kept per round"
        before = f", {received[0].mean():.1f} to build Omega" if chosen[0] or received[0].any() else ""
        seconds = ", ".join(f"{p}{KEPT}{result[f'seconds/{p}'][:, 2].sum():.1f}" for p in PHASES)
        budget = f"B_c = {run.budget}, " if declared(run).topology == "graph" else ""
        lines = [
            f"{short(run.method)} on {short(run.dataset)}, {run.partition}, {run.clients} clients, {budget}{run.rounds} rounds, seed {run.seed}",
            *accuracy(result.scored(), 100 * result.mean("round/test_acc")[0]),
            *([entry("edges", kept)] if chosen.any() else []),
            entry("models received", f"{received[1:].mean(1).sum() / rounds:.2f} per client and round{before}"),
            *controlled(result),
            entry("seconds (slowest)", seconds),
            f"  results              {path}",
        ]
        if chosen.any() and script:
            lines.append(f"  draw the graph       python {shlex.quote(script)} {shlex.quote(str(path))}")
    return "\n".join(lines)


def entry(name: str, text: str) -> str:
    """Return a name and a text beside it, in as many lines as it takes."""
    return textwrap.fill(text, 80, initial_indent=f"  {name:<21}", subsequent_indent=" " * 23).replace(KEPT, " ")


def accuracy(test: np.ndarray, before: float) -> list[str]:
    """Return lines about the test accuracies of the clients that were scored, in percent, and their mean in round 0."""
    if not len(test):
        none = "no client was scored (flipped labels, liars, newcomers and models that diverged do not count)"
        return [entry("test accuracy", none)]
    start = "" if before != before else f" ({before:.2f} % in round 0)"  # nan: nobody was scored in it
    return [
        entry("test accuracy", f"{test.mean():.2f} %, best by validation{start}"),
        entry(
            "spread over clients", f"{test.std():.2f} points (lowest {test.min():.1f} %, highest {test.max():.1f} %)"
        ),
    ]


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
