"""The results file: one HDF5 file per Run. `Recorder` writes it on root, `Result` reads it, finished or running.

Written with libver="earliest" and flushed each round, read with locking=False: after a kill at any moment the file opens.

Layout (N clients, C classes, T rounds, E edges of all rounds; row 0 of a T+1 axis is after preprocessing):

    / attrs              run (JSON of the resolved Run), key (JSON of `Run.key`: files by their content), schema, state running|finished|stopped, dataset, partition, method, budget, seed,
                         rounds_done, test_acc (mean over clients of /best/test_acc)
    /meta/starts         one row of JSON per start: time, hosts, ranks, devices, CPU, versions, commit
    /meta attrs          numerics, data_sha256, partition_sha256, parameters (D)
    /round/number        [T+1]
    /round/{epochs,gradient_steps}                                      [T+1] local epochs of a client, gradient steps of all, so far
    /round/{train_loss,val_loss,val_acc,test_loss,test_acc}             [T+1, N]
    /mixed/{val_acc,test_acc}                                           [T+1, N] with --mixed: after mixing
    /best/{round,val_acc,test_acc} [N], /best/confusion [N, C, C], /last/test_acc [N]      true class by predicted class
    /finetune/{val_acc,test_acc} [E+1, N], /finetune/{epochs,gradient_steps} [E+1]    with --finetune_epochs: row 0 = the best model of the
                         rounds, from which tuning starts; /best is then over rows 1 to E (its round counts on), /last is row E
    /client/{p,budget,flipped,diverged_round,epochs,n_train,n_val,n_test} [N], /client/class_counts [N, C]
    /graph/reach/{indptr [N+1], senders [E]}                            with --reach: receiver k can receive from these
    /graph/omega/{indptr [N+1], senders [E]}, /graph/chosen/{indptr [T+1, N+1], senders [E]}    receiver k of round t takes
                         senders[indptr[t, k] : indptr[t, k+1]], indptr running on over rounds; row 0 = Omega
    /graph/cases [T+1, N, 4] in the order of `graph.CASES`, /graph/evaluations [T+1, N] of the reward
    /traffic/models_received [T+1, N]                                   what a real network would carry (row 0: both phases of Algorithm 3)
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

from dpfl_mpi.config import NUMERICS, Run, stored_run
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CASES, CollaborationGraph
from dpfl_mpi.storage import disk
from dpfl_mpi.storage.files import DAMAGE, explained, remove_leftovers, replacing

P = ParamSpec("P")
T = TypeVar("T")
SCHEMA = 1
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
                        dataset=run.dataset,
                        partition=run.partition,
                        method=run.method,
                        budget=str(run.budget),
                        seed=run.seed,
                        state="running",
                        rounds_done=-1,
                        test_acc=np.nan,
                    )
                    self.file.create_dataset("meta/starts", (0,), h5py.string_dtype(), maxshape=(None,))
                    self.file["meta"].attrs.update(numerics=NUMERICS, **meta)
                self._set(state="running", key=json.dumps(run.key()))
                stored = self.file["meta/starts"]
                self.starts = starts or [json.loads(text) for text in stored.asstr()[:]]
                stored.resize(len(self.starts) + 1, 0)
                stored[:] = [json.dumps(s) for s in [*self.starts, start]]
                self.file.flush()
            stack.pop_all()  # stays open

    def copy(self, path: Path) -> None:
        """Write the file as it is now to another one, for a checkpoint."""
        self.file.flush()
        shutil.copyfile(self.path, path)

    def _set(self, **attributes: Any) -> None:
        """Change attributes in their place: what opens the file stays where it is."""
        for name, value in attributes.items():
            self.file.attrs.modify(name, value)

    @writes
    def set_attributes(self, group: str, **attributes: Any) -> None:
        """Write attributes of a group."""
        self.file[group].attrs.update(attributes)

    @writes
    def once(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write (or overwrite) whole arrays by their path."""
        for name, values in arrays.items():
            if name in self.file:
                self.file[name][...] = values
            else:
                self.file[name] = values

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
                )
            stored = self.file[name]
            stored.resize(len(stored) + 1, 0)
            stored[-1] = row

    @writes
    def append_graph(self, graph: CollaborationGraph) -> None:
        """Append a round's graph to /graph/chosen."""
        if "graph/chosen/senders" not in self.file:
            self.file.create_dataset(
                "graph/chosen/senders", (0,), np.int32, maxshape=(None,), chunks=(4096,), compression=1, shuffle=True
            )
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
                self.file.sync()  # a file that is not whole is not called finished
                self._set(state=state)

    def abandon(self) -> None:
        """Close the file as it is, marked stopped where that can still be written: the run is ending for another reason."""
        with contextlib.suppress(UserError):
            self.close("stopped")


