"""The results file: one HDF5 file per Run. `Recorder` writes it on root, `Result` reads it, finished or running.

Written with libver="earliest" and flushed each round, read with locking=False: after a kill at any moment the file opens. Every array has
a checksum per chunk (HDF5's fletcher32), and so have the attributes: what was damaged later is an error. `layout` says what each array may be.

Layout (N clients, C classes, T rounds, E edges of all rounds; row 0 of a T+1 axis is after preprocessing):

    / attrs              run (JSON of the resolved Run), key (JSON of `Run.key`: files by their content), schema,
                         state running|finished|stopped, dataset, partition, method, budget, seed, rounds_done,
                         declared (JSON: what code that is not shipped says of itself), test_acc (mean over benign clients of /best/test_acc)
    /meta/starts         one row of JSON per start: time, hosts, ranks, devices, CPU, versions, commit
    /meta attrs          numerics, data_sha256, class_names, mean and std (JSON), partition_sha256, parameters (D)
    /round/number        [T+1]
    /round/{epochs,gradient_steps}                                      [T+1] local epochs of a client, gradient steps of all, so far
    /round/{train_loss,val_loss,val_acc,test_loss,test_acc}             [T+1, N] where a method scores twice: of the last models
    /round/best_test_acc                                                [T+1, N] of the best model by validation so far
    /mixed/{val_acc,test_acc}                                           [T+1, N] with --mixed: after mixing
    /best/{round,val_acc,test_acc} [N], /best/confusion [N, C, C], /last/test_acc [N]      true class by predicted class
    /finetune/{val_acc,test_acc} [E+1, N], /finetune/{epochs,gradient_steps} [E+1]    with --finetune_epochs: row 0 = the best model of the
                         rounds, from which tuning starts; /best is then over rows 1 to E (its round counts on), /last is row E
    /client/{p,budget,flipped,diverged_round,epochs,n_train,n_val,n_test} [N], /client/class_counts [N, C]
    /client/of_data [N]                                                 with --partition natural: which of the data's own clients,
                         a row of /client_names of the prepared file
    /client/{liars,newcomers,drifted,stopped_round} [N], /client/drift_classes [2]     with --attack, --newcomers, --drift, --patience
    /newcomers/{val_acc,test_acc,models_received,evaluations} [E, N], /newcomers/epochs [E]     with --newcomers: after E epochs of their own
    /attack/success [N]                                                 with --attack backdoor: marked test images taken for class 0
    /graph/reach/{indptr [N+1], senders [E]}                            with --reach: receiver k can receive from these
    /graph/omega/{indptr [N+1], senders [E]}, /graph/chosen/{indptr [T+1, N+1], senders [E]}    receiver k of round t takes
                         senders[indptr[t, k] : indptr[t, k+1]], indptr running on over rounds; row 0 = Omega.
                         A round that averages nothing (--ggc_off_rounds skip) repeats the one before
    /graph/cases [T+1, N, 4] in the order of `graph.CASES`, /graph/evaluations [T+1, N] of the reward
    /traffic/models_received [T+1, N]                                   what a real network would carry (row 0: Algorithm 3, and line 4 of Algorithm 1)
    /traffic/{bytes_rma,bytes_collective} [T+1]                         what MPI carried here, all ranks together
    /seconds/{train,graph,exchange,wait,evaluate,write} [T+1, 3]        min, mean, max over ranks (wait: before the opening Fence)
    /model/best [N, D], attrs names and shapes                          with --save_models
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import h5py
import numpy as np

from dpfl_mpi import layout
from dpfl_mpi.config import Run
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.metrics import of_result
from dpfl_mpi.plugins import short
from dpfl_mpi.storage import disk
from dpfl_mpi.storage.files import explained, remove_leftovers, replacing
from dpfl_mpi.storage.foreign import is_there

P = ParamSpec("P")
T = TypeVar("T")
SCHEMA = 1
CHUNK = 2**20  # bytes of a chunk, which is read and checked as a whole
PHASES = ("train", "graph", "exchange", "wait", "evaluate", "write")  # of a round, in the order in which they are shown
# provenance: may differ between equal runs
EXEMPT = ("meta", "seconds", "traffic/bytes_rma", "traffic/bytes_collective")


def writes(method: Callable[Concatenate[Recorder, P], T]) -> Callable[Concatenate[Recorder, P], T]:
    """Return the method with HDF5's errors (a full disk, mostly) as a sentence."""

    @functools.wraps(method)
    def wrapper(self: Recorder, *args: P.args, **kwargs: P.kwargs) -> T:
        with explained(f"the results file {self.path} cannot be written"):
            return method(self, *args, **kwargs)

    return wrapper


