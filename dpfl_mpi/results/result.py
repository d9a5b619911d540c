"""Reads a results file: one HDF5 file per Run, finished or running.

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
from dataclasses import dataclass, field
from pathlib import Path
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

# scores, and their names in words
METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1"}
METRICS |= {"auc": "AUC"}
# flags of a Job that add arrays to a result, and one of those arrays
ADDS = {"save_models": "model/best", "mixed": "mixed/test_acc"}


@dataclass(frozen=True)
class Declared:
    """What a `methods.Method` declares, stored so that readers import no method."""

    title: str = ""
    look: str = ""
    citation: str = ""
    topology: str = "graph"
    searches: bool = True
    finetunes: bool = True
    given: bool = False
    models: int = 1
    unread: list[str] = field(default_factory=list)


def declared(run: Any) -> Declared:
    """Return what the method of a resolved Run declares."""
    known = run.declared["method"]
    if "look" not in known:  # of an older result
        known = known | {"look": f"{known['colour']} {known['line']} {known['marker']}"}
    return Declared(**{name: known[name] for name in vars(Declared()) if name in known})


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
            checksum = schema.checksum(self.file, self.hdf5.texts("meta/starts"))
            if self.file.attrs["checksum"] != checksum:
                raise ValueError
            self.run, self.key = stored_run(self.file.attrs)
            self.method: Declared = declared(self.run)
            on_error.pop_all()

    def __repr__(self) -> str:
        known = np.isfinite(self.test_acc)
        accuracy = f"{100 * self.test_acc:.2f} %" if known else "not known yet"
        return f"<{title(self)}: {self.state}, test accuracy {accuracy}, {self.path}>"

    @property
    def state(self) -> str:
        """ "finished", "running, round t" or "stopped after round t".

        A run is running while it holds the lock.
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
        """Clients that count in averages, bool `[N]`: no flipped labels, attackers or newcomers."""
        out = np.ones(len(self["client/p"]), bool)
        for name in ("client/flipped", "client/liars", "client/newcomers"):
            if name in self:
                out &= ~self[name].astype(bool)
        return out

    def benign_percentages(self, name: str = "best/test_acc") -> np.ndarray:
        """Return an array's values in percent, for benign clients that have one."""
        values = 100 * self[name][self.benign]
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
        """Return the clients' `name` and `group`, texts `[N]`, as far as the data have them."""
        names = {name: f"client/{name}" for name in ("name", "group")}
        return {name: self[array] for name, array in names.items() if array in self}

    def by_group(self) -> dict[str, float]:
        """Return the mean test accuracy of each group's benign clients, percent, in their order.

        It is nan where none of them was scored, and empty where the data have no groups.
        """
        if (groups := self.groups) is None:
            return {}
        values = np.where(self.benign, 100 * self["best/test_acc"], np.nan)
        return {str(g): float(mean(values[groups == g])) for g in np.unique(groups)}

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, their numbers where the result does not list names."""
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
        """Return some rows of an array, or all of it; type, shape and range are checked."""
        if name not in ARRAYS or name not in self.hdf5:
            raise UserError(f"{self.path} has no {name}; it has {', '.join(sorted(self.arrays()))}")
        kinds, axes, low, high = ARRAYS[name]
        shape = schema.shape(axes, self.run, self.finished)
        return self.hdf5.array(name, kinds, shape, low, high, rows)

    def stored(self, name: str) -> Any:
        """Return an array of `LAYOUT` as an h5py data set, unread."""
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
        """Return class_names, mean or std of the data, lists in /meta; empty if it has none."""
        with self.hdf5.reading(f"the attribute {name} of meta"):
            if name not in self.file["meta"].attrs:
                return []
        return list(self.hdf5.json(name, list, "meta"))

    @without_inner_frames
    def omega(self) -> CollaborationGraph:
        return self._graph("graph/omega", self["graph/omega/indptr"], self["graph/omega/senders"])

    @without_inner_frames
    def chosen(self, t: int) -> CollaborationGraph:
        """Return the graph of round t; round 0 is Omega. Only that round is read."""
        indptr_TN, senders_E = (self.stored(f"graph/chosen/{n}") for n in ("indptr", "senders"))
        if t not in range(len(indptr_TN)):
            allowed = f"allowed are 0 to {len(indptr_TN) - 1}"
            raise UserError(f"round {t!r} is not in {self.path}; {allowed}")
        with self.hdf5.reading("graph/chosen"):
            indptr = indptr_TN[t]
            senders = senders_E[indptr[0] : indptr[-1]]
        return self._graph("graph/chosen", indptr - indptr[0], senders)

    def _graph(self, name: str, indptr: np.ndarray, senders: np.ndarray) -> CollaborationGraph:
        n = len(indptr) - 1
        senders = senders.astype(np.int64)
        valid = n >= 0 and indptr[0] == 0 and indptr[-1] == len(senders)
        if not valid or (np.diff(indptr) < 0).any() or (senders >= n).any():
            raise self.hdf5.damaged(name, "is no graph")
        return CollaborationGraph(indptr.astype(np.int64), senders)

    @without_inner_frames
    def graph(self, t: int) -> np.ndarray:
        """Return bool `[N, N]`: (k, j) if client k averaged with client j in round t.

        With --ggc_off_rounds skip, a round without averaging repeats the one before.
        """
        return self.chosen(t).matrix()

    @property
    def last_round(self) -> int:
        """Number of the last round that is recorded completely, -1 before there is one."""
        names = ["round/number"] if self.finished else OVER_ROUNDS
        rows = min((len(self.stored(name)) for name in names if name in self), default=0)
        # in rounds_done fine-tuning epochs continue the count, but they are no rounds
        return max(-1, min(self.hdf5.attribute("rounds_done", int), rows - 1))

    def check_begun(self) -> None:
        """Raise `UserError` if no round is recorded yet."""
        if self.last_round < 0:
            running = self.state.startswith("running")
            how = "is running" if running else "was stopped; the same command starts it again"
            raise UserError(f"{self.path} {how}: no round is recorded yet")

    def mean(self, name: str) -> np.ndarray:
        """Return the mean of an array `[T+1, N]` over benign clients' finite values, `[T+1]`."""
        return mean(self[name][: self.last_round + 1].compress(self.benign, 1))

    def local_epochs(self) -> np.ndarray:
        """Return the local epochs of a client up to each round, over all its models, `[T+1]`."""
        return np.multiply(self["round/epochs"], self.method.models)

    def all_epochs(self) -> int:
        """Return the local epochs of a client over all its models, fine-tuning included."""
        tuned = self.run.finetune_epochs if "finetune/epochs" in self else 0
        return int(self.local_epochs()[self.last_round]) + tuned

    def by_round(self) -> dict[str, np.ndarray]:
        """Return what `curves` has, as arrays `[T+1]` by name; empty before there is a round."""
        rows = self.last_round + 1
        if not rows:
            return {}
        means = ("train_loss", "val_loss", "val_acc", "test_loss", "test_acc")
        out = {"epochs": self.local_epochs()[:rows]}
        out |= {name: self.mean(f"round/{name}") for name in means}
        out["edges"] = np.diff(self["graph/chosen/indptr"][:rows], axis=1).sum(1)
        out["models_received"] = self["traffic/models_received"][:rows].mean(1)
        out["seconds"] = sum(self[f"seconds/{phase}"][:rows, 1] for phase in PHASES)
        if "network/end" in self:
            out["hours"] = np.maximum.accumulate(self["network/end"][:rows].max(1)) / 3600
        if "traffic/bytes_sent" in self:
            out["bytes_sent"] = self["traffic/bytes_sent"][:rows].mean(1)
        return out

    @without_inner_frames
    def curves(self) -> pd.DataFrame:
        """Return one row per round; round 0 is after preprocessing.

        Losses and accuracies (0 to 1) are means over benign clients, models_received and
        bytes_sent over all clients. epochs counts all models of a client, edges the round's
        graph. seconds are those of a rank, waiting included; hours (--network) are simulated.
        """
        return data_frame(self.by_round(), "round")

    @without_inner_frames
    def to_pandas(self) -> pd.DataFrame:
        """Return one row per client: every array of one number per client.

        `/client/NAME` is the column NAME, `/best/NAME` is best_NAME, `/last/NAME` is last_NAME.
        name and group, where the data have them, come first.
        Accuracies are from 0 to 1. `collaborators` counts a client's senders in the last graph,
        `models_received` is over the whole run.
        """
        return data_frame(self.by_client(), "client")

    def by_client(self) -> dict[str, np.ndarray]:
        """Return what `to_pandas` has, as arrays `[N]` by name."""
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

    def liars_chosen(self) -> np.ndarray:
        """Return whether the sender lies, for each edge to a benign client in rounds 1 to T.

        It is bool `[edges]`, and empty without --attack.
        """
        out = [np.zeros(0, bool)]
        if "client/liars" in self:
            liars, benign = self["client/liars"].astype(bool), self.benign
            graphs = (self.chosen(t) for t in range(1, self.last_round + 1))
            out += [liars[graph.senders[benign[graph.receivers()]]] for graph in graphs]
        return np.concatenate(out)

    @without_inner_frames
    def score(self, metric: str) -> np.ndarray:
        """Return one of `METRICS` for each client's best model, on its own test images, `[N]`.

        Scores are from 0 to 1. Only the accuracy is known before the end of the run.
        """
        if metric not in METRICS:
            raise UserError(f"there is no score {metric}; allowed are {', '.join(METRICS)}")
        if metric == "accuracy":
            return self["best/test_acc"]
        if "best/confusion" not in self:
            reason = f"{metric} needs the confusion matrices, which are written at the end"
            raise UserError(f"{self.path} is {self.state}: {reason}")
        if metric == "auc":  # of older results unknown
            known = "best/test_auc" in self
            return self["best/test_auc"] if known else np.full(self.run.clients, np.nan)
        return score(self["best/confusion"], metric)

    @without_inner_frames
    def state_dict(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's best model: arrays float32 by layer name.

        `module.load_state_dict({k: torch.from_numpy(v) ...})` takes it. All are 0 for a client
        that was never scored, whose `/best/round` is -1.
        """
        if "model/best" not in self:
            raise UserError(f"{self.path} holds no models; run with --save_models")
        rows_ND = self.stored("model/best")
        if client not in range(len(rows_ND)):
            allowed = f"allowed are 0 to {len(rows_ND) - 1}"
            raise UserError(f"client {client!r} is not in {self.path}; {allowed}")
        names, shapes = (self.hdf5.json(name, list, "model") for name in ("names", "shapes"))
        with self.hdf5.reading("model/best"):
            ends = np.cumsum([math.prod(shape) for shape in shapes])
            layers = zip(names, shapes, np.split(rows_ND[client], ends[:-1]), strict=True)
            return {name: values.reshape(shape) for name, shape, values in layers}

    @functools.cached_property
    @without_inner_frames
    def source(self) -> Source:
        """The data of the run, from the file that the run names; `UserError` if they differ."""
        own, name = codes(self.run.contents).get("dataset"), self.run.dataset
        if own and own != admitted("dataset", name):
            how = f"name it with --dataset ({name}), in Python Result(path, dataset=...)"
            raise UserError(f"the run's data set is code of its own; {how}")
        source = open_source(self.run)
        if source.sha256 != self.fact("data_sha256"):
            raise UserError(f"{self.run.data} does not hold the data of {self.path}")
        return source

    @without_inner_frames
    def starts(self) -> list[dict[str, Any]]:
        """Return one description per start of the run: time, hosts, ranks, devices, versions."""
        texts = self.hdf5.texts("meta/starts")
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

        Provenance is left out, and so are arrays that only one has by --save_models or --mixed.
        """
        names_a, names_b = ({n for n in r.arrays() if not n.startswith(EXEMPT)} for r in (a, b))
        out = sorted(n for n in names_a ^ names_b if not n.startswith(ADDED))
        for name in sorted(names_a & names_b):
            x, y = a[name], b[name]
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
    where = f"{short(run.method)} on {short(run.dataset)}, {run.partition}, {run.clients} clients"
    return f"{where}, {limit and f'{limit}, '}{run.rounds} rounds, seed {run.seed}"


def limit_text(run: Resolved) -> str:
    """Return what names a Run's graph: B_c, or the --graphs that decide it; "" without one."""
    about = declared(run)
    if about.topology != "graph":
        return ""
    return Path(str(run.graphs)).stem if about.given else f"B_c = {run.typed_budget}"


def data_frame(columns: Mapping[str, Any], index: str) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError:
        raise UserError("a table needs pandas: pip install pandas") from None
    return pd.DataFrame(columns).rename_axis(index)


def is_torn(path: Path) -> bool:
    """Return whether an unreadable file begins as HDF5: a checkpoint may replace it."""
    with suppress(UserError), open_regular(path) as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"
    return False


def check_replaceable(path: Path) -> None:
    """Raise `UserError` if --fresh would replace something else than a result."""
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
    # the mean is over the classes of the client's images; F1 also counts predicted classes
    if metric == "balanced_accuracy":
        return mean(ratio(right, true))
    return mean(ratio(2 * right, true + predicted))


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve of a class against the rest, from 0 to 1.

    Images are ordered by the probability of the class; ties count a half. The mean is over the
    classes of the images; nan if there is one class alone. Logits are `[S, C]`.
    """
    x = logits.astype(np.float64)
    probability = np.exp(x - x.max(1, keepdims=True))
    probability /= probability.sum(1, keepdims=True)
    areas = [math.nan]
    for c in np.unique(labels):
        _, place, counts = np.unique(probability[:, c], return_inverse=True, return_counts=True)
        rank = (np.cumsum(counts) - (counts - 1) / 2)[place]
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
    """Return the result at a path named after the Run of a key; `UserError`: it is another's."""
    result = Result(path)
    differing = sorted(n for n in {*key, *result.key} if key.get(n) != result.key.get(n))
    if differing:
        result.close()
        raise UserError(f"{path} holds another Run (different: {', '.join(differing)})")
    return result


def changed_code(run: Resolved, path: Path) -> str:
    """Return how code of one's own differs from that of a result which is the same Run otherwise.

    "" where there is no such result beside `path`.
    """
    key, own = run.key(), codes(run.contents)
    pattern = glob.escape(path.stem[:-HEX]) + "?" * HEX + ".h5"
    for other in path.parent.glob(pattern) if own else ():
        with suppress(UserError), Result(other) as result:
            differing = {n for n in {*key, *result.key} if key.get(n) != result.key.get(n)}
            same_files = all(getattr(run, k) == getattr(result.run, k) for k in differing & {*own})
            if differing and differing <= {*own} and same_files:
                declared = result.run.declared
                then = {n: d for k in differing for n, d in declared[k].get("parts", {}).items()}
                now = {n: d for k in differing for n, d in run.declared[k]["parts"].items()}
                return f"{changes(now, then)} ({other}): this is another Run"
    return ""


def check_current(result: Result, run: Resolved, job: Job) -> None:
    """Raise `UserError` if a finished result of this Run is not what the Run would give now.

    It may lack what the Job adds, or be of other numerics or data. Data that are gone do not count.
    """
    done = f"{result.path} is finished and was computed"
    anew = "choose another --out, or compute it anew with --fresh"
    absent = [flag for flag, name in ADDS.items() if getattr(job, flag) and name not in result]
    if absent:
        lacks = " and ".join(f"--{flag}" for flag in absent)
        raise UserError(f"{done} without {lacks}; --fresh computes it anew, with it")
    numerics = result.hdf5.attribute("numerics", int, "meta")
    if numerics != NUMERICS:
        of = f"version {numerics} of the numbers; it is {NUMERICS} now (see CHANGELOG.md)"
        raise UserError(f"{done} under {of}: {anew}")
    if run.data and not hasattr(run.found("dataset"), "load"):
        then = now = result.hdf5.attribute("data_sha256", str, "meta", "")
        with suppress(UserError), Hdf5(Path(run.data), "a prepared file") as file:
            now = file.attribute("sha256", str, default=then)
        if now != then:
            of = f"other data: {run.data} has the sha256 {now[:12]} now, and had {then[:12]} then"
            raise UserError(f"{done} from {of}; bring back those data, {anew}")


def date_finished(
    run: Resolved, key: Mapping[str, Any], path: Path, job: Job, has_copy: bool
) -> str | None:
    """Return when a result was finished ("": unknown), None where it is not there or not finished.

    A torn one counts as not there if a checkpoint `has_copy` of what it recorded. Raises
    `UserError` where it is not what the Run would give now, or another file is in the way.
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
