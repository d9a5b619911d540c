"""Costs of a result, and the CSV files of collect.py as data frames (`dpfl_mpi.figures.frames`).

Beyond the frames of results there is [measures]: homophily and the like of Omega and the last
graph, one line per Run and graph.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import paper
from dpfl_mpi.figures.frames import Frames, of_method
from dpfl_mpi.figures.names import slug
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Method
from dpfl_mpi.plugins import find, short
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES

TEXTS = dict.fromkeys(("run", "flags", "classes", "collaborators"), str)  # not numbers
SETTINGS = (*paper.COLUMNS, "FEMNIST natural", "CIFAR-10 motivation")  # names of folders, as slugs
DEFAULTS = {"method": "dpfl", "tau_init": 10, "ggc_period": 1}  # of flags that a Run leaves out


def of_folder(folder: Path) -> Frames:
    runs = runs_of(folder)

    def table(name: str, dtype: Any = TEXTS) -> pd.DataFrame:
        path = folder / f"{name}.csv"
        if not path.exists():
            return pd.DataFrame({"run": []}, dtype=str)
        return pd.read_csv(path, dtype=dtype)

    def read(name: str) -> pd.DataFrame:
        if name == "measures":
            return table("graphs", {"run": str})  # `classes` is a number there
        lines = table(name)
        if name == "curves" and len(lines):
            models = lines["run"].map(runs.set_index("run")["models"])
            return lines.assign(models_epochs=lines["epochs"] * models)
        if name == "clients":
            chosen = table("graphs")
            if "t" in chosen:
                classes = chosen[chosen["t"] == 0][["run", "client", "classes"]]
                return lines.merge(classes, on=["run", "client"], how="left")
        if name == "graphs":
            groups = lines.groupby(["run", "t"]) if "collaborators" in lines else ()
            parts = [(run, t, functools.partial(graph_of, part)) for (run, t), part in groups]
            return pd.DataFrame(parts, columns=["run", "t", "graph"])
        return lines

    return Frames(runs, read)


def totals(result: Result) -> dict[str, int]:
    steps = "finetune" if result.run.finetune_epochs else "round"
    searched = "graph/evaluations" in result
    return {
        "gradient_steps": int(result[f"{steps}/gradient_steps"][-1]),
        "models_received": int(result["traffic/models_received"].sum()),
        "evaluations": int(result["graph/evaluations"].sum()) if searched else 0,
    }


def core_hours(result: Result) -> float:
    """Return the hours of all ranks in all phases."""
    seconds = sum(float(result[f"seconds/{phase}"][:, 1].sum()) for phase in PHASES)
    return result.starts()[-1]["ranks"] * seconds / 3600


def runs_of(folder: Path) -> pd.DataFrame:
    """Return the frame `runs` of runs.csv, rows in the order of Table 1."""
    runs = pd.read_csv(folder / "runs.csv", dtype=TEXTS)
    places = {row: place for place, row in enumerate(paper.TABLE_1)}
    order = runs["row"].map(places).fillna(len(places)).argsort(kind="stable")
    runs = runs.iloc[order].reset_index(drop=True)
    flags = runs["flags"].fillna("")
    for name, default in DEFAULTS.items():
        values = flags.str.extract(rf"--{name}=(\S+)", expand=False)
        runs[name] = values.fillna(str(default)).astype(type(default))
    methods = [
        find("method", name) if name.isidentifier() else Method(title=short(name))
        for name in runs["method"]
    ]
    runs = runs.assign(**pd.DataFrame([of_method(method) for method in methods]))
    budgets = runs["row"].str.extract(r"\(B_c = ([^)]*)\)", expand=False).fillna("")
    setting = {slug(name): name for name in SETTINGS}.get(folder.name, folder.name)
    runs = runs.assign(
        setting=setting,
        paper=setting,
        budget=budgets,
        order=budgets.str.removesuffix("N").replace("", "0").astype(float),
        omega_until=np.inf,
        seed_text="seed " + runs["seed"].astype(str),
    )
    return runs.rename(columns={"partition_sha256": "partition"})


def check_folder(folder: str | Path, flag: str = "--collect") -> None:
    """Raise `UserError` unless a flag names a folder."""
    if not Path(folder).is_dir():
        raise UserError(f"{flag} is {folder}; allowed is a folder with results")


def graph_of(lines: pd.DataFrame) -> CollaborationGraph:
    chosen = lines.sort_values("client")["collaborators"].fillna("").str.split()
    return CollaborationGraph.from_lists([[int(k) for k in senders] for senders in chosen])
