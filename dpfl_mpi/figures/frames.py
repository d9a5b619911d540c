"""Results as data frames: `of_results` makes `Frames`, which the `draw` of a figure is given.

A setting is the data and their partition, a row the name of a method with its budget in tables.
`frames.runs`, `frames.rows` and `frames.files` are there at once; a frame in brackets is made when
it is asked for, `frames["clients"]`, by the function below that has its name.

    runs        one line per Run: its path, setting, row, seed, and what `line_of` says
    rows        the first line of `runs` of each setting and row, in the order of tables
    files       one line per result file, in the order given; a Run may be there twice
    [clients]   one line per Run and client: accuracies of its best model, sample counts, classes,
                name and group where the data have them
    [scores]    one line per Run and client: test scores (`METRICS`), name, group, of finished Runs
    [curves]    one line per Run and round: means over clients, and epochs (of one and all models)
    [graphs]    one line per Run and recorded graph: t, and `graph`, a function that reads it
    [costs]     one line per Run and round: accuracy of the best models so far, percent, and costs
    [newcomers] one line per Run, newcomer and number of its own epochs: its test accuracy

Averages leave out clients with flipped labels, attackers and newcomers; their test_acc is nan.
Scores are from 0 to 1 unless percent is stated.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import paper
from dpfl_mpi.figures.names import budget_order, named, own_data, rank, repetitions, setting
from dpfl_mpi.figures.style import method_look
from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import METRICS, mean

KEYS = ["run", "setting", "row", "seed", "partition"]  # columns with which every frame begins


class Frames:
    """Data frames of Runs, made when they are asked for.

    `make(name)` returns the lines of a frame, with a column "run". If the frames come from results,
    lines of `runs` and `files` have a column "result".
    """

    def __init__(
        self,
        runs: pd.DataFrame,
        make: Callable[[str], pd.DataFrame],
        files: pd.DataFrame | None = None,
    ):
        self.runs = runs
        self.make = make
        self.files = runs if files is None else files
        self.rows = runs.drop_duplicates(["setting", "row"], ignore_index=True)
        self.read = functools.cache(lambda name: runs[KEYS].merge(make(name), on="run"))

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self.read(name)

    def of(self, name: str, setting: str, row: str | None = None) -> pd.DataFrame:
        """Return the lines of a frame, or of `runs`, of one setting and, if given, one row."""
        lines = self.runs if name == "runs" else self[name]
        lines = lines[lines["setting"] == setting]
        return lines if row is None else lines[lines["row"] == row]

    def where(self, condition: Any) -> "Frames":
        """Return the frames of some Runs: `condition` has a bool for each line of `runs`."""
        runs = self.runs[condition].reset_index(drop=True)
        return Frames(runs, self.make, self.files[self.files["run"].isin(runs["run"])])


def accuracy(result: Result, metric: str = "accuracy") -> np.ndarray:
    """Return each client's test score by its best model, 0 to 1, `[N]`; nan if not benign."""
    return np.where(result.benign, result.score(metric), np.nan)


def ranked_classes(result: Result) -> list[str]:
    """Return each client's classes, the most frequent first, as "3 5 7"."""
    out = []
    for counts in result["client/class_counts"]:
        ranked = np.argsort(-counts, kind="stable")
        out.append(" ".join(str(c) for c in ranked if counts[c]))
    return out


# one function per frame in brackets: it returns the lines of a result
def clients(result: Result) -> pd.DataFrame:
    columns = {
        "client": np.arange(len(result["client/p"])),
        "test_acc": accuracy(result),
        "val_acc": result["best/val_acc"],
        "round": result["best/round"],
        "p": result["client/p"],
    }
    columns |= {part: result[f"client/n_{part}"] for part in ("train", "val", "test")}
    return pd.DataFrame(columns | {"classes": ranked_classes(result)} | result.named())


