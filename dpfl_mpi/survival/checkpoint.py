"""Checkpoints: every rank's shard, committed by root's manifest; a run goes on from them under any number of ranks.

A generation is three kinds of HDF5 files in the folder `<results file>.checkpoint`:

    ROUND.TOKEN.RANK.shard.h5     the client state of one rank: /state/NAME, /momentum/NAME, /federation/NAME, each [K, ...]
    ROUND.TOKEN.results.h5        the results file as it was: what is recorded after the checkpoint is computed and recorded again
    ROUND.DIGEST.manifest.h5      written last, and only this makes the others count: attrs run, key, round, numerics, job, shards, schema,
                                  results, results_sha256; /client/{shard,row} [N]; /state/NAME, /federation/NAME the same on all ranks

Each is written under a temporary name, fsynced and renamed. A shard checks itself: HDF5's checksums cover its metadata (libver v110)
and every chunk, one client's row each. It also holds its own name, so that another one copied over it is noticed. The manifest's DIGEST
is of its bytes. The two newest generations are kept.

Axes: N clients in all, K on this rank, W row width.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import Parts
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.run import stored_run
from dpfl_mpi.settings.texts import every
from dpfl_mpi.storage import disk
from dpfl_mpi.storage.files import error_number, explained, replacing
from dpfl_mpi.storage.foreign import SMALL, Hdf5, memory, read_bytes, read_text, sha256
from dpfl_mpi.survival import values
from dpfl_mpi.survival.signals import again_text

KEEP = 2  # generations
LAYOUT = ("mixed",)  # fields of Job that decide which arrays a results file has
# facts of /meta that the key of a Run does not have: a data set may have been prepared anew from another source
DATA = {"data_sha256": "content of the data", "partition_sha256": "partition"}
Named = dict[str, Any]  # values by the path under which a file holds them
UNWRITTEN = (OSError, RuntimeError, MemoryError)  # a disk that fails, also where HDF5 says so; anything else is a bug


class Checkpoints:
    """The checkpoints of one results file. Methods are collective unless they say otherwise.

    `still_ours` is called on root before anything of theirs is replaced or deleted; it ends the run where another one has taken its lock.
    """

    def __init__(
        self, results: Path, run: Run, job: Job, world: World, still_ours: Callable[[], object] = lambda: None
    ):
        self.still_ours = still_ours
        self.folder = results.with_name(results.name + ".checkpoint")
        self.run, self.job, self.world = run, job, world
        how: tuple[str, float] = every(job.checkpoint_every) or ("never", 0.0)
        self.unit, self.period = how
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
        return bool(self._manifests())

    def due(self, t: int, stop: bool) -> tuple[bool, bool]:
        """Return (whether to save round t now, whether to stop after it), the same on all ranks. `stop` is this rank's wish."""
        passed = t % self.period == 0 if self.unit == "rounds" else time.monotonic() - self.last >= self.period
        due = self.world.root and self.unit != "never" and passed  # a clock: root decides
        votes = self.world.sum_int64(np.array([due, stop], np.int64))
        return bool(votes.any()), bool(votes[1])

    # writing -----------------------------------------------------------------------------------------------------------
    def save(self, parts: Parts, state: State, recorder: Recorder | None) -> None:
        """Keep the state after the round that `parts` is in, with the results recorded so far.

        Raises:
            UserError: on every rank, where any rank could not write; the generation before is whole.
        """
        start = time.perf_counter()
        stem = f"{parts.round:06d}.{self.world.decide(lambda: secrets.token_hex(6))}"
        shards = [f"{stem}.{rank:05d}.shard.h5" for rank in range(self.world.size)]
        clients, shared = split(parts, state)
        with self._all_or_nobody():
            if len(parts.ids):
                with replacing(self.folder / shards[self.world.rank]) as path, disk.File(path, "w", **NEW) as file:
                    file.attrs["shard"] = shards[self.world.rank]
                    for name, value in clients.items():
                        values.write(file, name, value)
        with self._all_or_nobody():
            if recorder:
                self._commit(parts, stem, shards, clients, shared, recorder)
        self.round, self.last = parts.round, time.monotonic()
        self.seconds = time.perf_counter() - start

    def _commit(
        self, parts: Parts, stem: str, shards: list[str], clients: Named, shared: Named, recorder: Recorder
    ) -> None:
        """Copy the results file, write the manifest, which makes the generation count, and delete what is older than the newest `KEEP`. On root."""
        with replacing(self.folder / f"{stem}.results.h5") as path:
            recorder.copy(path)
            digest = sha256(path)
        buffer = io.BytesIO()
        with h5py.File(buffer, "w", **NEW) as file:
            file.attrs.update(
                run=self.run.to_json(),
                key=json.dumps(self.run.key()),
                round=parts.round,
                numerics=self.run.numerics,
                job=json.dumps({name: getattr(self.job, name) for name in LAYOUT}),
                shards=json.dumps(shards),
                shards_named=True,  # each in its attribute `shard`; earlier versions wrote none
                schema=json.dumps({name: values.row_layout(value) for name, value in clients.items()}),
                results=f"{stem}.results.h5",
                results_sha256=digest,
            )
            file["client/shard"], file["client/row"] = parts.members.owner, parts.members.row_of
            for name, value in shared.items():
                values.write(file, name, value)
        data = buffer.getvalue()
        manifest = f"{parts.round:06d}.{hashlib.sha256(data).hexdigest()[:16]}.manifest.h5"
        self.still_ours()
        with replacing(self.folder / manifest) as path:
            path.write_bytes(data)
        self._forget([manifest, *(p.name for p in self._manifests() if p.name != manifest)][:KEEP])

    def _forget(self, manifests: list[str]) -> None:
        """Delete every file of the folder that none of these manifests names."""
        wanted = set(manifests)
        for name in manifests:
            with contextlib.suppress(UserError), Hdf5(self.folder / name, MANIFEST) as file:
                wanted |= {*map(str, file.json("shards", list)), file.attribute("results", str)}
        for path in self.folder.iterdir():
            if path.name not in wanted and OURS.fullmatch(path.name):
                with contextlib.suppress(IsADirectoryError):  # none of ours
                    path.unlink(missing_ok=True)

    @contextmanager
    def _all_or_nobody(self) -> Iterator[None]:
        """Raise on every rank where any rank's block failed to write."""
        code = 0
        try:
            yield
        except (UserError, *UNWRITTEN) as error:
            code = error_number(error) or errno.EIO
        worst = int(self.world.spread(np.array([float(code)]))[0, 2])
        if worst:
            whole = f"; the one of round {self.round} is whole, and {again_text(self.job)} goes on from there"
            whole = whole if self.round >= 0 else ""
            raise UserError(f"the checkpoint in {self.folder} cannot be written: {os.strerror(worst)}{whole}")

    def note_start(self) -> bool:
        """Note from which round this start goes on; return whether the one before went on from the same, so kept nothing. Call once."""

        def note() -> bool:
            path = self.folder / "begun_from"
            with explained(f"{path} cannot be written"):
                before = ""
                with contextlib.suppress(UserError):
                    before = read_text(path, SMALL, follow=False).strip()
                with replacing(path) as part:
                    part.write_text(f"{self.round}\n")
            return before == str(self.round)

        return bool(self.world.decide(note))

    def clear(self, sure: bool = False) -> None:
        """Delete all checkpoints: the run is finished, or to be started over.

        Raises:
            UserError: on every rank; not all could be deleted, and the caller must be `sure`.
        """

        def delete() -> None:
            self.still_ours()
            shutil.rmtree(self.folder, ignore_errors=True)
            if sure and self.exist():
                raise UserError(f"{self.folder} cannot be removed; remove it, or choose another --out")

        self.world.decide(delete)
        self.round = -1

    # reading -----------------------------------------------------------------------------------------------------------
    def _manifests(self) -> list[Path]:
        """Return the manifests, newest first."""
        found = [(p.lstat().st_mtime_ns, p) for p in self.folder.glob("*.manifest.h5")] if self.folder.is_dir() else []
        return [p for _, p in sorted(found, key=lambda item: (item[1].name[:6], item[0]), reverse=True)]

    def restore(self, parts: Parts) -> State | None:
        """Return the state of the newest whole checkpoint and set `parts` to it; None where there is no checkpoint.

        A damaged one falls back to the one before, with a warning.

        Raises:
            UserError: on every rank; a checkpoint is of another Run, or none is whole.
        """
        manifests = [self.folder / name for name in self.world.decide(lambda: [p.name for p in self._manifests()])]
        for i, manifest in enumerate(manifests):
            data = self.world.share(partial(self._read, manifest, parts.about))
            state: State | None = None
            if data:
                with contextlib.suppress(UserError), Hdf5(manifest, MANIFEST, data["manifest"].tobytes()) as file:
                    state = self._load(file, parts)
                    self.results = self.folder / file.attribute("results", str)
            if not self.world.agree(state is None):
                assert state is not None
                apply(parts, state)
                self.round = parts.round
                for damaged in manifests[:i] if self.world.root else ():
                    remove(damaged)  # would count as the newest until its round is reached again
                return {"client": state["client"], "shared": state["shared"]}
            if self.world.root:
                older = "going back to the one before" if i + 1 < len(manifests) else "and there is none before it"
                print(f"warning: the checkpoint {manifest} is damaged; {older}", file=sys.stderr, flush=True)
        if manifests:
            raise UserError(f"no checkpoint in {self.folder} is whole; start over with --fresh")
        return None

    def _read(self, manifest: Path, about: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the bytes of a manifest, nothing where it is damaged; refuse one of another Run, or of other data than `about` names. On root."""
        try:
            data = read_bytes(manifest, memory(), follow=False)  # it holds what is shared: a model of any size
            if hashlib.sha256(data).hexdigest()[:16] != manifest.name.split(".")[1]:
                return {}
            with Hdf5(manifest, MANIFEST, data) as file, file.reading("its Run"):
                theirs = stored_run(file.file.attrs)[1] | file.json("job", dict)
                theirs["version of the numbers"] = file.attribute("numerics", int)
                results, digest = self.folder / file.attribute("results", str), file.attribute("results_sha256", str)
        except UserError:
            return {}
        mine = (
            self.run.key()
            | {name: getattr(self.job, name) for name in LAYOUT}
            | {"version of the numbers": self.run.numerics}
        )
        different = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
        if different:
            raise UserError(
                f"{self.folder} holds a checkpoint of another run (different: {', '.join(different)}); "
                "choose another --out, or start over with --fresh"
            )
        try:
            if results.parent != self.folder or sha256(results) != digest:
                return {}
            with Hdf5(results, "a copy of a results file") as file:
                anew = [DATA[name] for name in DATA if file.attribute(name, str, "meta", about[name]) != about[name]]
        except UserError:
            return {}
        if anew:
            raise UserError(
                f"{self.folder} holds a checkpoint of a run on other data (different: {', '.join(anew)}); bring back the data that it began "
                "with, choose another --out, or start over with --fresh"
            )
        return {"manifest": np.frombuffer(data, np.uint8)}

    def _load(self, file: Hdf5, parts: Parts) -> State:
        """Return this rank's state, the method's in "client" and "shared", with what else was kept in "momentum" and "federation".

        It opens just the shards that hold this rank's clients.

        Raises:
            UserError: the manifest or a shard is damaged, or a shard is of another generation.
        """
        shards, schema = file.json("shards", list), file.json("schema", dict)
        shard = file.array("client/shard", "iu", (parts.n,), 0, len(shards) - 1)[parts.ids]
        row = file.array("client/row", "iu", (parts.n,), 0)[parts.ids]
        with file.reading("its schema"):
            arrays = {name: np.empty((len(parts.ids), *s["shape"]), s["dtype"]) for name, s in schema.items()}
        for number in np.unique(shard):
            with Hdf5(self.folder / Path(shards[number]).name, "a shard of a checkpoint") as part:
                if (
                    file.attribute("shards_named", bool, default=False)
                    and part.attribute("shard", str) != shards[number]
                ):
                    raise part.damaged("it", f"is not the shard {shards[number]}, but another one under its name")
                for name, array in arrays.items():
                    mine = np.flatnonzero(shard == number)
                    stored = part.dataset(name, array.dtype.kind, (None, *array.shape[1:]))
                    with part.reading(name):
                        if stored.dtype != array.dtype:
                            raise TypeError
                        for i in mine:
                            array[i] = stored[row[i]]
        out: State = {"client": {}, "shared": {}, "momentum": {}, "federation": {"round": file.attribute("round", int)}}
        for name, array in arrays.items():
            group, _, short = name.partition("/")
            value: Any = array
            if schema[name]["kind"] == "tensor":
                value = torch.from_numpy(array).to(
                    parts.backend.ensemble.device, copy=True
                )  # aligned as PyTorch aligns, as before
            out["client" if group == "state" else group][short] = value
        for group, into in (("state", "shared"), ("federation", "federation")):
            with file.reading(group):
                for short in file.file.get(group, {}):
                    out[into][short] = values.read(file.file[group][short], parts.backend.ensemble.device)
        return out


def remove(path: Path) -> None:
    """Remove a file, also where another one was put in its place."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


# names of the files of a checkpoint's folder; others in it are not ours to delete
OURS = re.compile(r"\d{6}\.[0-9a-f]{12,16}\.(\d{5}\.shard|results|manifest)\.h5|\..*\.part")
MANIFEST = "the manifest of a checkpoint"
NEW: dict[str, Any] = {"libver": ("v110", "v110")}  # checksummed metadata


def split(parts: Parts, state: State) -> tuple[Named, Named]:
    """Return (client arrays `[K, ...]`, what is the same on every rank), by path: the method's state and the Federation's."""
    clients = {f"state/{name}": value for name, value in state["client"].items()}
    clients |= {f"momentum/{name}": value for name, value in parts.training.momentum.items()}
    mine, same = parts.state()
    clients |= {f"federation/{name}": value for name, value in mine.items()}
    shared = {f"state/{name}": value for name, value in state["shared"].items()}
    shared |= {f"federation/{name}": value for name, value in same.items()}
    return clients, shared


def apply(parts: Parts, state: State) -> None:
    """Set the Federation to a restored state, and its window to what Omega needs."""
    parts.set_state(state["federation"]["round"], state["federation"], state["momentum"])
    omega = state["shared"].get("omega")
    if isinstance(omega, CollaborationGraph):
        parts.mail.narrow(omega)