def earlier_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts that a results file names, those after its last checkpoint too; none where it cannot be read."""
    try:
        with Result(path) as result:
            return result.starts()
    except (UserError, *DAMAGE):
        return []


class Result:
    """A results file as arrays by the names of the layout: `result["round/test_acc"]`, `result.graph(t)`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Open a finished, stopped or running file for reading.

        Raises:
            UserError: there is no such file, or it is not a result.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"{self.path}: there is no such result file")
        try:
            self.file = h5py.File(self.path, "r", locking=False)
            schema = int(self.file.attrs["schema"])
            meta = self.file.get("meta")
            self.run, self.key = stored_run(self.file.attrs, str(meta.attrs.get("data_sha256", "")) if meta else "")
        except (OSError, KeyError, ValueError, TypeError):
            raise UserError(f"{self.path} is not a result of dpfl_mpi, or it is damaged") from None
        if schema > SCHEMA:
            raise UserError(f"{self.path} has schema {schema}; this version of dpfl_mpi reads up to {SCHEMA}")

    @property
    def state(self) -> str:
        """ "finished", "stopped after round t" or "running, round t"."""
        state, done = str(self.file.attrs["state"]), int(self.file.attrs["rounds_done"])
        return (
            state
            if state == "finished"
            else f"running, round {done}"
            if state == "running"
            else f"stopped after round {done}"
        )

    @property
    def finished(self) -> bool:
        """Whether all rounds are there."""
        return str(self.file.attrs["state"]) == "finished"

    @property
    def test_acc(self) -> float:
        """Mean over benign clients of /best/test_acc in the last round that is recorded, nan before there is one."""
        return float(self.file.attrs.get("test_acc", np.nan))

    @property
    def benign(self) -> np.ndarray:
        """Which clients averages are over, bool `[N]`: those whose labels are not flipped (--flip_share)."""
        return ~self["client/flipped"] if "client/flipped" in self else np.ones(len(self["client/p"]), bool)

    def __contains__(self, name: str) -> bool:
        return name in self.file

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by its name in the layout."""
        if name not in self.file or not isinstance(self.file[name], h5py.Dataset):
            raise UserError(f"{self.path} has no {name}; it has {', '.join(sorted(self.names()))}")
        return self.file[name][()]

    def names(self) -> list[str]:
        """Return the names of all arrays."""
        found: list[str] = []
        self.file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
        return found

    def omega(self) -> CollaborationGraph:
        """Return Omega, the graph of preprocessing."""
        return CollaborationGraph(self["graph/omega/indptr"], self["graph/omega/senders"].astype(np.int64))

    def chosen(self, t: int) -> CollaborationGraph:
        """Return the graph of round t; round 0 is Omega."""
        rounds = len(self.file["graph/chosen/indptr"])
        if not 0 <= t < rounds:
            raise UserError(f"round {t} is not in {self.path}; allowed are 0 to {rounds - 1}")
        indptr = self.file["graph/chosen/indptr"][t]
        return CollaborationGraph(
            indptr - indptr[0], self.file["graph/chosen/senders"][indptr[0] : indptr[-1]].astype(np.int64)
        )

    def graph(self, t: int) -> np.ndarray:
        """Return bool `[N, N]`: element (k, j) says that in round t client k averaged with client j."""
        return self.chosen(t).matrix()

    @property
    def last_round(self) -> int:
        """Number of the last round that is recorded completely, -1 before there is one."""
        rounds = len(self.file["round/number"]) if "round/number" in self else 0
        return min(int(self.file.attrs["rounds_done"]), rounds - 1)  # fine-tuning counts on, without rounds

    def mean(self, name: str) -> np.ndarray:
        """Return the mean over clients of an array `[T+1, N]`, of the finite values of benign clients; nan where there is none."""
        values = self[name][: self.last_round + 1, self.benign]
        finite = np.isfinite(values)
        count = finite.sum(1)
        return np.where(count, np.where(finite, values, 0).sum(1) / np.maximum(count, 1), np.nan)

    def state_dict(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's best model by layer name, float32: `module.load_state_dict({k: torch.from_numpy(v) ...})` takes it."""
        if "model/best" not in self:
            raise UserError(f"{self.path} holds no models; run with --save_models")
        row = self.file["model/best"][client]
        names, shapes = json.loads(self.file["model"].attrs["names"]), json.loads(self.file["model"].attrs["shapes"])
        ends = np.cumsum([int(np.prod(s)) for s in shapes])
        return {n: row[end - int(np.prod(s)) : end].reshape(s) for n, s, end in zip(names, shapes, ends, strict=True)}

    def starts(self) -> list[dict[str, Any]]:
        """Return one description per start of the run: time, hosts, ranks, devices, CPU, versions."""
        return [json.loads(text) for text in self.file["meta/starts"].asstr()[:]]

    def close(self) -> None:
        """Close the file."""
        self.file.close()

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


__all__ = ["CASES", "EXEMPT", "PHASES", "SCHEMA", "Recorder", "Result"]
