"""Write the numbers of finished results as CSV files that git can keep: `python reproduction/collect.py --results results`.

A folder per setting (data and partition), four files in each, floats as short as they can be without losing a bit:

    runs.csv      a line per Run: its row in the tables, seed, flags, what it cost, what computed it, hashes of data and partition
    clients.csv   a line per Run and client: test accuracy of its best model by validation, that model's round, p_k, sizes
    curves.csv    a line per Run and round: means over clients
    graphs.csv    a line per client of the graphs of seed 42: Omega, half way, and the last; classes from the most frequent on

`run` in every file is the end of the result's name, eight hex digits of its key. What is there of other Runs stays.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "analysis"), str(HERE.parent)]

from _common import accuracy, has_graph

import numpy as np
import pandas as pd
from _find import found
from _names import setting
from _tables import row_name

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import changed, to_flags

TABLES = (
    "accuracy_table",
    "tau_init_table",
    "ggc_period_table",
    "random_graph",
    "label_flip",
    "motivation",
    "pareto",
    "writers",
    "tried",
)
DRAWN = 42  # the seed of which graphs are stored
ROUND = ("train_loss", "val_loss", "val_acc", "test_acc")
# beside method and budget
VARIED = (
    "tau_init",
    "ggc_period",
    "averaging",
    "metric",
    "flip_share",
    "flipped_run_ggc",
    "budget_counts_self",
    "reach",
)


def folder_of(run: Run) -> str:
    """Return the folder of a Run's setting, such as "cifar-10-patho-3"."""
    return re.sub(r"[^a-z0-9]+", "-", setting(run).lower()).strip("-")


def row_of(run: Run, standard: Run) -> str:
    """Return the name of the table's row that a resolved Run is a repetition of; fields and options unlike the data set's `standard` are named.

    So is code that is not shipped.
    """
    extra = [] if run.method in shipped("method") else [short(run.method)]
    extra += [f"{name} {getattr(run, name)}" for name in VARIED if getattr(run, name) != getattr(standard, name)]
    usual = standard.options or {}
    extra += [f"{name} {value}" for name, value in (run.options or {}).items() if value != usual.get(name, value)]
    return ", ".join([row_name(run), *extra])


def spent_in(result: Result, phase: str) -> float:
    """Return the core seconds of a phase over all rounds: the mean over ranks, times ranks."""
    return float(result[f"seconds/{phase}"][:, 1].sum()) * result.starts()[-1]["ranks"]


def cost(result: Result) -> float:
    """Return the core hours of a result's rounds."""
    return sum(spent_in(result, phase) for phase in PHASES) / 3600


def candidates(result: Result) -> dict[str, int]:
    """Return how many candidates of all greedy searches gained by being added, removed, neither or both, by name; of no search nothing."""
    if "graph/cases" not in result:
        return {}
    counts = result["graph/cases"].sum((0, 1))  # in the order of graph.CASES
    return dict(
        zip(("adding_gained", "removing_gained", "neither_gained", "both_gained"), map(int, counts), strict=True)
    )


def about(run: Run, result: Result) -> dict[str, Any]:
    """Return a Run's line of runs.csv."""
    starts, meta, held = result.starts(), result.file["meta"].attrs, result.run
    last = starts[-1]
    return {
        "row": row_of(
            held, Run(dataset=held.dataset, partition=held.partition, method=held.method).resolve(held.contents)
        ),
        "seed": held.seed,
        "flags": " ".join(to_flags(changed(run))),
        "name": held.slug(),
        "test_acc": np.nanmean(accuracy(result)),
        "epochs": int(result["round/epochs"][-1]) + held.finetune_epochs,
        "gradient_steps": int(
            result["finetune/gradient_steps" if held.finetune_epochs else "round/gradient_steps"][-1]
        ),
        "models_received": int(result["traffic/models_received"].sum()),
        "evaluations": int(result["graph/evaluations"].sum()) if "graph/evaluations" in result else 0,
        **candidates(result),
        "core_hours": round(cost(result), 3),
        "starts": len(starts),
        "ranks": last["ranks"],
        "device": last["device"],
        "kernels": last.get("kernels", "torch"),
        "cpu": last["cpu"],
        "commit": last["commit"],
        **{name: last["versions"].get(name, "") for name in ("dpfl_mpi", "python", "torch", "numpy", "h5py")},
        "data_sha256": meta["data_sha256"],
        "partition_sha256": meta["partition_sha256"],
        **{f"{phase}_seconds": round(spent_in(result, phase)) for phase in ("train", "graph", "evaluate")},
        "megabytes": round(result.path.stat().st_size / 1e6, 1),
    }


def clients(result: Result) -> pd.DataFrame:
    """Return the lines of clients.csv; clients with flipped labels, liars and newcomers have no accuracy."""
    return pd.DataFrame(
        {
            "client": np.arange(len(result["client/p"])),
            "test_acc": accuracy(result),
            "val_acc": result["best/val_acc"],
            "round": result["best/round"],
            "p": result["client/p"],
            **{part: result[f"client/n_{part}"] for part in ("train", "val", "test")},
        }
    )


