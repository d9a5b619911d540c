"""Reading a results file: one HDF5 file per Run, finished or running. The whole file is replaced, so after a kill at any moment it opens."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.results import schema
from dpfl_mpi.results.schema import ADDED, ARRAYS, EXEMPT, OVER_ROUNDS, SCHEMA
from dpfl_mpi.settings import NUMERICS, Job, Resolved, Run
from dpfl_mpi.settings.run import stored_run
from dpfl_mpi.storage.foreign import Hdf5, open_regular, refused_as
from dpfl_mpi.storage.lock import Lock

METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1"}  # and in words
KEPT = {"save_models": "model/best", "mixed": "mixed/test_acc"}  # what flags of a Job add to a result
STATES = {"running": "running, round {}", "stopped": "stopped after round {}", "finished": "finished"}


@dataclass(frozen=True)
class Declared:
    """What a method's file declares, as far as readers ask, none of whom imports it: see the fields of these names of `methods.Method`."""

    title: str = ""
    colour: str = ""
    line: str = "-"
    marker: str = "o"
    citation: str = ""
    topology: str = "graph"
    searches: bool = True
    finetunes: bool = True
    models: int = 1
    unread: list[str] = field(default_factory=list)


def declared(run: Any) -> Declared:
    """Return what the method of a resolved Run declares; `ValueError`: it is what no method can declare."""
    facts = {name: run.declared["method"][name] for name in vars(Declared())}
    typed = all(type(facts[name]) is type(value) for name, value in vars(Declared()).items())
    if not (typed and 1 <= facts["models"] <= 1000 and all(isinstance(name, str) for name in facts["unread"])):
        raise ValueError(f"the method declares {facts}")
    return Declared(**facts)