def scores(result: Result) -> pd.DataFrame:
    known = METRICS if "best/confusion" in result else ["accuracy"]  # the others come at the end
    columns = {metric: accuracy(result, metric) for metric in known}
    columns |= {
        metric: np.full(len(columns["accuracy"]), np.nan) for metric in {*METRICS} - {*known}
    }
    return pd.DataFrame(columns | result.named()).reset_index(names="client")


def curves(result: Result) -> pd.DataFrame:
    """Return the lines of `curves`; `models_epochs` are those of all models of a client."""
    rounds = slice(0, result.last_round + 1)
    columns = {"round": result["round/number"][rounds], "epochs": result["round/epochs"][rounds]}
    for name in ("train_loss", "val_loss", "val_acc", "test_acc"):
        columns[name] = result.mean(f"round/{name}")
    return pd.DataFrame(columns | {"models_epochs": columns["epochs"] * result.method.models})


def graphs(result: Result) -> pd.DataFrame:
    """Return the lines of `graphs`; none if no client ever chose."""
    rounds = range(0)
    if len(result["graph/chosen/senders"]):
        # a method that chooses only within rounds has no graph before round 1
        no_omega = not len(result.chosen(0).senders) and result.last_round > 0
        rounds = range(int(no_omega), result.last_round + 1)
    read = [functools.partial(result.chosen, t) for t in rounds]
    return pd.DataFrame({"t": rounds, "graph": read})


def best_so_far(val: np.ndarray, test: np.ndarray, latest: bool) -> np.ndarray:
    """Return the test accuracy of each client's best model so far, `[T, N]`.

    `val` and `test` are the accuracies of each round. The best has the highest `val`; of equal ones
    it is the `latest` or the first. It is nan before a client is scored.
    """
    best = np.fmax.accumulate(val)
    is_best = val == best
    if not latest:
        is_best[1:] &= best[1:] != best[:-1]
    best_round = np.maximum.accumulate(np.where(is_best, np.arange(len(val))[:, None], -1))
    of_best = np.take_along_axis(test, np.maximum(best_round, 0), 0)
    return np.where(best_round < 0, np.nan, of_best)


def costs(result: Result) -> pd.DataFrame:
    """Return the lines of `costs`: after each round, then after each epoch of fine-tuning."""
    # Costs are means per client. Fine-tuning receives no models, and its seconds are not recorded.
    rounds, benign = slice(0, result.last_round + 1), result.benign
    n_newcomers = int(result["client/newcomers"].sum()) if "client/newcomers" in result else 0
    n_trained = len(benign) - n_newcomers  # the clients among which gradient steps are shared
    received = result["traffic/models_received"][rounds][:, benign]
    evaluated = result["graph/evaluations"][rounds][:, benign]
    columns = {
        "accuracy": 100 * mean(result["round/best_test_acc"][rounds, benign]),
        "models": np.cumsum(received.mean(1)),
        "evaluations": np.cumsum(evaluated.mean(1)),
        "steps": result["round/gradient_steps"][rounds] / n_trained,
        "seconds": np.cumsum(result.by_round()["seconds"]),
    }
    out = pd.DataFrame(columns)
    if "finetune/val_acc" in result:
        val, test = (result[f"finetune/{part}_acc"][1:, benign] for part in ("val", "test"))
        tuning = {
            "accuracy": 100 * mean(best_so_far(val, test, result.run.tie == "latest")),
            "steps": result["finetune/gradient_steps"][1:] / n_trained,
        }
        unchanged = {name: columns[name][-1] for name in ("models", "evaluations")}
        out = pd.concat([out, pd.DataFrame(tuning).assign(**unchanged)], ignore_index=True)
    return out.reset_index(names="point")


def newcomers(result: Result) -> pd.DataFrame:
    if "newcomers/test_acc" not in result:
        return pd.DataFrame({"client": [], "epochs": [], "test_acc": []})
    counted = result["client/newcomers"].astype(bool) & result.honest
    ids, epochs = np.flatnonzero(counted), result["newcomers/epochs"]
    columns = {"client": np.tile(ids, len(epochs)), "epochs": np.repeat(epochs, len(ids))}
    return pd.DataFrame(columns | {"test_acc": result["newcomers/test_acc"][:, ids].ravel()})


