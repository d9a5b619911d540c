"""Write the numbers of finished results as CSV files: `python reproduction/collect.py`.

There is a folder per setting (data and partition). Floats are as short as possible without losing a
bit.

    runs.csv      one line per Run: row in the tables, seed, flags, costs, versions, hashes
    clients.csv   one line per Run and client: accuracies of the best model, its round, p_k, sizes
    curves.csv    one line per Run and round: means over clients
    graphs.csv    one line per client: Omega, the middle and the last graph of seed 42

The folder `controls` holds the Runs of controls.py. Its graphs.csv has the measures of each Run's
Omega and last graph; it also has costs.csv (accuracy of the best models so far, and costs),
newcomers.csv, and agreement.csv (of Omegas with one another). `run` is the end of the result's
name, eight hex digits of its key. Lines of Runs without a result here are kept.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from csv_files import TEXTS, check_folder, core_hours, totals

from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.figures import controls_table, frames, omega
from dpfl_mpi.figures.command import gather
from dpfl_mpi.figures.names import method_name, row_name, setting, slug
from dpfl_mpi.figures.tables import interval
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.sweep.wanted import runs_of

HERE = Path(__file__).resolve().parent
CONTROLS = HERE / "controls.py"
DRAWN = ("accuracy_table", "tau_init_table", "ggc_period_table", "random_graph", "label_flip")
DRAWN += ("motivation", "pareto")
FILES = [HERE.parent / "analysis" / f"{name}.py" for name in DRAWN]
FILES += [HERE / "writers.py", HERE / "tried.py", CONTROLS]
GRAPH_SEED = 42  # the seed whose graphs are stored
SORTED_BY = ["row", "seed", "run", "t", "client", "round"]
CASES = ("adding_gained", "removing_gained", "neither_gained", "both_gained")  # as graph.CASES
AGES = (0, 1, 5)  # epochs of newcomers
# fields that a row's name may contain; of the controls, which have one budget, the other ones
VARIED = ("tau_init", "ggc_period", "metric", "flip_share", "flipped_run_ggc")
VARIED += ("budget_counts_self", "reach")
CONTROLLED = ("search_share", "omega_period", "drift", "patience", "attack", "newcomers")


def row_of(run: Run, standard: Run) -> str:
    """Return a resolved Run's row; `standard` is the Run with the data set's own values."""
    words = [row_name(run)]
    words += [] if run.method in shipped("method") else [short(run.method)]
    words += changes(run, standard, VARIED)
    options, usual = run.options or {}, standard.options or {}
    words += [f"{name} {v}" for name, v in options.items() if v != usual.get(name)]
    return ", ".join(words)


def changes(run: Run, usual: Run, names: Iterable[str]) -> list[str]:
    """Return "field value" of each field in which a Run differs from the usual one."""
    values = {name: getattr(run, name) for name in names}
    return [f"{name} {value}" for name, value in values.items() if value != getattr(usual, name)]


def control_row(run: Run, method: str) -> str:
    """Return the row's name of a control: the method, and what the Run changes."""
    words = [method]
    if run.method == "replay":
        words.append((run.options or {})["variant"])
    if run.method == "random_graph" and run.graphs:
        words.append("DPFL's degrees")
    words += changes(run, Run(), CONTROLLED)
    if run.partition_seed not in (None, run.seed):
        words.append("same clients")
    return ", ".join(words)


def run_line(run: Run, result: Result) -> dict[str, Any]:
    resolved, start = result.run, {"kernels": "torch"} | result.starts()[-1]
    of_method = {"dataset": resolved.dataset, "method": resolved.method}
    standard = Run(**of_method, partition=str(resolved.partition)).resolve(resolved.contents)
    cases = result["graph/cases"].sum((0, 1)) if "graph/cases" in result else []
    versions = ("dpfl_mpi", "python", "torch", "numpy", "h5py")
    return {
        "row": row_of(resolved, standard),
        "seed": resolved.seed,
        "flags": " ".join(to_flags(changed(run))),
        "name": result.path.stem,
        "test_acc": np.nanmean(frames.accuracy(result)),
        "epochs": int(result["round/epochs"][-1]) + resolved.finetune_epochs,
        **totals(result),
        **dict(zip(CASES, map(int, cases), strict=False)),
        "core_hours": round(core_hours(result), 3),
        "starts": len(result.starts()),
        **{name: start[name] for name in ("ranks", "device", "kernels", "cpu", "commit")},
        **{name: start["versions"].get(name, "") for name in versions},
        **{name: result.fact(name) for name in ("data_sha256", "partition_sha256")},
    }


def control_line(run: Run, result: Result) -> dict[str, Any]:
    """Return a control's line of runs.csv: `run_line`, costs, and what the control measures."""
    out = run_line(run, result)
    out |= {"row": control_row(run, method_name(result.run))}
    out |= {"method": run.method, "rounds": run.rounds}
    for name, values in frames.costs(result).drop(columns=["point", "accuracy"]).items():
        out[f"{name}_per_client"] = round(float(np.nanmax(values)), 1)
    out["attackers"], out["attackers_chosen"] = controls_table.attacker_shares(result)
    out["backdoor"], out["backdoor_unmarked"] = controls_table.backdoor(result)
    means = controls_table.newcomers(result)
    if len(means):
        each = list(result.of_newcomers().values())
        out |= {f"newcomers_{age}": mean for age, mean in zip(AGES, means, strict=True)}
        for age, values in zip(AGES, each, strict=True):
            out[f"newcomers_{age}_half"] = interval([values])[1]
    if run.patience:
        out["stopped"] = float((result["client/stopped_round"] >= 0).mean())
    return out


