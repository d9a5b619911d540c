"""Reads results files: one HDF5 file per Run, finished or still running.

A Run is the settings that decide the numbers; its key has those that differ from their defaults. A
Job is where and how it is computed. Users and figures open a `Result`; the functions below it tell
the engine whether a Run has been computed. Arrays have the names of `schema.LAYOUT`. Axes: N
clients, C classes, T + 1 rounds, where row 0 is after preprocessing and before round 1. Benign
clients are those that averages count: no attackers, no flipped labels, no newcomers.
Each write replaces the whole file, so it can be opened after a kill at any moment.
"""

from __future__ import annotations

import functools
import glob
import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_mpi.data.source import Source, open_source
from dpfl_mpi.errors import UserError, without_inner_frames
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.plugins import admitted, changes, codes, short
from dpfl_mpi.results import schema
from dpfl_mpi.results.schema import ADDED, ARRAYS, EXEMPT, OVER_ROUNDS, PHASES, SCHEMA
from dpfl_mpi.settings import NUMERICS, Job, Resolved
from dpfl_mpi.settings.run import HEX, stored_run
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, open_regular, refused_as
from dpfl_mpi.storage.lock import Lock

if TYPE_CHECKING:
    import pandas as pd

# the scores of a model, and what tables call them
METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1"}
METRICS |= {"auc": "AUC"}
# flags of a Job that add arrays to a result, each with one array that it adds
ARRAY_OF_FLAG = {"save_models": "model/best", "mixed": "mixed/test_acc"}


def declared(run: Any) -> SimpleNamespace:
    """Return what the method of a Run says of itself (`methods.Method`), without importing it."""
    return SimpleNamespace(**run.declared["method"])


