"""Results as data frames (`of_results`).

    runs        a line per Run: run, setting, row (its name in tables), seed, partition; method, budget, colour and more, see `line_of`
    rows        the first line of `runs` of each setting and row, in the order of tables
    files       a line per result in the order they were named: of a Run that is there twice two
    [clients]   a line per Run and client: test_acc of its best model by validation, val_acc, its round, p, sizes train, val, test, classes
    [scores]    a line per Run and client: its accuracy, balanced accuracy and macro F1 on its test images, of finished Runs
    [curves]    a line per Run and round: means over clients, epochs, and models_epochs, those of all of a client's models
    [graphs]    a line per Run and recorded graph: t, and graph, a function that reads it
    [costs]     a line per Run and point of its curve: accuracy of the best models so far, percent, and what they took
    [newcomers] a line per Run, newcomer and number of its epochs: its accuracy

Averages leave out clients with flipped labels, liars and newcomers; such a client's test_acc is nan. Scores are from 0 to 1 but where it says percent.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures import paper
from dpfl_mpi.figures.names import budget_order, named, own_data, rank, repetitions, setting
from dpfl_mpi.figures.style import look
from dpfl_mpi.methods import Method
from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result, summary
from dpfl_mpi.results.result import METRICS, Declared, mean

WHO = ["run", "setting", "row", "seed", "partition"]  # with which every line of every frame begins


class Frames:
    """Data frames of Runs, read when they are asked for. Of results, lines of `runs` and `files` have each its `result`."""

    def __init__(self, runs: pd.DataFrame, lines: Callable[[str], pd.DataFrame], files: pd.DataFrame | None = None):
        self.runs, self.lines, self.files = runs, lines, runs if files is None else files
        self.rows = runs.drop_duplicates(["setting", "row"], ignore_index=True)
        self.read = functools.cache(lambda name: runs[WHO].merge(lines(name), on="run"))

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self.read(name)

    def of(self, name: str, setting: str, row: str | None = None) -> pd.DataFrame:
        """Return the lines of a frame, or of `runs`, that are of a setting, and of a row of it."""
        lines = self.runs if name == "runs" else self[name]
        return lines[(lines["setting"] == setting) & (True if row is None else lines["row"] == row)]

    def where(self, condition: Any) -> "Frames":
        """Return the frames of the Runs for which `condition`, a column of booleans beside `runs`, is true."""
        runs = self.runs[condition].reset_index(drop=True)
        return Frames(runs, self.lines, self.files[self.files["run"].isin(runs["run"])])


def accuracy(result: Result, metric: str = "accuracy") -> np.ndarray:
    """Return each client's test accuracy, or another of `METRICS`, 0 to 1, `[N]`: that of its best model by validation, fine-tuned where it tunes."""
    return np.where(result.benign, result.score(metric), np.nan)


def ranked_classes(result: Result) -> list[str]:
    """Return each client's classes, the most frequent first, as "3 5 7"."""
    counts = result["client/class_counts"]
    ranked = np.argsort(-counts, axis=1, kind="stable")
    return [listed(c for c in mine if held[c]) for mine, held in zip(ranked, counts, strict=True)]


def listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def clients(result: Result) -> pd.DataFrame:
    best = {"test_acc": accuracy(result), "val_acc": result["best/val_acc"], "round": result["best/round"]}
    sizes = {part: result[f"client/n_{part}"] for part in ("train", "val", "test")}
    out = {"client": np.arange(len(result["client/p"])), **best, "p": result["client/p"], **sizes}
    return pd.DataFrame(out | {"classes": ranked_classes(result)})


def scores(result: Result) -> pd.DataFrame:
    """Return the lines of `scores`: every one of `METRICS`, by client."""
    return pd.DataFrame({metric: accuracy(result, metric) for metric in METRICS}).reset_index(names="client")


def curves(result: Result) -> pd.DataFrame:
    rounds = slice(0, result.last_round + 1)
    out = {"round": result["round/number"][rounds], "epochs": result["round/epochs"][rounds]}
    out |= {name: result.mean(f"round/{name}") for name in ("train_loss", "val_loss", "val_acc", "test_acc")}
    return pd.DataFrame(out).assign(models_epochs=out["epochs"] * result.method.models)


def graphs(result: Result) -> pd.DataFrame:
    """Return the lines of `graphs`: none where no client ever chose. A method that chooses in each round alone has no Omega."""
    rounds = range(0)
    if len(result["graph/chosen/senders"]):
        rounds = range(int(not len(result.chosen(0).senders) and result.last_round > 0), result.last_round + 1)
    lines = [{"t": t, "graph": functools.partial(result.chosen, t)} for t in rounds]
    return pd.DataFrame(lines, columns=["t", "graph"])


def best_so_far(val: np.ndarray, test: np.ndarray, latest: bool) -> np.ndarray:
    """Return the test accuracy of each client's best model by validation so far, from its scores `[T, N]`; of equal ones the latest, or the earliest."""
    out, best, now = np.empty_like(test), np.full(val.shape[1], np.nan), np.full(val.shape[1], np.nan)
    for t in range(len(val)):
        better = np.isnan(best) & np.isfinite(val[t]) | (val[t] > best) | (latest & (val[t] == best))
        best, now = np.where(better, val[t], best), np.where(better, test[t], now)
        out[t] = now
    return out


