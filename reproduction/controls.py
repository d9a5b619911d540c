"""What the controls found on CIFAR-10: `python -m dpfl_mpi.sweep reproduction/controls.py` computes the Runs, this file collects their numbers.

All Runs are the paper's CIFAR-10 Patho(3), N = 100, B_c = 0.1N, but shorter. Comparisons over three partitions have 20 rounds, of DPFL 110 local epochs.
Lies, newcomers and drift, on one partition, have 6 rounds, of DPFL 40 epochs. Methods with a server train none before round 1, so ten epochs less.
Replayed graphs need the result that they replay, so the sweep is called twice.

    runs.csv       a line per Run: its name in the tables, flags, costs, and what the controls measure
    clients.csv    a line per Run and client, as for Table 1
    curves.csv     a line per Run and round: means over benign clients
    costs.csv      a line per Run and round: accuracy of the best models so far, and what they took per client
    graphs.csv     the measures of every Run's Omega and of its last graph; agreement.csv: of Omegas with one another
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "analysis"), str(HERE.parent)]

from _common import has_graph

import numpy as np
import pandas as pd
from _find import found
from _names import method_name
from _tables import interval
from collect import about, clients, curves, write
from controls_table import backdoor, liar_shares, newcomers
from omega import agreement, of_round, overlap, z_score
from pareto import curves as costs

from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import ATTACKS

SEEDS = (42, 32, 52)  # a partition each


def long(method: str, seed: int = 42, rounds: int = 20, **fields: Any) -> Run:
    """Return a Run of 110 local epochs: DPFL's 10 before round 1 and 5 in each of 20 rounds. Methods with a server have 100."""
    return Run(**{"dataset": "cifar10", "budget": "0.1N", "method": method, "seed": seed, "rounds": rounds} | fields)


def short(method: str, rounds: int = 6, **fields: Any) -> Run:
    """Return a Run of 40 local epochs; methods with a server have 30."""
    return Run(dataset="cifar10", budget="0.1N", method=method, rounds=rounds, **fields)


def replayed(seed: int) -> list[Run]:
    """Return the Runs that take their graphs from DPFL's, as far as that is in the folder `results`."""
    source = long("dpfl", seed).path()
    if not source.is_file():
        return []
    of = {"graphs": str(source), "seed": seed}
    out = [long("random_graph", **of)]
    if seed == 42:
        out += [long("replay", **of, options={"variant": variant}) for variant in ("rewired", "shuffled")]
        out += [long("replay", **of | {"budget": "inf"}, options={"variant": "reversed"})]
    return out


COMPARED = [
    run
    for seed in SEEDS
    for run in (
        long("dpfl", seed),
        long("local", seed, 22),
        long("fedavg", seed),
        long("fedavg", seed, finetune_epochs=10),
        long("pairwise", seed),
        long("dpfl", seed, search_share=0.5),
        *replayed(seed),
    )
]
MORE = [long("oracle"), long("random_graph"), long("pens", rounds=22)]
SAME_CLIENTS = [long("dpfl", 32, partition_seed=42)]  # as the Run of seed 42, with other draws
HARMFUL = ("sign_flip", "scale", "backdoor")  # to a server, which averages with whoever sends
ATTACKED = [short(m) for m in ("dpfl", "fedavg")] + [
    short(m, attack=f"{kind}:0.2") for m in ("dpfl", "fedavg") for kind in ATTACKS if m == "dpfl" or kind in HARMFUL
]
LATER = [short(m, newcomers=0.1) for m in ("dpfl", "fedavg", "fedrep", "knnper", "ditto")]
MOVED = [
    short("dpfl", drift="0.5:3"),
    short("dpfl", drift="0.5:3", omega_period=2),
    short("dpfl", omega_period=2),
    short("fedavg", drift="0.5:3"),
    short("local", rounds=8, drift="0.5:5"),
    long("dpfl", patience=5),
]
RUNS = [*COMPARED, *MORE, *ATTACKED, *LATER, *MOVED, *SAME_CLIENTS]

VARIED = ("search_share", "omega_period", "drift", "patience", "attack", "newcomers")


