"""Checkpoints: every rank's shards, committed by root's manifest; a run goes on from them under any number of ranks.

A generation is three kinds of HDF5 files in the folder `<results file>.checkpoint`:

    ROUND.TOKEN.NUMBER.shard.h5      the client state of one rank, or of some of its clients: /state/NAME, /momentum/NAME, /federation/NAME
    ROUND.TOKEN.results.h5           the results file as it was: what is recorded after the checkpoint is computed and recorded again
    ROUND.TOKEN.DIGEST.manifest.h5   written last, and only this makes the others count: attrs key, round, schema, results_sha256;
                                     /client/{shard,row} [N]; /state/NAME, /federation/NAME the same on all ranks

Each is written under a temporary name, fsynced and renamed. A shard checks itself: HDF5's checksums cover its metadata (libver v110)
and every chunk, one client's row each. It also holds its own name, so that another one copied over it is noticed. The manifest's DIGEST
is of its bytes. The two newest generations are kept.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.mpi.slurm import job_number
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import NUMERICS, Job
from dpfl_mpi.storage.files import checkpoints_of, explained, manifests, reason, replacing, write
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, sha256
from dpfl_mpi.storage.lock import content
from dpfl_mpi.survival.signals import HANGS, again_text

KEEP = 2  # generations
SHARD = 2**26  # bytes of a shard, which a rank holds once more while it is written, or one client's
# names of the files of a checkpoint's folder; others in it are not ours to delete
OURS = re.compile(r"\d{6,}\.[0-9a-f]{12}\.(\d{5,}\.shard|results|[0-9a-f]{16}\.manifest)\.h5|\..*\.part")
DIGITS = 16  # of the SHA-256 of a manifest, in its name
MANIFEST = "the manifest of a checkpoint"
# facts of /meta that the key of a Run does not have: a data set may have been prepared anew from another source
DATA = {"data_sha256": "content of the data", "partition_sha256": "partition"}
UNWRITTEN = (OSError, RuntimeError, MemoryError)  # a disk that fails, also where HDF5 says so; anything else is a bug
Named = dict[str, Any]  # values by the path under which a file holds them


class Checkpoints:
    """The checkpoints of one results file. Methods are collective unless they say otherwise.

    `still_ours` is called on root before anything of theirs is replaced or deleted; it ends the run where another one has taken its lock.
    """

    def __init__(
        self,
        results: Path,
        key: Mapping[str, Any],
        job: Job,
        world: World,
        still_ours: Callable[[], object] = lambda: None,
    ):
        self.still_ours = still_ours
        self.folder = checkpoints_of(results)
        self.key = key  # of the Run
        self.job = job
        self.world = world
        self.unit, self.period = job.checkpoint_every.unit, job.checkpoint_every.amount
        self.last = time.monotonic()  # when the last one was saved
        self.round = -1  # the newest round that is safe
        self.seconds = 0.0  # that the last save took
        self.results: Path | None = None  # the results file as the restored checkpoint left it
        world.decide(self._check_folder)

    def _check_folder(self) -> None:
        """Raise `UserError` where the folder is a link: what it leads to would be written to and cleared out."""
        if os.path.lexists(self.folder) and (self.folder.is_symlink() or not self.folder.is_dir()):
            raise UserError(f"{self.folder} is a link, or no folder; remove it, or choose another --out")

    def exist(self) -> bool:
        """Return whether there is a checkpoint, whole or not. On root; not collective."""
        return bool(manifests(self.folder))

    def due(self, t: int, stop: bool) -> tuple[bool, bool]:
        """Return (whether to save round t now, whether to stop after it), the same on all ranks. `stop` is this rank's wish."""
        passed = t % self.period == 0 if self.unit == "rounds" else time.monotonic() - self.last >= self.period
        due = self.world.root and self.unit != "never" and passed  # a clock: root decides
        votes = self.world.sum_int64(np.array([due, stop], np.int64))
        return bool(votes.any()), bool(votes[1])

    def _key(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return what must be the same for a run to go on: the Run, which arrays its results have, and what was found out `about` its data."""
        more = {"mixed": self.job.mixed, "version of the numbers": NUMERICS}
        return {**self.key} | more | {name: about.get(name) for name in DATA}

    # writing -----------------------------------------------------------------------------------------------------------
    def save(self, parts: Parts, state: State, recorder: Recorder | None) -> None:
        """Keep the state after the round that `parts` is in, with the results recorded so far.

        Raises `UserError` on every rank, where any rank could not write; the generation before is whole.
        """
        start = time.perf_counter()
        stem = f"{parts.round:06d}.{self.world.decide(lambda: secrets.token_hex(6))}"
        mine, same = parts.state()
        clients = flat(state=state["client"], momentum=parts.training.momentum, federation=mine)
        shared = flat(state=state["shared"], federation=same)
        schema = {name: row_layout(value) for name, value in clients.items()}
        each = max(1, SHARD // sum(np.dtype(s["dtype"]).itemsize * math.prod(s["shape"]) for s in schema.values()))
        with self._all_or_nobody():
            for number, first in enumerate(range(0, len(parts.ids), each)):
                name = f"{stem}.{self.world.rank + self.world.size * number:05d}.shard.h5"
                rows = {name: value[first : first + each] for name, value in clients.items()}
                write(self.folder / name, image(rows, shard=name))
        with self._all_or_nobody():
            if recorder:
                shard, row = np.divmod(parts.members.row_of, each)
                where = {"client/shard": parts.members.owner + self.world.size * shard, "client/row": row}
                self._commit(parts, stem, schema, shared | where, recorder)
        self.round, self.last = parts.round, time.monotonic()
        self.seconds = time.perf_counter() - start

    def _commit(self, parts: Parts, stem: str, schema: Named, shared: Named, recorder: Recorder) -> None:
        """Copy the results file, write the manifest, which makes the generation count, and delete older ones. On root."""
        results = self.folder / f"{stem}.results.h5"
        with replacing(results) as path:
            recorder.copy(path)
        data = image(
            shared,
            key=json.dumps(self._key(parts.about)),
            round=parts.round,
            schema=json.dumps(schema),
            results_sha256=sha256(results),
        )
        self.still_ours()
        write(self.folder / f"{stem}.{hashlib.sha256(data).hexdigest()[:DIGITS]}.manifest.h5", data)
        self._forget(stem)

    def _forget(self, *newest: str) -> None:
        """Delete every file that is of none of the newest `KEEP` generations, of which these are first: older ones, and what was never committed."""
        before = (stem_of(path) for path in manifests(self.folder) if stem_of(path) not in newest)
        kept = [*newest, *before][:KEEP]
        for path in self.folder.iterdir():
            if stem_of(path) not in kept and OURS.fullmatch(path.name):
                with contextlib.suppress(IsADirectoryError):  # none of ours
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _all_or_nobody(self) -> Iterator[None]:
        """Raise on every rank where any rank's block failed to write."""
        mistake = ""
        try:
            yield
        except (UserError, *UNWRITTEN) as error:
            mistake = reason(error) or type(error).__name__
        if said := self.world.first(mistake):
            whole = f"; the one of round {self.round} is whole, and {again_text(self.job)} goes on from there"
            whole = whole if self.round >= 0 else ""
            raise UserError(f"the checkpoint in {self.folder} cannot be written: {said}{whole}")

    def note_start(self) -> bool:
        """Note from which round this start goes on; return whether the one before went on from the same, so kept nothing. Call once."""

        def note() -> bool:
            path = self.folder / "begun_from"
            with explained(f"{path} cannot be written"):
                before = content(path).strip()
                write(path, f"{self.round}\n".encode())
                self._forget()  # what a full disk or a kill left half-written
            return before == str(self.round)

        return bool(self.world.decide(note))

    def count_hang(self) -> int:
        """Note that this job hung and return how often it has; too often if that cannot be noted.

        Not collective: any rank may call it.
        """
        path, job = self.folder / "hangs", job_number() or "none"
        jobs = [*content(path).split(), job]
        try:
            write(path, " ".join(jobs).encode())
        except OSError:
            return HANGS + 1
        return jobs.count(job)

    def clear(self, sure: bool = False) -> None:
        """Delete all checkpoints; raise `UserError` on every rank where the caller must be `sure`, and not all could be deleted."""

        def delete() -> None:
            self.still_ours()
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                if OURS.fullmatch(path.name) or path.name in ("begun_from", "hangs"):
                    with contextlib.suppress(OSError):
                        path.unlink()
            with contextlib.suppress(OSError):  # something else is in it
                self.folder.rmdir()
            if sure and self.exist():
                raise UserError(f"{self.folder} cannot be removed; remove it, or choose another --out")

        self.world.decide(delete)
        self.round = -1

    # reading -----------------------------------------------------------------------------------------------------------
    def restore(self, parts: Parts) -> State | None:
        """Return the state of the newest whole checkpoint and set `parts` to it; None where there is no checkpoint.

        A damaged one falls back to the one before, with a warning. `UserError` on every rank: one is of another Run, or none is whole.
        """
        found = [self.folder / name for name in self.world.decide(lambda: [p.name for p in manifests(self.folder)])]
        for i, manifest in enumerate(found):
            state, why = None, "its manifest, or its copy of the results, is not as it was written"
            if self.world.decide(partial(self._whole, manifest, parts.about)):
                try:
                    with Hdf5(manifest, MANIFEST) as file:
                        state, why = self._load(file, parts), ""
                except UserError as error:
                    why = str(error)
            if not (why := self.world.first(why)):
                assert state is not None
                parts.set_state(state["federation"]["round"], state["federation"], state["momentum"])
                if isinstance(omega := state["shared"].get("omega"), CollaborationGraph):
                    parts.mail.narrow(omega)
                self.round, self.results = parts.round, results_of(manifest)
                for damaged in found[:i] if self.world.root else ():
                    with contextlib.suppress(OSError):  # a folder in its place
                        damaged.unlink()  # would count as the newest until its round is reached again
                return {"client": state["client"], "shared": state["shared"]}
            if self.world.root:
                older = "going back to the one before" if i + 1 < len(found) else "and there is none before it"
                complain(f"warning: the checkpoint {manifest} is damaged ({why}); {older}")
        if found:
            raise UserError(f"no checkpoint in {self.folder} is whole ({why}); start over with --fresh")
        return None

    def _whole(self, manifest: Path, about: Mapping[str, Any]) -> bool:
        """Return whether a manifest and the copy of the results are as they were written; refuse them of another Run or other data. On root."""
        mine = self._key(about)
        try:
            if sha256(manifest)[:DIGITS] not in manifest.name:
                return False
            with Hdf5(manifest, MANIFEST) as file:
                theirs, results_sha256 = file.json("key", dict), file.attribute("results_sha256", str)
            whole = sha256(results_of(manifest)) == results_sha256
        except Unreadable:
            return False
        different = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
        if fields := [name for name in different if name not in DATA]:
            said, mend = f"another run (different: {', '.join(fields)})", "choose"
        else:
            names = ", ".join(DATA[name] for name in different)
            said, mend = f"a run on other data (different: {names})", "bring back the data that it began with, choose"
        if different:
            raise UserError(f"{self.folder} holds a checkpoint of {said}; {mend} another --out, or add --fresh")
        return whole

    def _load(self, file: Hdf5, parts: Parts) -> State:
        """Return this rank's state, the method's in "client" and "shared", with what else was kept in "momentum" and "federation".

        It opens just the shards that hold this rank's clients; `UserError`: one is damaged, or of another generation.
        """
        schema, device = file.json("schema", dict), parts.backend.ensemble.device
        shard = file.array("client/shard", "iu", (parts.n,), 0)[parts.ids]
        row = file.array("client/row", "iu", (parts.n,), 0)[parts.ids]
        with file.reading("its schema"):
            arrays = {name: np.empty((len(parts.ids), *s["shape"]), s["dtype"]) for name, s in schema.items()}
        for number in np.unique(shard):
            path = self.folder / f"{stem_of(file.path)}.{number:05d}.shard.h5"
            with Hdf5(path, "a shard of a checkpoint") as part:
                if part.attribute("shard", str) != path.name:
                    raise part.damaged("it", f"is not the shard {path.name}, but another one under its name")
                for name, array in arrays.items():
                    rows = part.dataset(name, array.dtype.kind, (None, *array.shape[1:]))
                    with part.reading(name):
                        for i in np.flatnonzero(shard == number):
                            array[i] = rows[row[i]]
        out: State = {"client": {}, "shared": {}, "momentum": {}, "federation": {"round": file.attribute("round", int)}}
        for name, array in arrays.items():
            group, _, short = name.partition("/")
            value: Any = array
            if schema[name]["kind"] == "tensor":
                value = torch.from_numpy(array).to(device, copy=True)  # aligned as PyTorch aligns, as before
            out["client" if group == "state" else group][short] = value
        for group, into in (("state", "shared"), ("federation", "federation")):
            with file.reading(group):
                for short in file.file.get(group, {}):
                    out[into][short] = stored(file.file[group][short], device)
        return out


def stem_of(path: Path) -> str:
    """Return what the names of a generation's files begin with."""
    return ".".join(path.name.split(".")[:2])


def results_of(manifest: Path) -> Path:
    return manifest.with_name(f"{stem_of(manifest)}.results.h5")


def image(named: Named, **attributes: Any) -> bytes:
    """Return an HDF5 file of these values and attributes, with checksums of its metadata: HDF5 itself never sees a disk that may fail."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        file.attrs.update(attributes)
        for name, value in named.items():
            store(file, name, value)
    return buffer.getvalue()


def flat(**groups: Mapping[str, Any]) -> Named:
    return {f"{group}/{name}": value for group, named in groups.items() for name, value in named.items()}


# what a checkpoint can hold, and how it lies in HDF5 -------------------------------------------------------------------------
def numpy_of(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def row_layout(value: Any) -> dict[str, Any]:
    """Return what a rank without clients must know of a client array: kind, type and shape of a row."""
    array = numpy_of(value[:0])  # from a GPU no rows
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    return {"kind": kind, "dtype": array.dtype.str, "shape": array.shape[1:]}


def store(file: h5py.File, name: str, value: Any) -> None:
    """Write a tensor, array, graph or scalar, one row as one checksummed chunk; raise `TypeError` for any other value."""
    if isinstance(value, CollaborationGraph):
        file[f"{name}/indptr"], file[f"{name}/senders"] = value.indptr, value.senders
        file[name].attrs["kind"] = "graph"
    elif isinstance(value, torch.Tensor | np.ndarray | np.number | np.bool_):
        array = numpy_of(value)
        rows = (1, *array.shape[1:]) if array.ndim > 1 else array.shape
        checked = {"chunks": rows, "fletcher32": True} if rows and array.size else {}  # a number alone is no chunk
        file.create_dataset(name, data=array, **checked)
        others = "array" if isinstance(value, np.ndarray) else "number"
        file[name].attrs["kind"] = "tensor" if isinstance(value, torch.Tensor) else others
    elif value is None or isinstance(value, bool | int | float | str):
        group = file.create_group(name)
        group.attrs["kind"] = "scalar"
        group.attrs["json"] = json.dumps(value)
    else:
        kind = type(value).__name__
        raise TypeError(f"a checkpoint cannot hold {name}: it is a {kind}, not a tensor, array, graph or scalar")


def stored(item: Any, device: torch.device) -> Any:
    """Return what `store` wrote."""
    kind = item.attrs["kind"]
    if kind == "graph":
        return CollaborationGraph(item["indptr"][()], item["senders"][()])
    if kind == "scalar":
        return json.loads(item.attrs["json"])
    if kind == "number":  # of NumPy's types, which promote others
        return item[()]
    array = np.asarray(item[()])  # h5py gives an array of no axes as a number
    return torch.from_numpy(array).to(device, copy=True) if kind == "tensor" else array