def curves(result: Result) -> pd.DataFrame:
    """Return the lines of curves.csv: means over the clients that averages are over."""
    means = {name: pd.DataFrame(result[f"round/{name}"][:, result.benign]).mean(axis=1).round(6) for name in ROUND}
    out = pd.DataFrame({"round": result["round/number"], "epochs": result["round/epochs"], **means})
    return out.dropna(subset=["test_acc"])  # most baselines score nothing before round 1


def graphs(result: Result) -> pd.DataFrame:
    """Return the lines of graphs.csv: round t, and whom each client receives from; of a Run with another seed, or without a graph, none."""
    if result.run.seed != DRAWN or not has_graph(result):
        return pd.DataFrame(columns=["t", "client", "classes", "collaborators"])
    counts = result["client/class_counts"]
    ranked = np.argsort(-counts, axis=1, kind="stable")
    classes = [listed(c for c in of_client if held[c]) for of_client, held in zip(ranked, counts, strict=True)]
    rounds = sorted({0, result.last_round // 2, result.last_round})
    return pd.DataFrame(
        {"t": t, "client": k, "classes": classes[k], "collaborators": listed(np.flatnonzero(chosen))}
        for t in rounds
        for k, chosen in enumerate(result.graph(t))
    )


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as "3 5 7"."""
    return " ".join(map(str, numbers))


FILES: dict[str, Callable[[Run, Result], pd.DataFrame]] = {
    "runs": lambda run, result: pd.DataFrame([about(run, result)]),
    "clients": lambda _, result: clients(result),
    "curves": lambda _, result: curves(result),
    "graphs": lambda _, result: graphs(result),
}


def pairs(names: list[str], results: Path) -> Iterator[tuple[Run, Result]]:
    """Yield every Run of the tables that has a finished result, once."""
    seen = set()
    for name in names:
        for run in importlib.import_module(name).RUNS:
            try:
                path = found(run, results)
            except UserError as error:
                print(f"not here: {error}", file=sys.stderr)
                continue
            if path and path not in seen:
                seen.add(path)
                with Result(path) as result:
                    if result.finished:
                        yield run, result


def write(folder: Path, files: dict[str, list[pd.DataFrame]]) -> None:
    """Write the lines into the CSV files of a folder, beside those of other Runs.

    A Run that was made anew under another name (a later version of the numbers) takes the place of the old one. Runs on other data are refused:
    the tables pair clients over all Runs of a folder.
    """
    runs, gone = pd.concat(files["runs"]), set()
    if (path := folder / "runs.csv").exists():
        old = pd.read_csv(path, dtype={"run": str})
        if set(old["data_sha256"]) | set(runs["data_sha256"]) != set(old["data_sha256"]):
            raise SystemExit(
                f"error: {folder} holds Runs on other data (data_sha256); write these elsewhere, with --out"
            )
        same = old.reset_index().merge(runs[["row", "seed", "epochs", "run"]], on=["row", "seed", "epochs"])
        gone = set(same.loc[same["run_x"] != same["run_y"], "run_x"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, frames in files.items():
        if lines := [frame for frame in frames if len(frame)]:
            merge(folder / f"{name}.csv", pd.concat(lines), gone)
    print(f"{folder}: {len(runs)} Runs" + (f", in place of {', '.join(sorted(gone))}" if gone else ""))


def merge(path: Path, new: pd.DataFrame, gone: Iterable[str] = ()) -> None:
    """Write the lines of the file and the new ones, which replace those of the same Run and of the Runs that are `gone`."""
    if path.exists():
        old = pd.read_csv(path, dtype=dict.fromkeys(("run", "classes", "collaborators"), str))
        new = pd.concat([old[~old["run"].isin({*new["run"], *gone})], new])
    keys = [
        c for c in ("row", "seed", "run", "t", "client", "round") if c in new and not (c == "round" and "client" in new)
    ]
    new.sort_values(keys, kind="stable").to_csv(path, index=False)


def main() -> None:
    """Write the CSV files and print how many Runs each folder has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES), metavar="TABLE", help="files of analysis/ [all]")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR")
    args = parser.parse_args()
    lines: dict[str, dict[str, list[pd.DataFrame]]] = {}
    for run, result in pairs([Path(t).stem for t in args.tables], args.results):
        files = lines.setdefault(folder_of(result.run), {name: [] for name in FILES})
        tag = result.run.slug()[-8:]
        for name, frame in ((name, lines_of(run, result)) for name, lines_of in FILES.items()):
            frame.insert(0, "run", tag)
            files[name].append(frame)
    for folder, files in lines.items():
        write(args.out / folder, files)


if __name__ == "__main__":
    main()
