"""Write the numbers of finished results as CSV files that git can keep: `python reproduction/collect.py --results results`.

A folder per setting (data and partition), files in each, floats as short as they can be without losing a bit:

    runs.csv      a line per Run: its row in the tables, seed, flags, what it cost, what computed it, hashes of data and partition
    clients.csv   a line per Run and client: test accuracy of its best model by validation, that model's round, p_k, sizes
    curves.csv    a line per Run and round: means over clients
    graphs.csv    a line per client of the graphs of seed 42: Omega, half way, and the last; classes from the most frequent on

The folder `controls`, of the Runs of controls.py, has the measures of each Run's Omega and last graph as graphs.csv, and costs.csv (accuracy of the best
models so far, and what they took), newcomers.csv and agreement.csv (of Omegas with one another). `run` in every file is the end of the result's
name, eight hex digits of its key. What is there of other Runs stays.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from csv_files import TEXTS

from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.figures import frames, omega
from dpfl_mpi.figures.command import find_result
from dpfl_mpi.figures.controls_table import backdoor, liar_shares, newcomers
from dpfl_mpi.figures.names import method_name, row_name, setting, slug
from dpfl_mpi.figures.tables import interval
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.sweep.wanted import runs_of

HERE = Path(__file__).resolve().parent
CONTROLS = HERE / "controls.py"
TABLES = (
    *(HERE.parent / "analysis" / f"{name}_table.py" for name in ("accuracy", "tau_init", "ggc_period")),
    *(HERE.parent / "analysis" / f"{name}.py" for name in ("random_graph", "label_flip", "motivation", "pareto")),
    *(HERE / name for name in ("writers.py", "tried.py")),
    CONTROLS,
)
DRAWN = 42  # the seed of which graphs are stored
KEYS = ["row", "seed", "run", "t", "client", "round"]  # to sort by
CASES = ("adding_gained", "removing_gained", "neither_gained", "both_gained")  # in the order of graph.CASES
# what a row names beside method and budget; of the controls, which have one budget, beside the method
VARIED = ("tau_init", "ggc_period", "metric", "flip_share", "flipped_run_ggc")
VARIED += ("budget_counts_self", "reach")
CONTROLLED = ("search_share", "omega_period", "drift", "patience", "attack", "newcomers")


def row_of(run: Run, standard: Run) -> str:
    """Return the name of the table's row of a resolved Run; fields and options unlike the data set's `standard`, and own code, are named."""
    extra = [] if run.method in shipped("method") else [short(run.method)]
    extra += [f"{name} {getattr(run, name)}" for name in VARIED if getattr(run, name) != getattr(standard, name)]
    usual = standard.options or {}
    extra += [f"{name} {value}" for name, value in (run.options or {}).items() if value != usual.get(name, value)]
    return ", ".join([row_name(run), *extra])


def control_row(run: Run, method: str) -> str:
    """Return the name of a control's row: the method, "+FT", and what the control changes in the Run as it was asked for."""
    words = [(run.options or {})["variant"]] if run.method == "replay" else []
    words += ["DPFL's degrees"] if run.method == "random_graph" and run.graphs else []
    words += [f"{name} {getattr(run, name)}" for name in CONTROLLED if getattr(run, name) != getattr(Run(), name)]
    words += ["same clients"] if run.partition_seed not in (None, run.seed) else []
    return ", ".join([method, *words])


def about(run: Run, result: Result) -> dict[str, Any]:
    held, last = result.run, {"kernels": "torch"} | result.starts()[-1]
    usual = Run(dataset=held.dataset, partition=str(held.partition), method=held.method).resolve(held.contents)
    cases = result["graph/cases"].sum((0, 1)) if "graph/cases" in result else []
    core = {phase: float(result[f"seconds/{phase}"][:, 1].sum()) * last["ranks"] for phase in PHASES}  # mean over ranks
    steps = result["finetune/gradient_steps" if held.finetune_epochs else "round/gradient_steps"]
    return {
        "row": row_of(held, usual),
        "seed": held.seed,
        "flags": " ".join(to_flags(changed(run))),
        "name": result.path.stem,
        "test_acc": np.nanmean(frames.accuracy(result)),
        "epochs": int(result["round/epochs"][-1]) + held.finetune_epochs,
        "gradient_steps": int(steps[-1]),
        "models_received": int(result["traffic/models_received"].sum()),
        "evaluations": int(result["graph/evaluations"].sum()) if "graph/evaluations" in result else 0,
        **dict(zip(CASES, map(int, cases), strict=False)),
        "core_hours": round(sum(core.values()) / 3600, 3),
        "starts": len(result.starts()),
        **{name: last[name] for name in ("ranks", "device", "kernels", "cpu", "commit")},
        **{name: last["versions"].get(name, "") for name in ("dpfl_mpi", "python", "torch", "numpy", "h5py")},
        **{name: result.fact(name) for name in ("data_sha256", "partition_sha256")},
        **{f"{phase}_seconds": round(core[phase]) for phase in ("train", "graph", "evaluate")},
        "megabytes": round(result.path.stat().st_size / 1e6, 1),
    }


