"""The CSV files of this folder, which collect.py writes of results, as the data frames that figures are drawn of (`dpfl_mpi.figures.frames`).

Beside those there is [measures], a line per Run, of Omega and the last graph: homophily and the like.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from dpfl_mpi.figures import paper
from dpfl_mpi.figures.frames import Frames, of_method
from dpfl_mpi.figures.names import slug
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Method
from dpfl_mpi.plugins import find, short

TEXTS = dict.fromkeys(("run", "flags", "classes", "collaborators"), str)  # lists of numbers; a single one is none
SETTINGS = (*paper.COLUMNS, "FEMNIST natural", "CIFAR-10 motivation")  # the names of folders


def of_folder(folder: Path) -> Frames:
    """Return the frames of the CSV files of a folder, which `reproduction/collect.py` wrote of results."""
    runs = pd.read_csv(folder / "runs.csv", dtype=TEXTS)
    places = {row: place for place, row in enumerate(paper.TABLE_1)}
    runs = runs.iloc[runs["row"].map(places).fillna(len(places)).argsort(kind="stable")].reset_index(drop=True)
    where = {slug(name): name for name in SETTINGS}.get(folder.name, folder.name)
    flags = runs["flags"].fillna("")
    for name, usual in (("method", "dpfl"), ("tau_init", 10), ("ggc_period", 1)):
        runs[name] = flags.str.extract(rf"--{name}=(\S+)", expand=False).fillna(str(usual)).astype(type(usual))
    methods = [find("method", name) if name.isidentifier() else Method(title=short(name)) for name in runs["method"]]
    told = pd.DataFrame([of_method(method) for method in methods])
    budgets = runs["row"].str.extract(r"\(B_c = ([^)]*)\)", expand=False).fillna("")
    order = budgets.str.removesuffix("N").replace("", "0").astype(float)
    runs = runs.assign(setting=where, paper=where, budget=budgets, order=order, omega_until=np.inf, **told)
    runs["seed_text"] = "seed " + runs["seed"].astype(str)
    runs = runs.rename(columns={"partition_sha256": "partition"})

    def table(name: str, texts: Mapping[str, type] = TEXTS) -> pd.DataFrame:
        path = folder / f"{name}.csv"
        return pd.read_csv(path, dtype=texts) if path.exists() else pd.DataFrame({"run": []}, dtype=str)

    def read(name: str) -> pd.DataFrame:
        if name == "measures":
            return table("graphs", {"run": str})  # whose `classes` are a number
        lines = table(name)
        if name == "curves" and len(lines):
            return lines.assign(models_epochs=lines["epochs"] * lines["run"].map(runs.set_index("run")["models"]))
        if name == "clients" and "t" in (held := table("graphs")):
            return lines.merge(held[held["t"] == 0][["run", "client", "classes"]], on=["run", "client"], how="left")
        if name == "graphs":
            each = lines.groupby(["run", "t"]) if "collaborators" in lines else ()
            parts = [{"run": run, "t": t, "graph": functools.partial(graph_of, part)} for (run, t), part in each]
            return pd.DataFrame(parts, columns=["run", "t", "graph"])
        return lines

    return Frames(runs, read)


def graph_of(lines: pd.DataFrame) -> CollaborationGraph:
    chosen = lines.sort_values("client")["collaborators"].fillna("").str.split()
    return CollaborationGraph.from_lists([[int(k) for k in senders] for senders in chosen])