def costs(result: Result) -> pd.DataFrame:
    """Return the lines of `costs`: up to each round, and each tuning epoch behind them, which has no models and no known seconds."""
    rounds, benign = slice(0, result.last_round + 1), result.benign
    train = len(benign) - (int(result["client/newcomers"].sum()) if "client/newcomers" in result else 0)  # who trains
    out = {
        "accuracy": 100 * mean(result["round/best_test_acc"][rounds, benign]),
        "models": np.cumsum(result["traffic/models_received"][rounds][:, benign].mean(1)),
        "evaluations": np.cumsum(result["graph/evaluations"][rounds][:, benign].mean(1)),
        "steps": result["round/gradient_steps"][rounds] / train,
        "seconds": np.cumsum(summary.curves(result)["seconds"]),
    }
    frame = pd.DataFrame(out)
    if "finetune/val_acc" in result:
        val, test = (result[f"finetune/{part}_acc"][1:, benign] for part in ("val", "test"))
        accuracies = 100 * mean(best_so_far(val, test, result.run.tie == "latest"))
        more = pd.DataFrame({"accuracy": accuracies, "steps": result["finetune/gradient_steps"][1:] / train})
        same = {name: out[name][-1] for name in ("models", "evaluations")}
        frame = pd.concat([frame, more.assign(**same)], ignore_index=True)
    return frame.reset_index(names="point")


def newcomers(result: Result) -> pd.DataFrame:
    who = np.flatnonzero(result["client/newcomers"]) if "newcomers/test_acc" in result else np.zeros(0, int)
    parts = zip(result["newcomers/epochs"], result["newcomers/test_acc"][:, who], strict=True) if len(who) else ()
    each = [pd.DataFrame({"client": who, "epochs": count, "test_acc": scored}) for count, scored in parts]
    return pd.concat([pd.DataFrame({"client": [], "epochs": [], "test_acc": []}), *each])


LINES = {f.__name__: f for f in (clients, scores, curves, graphs, costs, newcomers)}


def line_of(result: Result) -> dict[str, Any]:
    """Return the line of `runs` of a result, but for its setting and its row."""
    run = result.run
    dealt = "" if run.partition_seed == run.seed else f" (partition {run.partition_seed})"
    recorded = 1 if run.churn or (run.options or {}).get("redraw") else run.omega_period
    return {
        "run": str(result.path),
        "seed": run.seed,
        "said_seed": f"seed {run.seed}{dealt}",
        # what two results share that can be compared client by client
        "partition": result.fact("data_sha256") + result.fact("partition_sha256"),
        "key": str(result.key),
        "method": short(run.method),
        "budget": str(run.budget),
        "said_budget": run.said_budget,
        "order": budget_order(run),
        # the first round whose Omega is not the recorded one, as it is mended or made anew; beyond the last where there is none
        "omega_until": int(min(recorded, result.last_round + 1)),
        "tau_init": run.tau_init,
        "ggc_period": run.ggc_period,
        "epochs": summary.epochs(result),
        "finished": result.finished,
        "paper": setting(run) if run.clients == paper.CLIENTS and not own_data(run) else "",
        "result": result,
        **of_method(result.method),
    }


def of_results(results: Sequence[Result]) -> Frames:
    """Return the frames of results: settings in the order of the results, rows in that of tables. A Run that is there twice counts once."""
    groups = named(repetitions(results))
    order = [where for where, _, _ in groups]
    groups.sort(key=lambda g: (order.index(g[0]), *rank(g[2][0].run)))
    files = pd.DataFrame([line_of(r) | {"setting": where, "row": row} for where, row, group in groups for r in group])
    runs = files.sort_values("finished", ascending=False, kind="stable").drop_duplicates(["key", "partition"])
    runs = runs.sort_index(ignore_index=True)

    def read(name: str) -> pd.DataFrame:
        parts = [LINES[name](r).assign(run=run) for run, r in zip(runs["run"], runs["result"], strict=True)]
        return pd.concat(parts, ignore_index=True)

    place = {str(r.path): i for i, r in enumerate(results)}
    return Frames(runs, read, files.sort_values("run", key=lambda run: run.map(place), kind="stable"))


def of_method(method: Method | Declared) -> dict[str, Any]:
    """Return the columns of `runs` that say what a method is, and how its curves look."""
    seen = dict(zip(("colour", "line", "marker"), look(method), strict=True))
    return {name: getattr(method, name) for name in ("topology", "searches", "models")} | seen


def with_graphs(frames: Frames) -> pd.DataFrame:
    """Return `graphs`; a `UserError` where no Run has one."""
    if not len(out := frames["graphs"]):
        raise UserError("none of these results has a collaboration graph (their clients receive from nobody)")
    return out


def client_order(classes: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients by their most frequent class, then their second, and so on, and the most frequent of each client, both int `[N]`."""
    held = [[*map(int, each.split())] or [-1] for each in classes]
    return np.array(sorted(range(len(held)), key=held.__getitem__)), np.array([each[0] for each in held])