class Result(contextlib.AbstractContextManager["Result"]):
    """A results file as arrays by the names of `schema.LAYOUT`: `result["round/test_acc"]`, `result.graph(t)`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Open a finished, stopped or running file for reading; `UserError`: none is there, it is no result, damaged, or of a later schema."""
        with refused_as(f"{path!r} is no path of a result", (TypeError,)):
            self.path = Path(path)
        if not os.path.exists(self.path):  # Path.exists raises for a name that is too long
            raise UserError(f"{self.path}: there is no such result file")
        self.hdf5 = Hdf5(self.path, "a result of dpfl_mpi")
        self.file = self.hdf5.file
        damaged = refused_as(f"{self.path} is not a result of dpfl_mpi, or it is damaged")
        with contextlib.ExitStack() as unless_read, damaged:
            unless_read.callback(self.close)
            if (version := int(self.file.attrs["schema"])) > SCHEMA:
                raise UserError(f"{self.path} has schema {version}; this version of dpfl_mpi reads up to {SCHEMA}")
            if self.file.attrs["checksum"] != schema.seal(self.file, self.hdf5.texts("meta/starts")):
                raise ValueError
            self.run, self.key = stored_run(self.file.attrs)
            self.method: Declared = declared(self.run)
            unless_read.pop_all()

    @property
    def state(self) -> str:
        """ "finished", "running, round t" while a run holds the lock or has written on since this was opened, else "stopped after round t"."""
        with self.hdf5.reading("its state"):
            state, t = self.file.attrs["state"], self.file.attrs["rounds_done"]
            killed = state == "running" and not Lock(self.path).taken() and not self.hdf5.replaced()
            return STATES["stopped" if killed else state].format(t)

    @property
    def finished(self) -> bool:
        with self.hdf5.reading("its state"):
            return bool(self.file.attrs["state"] == "finished")

    @property
    def test_acc(self) -> float:
        """Mean over benign clients of /best/test_acc in the last round that is recorded, nan before there is one."""
        return float(self.hdf5.attribute("test_acc", float))

    @property
    def benign(self) -> np.ndarray:
        """Which clients averages are over, bool `[N]`: no flipped labels (--flip_share), no liars (--attack), no --newcomers."""
        out = np.ones(len(self["client/p"]), bool)
        for name in ("client/flipped", "client/liars", "client/newcomers"):
            if name in self:
                out &= ~self[name].astype(bool)
        return out

    def scored(self, name: str = "best/test_acc") -> np.ndarray:
        """Return accuracies `[N]` in percent, those of benign clients that were scored alone: there may be none."""
        values = 100 * self[name][self.benign]
        return values[np.isfinite(values)]

    def __contains__(self, name: str) -> bool:
        return name in self.hdf5

    def part(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Return some rows of an array by its name, without `rows` all of it; `UserError`: it is not there, or damaged (type, shape, range, checksum)."""
        if name not in ARRAYS or name not in self.hdf5:
            raise UserError(f"{self.path} has no {name}; it has {', '.join(sorted(self.names()))}")
        kinds, axes, low, high = ARRAYS[name]
        return self.hdf5.array(name, kinds, schema.shape(axes, self.run, self.finished), low, high, rows)

    __getitem__ = part

    def stored(self, name: str) -> Any:
        """Return an array of `LAYOUT`, which is still in the file, as h5py has it."""
        kinds, axes, _, _ = ARRAYS[name]
        return self.hdf5.dataset(name, kinds, schema.shape(axes, self.run, self.finished))

    def names(self) -> list[str]:
        return self.hdf5.names()

    def fact(self, name: str) -> str:
        """Return a fact of the run, an attribute of /meta, as text: data_sha256, partition_sha256, numerics."""
        with self.hdf5.reading(f"the attribute {name} of meta"):
            return str(self.file["meta"].attrs[name])

    def listed(self, name: str) -> list[Any]:
        """Return class_names, mean or std of the data, attributes of /meta; nothing where it has none."""
        with self.hdf5.reading(f"the attribute {name} of meta"):
            there = name in self.file["meta"].attrs
        return list(self.hdf5.json(name, list, "meta")) if there else []

    def omega(self) -> CollaborationGraph:
        return self._graph("graph/omega", self["graph/omega/indptr"], self["graph/omega/senders"])

    def chosen(self, t: int) -> CollaborationGraph:
        """Return the graph of round t, of which no more is read than that round; round 0 is Omega."""
        rows, senders = (self.stored(f"graph/chosen/{name}") for name in ("indptr", "senders"))
        if t not in range(len(rows)):
            raise UserError(f"round {t!r} is not in {self.path}; allowed are 0 to {len(rows) - 1}")
        with self.hdf5.reading("graph/chosen"):
            indptr = rows[t]
            mine = senders[indptr[0] : indptr[-1]]
        return self._graph("graph/chosen", indptr - indptr[0], mine)

    def _graph(self, name: str, indptr: np.ndarray, senders: np.ndarray) -> CollaborationGraph:
        senders, n = senders.astype(np.int64), len(indptr) - 1
        edges = int(indptr[-1]) if n >= 0 else -1
        if n < 0 or indptr[0] != 0 or (np.diff(indptr) < 0).any() or edges != len(senders) or (senders >= n).any():
            raise self.hdf5.damaged(name, "is no graph")
        return CollaborationGraph(indptr.astype(np.int64), senders)

    def graph(self, t: int) -> np.ndarray:
        """Return bool `[N, N]`: element (k, j) says that in round t client k averaged with client j (with --ggc_off_rounds skip: when it last did)."""
        return self.chosen(t).matrix()

    @property
    def last_round(self) -> int:
        """Number of the last round that is recorded completely, -1 before there is one."""
        there = ["round/number"] if self.finished else OVER_ROUNDS
        rounds = min((len(self.stored(name)) for name in there if name in self), default=0)
        # fine-tuning counts on, without rounds
        return max(-1, min(self.hdf5.attribute("rounds_done", int), rounds - 1))

    def mean(self, name: str) -> np.ndarray:
        """Return the mean over clients of an array `[T+1, N]`: of finite values of benign clients,
        nan where there is none. Rounds that follow change no bit of it."""
        return mean(self[name][: self.last_round + 1].compress(self.benign, 1))

    def local_epochs(self) -> np.ndarray:
        """Return the local epochs of a client up to each round, of all its models together, int `[T+1]`: Ditto trains two models."""
        return np.multiply(self["round/epochs"], self.method.models)

    def met_liars(self) -> np.ndarray:
        """Return for each edge to a benign client in rounds 1 to T whether its sender lies (--attack), bool `[edges]`: empty without liars or edges."""
        if "client/liars" not in self:
            return np.zeros(0, bool)
        liars, benign = self["client/liars"].astype(bool), self.benign
        graphs = [self.chosen(t) for t in range(1, self.last_round + 1)]
        return np.concatenate([np.zeros(0, bool), *(liars[g.senders[benign[g.receivers()]]] for g in graphs)])

    def score(self, metric: str) -> np.ndarray:
        """Return a score of `METRICS` of each client's best model on its test images, 0 to 1, `[N]`; but for the accuracy there is none before the end."""
        if metric not in METRICS:
            raise UserError(f"there is no score {metric}; allowed are {', '.join(METRICS)}")
        if metric == "accuracy":
            return self["best/test_acc"]
        if "best/confusion" not in self:
            raise UserError(f"{self.path} is {self.state}: its confusion matrices, and so {metric}, come at the end")
        return score(self["best/confusion"], metric)

    def state_dict(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's best model by layer name, float32: `module.load_state_dict({k: torch.from_numpy(v) ...})` takes it.

        It is zeros where a client was never scored: `/best/round` is -1.
        """
        if "model/best" not in self:
            raise UserError(f"{self.path} holds no models; run with --save_models")
        rows = self.stored("model/best")
        if client not in range(len(rows)):
            raise UserError(f"client {client!r} is not in {self.path}; allowed are 0 to {len(rows) - 1}")
        names, shapes = (self.hdf5.json(name, list, "model") for name in ("names", "shapes"))
        with self.hdf5.reading("model/best"):
            parts = np.split(rows[client], np.cumsum([math.prod(shape) for shape in shapes])[:-1])
            return {n: part.reshape(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}

    def starts(self) -> list[dict[str, Any]]:
        """Return one description per start of the run: time, hosts, ranks, devices, CPU, versions."""
        texts = self.hdf5.texts("meta/starts")
        with self.hdf5.reading("meta/starts"):
            return [dict(json.loads(text)) for text in texts]

    def close(self) -> None:
        self.hdf5.file.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def differences(a: Result, b: Result) -> list[str]:
        """Return the names of the arrays that are not bitwise equal in two results, or that one of them lacks.

        Provenance is exempt, and so is what --save_models or --mixed adds to one of them.
        """
        mine, theirs = ({n for n in r.names() if not n.startswith(EXEMPT)} for r in (a, b))
        both = ((name, a[name], b[name]) for name in sorted(mine & theirs))
        unlike = (n for n, x, y in both if (x.shape, x.dtype, x.tobytes()) != (y.shape, y.dtype, y.tobytes()))
        return [*sorted(n for n in mine ^ theirs if not n.startswith(ADDED)), *unlike]

    @staticmethod
    def same_numbers(a: Result, b: Result) -> bool:
        """Return whether two results are of one Run and hold the same numbers to the bit; `differences` names the arrays that do not."""
        return a.key == b.key and not Result.differences(a, b)


def torn(path: Path) -> bool:
    """Return whether a file that is no readable result begins as one, so that a checkpoint beside it may replace it."""
    with contextlib.suppress(UserError), open_regular(path, follow=False) as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"
    return False


def check_ours(path: Path) -> None:
    """Raise `UserError` where --fresh would replace something else than a result: a text, a link, a device."""
    ours = not os.path.lexists(path)
    with contextlib.suppress(UserError), open_regular(path, follow=False), Hdf5(path, "a result") as file:
        ours = {"run", "schema", "state"} <= set(file.file.attrs)
    if not ours:
        only = "--fresh replaces nothing else; remove it, or choose another --out"
        raise UserError(f"{path} is not a result of dpfl_mpi, and {only}")


def score(confusion: np.ndarray, metric: str) -> np.ndarray:
    """Return balanced accuracy or macro F1, 0 to 1, of each matrix `[..., C, C]` of counts by true class and by class taken for; nan where it has no image."""
    counts = np.asarray(confusion, np.float64)
    right = np.diagonal(counts, axis1=-2, axis2=-1)
    true, taken = counts.sum(-1), counts.sum(-2)  # images of a class; taken for it
    # over the classes of the client's images; for F1 those that it was taken for, too
    return mean(share(right, true) if metric == "balanced_accuracy" else share(2 * right, true + taken))


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def mean(values: np.ndarray, weights: np.ndarray | float = 1) -> np.ndarray:
    """Return the weighted mean of the finite values over the last axis, nan where there is none."""
    finite = np.isfinite(values)
    return share((np.where(finite, values, 0) * weights).sum(-1), (finite * weights).sum(-1))


def result_of(run: Run, path: Path) -> Result:
    """Return the result at a path that is named after a Run; `UserError`: it is another Run's."""
    result = Result(path)
    mine, theirs = run.key(), result.key
    if fields := ", ".join(sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))):
        result.close()
        raise UserError(f"{path} holds another Run (different: {fields})")
    return result


