"""`Checkpoints`: saves the state of a run, and restores it on any number of ranks.

A checkpoint is three kinds of HDF5 files in the folder `<results file>.checkpoint`:

    ROUND.TOKEN.NUMBER.shard.h5      the state of some clients of a rank, written by that rank
    ROUND.TOKEN.results.h5           a copy of the results file, from root (rank 0)
    ROUND.TOKEN.DIGEST.manifest.h5   what all ranks share, and which shard has which client; root
                                     writes it last, and without it the others do not count

HDF5 has a checksum of a shard's metadata (libver v110) and of each client's row in it. A shard also
holds its own name. DIGEST is of the manifest's bytes. The two newest checkpoints are kept. The
loop over rounds (engine/train.py) calls `save` and `restore`.
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

from dpfl_mpi import batch
from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import NUMERICS, Job
from dpfl_mpi.storage.files import checkpoints_of, explained, manifests, reason, replacing, write
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, sha256
from dpfl_mpi.storage.lock import content
from dpfl_mpi.survival.signals import HANGS, again_text

KEEP = 2  # checkpoints
SHARD = 2**26  # bytes of a shard, made in memory and then written; it has at least one row
# names of the files of a checkpoint, and of half-written ones; no others are deleted
KINDS = r"(\d{5,}\.shard|results|[0-9a-f]{16}\.manifest)"
OURS = re.compile(rf"\d{{6,}}\.[0-9a-f]{{12}}\.{KINDS}\.h5|\..*\.part")
NOTES = ("begun_from", "hangs")  # text files of `note_start` and `count_hang` in the folder
DIGITS = 16  # of the SHA-256 of a manifest, in its name
MANIFEST = "the manifest of a checkpoint"
# by name in a result, in words: data prepared anew from another source have the same settings
DATA = {"data_sha256": "content of the data", "partition_sha256": "partition"}
WRITE_ERRORS = (OSError, RuntimeError, MemoryError)  # a failing disk; anything else is a bug
Named = dict[str, Any]  # values by their path in an HDF5 file, such as "state/w"


class Checkpoints:
    """The checkpoints of one results file. Methods are collective unless they say otherwise.

    Root calls `still_ours` before it changes files, to end a run whose lock another has taken.
    """

    def __init__(
        self,
        results: Path,
        key: Mapping[str, Any],
        job: Job,
        world: World,
        still_ours: Callable[[], object] = lambda: None,
    ):
        self.key, self.job, self.world, self.still_ours = key, job, world, still_ours
        self.folder = checkpoints_of(results)
        self.last = time.monotonic()  # when the last checkpoint was saved
        self.round = -1  # the newest round that is saved
        self.seconds = 0.0  # of the last save
        self.results: Path | None = None  # the restored checkpoint's copy of the results file
        self.restarts = world.decide(batch.restarts)
        world.decide(self._check_folder)

    def _check_folder(self) -> None:
        """Raise `UserError` if the folder is a link, whose target would be changed, or a file."""
        if os.path.lexists(self.folder) and (self.folder.is_symlink() or not self.folder.is_dir()):
            mend = "remove it, or choose another --out"
            raise UserError(f"{self.folder} is a link, or no folder; {mend}")

    def exist(self) -> bool:
        """Return whether there is a checkpoint, whole or damaged. On root; not collective."""
        return bool(manifests(self.folder))

    def _key(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return what must be the same for a run to go on: its settings, data and results."""
        more = {"mixed": self.job.mixed, "version of the numbers": NUMERICS}
        return {**self.key} | more | {name: about.get(name) for name in DATA}

    def save(
        self, parts: Parts, state: State, recorder: Recorder | None, stop: bool = True
    ) -> tuple[bool, bool]:
        """Save state and results if that is due after this round, or any rank wishes to `stop`.

        Return on all ranks whether it was saved and whether to stop. `UserError` on all if one
        could not write; the checkpoint before stays.
        """
        start, every = time.perf_counter(), self.job.checkpoint_every
        if every.kind == "rounds":
            due = parts.round % every.rounds == 0
        else:
            due = time.monotonic() - self.last >= every.seconds
        due = due and self.world.root  # root's clock decides
        votes = self.world.sum_int64(np.array([due, stop], np.int64))
        if not votes.any():
            return False, False
        # values of local clients [K, ...], for the shards, and values that all ranks share
        of_clients, of_all_ranks = parts.state()
        clients = named("state", state["client"]) | named("momentum", parts.training.momentum)
        clients |= named("federation", of_clients)
        shared = named("state", state["shared"]) | named("federation", of_all_ranks)
        schema, row_bytes = {}, 0
        for name, value in clients.items():
            empty = numpy_of(value[:0])  # no rows: nothing is copied from a GPU
            kind = "tensor" if isinstance(value, torch.Tensor) else "array"
            schema[name] = {"kind": kind, "dtype": empty.dtype.str, "shape": empty.shape[1:]}
            row_bytes += empty.itemsize * math.prod(empty.shape[1:])
        # each rank writes its shards, numbered so that no two ranks share a number
        stem = f"{parts.round:06d}.{self.world.decide(lambda: secrets.token_hex(6))}"
        rows_per_shard = max(1, SHARD // row_bytes)
        with self._errors_on_all_ranks():
            for number, first in enumerate(range(0, len(parts.ids), rows_per_shard)):
                name = f"{stem}.{self.world.rank + self.world.size * number:05d}.shard.h5"
                rows = {
                    name: value[first : first + rows_per_shard] for name, value in clients.items()
                }
                write(self.folder / name, hdf5_bytes(rows, shard=name))
        with self._errors_on_all_ranks():
            if recorder:
                numbers, shared["client/row"] = np.divmod(parts.members.row_of, rows_per_shard)
                shared["client/shard"] = parts.members.owner + self.world.size * numbers
                self._commit(parts, stem, schema, shared, recorder)
        self.round = parts.round
        self.last = time.monotonic()
        self.seconds = time.perf_counter() - start
        return True, bool(votes[1])

    def _commit(
        self, parts: Parts, stem: str, schema: Named, shared: Named, recorder: Recorder
    ) -> None:
        """Copy the results file, write the manifest, delete older checkpoints. On root."""
        self.still_ours()
        results = self.folder / f"{stem}.results.h5"
        with replacing(results) as path:
            recorder.copy(path)
        data = hdf5_bytes(
            shared,
            key=json.dumps(self._key(parts.provenance)),
            round=parts.round,
            schema=json.dumps(schema),
            results_sha256=sha256(results),
        )
        self.still_ours()
        digest = hashlib.sha256(data).hexdigest()[:DIGITS]
        write(self.folder / f"{stem}.{digest}.manifest.h5", data)
        self._delete_older(stem)

    def _delete_older(self, *newest: str) -> None:
        """Delete all but `KEEP` checkpoints: those of stem `newest`, then those of late rounds."""
        keep = [*dict.fromkeys([*newest, *map(stem_of, manifests(self.folder))])][:KEEP]
        for path in self.folder.iterdir():
            if stem_of(path) not in keep and OURS.fullmatch(path.name):
                with contextlib.suppress(IsADirectoryError):  # made by somebody else
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors_on_all_ranks(self) -> Iterator[None]:
        """Raise `UserError` on every rank if the block failed to write on any."""
        mistake = ""
        try:
            yield
        except (UserError, *WRITE_ERRORS) as error:
            mistake = reason(error) or type(error).__name__
        if first := self.world.first(mistake):
            whole = ""
            if self.round >= 0:
                again = f"{again_text(self.job)} goes on from there"
                whole = f"; the one of round {self.round} is whole, and {again}"
            raise UserError(f"the checkpoint in {self.folder} cannot be written: {first}{whole}")

    def note_start(self) -> bool:
        """Note the round that this start goes on from; return whether the last noted the same."""

        def note() -> bool:
            self.still_ours()
            path = self.folder / "begun_from"
            with explained(f"{path} cannot be written"):
                before = content(path).strip()
                write(path, f"{self.round}\n".encode())
                self._delete_older()  # also what a full disk or a kill left half-written
            return before == str(self.round)

        return bool(self.world.decide(note))

    def count_hang(self) -> int:
        """Note that this start of a job hung; return how many of its starts did. Not collective."""
        if not (job := batch.first()):
            return 1
        path = self.folder / "hangs"
        starts = {*content(path).split(), f"{job}:{self.restarts}"}
        try:
            write(path, " ".join(sorted(starts)).encode())
        except OSError:
            return HANGS + 1
        return sum(name.startswith(f"{job}:") for name in starts)

    def clear(self, sure: bool = False) -> None:
        """Delete all checkpoints; if `sure`, raise `UserError` where that was not possible."""

        def delete() -> None:
            self.still_ours()
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                if OURS.fullmatch(path.name) or path.name in NOTES:
                    with contextlib.suppress(OSError):
                        path.unlink()
            with contextlib.suppress(OSError):  # somebody else has a file in it
                self.folder.rmdir()
            if sure and self.exist():
                mend = "remove it, or choose another --out"
                raise UserError(f"{self.folder} cannot be removed; {mend}")

        self.world.decide(delete)
        self.round = -1

    def restore(self, parts: Parts) -> State | None:
        """Set `parts` to the newest whole checkpoint, if any; return the method's state, or None.

        Root warns of damaged ones. `UserError` if none is whole, or one is of another Run.
        """
        names = self.world.decide(lambda: [path.name for path in manifests(self.folder)])
        found = [self.folder / name for name in names]  # the newest first
        for i, manifest in enumerate(found):
            problem = "its manifest, or its copy of the results, is not as it was written"
            if self.world.decide(partial(self._is_whole, manifest, parts.provenance)):
                try:
                    state = self.world.each_rank(partial(self._load, manifest, parts))
                    break
                except UserError as error:
                    problem = str(error)
            if self.world.root:
                last = i + 1 == len(found)
                older = "and there is none before it" if last else "going back to the one before"
                complain(f"warning: the checkpoint {manifest} is damaged ({problem}); {older}")
        else:
            if found:
                whole = f"no checkpoint in {self.folder} is whole ({problem})"
                raise UserError(f"{whole}; start over with --fresh")
            return None
        federation = state.pop("federation")
        parts.set_state(federation["round"], federation, state.pop("momentum"))
        if isinstance(omega := state["shared"].get("omega"), CollaborationGraph):
            parts.mail.narrow(omega)  # the window has room for its models alone, as before
        self.round, self.results = parts.round, results_of(manifest)
        # a damaged manifest would count as the newest until its round is reached again
        for damaged in found[:i] if self.world.root else ():
            with contextlib.suppress(OSError):  # a folder in its place
                damaged.unlink()
        return state

    def _is_whole(self, manifest: Path, about: Mapping[str, Any]) -> bool:
        """Return whether manifest and results are whole; `UserError` if another Run's. On root."""
        try:
            if sha256(manifest)[:DIGITS] not in manifest.name:
                return False
            with Hdf5(manifest, MANIFEST) as file:
                saved = file.json("key", dict)
                results_sha256 = file.attribute("results_sha256", str)
            whole = sha256(results_of(manifest)) == results_sha256
        except Unreadable:
            return False
        self._check_same_run(saved, self._key(about))
        return whole

    def _check_same_run(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raise `UserError` if the key in a checkpoint is not that of this Run and its data."""
        different = sorted(n for n in {*own, *saved} if own.get(n) != saved.get(n))
        fields = [name for name in different if name not in DATA]
        if fields:
            what, remedy = "another run", "choose"
        elif different:
            what, remedy = "a run on other data", "bring back the data that it began with, choose"
        else:
            return
        what += f" (different: {', '.join(fields or [DATA[name] for name in different])})"
        holds = f"{self.folder} holds a checkpoint of {what}"
        raise UserError(f"{holds}; {remedy} another --out, or add --fresh")

    def _load(self, manifest: Path, parts: Parts) -> State:
        """Return what a checkpoint has of local clients and all ranks; `UserError` if damaged."""
        k, device = len(parts.ids), parts.backend.ensemble.device
        out: State = {"client": {}, "shared": {}, "momentum": {}, "federation": {}}
        with Hdf5(manifest, MANIFEST) as file:
            schema = file.json("schema", dict)
            # in which shard, and in which row of it, each local client is
            shard = file.array("client/shard", "iu", (parts.n,), 0)[parts.ids]
            row = file.array("client/row", "iu", (parts.n,), 0)[parts.ids]
            with file.reading("its schema"):
                arrays = {n: np.empty((k, *s["shape"]), s["dtype"]) for n, s in schema.items()}
            out["federation"]["round"] = file.attribute("round", int)
            for group, into in (("state", "shared"), ("federation", "federation")):
                with file.reading(group):
                    for short in file.file.get(group, {}):
                        out[into][short] = stored(file.file[group][short], device)
        for number in np.unique(shard):
            path = self.folder / f"{stem_of(manifest)}.{number:05d}.shard.h5"
            with Hdf5(path, "a shard of a checkpoint") as part:
                if part.attribute("shard", str) != path.name:
                    what = f"is not the shard {path.name}, but another one under its name"
                    raise part.damaged("it", what)
                for name, array in arrays.items():
                    rows = part.dataset(name, array.dtype.kind, (None, *array.shape[1:]))
                    with part.reading(name):
                        for i in np.flatnonzero(shard == number):
                            array[i] = rows[row[i]]
        for name, array in arrays.items():
            group, _, short = name.partition("/")
            value: Any = array
            if schema[name]["kind"] == "tensor":
                # copied to be aligned as PyTorch aligns, for the same bits as before
                value = torch.from_numpy(array).to(device, copy=True)
            out["client" if group == "state" else group][short] = value
        return out


def stem_of(path: Path) -> str:
    """Return what the names of a checkpoint's files begin with, ROUND.TOKEN."""
    return ".".join(path.name.split(".")[:2])


def named(group: str, values: Mapping[str, Any]) -> Named:
    """Return values with the names that they have in an HDF5 group of a file."""
    return {f"{group}/{name}": value for name, value in values.items()}


def results_of(manifest: Path) -> Path:
    return manifest.with_name(f"{stem_of(manifest)}.results.h5")


def hdf5_bytes(values: Named, **attributes: Any) -> bytes:
    """Return the bytes of an HDF5 file, made in memory, so that HDF5 never meets a full disk."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        file.attrs.update(attributes)
        for name, value in values.items():
            store(file, name, value)
    return buffer.getvalue()


def numpy_of(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def store(file: h5py.File, name: str, value: Any) -> None:
    """Write a tensor, array, graph or scalar. Each row of an array has its own checksum."""
    if isinstance(value, CollaborationGraph):
        file[f"{name}/indptr"], file[f"{name}/senders"] = value.indptr, value.senders
        file[name].attrs["kind"] = "graph"
    elif isinstance(value, torch.Tensor | np.ndarray | np.number | np.bool_):
        array = numpy_of(value)
        rows = (1, *array.shape[1:]) if array.ndim > 1 else array.shape
        # HDF5 has checksums of chunks, and no chunks of single numbers
        checksums = {"chunks": rows, "fletcher32": True} if rows and array.size else {}
        file.create_dataset(name, data=array, **checksums)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        file[name].attrs["kind"] = "tensor" if isinstance(value, torch.Tensor) else kind
    elif value is None or isinstance(value, bool | int | float | str):
        group = file.create_group(name)
        group.attrs["kind"] = "scalar"
        group.attrs["json"] = json.dumps(value)
    else:
        what = f"it is a {type(value).__name__}, not a tensor, array, graph or scalar"
        raise TypeError(f"a checkpoint cannot hold {name}: {what}")


def stored(item: Any, device: torch.device) -> Any:
    """Return what `store` wrote."""
    kind = item.attrs["kind"]
    if kind == "graph":
        return CollaborationGraph(item["indptr"][()], item["senders"][()])
    if kind == "scalar":
        return json.loads(item.attrs["json"])
    if kind == "number":  # of NumPy, whose type decides that of a sum
        return item[()]
    array = np.asarray(item[()])  # h5py gives an array of no axes as a number
    return torch.from_numpy(array).to(device, copy=True) if kind == "tensor" else array