class Recorder:
    """Writes the results file, on root only. Every time axis grows by one row per round."""

    def __init__(
        self, path: Path, run: Run, meta: Mapping[str, Any], start: Mapping[str, Any], snapshot: Path | None = None
    ):
        """Create the file, or go on with it as a checkpoint's `snapshot` left it: what came later is recorded again.

        `meta` are facts of the run, `start` describes this start. The file gets its name when it can be read.
        """
        self.path = path
        with explained(f"the results file {path} cannot be written"), contextlib.ExitStack() as stack:
            remove_leftovers(path)
            starts = earlier_starts(path) if snapshot else []
            with replacing(path) as part:
                if snapshot:
                    shutil.copyfile(snapshot, part)
                self.file = stack.enter_context(disk.File(part, "r+" if snapshot else "w", libver="earliest"))
                if not snapshot:
                    self.file.attrs.update(
                        run=run.to_json(),
                        schema=SCHEMA,
                        dataset=short(run.dataset),
                        partition=run.partition,
                        method=short(run.method),
                        budget=str(run.budget),
                        seed=run.seed,
                        declared=json.dumps(getattr(run, "declared", {})),
                        state="running",
                        rounds_done=-1,
                        test_acc=np.nan,
                        progress=0,  # a checksum of the two, once they change no more
                    )
                    self.file.create_dataset("meta/starts", (0,), h5py.string_dtype(), maxshape=(None,))
                    self.file["meta"].attrs.update(numerics=run.numerics, **meta)
                self._set(state="running", key=json.dumps(run.key()))
                self._set(checksum=layout.seal(self.file.attrs, self.file["meta"].attrs))
                stored = self.file["meta/starts"]
                self.starts = starts or [json.loads(text) for text in stored.asstr()[:]]
                stored.resize(len(self.starts) + 1, 0)
                stored[:] = texts = [json.dumps(s) for s in [*self.starts, start]]
                stored.attrs["checksum"] = layout.checksum(texts)
                self.file.flush()
            stack.pop_all()  # stays open

    def copy(self, path: Path) -> None:
        """Write the file as it is now to another one, for a checkpoint: our open file, whoever has put another one under its name."""
        self.file.flush()
        with open(self.file.disk.fd, "rb", closefd=False) as mine, open(path, "wb") as out:
            mine.seek(0)
            shutil.copyfileobj(mine, out, CHUNK)

    def _set(self, **attributes: Any) -> None:
        """Change attributes in their place: what opens the file stays where it is."""
        for name, value in attributes.items():
            self.file.attrs.modify(name, value)

    @writes
    def set_attributes(self, group: str, **attributes: Any) -> None:
        """Write attributes of a group that has none yet."""
        self.file[group].attrs.update(attributes, checksum=layout.checksum(attributes))

    @writes
    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write whole arrays by their path, over what is there."""
        for name, values in arrays.items():
            values = np.asarray(values)
            if name in self.file:
                self.file[name][...] = values
            elif values.ndim == 0 or values.size == 0:
                self.file[name] = values
            else:
                rows = max(1, min(len(values), CHUNK // max(1, values[0].nbytes)))
                self.file.create_dataset(name, data=values, chunks=(rows, *values.shape[1:]), fletcher32=True)

    @writes
    def append(self, arrays: Mapping[str, Any]) -> None:
        """Append one row to each time axis."""
        for name, row in arrays.items():
            row = np.asarray(row)
            if name not in self.file:
                chunk = (max(1, min(32, 65536 // max(1, row.nbytes))), *row.shape)
                self.file.create_dataset(
                    name,
                    (0, *row.shape),
                    row.dtype,
                    maxshape=(None, *row.shape),
                    chunks=chunk,
                    compression=1,
                    shuffle=True,
                    fletcher32=True,
                )
            stored = self.file[name]
            stored.resize(len(stored) + 1, 0)
            stored[-1] = row

    def lacks(self, name: str) -> bool:
        """Return whether the rounds that are there have no such array: an earlier version of dpfl_mpi began the file."""
        return name not in self.file and "round/number" in self.file

    @writes
    def append_graph(self, graph: CollaborationGraph) -> None:
        """Append a round's graph to /graph/chosen."""
        if "graph/chosen/senders" not in self.file:
            how: dict[str, Any] = {"compression": 1, "shuffle": True, "fletcher32": True}
            self.file.create_dataset("graph/chosen/senders", (0,), np.int32, maxshape=(None,), chunks=(4096,), **how)
        senders = self.file["graph/chosen/senders"]
        edges = len(senders)
        self.append({"graph/chosen/indptr": graph.indptr + edges})
        senders.resize(edges + len(graph.senders), 0)
        if len(graph.senders):
            senders[edges:] = graph.senders

    @writes
    def flush(self, rounds_done: int, test_acc: float) -> None:
        """Make the round durable against a kill of the process."""
        self._set(rounds_done=rounds_done, test_acc=test_acc)
        self.file.flush()

    @writes
    def close(self, state: str) -> None:
        """Close the file, marked finished or stopped."""
        if self.file:
            with self.file:
                done = [self.file.attrs["rounds_done"], self.file.attrs["test_acc"]]
                self._set(progress=layout.number(done))
                self.file.sync()  # a file that is not whole is not called finished
                self._set(state=state)

    def abandon(self) -> None:
        """Close the file as it is, marked stopped where that can still be written: the run is ending for another reason."""
        with contextlib.suppress(Exception):  # that reason alone is told
            self.close("stopped")