def check_current(result: Result, run: Resolved, job: Job) -> None:
    """Raise `UserError` where a finished result has this Run's key, and other numbers or data behind it, or lacks what the Job adds;
    where the data are gone, it stands."""
    if lacks := [f"--{flag}" for flag, name in KEPT.items() if getattr(job, flag) and name not in result]:
        without = f"without {' and '.join(lacks)}; --fresh computes it anew, with it"
        raise UserError(f"{result.path} is finished and was computed {without}")
    ways = "choose another --out, or compute it anew with --fresh"
    if (numerics := result.hdf5.attribute("numerics", int, "meta")) != NUMERICS:
        of = f"version {numerics} of the numbers; it is {NUMERICS} now (see CHANGELOG.md)"
        raise UserError(f"{result.path} is finished and was computed under {of}: {ways}")
    now = ""
    if run.data and not hasattr(run.found("dataset"), "load"):
        with contextlib.suppress(UserError), Hdf5(Path(run.data), "a prepared file") as file:
            now = str(file.attribute("sha256", str, default=""))
    then = result.hdf5.attribute("data_sha256", str, "meta", now)
    if now and then != now:
        of = f"other data: {run.data} has the sha256 {now[:12]} now, and had {then[:12]} then"
        raise UserError(f"{result.path} is finished and was computed from {of}; bring back those data, {ways}")