def control(run: Run, result: Result) -> dict[str, Any]:
    spent = frames.costs(result).drop(columns=["point", "accuracy"])
    found = dict(zip(("liars", "liars_chosen"), liar_shares(result), strict=True))
    found |= dict(zip(("backdoor", "backdoor_unmarked"), backdoor(result), strict=True))
    if len(came := newcomers(result)):
        each = result["newcomers/test_acc"][:, result["client/newcomers"].astype(bool)]
        found |= {f"newcomers_{epochs}": value for epochs, value in zip((0, 1, 5), came, strict=True)}
        found |= {f"newcomers_{epochs}_half": interval([row])[1] for epochs, row in zip((0, 1, 5), each, strict=True)}
    if run.patience:
        found["stopped"] = float((result["client/stopped_round"] >= 0).mean())
    named = {"row": control_row(run, method_name(result.run)), "method": run.method, "rounds": run.rounds}
    costs = {f"{name}_per_client": round(float(np.nanmax(values)), 1) for name, values in spent.items()}
    return about(run, result) | named | costs | found


def graphs(result: Result) -> pd.DataFrame:
    """Return the lines of graphs.csv: of a Run with another seed, or without a graph, none."""
    if result.run.seed != DRAWN or not len(result["graph/chosen/senders"]):
        return pd.DataFrame(columns=["t", "client", "classes", "collaborators"])
    classes = frames.ranked_classes(result)
    return pd.DataFrame(
        {"t": t, "client": k, "classes": classes[k], "collaborators": frames.joined(np.flatnonzero(chosen))}
        for t in sorted({0, result.last_round // 2, result.last_round})
        for k, chosen in enumerate(result.graph(t))
    )


def measures(result: Result) -> pd.DataFrame:
    """Return the lines of the controls' graphs.csv: the measures of Omega, and of the last round's graph."""
    rounds = (0, result.last_round) if len(result["graph/chosen/senders"]) else ()
    degree = [len(result.chosen(t).senders) / len(result["client/p"]) for t in rounds]
    each = [omega.of_round(result, t) | {"z": omega.z_of_round(result, t, 50)} for t in rounds]
    return pd.DataFrame([{"round": t, "degree": d, **e} for t, d, e in zip(rounds, degree, each, strict=True)]).round(6)


def lines_of(run: Run, result: Result, controls: bool = False) -> dict[str, pd.DataFrame]:
    each = {
        "runs": pd.DataFrame([control(run, result) if controls else about(run, result)]),
        "clients": frames.clients(result).drop(columns="classes"),
        # most baselines score nothing before round 1
        "curves": frames.curves(result).drop(columns="models_epochs").round(6).dropna(subset=["test_acc"]),
        "graphs": measures(result) if controls else graphs(result),
    }
    if controls:
        each |= {"costs": frames.costs(result).round(4), "newcomers": frames.newcomers(result)}
    for frame in each.values():
        frame.insert(0, "run", result.run.slug()[-8:])
    return each


def finished(file: Path, results: Path) -> Iterator[tuple[Run, Path]]:
    """Yield every Run of a file that has a finished result, and its path; say which have none."""
    for run in runs_of(file):
        try:
            result = find_result(run, results)
        except UserError as error:
            print(f"not here: {error}", file=sys.stderr)
            continue
        if result and result.finished:
            yield run, result.path


def write(folder: Path, files: dict[str, list[pd.DataFrame]]) -> None:
    """Write the lines into the CSV files of a folder, in place of those of the same row, seed and length, beside those of other Runs.

    Runs on other data are refused: the tables pair clients over all Runs of a folder.
    """
    runs, gone = pd.concat(files["runs"]), set()
    if (path := folder / "runs.csv").exists():
        old = pd.read_csv(path, dtype={"run": str})
        if set(old["data_sha256"]) | set(runs["data_sha256"]) != set(old["data_sha256"]):
            raise UserError(f"{folder} holds Runs on other data (data_sha256); write these elsewhere: --out")
        same = old.reset_index().merge(runs[["row", "seed", "epochs", "run"]], on=["row", "seed", "epochs"])
        gone = set(same.loc[same["run_x"] != same["run_y"], "run_x"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in files.items():
        if lines := [frame for frame in each if len(frame)]:
            path, new = folder / f"{name}.csv", pd.concat(lines)
            if path.exists():
                old = pd.read_csv(path, dtype=TEXTS)
                new = pd.concat([old[~old["run"].isin({*new["run"], *gone})], new])
            keys = [c for c in KEYS if c in new and not (c == "round" and "client" in new)]
            new.sort_values(keys, kind="stable").to_csv(path, index=False)
    print(f"{folder}: {len(runs)} Runs" + (f", in place of {', '.join(sorted(gone))}" if gone else ""))


@in_a_sentence
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, default=TABLES, metavar="FILE", help="files with RUNS [all]")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR")
    args = parser.parse_args()
    folders = defaultdict[str, Any](lambda: defaultdict(list))  # the frames of each file of a folder
    seen, repeated = set(), {}  # a path for each seed and partition: 6 and 20 rounds of one have the same Omega
    for file in args.tables:
        controls = file.name == CONTROLS.name
        for run, path in finished(file, args.results):
            if (controls, path) in seen:
                continue
            seen.add((controls, path))
            with Result(path) as result:
                folder = "controls" if controls else slug(setting(result.run))
                for name, frame in lines_of(run, result, controls).items():
                    folders[folder][name].append(frame)
                if controls and control_row(run, method_name(result.run)) in ("DPFL", "DPFL, same clients"):
                    repeated[result.run.seed, result.fact("partition_sha256")] = path
    for folder, files in folders.items():
        write(args.out / folder, files)
    if "controls" in folders:
        of = frames.of_results([Result(path) for path in repeated.values()])
        same = omega.agreement(of.runs.assign(row="DPFL"), 50)
        same.to_csv(args.out / "controls" / "agreement.csv", index=False)


if __name__ == "__main__":
    exit_with(main)