class Result(AbstractContextManager["Result"]):
    """A results file, finished or running, as arrays by the names of `schema.LAYOUT`.

    `result["round/test_acc"]` is an array, `result.graph(t)` the graph of round t.
    """

    @without_inner_frames
    def __init__(self, path: str | os.PathLike[str]):
        """Open a file for reading.

        Raises `UserError` if it is missing, no result, damaged, or of a later version.
        """
        with refused_as(f"{path!r} is no path of a result", (TypeError,)):
            self.path = Path(path)
        if not os.path.exists(self.path):  # Path.exists raises for a name that is too long
            raise UserError(f"{self.path}: there is no such result file")
        self.hdf5 = Hdf5(self.path, "a result of dpfl_mpi")
        self.file = self.hdf5.file
        damaged = refused_as(f"{self.path} is not a result of dpfl_mpi, or it is damaged")
        with ExitStack() as on_error, damaged:
            on_error.callback(self.close)
            version = int(self.file.attrs["schema"])
            if version > SCHEMA:
                reads = f"this version of dpfl_mpi reads up to {SCHEMA}"
                raise UserError(f"{self.path} has schema {version}; {reads}")
            checksum = schema.checksum(
                self.file, self.hdf5.array("meta/starts", "OS", (None,)).tolist()
            )
            if self.file.attrs["checksum"] != checksum:
                raise ValueError
            self.run, self.key = stored_run(self.file.attrs)
            self.method = declared(self.run)
            on_error.pop_all()  # all is well: the file stays open

    def __repr__(self) -> str:
        if not self.file:
            return f"<closed result {self.path}>"
        scored = np.isfinite(self.test_acc)
        accuracy = f"{100 * self.test_acc:.2f} %" if scored else "not known yet"
        return f"<{title(self)}: {self.state}, test accuracy {accuracy}, {self.path}>"

    @property
    def state(self) -> str:
        """ "finished", "running, round t" or "stopped after round t".

        The process that computes a Run holds the lock of its file; without it, it was killed.
        """
        if self.finished:
            return "finished"
        t = self.hdf5.attribute("rounds_done", int)
        running = self.hdf5.attribute("state", str) == "running"
        if running and Lock(self.path).taken():
            return f"running, round {t}"
        return f"stopped after round {t}"

    @property
    def finished(self) -> bool:
        return bool(self.hdf5.attribute("state", str) == "finished")

    @property
    def test_acc(self) -> float:
        """Mean of /best/test_acc over benign clients, 0 to 1; nan before round 0 ends."""
        return float(self.hdf5.attribute("test_acc", float))

    @property
    def benign(self) -> np.ndarray:
        """Which clients count in averages, bool `[N]`."""
        out = self.honest
        return out & ~self["client/newcomers"].astype(bool) if "client/newcomers" in self else out

    @property
    def honest(self) -> np.ndarray:
        """Which clients have right labels and send true models, bool `[N]`."""
        out = np.ones(len(self["client/p"]), bool)
        for name in ("client/flipped", "client/attackers"):
            if name in self:
                out &= ~self[name].astype(bool)
        return out

    def of_newcomers(self) -> dict[int, np.ndarray]:
        """Return the test accuracies of honest newcomers by the epochs that they trained."""
        if "newcomers/test_acc" not in self:
            return {}
        rows = zip(self["newcomers/epochs"], self["newcomers/test_acc"], strict=True)
        return {int(epochs): row[self.honest & np.isfinite(row)] for epochs, row in rows}

    def benign_percentages(self, name: str = "best/test_acc") -> np.ndarray:
        """Return an array's values in percent, for benign clients that have one."""
        of_all = self.score("accuracy") if name == "best/test_acc" else self[name]
        values = 100 * of_all[self.benign]
        return values[np.isfinite(values)]

    @property
    def names(self) -> np.ndarray:
        """The clients' names, texts `[N]`; their numbers where the data have no names."""
        if "client/name" in self:
            return self["client/name"]
        return np.arange(self.run.clients).astype(str)

    @property
    def groups(self) -> np.ndarray | None:
        """The clients' groups, such as domains, texts `[N]`; None where the data have none."""
        return self.rows("client/group") if "client/group" in self else None

    def named(self) -> dict[str, np.ndarray]:
        """Return the arrays `name` and `group` of the clients, as far as the data have them."""
        names = {name: f"client/{name}" for name in ("name", "group")}
        return {name: self[array] for name, array in names.items() if array in self}

    def by_group(self) -> dict[str, float]:
        """Return each group's mean test accuracy over its benign clients, in percent.

        It is nan where none of them was scored. Data without groups give an empty dict.
        """
        if (groups := self.groups) is None:
            return {}
        values = np.where(self.benign, 100 * self["best/test_acc"], np.nan)
        return {str(group): float(mean(values[groups == group])) for group in np.unique(groups)}

    @property
    def class_names(self) -> list[str]:
        """The names of the classes; their numbers where the result does not list names."""
        classes = self["client/class_counts"].shape[1]
        names = list(map(str, self.listed("class_names")))
        return names if len(names) == classes else list(map(str, range(classes)))

    def __contains__(self, name: str) -> bool:
        return name in self.hdf5

    @without_inner_frames
    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by its name; `UserError`: it is missing or damaged."""
        return self.rows(name)

    def rows(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Return some rows of an array, or all of it, with type, shape and range checked."""
        if name not in ARRAYS or name not in self.hdf5:
            raise UserError(f"{self.path} has no {name}; it has {', '.join(sorted(self.arrays()))}")
        layout = ARRAYS[name]
        shape = schema.shape(layout.axes, self.run, self.finished)
        return self.hdf5.array(name, layout.kinds, shape, layout.low, layout.high, rows)

    def stored(self, name: str) -> Any:
        """Return an array as an h5py data set, of which nothing is read yet."""
        layout = ARRAYS[name]
        shape = schema.shape(layout.axes, self.run, self.finished)
        return self.hdf5.dataset(name, layout.kinds, shape)

    def arrays(self) -> list[str]:
        return self.hdf5.names()

    def fact(self, name: str) -> str:
        """Return an attribute of /meta as text, such as data_sha256 or numerics."""
        with self.hdf5.reading(f"the attribute {name} of meta"):
            return str(self.file["meta"].attrs[name])

    def listed(self, name: str) -> list[Any]:
        """Return `class_names`, `mean` or `std` of the data, which are lists in /meta."""
        return list(self.hdf5.json(name, list, "meta"))

    @without_inner_frames
    def omega(self) -> CollaborationGraph:
        return self._graph("graph/omega", self["graph/omega/indptr"], self["graph/omega/senders"])

    @without_inner_frames
    def chosen(self, t: int) -> CollaborationGraph:
        """Return the graph of round t; round 0 is Omega. Only that round is read."""
        indptr_of_rounds = self.stored("graph/chosen/indptr")  # [T+1, N+1]
        senders_of_rounds = self.stored("graph/chosen/senders")  # of all rounds, one after another
        if not isinstance(t, int | np.integer) or t not in range(len(indptr_of_rounds)):
            allowed = f"allowed are 0 to {len(indptr_of_rounds) - 1}"
            raise UserError(f"round {t!r} is not in {self.path}; {allowed}")
        with self.hdf5.reading("graph/chosen"):
            indptr = indptr_of_rounds[t]
            senders = senders_of_rounds[indptr[0] : indptr[-1]]
        return self._graph("graph/chosen", indptr - indptr[0], senders)

    def _graph(self, name: str, indptr: np.ndarray, senders: np.ndarray) -> CollaborationGraph:
        """Return the graph in which client k receives from senders[indptr[k] : indptr[k + 1]]."""
        n = len(indptr) - 1
        senders = senders.astype(np.int64)
        valid = n >= 0 and indptr[0] == 0 and indptr[-1] == len(senders)
        if not valid or (np.diff(indptr) < 0).any() or ((senders < 0) | (senders >= n)).any():
            raise self.hdf5.damaged(name, "is no graph")
        return CollaborationGraph(indptr.astype(np.int64), senders)

    @without_inner_frames
    def graph(self, t: int) -> np.ndarray:
        """Return bool `[N, N]`: entry (k, j) says whether client k averaged with j in round t.

        With --ggc_off_rounds skip, a round without averaging repeats the one before.
        """
        return self.chosen(t).matrix()

    @property
    def last_round(self) -> int:
        """The last round that is recorded completely, -1 before there is one."""
        # an error within a round may have left its row in some arrays only
        names = ["round/number"] if self.finished else OVER_ROUNDS
        rows = min((len(self.stored(name)) for name in names if name in self), default=0)
        # rounds_done also counts the epochs of fine-tuning, which are no rounds
        return max(-1, min(self.hdf5.attribute("rounds_done", int), rows - 1))

    def check_begun(self) -> None:
        """Raise `UserError` if no round is recorded yet."""
        if self.last_round < 0:
            running = self.state.startswith("running")
            state = "is running" if running else "was stopped; the same command starts it again"
            raise UserError(f"{self.path} {state}: no round is recorded yet")

    def mean(self, name: str) -> np.ndarray:
        """Return the mean of an array `[T+1, N]` over benign clients' finite values, `[T+1]`.

        A client that stopped early keeps the value of its last round.
        """
        values = self[name][: self.last_round + 1]
        if "client/stopped_round" in self:
            stopped, t = self["client/stopped_round"], np.arange(len(values))[:, None]
            values = np.take_along_axis(values, np.where(stopped < 0, t, np.minimum(t, stopped)), 0)
        return mean(values.compress(self.benign, 1))

    def local_epochs(self) -> np.ndarray:
        """Return a client's local epochs up to each round, of all its models together, `[T+1]`."""
        return np.multiply(self["round/epochs"], self.method.models)

    def all_epochs(self) -> int:
        """Return a client's local epochs in the whole run, fine-tuning included."""
        tuned = self.run.finetune_epochs if "finetune/epochs" in self else 0
        return int(self.local_epochs()[self.last_round]) + tuned

    def by_round(self) -> dict[str, np.ndarray]:
        """Return the columns of `curves`, arrays `[T+1]`; empty before there is a round."""
        rows = self.last_round + 1
        if not rows:
            return {}
        means = ("train_loss", "val_loss", "val_acc", "test_loss", "test_acc")
        out = {"epochs": self.local_epochs()[:rows]}
        out |= {name: self.mean(f"round/{name}") for name in means}
        out["edges"] = np.diff(self["graph/chosen/indptr"][:rows], axis=1).sum(1)
        counted = self.benign
        counted = counted if counted.any() else ~counted
        out["models_received"] = self["traffic/models_received"][:rows, counted].mean(1)
        # column 1 is the mean of the ranks
        out["seconds"] = sum(self[f"seconds/{phase}"][:rows, 1] for phase in PHASES)
        if "network/end" in self:  # a round ends with its last client
            out["hours"] = np.maximum.accumulate(self["network/end"][:rows].max(1)) / 3600
        if "traffic/bytes_sent" in self:
            out["bytes_sent"] = self["traffic/bytes_sent"][:rows].mean(1)
        return out

    @without_inner_frames
    def curves(self) -> pd.DataFrame:
        """Return one row per round; round 0 is after preprocessing.

        Losses and accuracies (0 to 1) are means over the benign clients that took part, those that
        stopped early included; models_received over all benign clients, bytes_sent over all.
        epochs are the most of any client, of all its models; edges those of the round's graph.
        seconds are the mean of the ranks, waiting included; hours (--network) are simulated.
        """
        return data_frame(self.by_round(), "round")

    @without_inner_frames
    def to_pandas(self) -> pd.DataFrame:
        """Return one row per client: /client, /best and /last, and scores by class.

        `/client/NAME` is the column NAME, `/best/NAME` is best_NAME, `/last/NAME` is last_NAME.
        name and group, where the data have them, come first.
        Accuracies are from 0 to 1. `collaborators` counts a client's senders in the last graph,
        `models_received` is over the whole run.
        """
        return data_frame(self.by_client(), "client")

    def by_client(self) -> dict[str, np.ndarray]:
        """Return the columns of `to_pandas`, arrays `[N]`."""
        columns = self.named()
        for name in self.arrays():
            group, _, rest = name.partition("/")
            if group in ("client", "best", "last") and name in ARRAYS and ARRAYS[name].axes == "N":
                columns[rest if group == "client" else f"{group}_{rest}"] = self[name]
        if "best/confusion" in self:
            columns |= {metric: self.score(metric) for metric in ("balanced_accuracy", "macro_f1")}
        if self.last_round >= 0:
            columns["collaborators"] = self.chosen(self.last_round).degrees()
            columns["models_received"] = self["traffic/models_received"].sum(0)
        return columns

    def attackers_chosen(self) -> np.ndarray:
        """Return for each edge to a benign client, in rounds 1 to T, whether the sender attacks.

        It is bool `[edges]`, and empty without --attack.
        """
        out = [np.zeros(0, bool)]
        if "client/attackers" in self:
            is_attacker = self["client/attackers"].astype(bool)
            for t in range(1, self.last_round + 1):
                graph = self.chosen(t)
                to_benign = self.benign[graph.receivers()]
                out.append(is_attacker[graph.senders[to_benign]])
        return np.concatenate(out)

    @without_inner_frames
    def score(self, metric: str) -> np.ndarray:
        """Return one of `METRICS` for each client's best model, on its own test images, `[N]`.

        Scores are from 0 to 1. Only the accuracy is known before the end of the run.
        """
        if metric not in METRICS:
            raise UserError(f"there is no score {metric}; allowed are {', '.join(METRICS)}")
        if metric == "accuracy":
            of_best = self["best/test_acc"]
            # names of arrays have no checksum: without client/flipped the mean would be another
            if self.finished and abs(mean(of_best[self.benign]) - self.test_acc) > 1e-6:
                raise self.hdf5.damaged("best/test_acc", "has another mean than the one stored")
            return of_best
        if "best/confusion" not in self:
            reason = f"{metric} needs the confusion matrices, which are written at the end"
            raise UserError(f"{self.path} is {self.state}: {reason}")
        if metric == "auc":  # which older results lack
            has_auc = "best/test_auc" in self
            return self["best/test_auc"] if has_auc else np.full(self.run.clients, np.nan)
        return score(self["best/confusion"], metric)

    @without_inner_frames
    def state_dict(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's best model: float32 arrays by layer name.

        Give `load_state_dict` its arrays as tensors. All are 0 for a client that was never scored,
        whose `/best/round` is -1.
        """
        if "model/best" not in self:
            raise UserError(f"{self.path} holds no models; a run with --save_models ends with them")
        models = self.stored("model/best")  # one row of D parameters per client
        whole = isinstance(client, int | np.integer) and not isinstance(client, bool)
        if not whole or client not in range(len(models)):
            allowed = f"allowed are 0 to {len(models) - 1}"
            raise UserError(f"client {client!r} is not in {self.path}; {allowed}")
        names, shapes = (self.hdf5.json(name, list, "model") for name in ("names", "shapes"))
        with self.hdf5.reading("model/best"):
            # the row has the layers one after the other
            ends = np.cumsum([math.prod(shape) for shape in shapes])
            layers = zip(names, shapes, np.split(models[client], ends[:-1]), strict=True)
            return {name: values.reshape(shape) for name, shape, values in layers}

    @functools.cached_property
    @without_inner_frames
    def source(self) -> Source:
        """The data of the run, from where the run had them; `UserError` if they differ now."""
        stored_code, name = codes(self.run.contents).get("dataset"), self.run.dataset
        if stored_code and stored_code != admitted("dataset", name):
            mend = f"name it with --dataset ({name}), in Python Result(path, dataset=...)"
            raise UserError(f"the run's data set is code of its own; {mend}")
        source = open_source(self.run)
        if source.sha256 != self.fact("data_sha256"):
            raise UserError(f"{self.run.data} does not hold the data of {self.path}")
        return source

    @without_inner_frames
    def starts(self) -> list[dict[str, Any]]:
        """Return one description per start of the run: time, hosts, ranks, devices, versions."""
        texts = self.hdf5.array("meta/starts", "OS", (None,))
        with self.hdf5.reading("meta/starts"):
            return [dict(json.loads(text)) for text in texts]

    @property
    def warning(self) -> str:
        """Why PyTorch computed in place of the kernels at the last start; "" if it did not."""
        return str((self.starts() or [{}])[-1].get("warning", ""))

    def close(self) -> None:
        self.hdf5.file.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def differences(a: Result, b: Result) -> list[str]:
        """Return the names of the arrays that differ in a bit, or that one result lacks.

        Times are left out, and so is what only one has because of --save_models or --mixed.
        """
        names_a, names_b = ({n for n in r.arrays() if not n.startswith(EXEMPT)} for r in (a, b))
        out = sorted(n for n in names_a ^ names_b if not n.startswith(ADDED))
        for name in sorted(names_a & names_b):
            x, y = a[name], b[name]  # compared as bytes, so that nan equals nan
            if (x.shape, x.dtype, x.tobytes()) != (y.shape, y.dtype, y.tobytes()):
                out.append(name)
        return out

    @staticmethod
    def same_numbers(a: Result, b: Result) -> bool:
        """Return whether two results are of one Run and hold the same numbers to the bit."""
        return a.key == b.key and not Result.differences(a, b)


def title(result: Result) -> str:
    """Return the settings that matter most, as one line."""
    run, limit = result.run, limit_text(result.run)
    what = f"{short(run.method)} on {short(run.dataset)}, {run.partition}, {run.clients} clients"
    return f"{what}, {limit and f'{limit}, '}{rounds_text(result)}, seed {run.seed}"


def rounds_text(result: Result) -> str:
    """Return "20 rounds", or "7 of 20 rounds" of a run that ended as all clients had stopped."""
    ended_early = result.finished and result.last_round < result.run.rounds
    return f"{f'{result.last_round} of ' if ended_early else ''}{result.run.rounds} rounds"


def limit_text(run: Resolved) -> str:
    """Return what limits a Run's graph: its budget B_c, or the given graph; "" without a graph."""
    method = declared(run)
    if method.topology != "graph":
        return ""
    return Path(str(run.graphs)).stem if method.given else f"B_c = {run.typed_budget}"


def data_frame(columns: Mapping[str, Any], index: str) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError:
        raise UserError("a table needs pandas: pip install pandas") from None
    return pd.DataFrame(columns).rename_axis(index)


def is_torn(path: Path) -> bool:
    """Return whether an unreadable file is empty or begins as HDF5: it is ours, torn by a kill."""
    with suppress(UserError), open_regular(path) as file:
        return file.read(8) in (b"", b"\x89HDF\r\n\x1a\n")
    return False


def check_replaceable(path: Path) -> None:
    """Raise `UserError` if the file that --fresh would replace is not a result."""
    replaceable = not os.path.lexists(path)
    with suppress(UserError), Hdf5(path, "a result") as hdf5:
        is_result = {"run", "schema", "state"} <= set(hdf5.file.attrs)
        replaceable = is_result and not path.is_symlink()
    if not replaceable:
        only = "--fresh replaces nothing else; remove it, or choose another --out"
        raise UserError(f"{path} is not a result of dpfl_mpi, and {only}")


def score(confusion: np.ndarray, metric: str) -> np.ndarray:
    """Return balanced accuracy or macro F1, 0 to 1, of confusion matrices `[..., C, C]`.

    Rows are true classes, columns predicted ones. It is nan for a matrix without an image.
    """
    counts = np.asarray(confusion, np.float64)
    right = np.diagonal(counts, axis1=-2, axis2=-1)
    true, predicted = counts.sum(-1), counts.sum(-2)
    if metric == "balanced_accuracy":  # mean of the recalls of the classes that the images have
        return mean(ratio(right, true))
    return mean(ratio(2 * right, true + predicted))  # F1 of these and of the classes predicted


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve, mean over the classes of the images, from 0 to 1.

    For a class it is the chance that an image of it has a higher probability of the class than an
    image of another one; ties count a half. It is nan with one class. `logits` are `[M, C]`.
    """
    if not np.isfinite(logits).all():  # an exploded model
        return math.nan
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(1, keepdims=True)
    probability = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    areas = [math.nan]
    for c in np.unique(labels):
        # Mann and Whitney: the area follows from the ranks of the class's images, from 1 to M
        _, index, counts = np.unique(probability[:, c], return_inverse=True, return_counts=True)
        rank = (np.cumsum(counts) - (counts - 1) / 2)[index]  # equal values share their mean rank
        of_class = labels == c
        n, others = int(of_class.sum()), int((~of_class).sum())
        if others:
            areas.append((rank[of_class].sum() - n * (n + 1) / 2) / (n * others))
    return float(mean(np.array(areas)))


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, nan where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values over the last axis, nan where there is none."""
    finite = np.isfinite(values)
    return ratio(np.where(finite, values, 0).sum(-1), finite.sum(-1))


def result_of(key: Mapping[str, Any], path: Path) -> Result:
    """Return the result at a path, open; `UserError` if it is not of the Run that has this key."""
    result = Result(path)
    if differing := differing_fields(key, result.key):
        result.close()
        names = ", ".join(sorted(differing))
        raise UserError(f"{path} holds another Run (different: {names})")
    return result


def differing_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    return {name for name in {*a, *b} if a.get(name) != b.get(name)}


def changed_code(run: Resolved, path: Path) -> str:
    """Return a note which parts of the user's own code were edited since a result beside `path`.

    Its Run differs in this code alone, and will not be continued. "" without such a result.
    """
    key, own_code = run.key(), codes(run.contents)
    # their names differ in the last digits alone, a hash of the key
    pattern = glob.escape(path.stem[:-HEX]) + "?" * HEX + ".h5"
    for other in path.parent.glob(pattern) if own_code else ():
        with suppress(UserError), Result(other) as result:
            kinds = differing_fields(key, result.key)  # such as "method"
            if not kinds or not kinds <= {*own_code}:
                continue
            if all(getattr(run, kind) == getattr(result.run, kind) for kind in kinds):  # its path
                then, now = dict[str, str](), dict[str, str]()  # hashes of functions and classes
                for kind in kinds:
                    then |= result.run.declared[kind].get("parts", {})
                    now |= run.declared[kind]["parts"]
                return f"{changes(now, then)} ({other}): this is another Run"
    return ""


def check_current(result: Result, run: Resolved, job: Job) -> None:
    """Raise `UserError` if a finished result of this Run is not what the Run would give now.

    It may lack arrays that the Job asks for, or be of other numerics or of data that have changed.
    """
    done = f"{result.path} is finished and was computed"
    anew = "choose another --out, or compute it anew with --fresh"
    asked = [flag for flag in ARRAY_OF_FLAG if getattr(job, flag)]
    if absent := [f"--{flag}" for flag in asked if ARRAY_OF_FLAG[flag] not in result]:
        lacks = " and ".join(absent)
        raise UserError(f"{done} without {lacks}; --fresh computes it anew, with it")
    numerics = result.hdf5.attribute("numerics", int, "meta")
    if numerics != NUMERICS:
        of = f"version {numerics} of the numbers; it is {NUMERICS} now (see CHANGELOG.md)"
        raise UserError(f"{done} under {of}: {anew}")
    if run.data and not hasattr(run.found("dataset"), "load"):  # data in a prepared file
        then = now = result.hdf5.attribute("data_sha256", str, "meta", "")
        with suppress(UserError), Hdf5(Path(run.data), "a prepared file") as file:
            now = file.attribute("sha256", str, default=then)
        if now != then:
            of = f"other data: {run.data} has the sha256 {now[:12]} now, and had {then[:12]} then"
            raise UserError(f"{done} from {of}; bring back those data, {anew}")


def date_started(
    run: Resolved, key: Mapping[str, Any], path: Path, job: Job, has_copy: bool
) -> str | None:
    """Return when a finished result was last started ("": unknown), None if there is none.

    A file torn by a kill counts as not there where a checkpoint folder `has_copy` of it. A
    `UserError` if the result is not what the Run would give now, or another file is in the way.
    """
    if not os.path.lexists(path):
        return None
    try:
        result = result_of(key, path)
    except UserError as error:
        if isinstance(error, Unreadable) and has_copy and is_torn(path):
            return None
        raise UserError(f"{error}; move it away, and the same command computes it anew") from None
    with result:
        if not result.finished:
            return None
        check_current(result, run, job)
        starts = result.starts()
    return str(starts[-1].get("time", ""))[:16].replace("T", " ") if starts else ""