def graph_lines(result: Result) -> pd.DataFrame:
    """Return the lines of graphs.csv; none for another seed, or without a graph."""
    if result.run.seed != GRAPH_SEED or not len(result["graph/chosen/senders"]):
        return pd.DataFrame(columns=["t", "client", "classes", "collaborators"])
    classes, lines = frames.ranked_classes(result), []
    for t in sorted({0, result.last_round // 2, result.last_round}):
        for k, chosen in enumerate(result.graph(t)):
            senders = " ".join(map(str, np.flatnonzero(chosen)))
            lines.append({"t": t, "client": k, "classes": classes[k], "collaborators": senders})
    return pd.DataFrame(lines)


def measures(result: Result) -> pd.DataFrame:
    """Return the lines of the controls' graphs.csv: measures of Omega and of the last graph."""
    lines = []
    for t in (0, result.last_round) if len(result["graph/chosen/senders"]) else ():
        degree = len(result.chosen(t).senders) / len(result["client/p"])
        z = {"z": omega.z_of_round(result, t, 50)}
        lines.append({"round": t, "degree": degree} | omega.of_round(result, t) | z)
    return pd.DataFrame(lines).round(6)


def lines_of(run: Run, result: Result, controls: bool = False) -> dict[str, pd.DataFrame]:
    """Return a Run's lines of each CSV file."""
    of_client = ["classes", "name", "group"]
    curves = frames.curves(result).drop(columns="models_epochs").round(6)
    line = control_line(run, result) if controls else run_line(run, result)
    out = {
        "runs": pd.DataFrame([line]),
        "clients": frames.clients(result).drop(columns=of_client, errors="ignore"),
        "curves": curves.dropna(subset=["test_acc"]),  # most baselines score nothing in round 0
        "graphs": measures(result) if controls else graph_lines(result),
    }
    if controls:
        out["costs"] = frames.costs(result).round(4)
        out["newcomers"] = frames.newcomers(result)
    for frame in out.values():
        frame.insert(0, "run", result.run.slug()[-8:])
    return out


def finished(file: Path, results: Path) -> Iterator[tuple[Run, Path]]:
    """Yield every Run of a file that has a finished result, and its path."""
    for run in runs_of(file):
        found, missing = gather([run], results)
        print(*missing, sep="\n", file=sys.stderr)
        yield from ((run, result.path) for result in found if result.finished)


def write(folder: Path, files: dict[str, list[pd.DataFrame]]) -> None:
    """Add lines to the CSV files of a folder.

    They replace those of Runs with the same row, seed and length. Runs on other data are refused:
    the tables pair clients over all Runs of a folder.
    """
    runs, replaced = pd.concat(files["runs"]), set()
    if (folder / "runs.csv").exists():
        old = pd.read_csv(folder / "runs.csv", dtype={"run": str})
        if not set(runs["data_sha256"]) <= set(old["data_sha256"]):
            reason = "holds Runs on other data (data_sha256); write these elsewhere: --out"
            raise UserError(f"{folder} {reason}")
        keys = ["row", "seed", "epochs"]
        both = old.merge(runs[[*keys, "run"]], on=keys)
        replaced = set(both.loc[both["run_x"] != both["run_y"], "run_x"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in files.items():
        parts = [frame for frame in parts if len(frame)]
        if not parts:
            continue
        path, lines = folder / f"{name}.csv", pd.concat(parts)
        if path.exists():
            old = pd.read_csv(path, dtype=TEXTS)
            lines = pd.concat([old[~old["run"].isin({*lines["run"], *replaced})], lines])
        keys = [c for c in SORTED_BY if c in lines]
        if "client" in lines and "round" in keys:
            keys.remove("round")  # a client's best round, not a key
        lines = lines.sort_values(keys, kind="stable")
        if name == "runs":  # a Run may lack costs, and whole numbers stay whole beside a gap
            lines = lines.convert_dtypes()
        lines.to_csv(path, index=False)
    instead = f", in place of {', '.join(sorted(replaced))}" if replaced else ""
    print(f"{folder}: {len(runs)} Runs{instead}")


@in_a_sentence
def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("files", nargs="*", type=Path, default=FILES, metavar="FILE", help="files with RUNS (all)")
    add("--results", type=Path, default=Path("results"), metavar="DIR")
    add("--out", type=Path, default=HERE, metavar="DIR")
    args = parser.parse_args()
    check_folder(args.results, "--results")
    folders = defaultdict[str, Any](lambda: defaultdict(list))
    repeated = {}  # path of a DPFL control by seed and partition
    written = set()  # a Run may be in several files
    for file in args.files:
        controls = file.name == CONTROLS.name
        for run, path in finished(file, args.results):
            if (controls, path) in written:
                continue
            written.add((controls, path))
            with Result(path) as result:
                folder = "controls" if controls else slug(setting(result.run))
                for name, frame in lines_of(run, result, controls).items():
                    folders[folder][name].append(frame)
                row = control_row(run, method_name(result.run))
                if controls and row in ("DPFL", "DPFL, same clients"):
                    repeated[result.run.seed, result.fact("partition_sha256")] = path
    for folder, files in folders.items():
        write(args.out / folder, files)
    if "controls" in folders:
        runs = frames.of_results([Result(path) for path in repeated.values()]).runs
        agreement = omega.agreement(runs.assign(row="DPFL"), 50)
        agreement.to_csv(args.out / "controls" / "agreement.csv", index=False)


if __name__ == "__main__":
    exit_with(main)
