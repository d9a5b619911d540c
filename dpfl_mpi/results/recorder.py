"""`Recorder` writes the results file of a run, on rank 0. `engine.record` gives it the numbers.

Arrays are collected in memory, given to HDF5 now and then, and written to disk as a whole file, at
most once a second. A checkpoint keeps a copy of the file; a start that goes on begins with that.
"""

import contextlib
import io
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.plugins import short
from dpfl_mpi.results.result import Result
from dpfl_mpi.results.schema import CHUNK, SCHEMA, checksum
from dpfl_mpi.settings import NUMERICS, Resolved
from dpfl_mpi.storage.files import explained, remove_leftovers, write

SHARE = 0.05  # of a run's time that writing the file to disk may take
APART_S = 1.0  # least seconds between two writes: each leaves 5 kB in HDF5's memory
SENDERS = "graph/chosen/senders"  # grows by the edges of each round
# how arrays are stored that grow by a row each round
COMPRESSED: dict[str, Any] = {"compression": 1, "shuffle": True, "fletcher32": True}


class Recorder:
    """Writes the results file. Arrays over rounds grow by one row per round.

    HDF5 writes into memory, and the whole image then replaces the file: after a failed write, as on
    a full disk, HDF5 would crash the process. It is given many rows at once, as each of its calls
    takes 0.3 ms, and a round has 50 arrays.
    """

    def __init__(
        self,
        path: Path,
        run: Resolved,
        meta: Mapping[str, Any],
        start: Mapping[str, Any],
        snapshot: Path | None = None,
        still_ours: Callable[[], object] = lambda: None,
    ):
        """Create the file, or go on from `snapshot`, a checkpoint's copy.

        Args:
            meta: facts of the run's data, partition and model.
            start: time, hosts, ranks and versions of this start.
            still_ours: called before each write to disk; raises if another process has the file.
        """
        self.path, self.still_ours = path, still_ours
        self.written = 0.0  # when the file was last replaced
        self.took = 0.0  # seconds that replacing it took
        # what HDF5 has not been given yet: new rows, whole arrays, attributes
        self.grown: dict[str, list[np.ndarray]] = {}
        self.whole: dict[str, np.ndarray] = {}
        self.noted: dict[str, Any] = {}
        starts: list[dict[str, Any]] = []
        with self.explained():
            remove_leftovers(path)
            if snapshot:
                Result(snapshot).close()  # refuses a later schema
                with contextlib.suppress(UserError), Result(path) as result:
                    starts = result.starts()  # also those after the checkpoint
            self.image = io.BytesIO(snapshot.read_bytes() if snapshot else b"")
            self.file = h5py.File(self.image, "r+" if snapshot else "w", libver="earliest")
            if not snapshot:
                self._begin(run, meta)
            self.edges = len(self.file[SENDERS]) if SENDERS in self.file else 0  # stored so far
            # a new file has no key yet, and a copy may say that the Run stopped
            self._set(state="running", key=json.dumps(run.key()))
            stored = self.file["meta/starts"]
            self.starts = starts or [json.loads(text) for text in stored.asstr()[:]]
            stored.resize(len(self.starts) + 1, 0)
            stored[:] = [json.dumps(s) for s in [*self.starts, start]]
            self._replace()

    def _begin(self, run: Resolved, meta: Mapping[str, Any]) -> None:
        """Write the attributes of a new file."""
        facts = {"dataset": short(run.dataset), "method": short(run.method)}
        facts |= {"partition": str(run.partition), "budget": str(run.budget)}
        facts |= {"declared": json.dumps(run.declared), "run": run.to_json()}
        state = {"state": "running", "rounds_done": -1, "test_acc": np.nan}
        self.file.attrs.update(facts | state, schema=SCHEMA, seed=run.seed)
        self.file.create_dataset("meta/starts", (0,), h5py.string_dtype(), maxshape=(None,))
        self.file["meta"].attrs.update(numerics=NUMERICS, **meta)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return explained(f"the results file {self.path} cannot be written")

    def _replace(self) -> None:
        """Write the file to disk, with all that is new."""
        start = time.monotonic()
        with self.explained():
            self._give()
            starts = self.file["meta/starts"].asstr()[:].tolist()
            self._set(checksum=checksum(self.file, starts))
            self.file.flush()
            self.still_ours()
            with self.image.getbuffer() as data:  # no second copy in memory
                write(self.path, data)
        self.written = time.monotonic()
        self.took = self.written - start

    def copy(self, path: Path) -> None:
        """Write the file to disk as it is now, and a copy of it for a checkpoint."""
        self._replace()
        with self.image.getbuffer() as data, open(path, "wb") as file:
            file.write(data)

    def _set(self, **attributes: Any) -> None:
        """Change attributes in place: HDF5 then need not move the header that holds them."""
        for name, value in attributes.items():
            self.file.attrs.modify(name, value)

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write whole arrays by their path; they replace what is there."""
        self.whole |= {name: np.array(values) for name, values in arrays.items()}

    def _give(self) -> None:
        """Give HDF5 what is new since the last time."""
        grown, whole, self.grown, self.whole = self.grown, self.whole, {}, {}
        for name, rows in grown.items():
            values = np.concatenate(rows)
            if name not in self.file:
                most_rows = 4096 if name == SENDERS else 32
                chunk = max(1, min(most_rows, 65536 // max(1, rows[0][:1].nbytes)))
                shape = values.shape[1:]
                storage = {"maxshape": (None, *shape), "chunks": (chunk, *shape)} | COMPRESSED
                self.file.create_dataset(name, (0, *shape), rows[0].dtype, **storage)
            stored = self.file[name]
            stored.resize(len(stored) + len(values), 0)
            if len(values):
                stored[-len(values) :] = values
        for name, values in whole.items():
            if values.dtype.kind == "U":  # texts of one length: HDF5 has a checksum for these
                values = np.char.encode(values, "utf-8")
                values = values.astype(h5py.string_dtype(length=max(1, values.itemsize)))
            if values.size:
                self.write_rows(name, values, len(values))
            elif name not in self.file:
                self.file[name] = values
        self._set(**self.noted)

    def write_rows(self, name: str, values: np.ndarray, n: int, first: int = 0) -> None:
        """Write rows of an array that has n, from row `first` on; create it if it is not there."""
        if name not in self.file:
            shape = values.shape[1:]
            chunk = max(1, min(n, CHUNK // max(1, values[0].nbytes))), *shape
            storage: dict[str, Any] = {"chunks": chunk, "fletcher32": True}
            self.file.create_dataset(name, (n, *shape), values.dtype, **storage)
        self.file[name][first : first + len(values)] = values

    def append(self, arrays: Mapping[str, Any]) -> None:
        """Collect this round's row of each of these arrays for the next write."""
        for name, row in arrays.items():
            self.grown.setdefault(name, []).append(np.array(row)[None])

    def append_graph(self, graph: CollaborationGraph) -> None:
        self.append({"graph/chosen/indptr": graph.indptr + self.edges})
        self.grown.setdefault(SENDERS, []).append(graph.senders.astype(np.int32))
        self.edges += len(graph.senders)

    def flush(self, rounds_done: int, test_acc: float) -> None:
        """Note the last round; write the file to disk if the last time is long enough ago."""
        self.noted = {"rounds_done": rounds_done, "test_acc": test_acc}
        if time.monotonic() - self.written > max(APART_S, self.took / SHARE):
            self._replace()

    def close(self, state: str) -> None:
        if self.file:
            self._set(state=state)
            self._replace()
            self.file.close()

    def abandon(self) -> None:
        """Close the file of a run that ends early, marked stopped where that can be written."""
        with contextlib.suppress(Exception):  # an error that ended the run is printed instead
            self.close("stopped")