def row_of(run: Run) -> str:
    """Return the name of a row: the method, "+FT", and what the control changes."""
    words = [f"{name} {getattr(run, name)}" for name in VARIED if getattr(run, name) != getattr(Run(), name)]
    if run.method == "replay":
        words.insert(0, (run.options or {})["variant"])
    if run.method == "random_graph" and run.graphs:
        words.insert(0, "DPFL's degrees")
    if run in SAME_CLIENTS:
        words.append("same clients")
    return ", ".join([method_name(run), *words])


def line_of(run: Run, result: Result) -> dict[str, Any]:
    """Return a Run's line of runs.csv."""
    liars, chosen = liar_shares(result)
    opened, unmarked = backdoor(result)
    spent = {
        f"{name}_per_client": round(float(np.nanmax(values)), 1)
        for name, values in costs(result).items()
        if name != "accuracy"
    }
    came = {f"newcomers_{epochs}": value for epochs, value in zip((0, 1, 5), newcomers(result), strict=False)}
    if came:
        each = result["newcomers/test_acc"][:, result["client/newcomers"].astype(bool)]
        came |= {f"newcomers_{epochs}_half": interval([row])[1] for epochs, row in zip((0, 1, 5), each, strict=True)}
    stopped = {"stopped": float((result["client/stopped_round"] >= 0).mean())} if run.patience else {}
    lies = {"liars": liars, "liars_chosen": chosen, "backdoor": opened, "backdoor_unmarked": unmarked}
    return (
        about(run, result)
        | {"row": row_of(run), "method": run.method, "rounds": run.rounds}
        | spent
        | lies
        | came
        | stopped
    )


def cost_lines(result: Result) -> pd.DataFrame:
    """Return the lines of costs.csv; what is fine-tuned goes on after the last round."""
    frame = pd.DataFrame(costs(result)).round(4)
    frame.insert(0, "point", np.arange(len(frame)))
    return frame


def newcomer_lines(result: Result) -> pd.DataFrame:
    """Return the lines of newcomers.csv: the accuracy of each client that came later, after each number of epochs of its own."""
    clients = np.flatnonzero(result["client/newcomers"])
    parts = zip(result["newcomers/epochs"], result["newcomers/test_acc"][:, clients], strict=True)
    return pd.concat(pd.DataFrame({"client": clients, "epochs": epochs, "test_acc": each}) for epochs, each in parts)


def graph_lines(result: Result) -> pd.DataFrame:
    """Return the lines of graphs.csv: the measures of Omega, and of the last round's graph."""
    common, rows = overlap(result["client/class_counts"]), []
    for t in (0, result.last_round):
        graph = result.chosen(t)
        z = z_score(graph, common, 50, np.random.default_rng(0))
        rows.append({"round": t, "degree": len(graph.senders) / graph.n, **of_round(result, t), "z": z})
    return pd.DataFrame(rows).round(6)


def finished(folder: Path) -> Iterator[tuple[Run, Result]]:
    """Yield every Run that has a finished result; say which have none."""
    for run in RUNS:
        path = found(run, folder)
        if path is None:
            print(f"not here: {row_of(run)}, seed {run.seed}", file=sys.stderr)
            continue
        with Result(path) as result:
            if result.finished:
                yield run, result


def main() -> None:
    """Write the CSV files of the Runs that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=HERE / "controls", metavar="DIR")
    args = parser.parse_args()
    files: dict[str, list[pd.DataFrame]] = {}
    for run, result in finished(args.results):
        lines = {
            "runs": pd.DataFrame([line_of(run, result)]),
            "clients": clients(result),
            "curves": curves(result),
            "costs": cost_lines(result),
        }
        if has_graph(result):
            lines["graphs"] = graph_lines(result)
        if "newcomers/test_acc" in result:
            lines["newcomers"] = newcomer_lines(result)
        for name, frame in lines.items():
            frame.insert(0, "run", result.run.slug()[-8:])
            files.setdefault(name, []).append(frame)
    if not files:
        raise SystemExit(f"{args.results} has no result of these Runs")
    write(args.out, files)
    repeated = [path for run in (COMPARED[0], *SAME_CLIENTS) if (path := found(run, args.results))]
    if len(repeated) > 1:
        agreement([Result(path) for path in repeated], ["DPFL"] * len(repeated), 50).to_csv(
            args.out / "agreement.csv", index=False
        )


if __name__ == "__main__":
    main()