FRAMES = {f.__name__: f for f in (clients, scores, curves, graphs, costs, newcomers)}


def line_of(result: Result) -> dict[str, Any]:
    """Return a result's line in `runs`, without its setting and row."""
    run = result.run
    other_seed = f" (partition {run.partition_seed})" if run.partition_seed != run.seed else ""
    omega_changes = run.churn or (run.options or {}).get("redraw")
    period = 1 if omega_changes else run.omega_period
    return {
        "run": str(result.path),
        "seed": run.seed,
        "seed_text": f"seed {run.seed}{other_seed}",
        # results that can be compared client by client share it
        "partition": result.fact("data_sha256") + result.fact("partition_sha256"),
        "key": str(result.key),
        "method": short(run.method),
        "budget": str(run.budget),
        "order": budget_order(run),
        # first round whose Omega is not the recorded one; beyond the last round if there is none
        "omega_until": int(min(period, result.last_round + 1)),
        "tau_init": run.tau_init,
        "ggc_period": run.ggc_period,
        "epochs": result.all_epochs(),
        "finished": result.finished,
        "paper": setting(run) if run.clients == paper.CLIENTS and not own_data(run) else "",
        "result": result,
        **of_method(result.method),
    }


def of_method(method: Any) -> dict[str, Any]:
    """Return the columns of `runs` that describe a method, and how its curves look."""
    look = dict(zip(("colour", "line", "marker"), method_look(method), strict=True))
    return {name: getattr(method, name) for name in ("topology", "searches", "models")} | look


def of_results(results: Sequence[Result]) -> Frames:
    """Return the frames of results.

    Settings are in the order of the results, rows in that of tables. A Run given twice counts once.
    """
    # each group has a setting, a row, and the results that repeat this with other seeds
    groups = named(repetitions(results))
    settings = [where for where, _, _ in groups]
    groups.sort(key=lambda group: (settings.index(group[0]), *rank(group[2][0].run)))
    lines = []
    for where, row, group in groups:
        lines += [line_of(result) | {"setting": where, "row": row} for result in group]
    files = pd.DataFrame(lines)
    # of several files of a Run, a finished one counts
    runs = files.sort_values("finished", ascending=False, kind="stable")
    runs = runs.drop_duplicates(["key", "partition"]).sort_index(ignore_index=True)

    def make(name: str) -> pd.DataFrame:
        pairs = zip(runs["run"], runs["result"], strict=True)
        parts = [FRAMES[name](result).assign(run=run) for run, result in pairs]
        return pd.concat(parts, ignore_index=True)

    position = {str(result.path): i for i, result in enumerate(results)}
    as_given = files.sort_values("run", key=lambda run: run.map(position), kind="stable")
    return Frames(runs, make, as_given)


def with_graphs(frames: Frames) -> pd.DataFrame:
    """Return the frame `graphs`. Raises UserError if no Run has a graph."""
    if not len(out := frames["graphs"]):
        reason = "their clients receive from nobody"
        raise UserError(f"none of these results has a collaboration graph ({reason})")
    return out


def client_order(classes: Iterable[str], groups: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients sorted by their classes, and the most frequent class of each, int `[N]`.

    `classes` are texts such as "3 5 7", as `ranked_classes` returns them; a client without classes
    has -1. With `groups` of clients, texts `[N]`, clients are sorted by these, and the numbers are
    those of the groups in alphabetical order.
    """
    if groups is not None:
        numbers = np.unique(np.asarray(groups, str), return_inverse=True)[1]
        return np.argsort(numbers, kind="stable"), numbers
    ranked = [[*map(int, text.split())] or [-1] for text in classes]
    order = sorted(range(len(ranked)), key=ranked.__getitem__)
    return np.array(order), np.array([of_client[0] for of_client in ranked])
