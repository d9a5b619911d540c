"""`Recorder` writes the results file, on root."""

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
from dpfl_mpi.results.schema import CHUNK, SCHEMA, seal
from dpfl_mpi.settings import NUMERICS, Resolved
from dpfl_mpi.storage.files import explained, remove_leftovers, write

SHARE, CHEAP = 0.05, 0.01  # of the time, and seconds: what putting the file on disk may take each round
GROWS: dict[str, Any] = {"compression": 1, "shuffle": True, "fletcher32": True}  # an array that grows each round


class Recorder:
    """Writes the results file, on root only. Every time axis grows by one row per round.

    HDF5 writes into memory and the whole image replaces the file: after a write that failed, as on a full disk, HDF5 would crash the process.
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
        """Create the file, or go on from a checkpoint's `snapshot`; `meta` tells of the run, `start` of this start; `still_ours` comes before a write."""
        self.path, self.still_ours = path, still_ours
        self.written = self.took = 0.0  # when the file was last replaced, and the seconds of that
        starts: list[dict[str, Any]] = []
        with self.explained():
            remove_leftovers(path)
            if snapshot:
                Result(snapshot).close()  # one of a later schema is refused
                with contextlib.suppress(UserError), Result(path) as result:
                    starts = result.starts()  # those after the checkpoint too
            self.image = io.BytesIO(snapshot.read_bytes() if snapshot else b"")
            self.file = h5py.File(self.image, "r+" if snapshot else "w", libver="earliest")
            if not snapshot:
                self._begin(run, meta)
            self._set(state="running", key=json.dumps(run.key()))
            stored = self.file["meta/starts"]
            self.starts = starts or [json.loads(text) for text in stored.asstr()[:]]
            stored.resize(len(self.starts) + 1, 0)
            stored[:] = [json.dumps(s) for s in [*self.starts, start]]
            self._replace()

    def _begin(self, run: Resolved, meta: Mapping[str, Any]) -> None:
        about = {"dataset": short(run.dataset), "method": short(run.method), "declared": json.dumps(run.declared)}
        about |= {name: str(getattr(run, name)) for name in ("partition", "budget")}
        state = {"state": "running", "rounds_done": -1, "test_acc": np.nan}
        self.file.attrs.update(about | state, run=run.to_json(), schema=SCHEMA, seed=run.seed)
        self.file.create_dataset("meta/starts", (0,), h5py.string_dtype(), maxshape=(None,))
        self.file["meta"].attrs.update(numerics=NUMERICS, **meta)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return explained(f"the results file {self.path} cannot be written")

    def _replace(self) -> None:
        start = time.monotonic()
        with self.explained():
            if self.file:
                self._set(checksum=seal(self.file, self.file["meta/starts"].asstr()[:].tolist()))
                self.file.flush()
            self.still_ours()
            with self.image.getbuffer() as data:  # no second copy in memory
                write(self.path, data)
        self.written = time.monotonic()
        self.took = self.written - start

    def copy(self, path: Path) -> None:
        """Put the file on disk as it is now, and the same under another name, for a checkpoint."""
        self._replace()
        with self.image.getbuffer() as data:
            path.write_bytes(data)

    def _set(self, **attributes: Any) -> None:
        """Change attributes in their place: what opens the file stays where it is."""
        for name, value in attributes.items():
            self.file.attrs.modify(name, value)

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write whole arrays by their path, over what is there."""
        for name, values in arrays.items():
            values = np.asarray(values)
            if values.size:
                self.write_rows(name, values, len(values))
            elif name not in self.file:
                self.file[name] = values

    def write_rows(self, name: str, values: np.ndarray, n: int, first: int = 0) -> None:
        """Write rows of an array of n, from row `first` on; the first of them make it."""
        if name not in self.file:
            chunk = max(1, min(n, CHUNK // max(1, values[0].nbytes))), *values.shape[1:]
            self.file.create_dataset(name, (n, *values.shape[1:]), values.dtype, chunks=chunk, fletcher32=True)
        self.file[name][first : first + len(values)] = values

    def append(self, arrays: Mapping[str, Any]) -> None:
        """Append one row to each time axis."""
        for name, row in arrays.items():
            row = np.asarray(row)
            if name not in self.file:
                shape, chunk = row.shape, (max(1, min(32, 65536 // max(1, row.nbytes))), *row.shape)
                self.file.create_dataset(name, (0, *shape), row.dtype, maxshape=(None, *shape), chunks=chunk, **GROWS)
            stored = self.file[name]
            stored.resize(len(stored) + 1, 0)
            stored[-1] = row

    def append_graph(self, graph: CollaborationGraph) -> None:
        name = "graph/chosen/senders"
        if name not in self.file:
            self.file.create_dataset(name, (0,), np.int32, maxshape=(None,), chunks=(4096,), **GROWS)
        senders = self.file[name]
        edges = len(senders)
        self.append({"graph/chosen/indptr": graph.indptr + edges})
        senders.resize(edges + len(graph.senders), 0)
        if len(graph.senders):
            senders[edges:] = graph.senders

    def flush(self, rounds_done: int, test_acc: float) -> None:
        """Put the round on disk, where the last time took no more than `SHARE` of the time since; else a later flush, `copy` or `close` does."""
        self._set(rounds_done=rounds_done, test_acc=test_acc)
        if self.took < max(CHEAP, SHARE * (time.monotonic() - self.written)):
            self._replace()

    def close(self, state: str) -> None:
        if self.file:
            self._set(state=state)
            self._replace()
            self.file.close()

    def abandon(self) -> None:
        """Close the file as it is, marked stopped where that can still be written: the run is ending for another reason."""
        with contextlib.suppress(Exception):  # that reason alone is told
            self.close("stopped")