def earlier_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts that a results file names, those after its last checkpoint too; none where it cannot be read."""
    try:
        with Result(path) as result:
            return result.starts()
    except UserError:
        return []


class Result:
    """A results file as arrays by the names of the layout: `result["round/test_acc"]`, `result.graph(t)`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Open a finished, stopped or running file for reading.

        Raises:
            UserError: there is no such file, or it is not a result.
        """
        self.path = Path(path)
        if not is_there(self.path):
            raise UserError(f"{self.path}: there is no such result file")
        self.hdf5, self.run, self.key = layout.open_result(self.path, SCHEMA)
        self.file = self.hdf5.file

    @property
    def state(self) -> str:
        """ "finished", "stopped after round t" or "running, round t"."""
        state, done = layout.state(self.hdf5), self.hdf5.attribute("rounds_done", int)
        return {"running": f"running, round {done}", "stopped": f"stopped after round {done}"}.get(state, state)

    @property
    def finished(self) -> bool:
        """Whether all rounds are there."""
        return layout.state(self.hdf5) == "finished"

    @property
    def test_acc(self) -> float:
        """Mean over benign clients of /best/test_acc in the last round that is recorded, nan before there is one."""
        return float(self.hdf5.attribute("test_acc", float, default=float("nan")))

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

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by its name in the layout; errors as in `part`."""
        return self.part(name)

    def part(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Return some rows of an array by its name in the layout, without `rows` all of it.

        Raises:
            UserError: it is not there, or damaged: of another type or shape, out of its range, or its checksum does not fit.
        """
        if name not in self.hdf5 or (name not in layout.ARRAYS and name not in self.names()):
            raise UserError(f"{self.path} has no {name}; it has {', '.join(sorted(self.names()))}")
        return layout.array(self.hdf5, name, self.run, self.finished, rows)

    def names(self) -> list[str]:
        """Return the names of all arrays."""
        return self.hdf5.names()

    def fact(self, name: str) -> str:
        """Return a fact of the run, an attribute of /meta, as text: data_sha256, partition_sha256, numerics."""
        with self.hdf5.reading(f"the attribute {name} of meta"):
            return str(self.file["meta"].attrs[name])

    def listed(self, name: str) -> list[Any]:
        """Return class_names, mean or std of the data, attributes of /meta; empty in a result that does not hold them."""
        held: list[Any] = self.hdf5.json(name, list, "meta", "[]")
        return held

    def omega(self) -> CollaborationGraph:
        """Return Omega, the graph of preprocessing."""
        return layout.graph(self.hdf5, "graph/omega", self["graph/omega/indptr"], self["graph/omega/senders"])

    def chosen(self, t: int) -> CollaborationGraph:
        """Return the graph of round t; round 0 is Omega."""
        return layout.chosen(self.hdf5, self.run, t)

    def graph(self, t: int) -> np.ndarray:
        """Return bool `[N, N]`: element (k, j) says that in round t client k averaged with client j (with --ggc_off_rounds skip: when it last did)."""
        return self.chosen(t).matrix()

    @property
    def last_round(self) -> int:
        """Number of the last round that is recorded completely, -1 before there is one."""
        return layout.last_round(self.hdf5)

    def mean(self, name: str) -> np.ndarray:
        """Return the mean over clients of an array `[T+1, N]`, of the finite values of benign clients; nan where there is none."""
        values = self[name][: self.last_round + 1, self.benign]
        finite = np.isfinite(values)
        count = finite.sum(1)
        return np.where(count, np.where(finite, values, 0).sum(1) / np.maximum(count, 1), np.nan)

    def met_liars(self) -> np.ndarray:
        """Return for each edge to a benign client in rounds 1 to T whether its sender lies (--attack), bool `[edges]`: empty without liars or edges."""
        if "client/liars" not in self:
            return np.zeros(0, bool)
        liars, benign = self["client/liars"].astype(bool), self.benign
        graphs = [self.chosen(t) for t in range(1, self.last_round + 1)]
        return np.concatenate([np.zeros(0, bool), *(liars[g.senders[benign[g.receivers()]]] for g in graphs)])

    def score(self, metric: str) -> np.ndarray:
        """Return a score of each client's best model on its test images, 0 to 1, `[N]`: see `metrics.of_result`."""
        return of_result(self, metric)

    def state_dict(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's best model by layer name, float32: `module.load_state_dict({k: torch.from_numpy(v) ...})` takes it."""
        if "model/best" not in self:
            raise UserError(f"{self.path} holds no models; run with --save_models")
        rows = self.hdf5.dataset("model/best", "f", (int(self.run.clients), None))
        if not 0 <= client < len(rows):
            raise UserError(f"client {client} is not in {self.path}; allowed are 0 to {len(rows) - 1}")
        layers = layout.layers(self.hdf5)
        with self.hdf5.reading("model/best"):
            row, ends = rows[client], np.cumsum([int(np.prod(shape)) for _, shape in layers])
            return {n: row[end - int(np.prod(s)) : end].reshape(s) for (n, s), end in zip(layers, ends, strict=True)}

    def starts(self) -> list[dict[str, Any]]:
        """Return one description per start of the run: time, hosts, ranks, devices, CPU, versions."""
        return layout.starts(self.hdf5)

    def close(self) -> None:
        """Close the file."""
        self.hdf5.close()

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def differences(a: Result, b: Result) -> list[str]:
        """Return the names of the arrays that are not bitwise equal in two results (provenance is exempt)."""
        mine, theirs = ({n for n in r.names() if not n.startswith(EXEMPT)} for r in (a, b))
        out = sorted(mine ^ theirs)
        for name in sorted(mine & theirs):
            x, y = a[name], b[name]
            if x.shape != y.shape or x.dtype != y.dtype or x.tobytes() != y.tobytes():
                out.append(name)
        return out

    @staticmethod
    def same_numbers(a: Result, b: Result) -> bool:
        """Return whether two results hold the same numbers to the bit, whatever ranks and hosts computed them."""
        return a.key == b.key and not Result.differences(a, b)
