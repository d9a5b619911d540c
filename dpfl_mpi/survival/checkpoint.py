"""Checkpoints: every rank's shard, committed by root's manifest; a run goes on from them under any number of ranks.

A generation is three kinds of HDF5 files in the folder `<results file>.checkpoint`:

    ROUND.TOKEN.RANK.shard.h5     the client state of one rank: /state/NAME, /momentum/NAME, /federation/NAME, each [K, ...]
    ROUND.TOKEN.results.h5        the results file as it was: what is recorded after the checkpoint is computed and recorded again
    ROUND.DIGEST.manifest.h5      written last, and only this makes the others count: attrs run, key, round, numerics, job, shards, schema,
                                  results, results_sha256; /client/{shard,row} [N]; /state/NAME, /federation/NAME the same on all ranks

Each is written under a temporary name, fsynced and renamed. A shard checks itself: HDF5's checksums cover its metadata (libver v110)
and every chunk, one client's row each. The manifest's DIGEST is of its bytes. The two newest generations are kept.

Axes: N clients in all, K on this rank, W row width.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch

from dpfl_mpi.config import NUMERICS, Job, Run, restore
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.settings.texts import every
from dpfl_mpi.storage import disk

if TYPE_CHECKING:
    from dpfl_mpi.federation import Federation
    from dpfl_mpi.mpi.world import World
    from dpfl_mpi.results import Recorder

KEEP = 2  # generations
LAYOUT = ("mixed",)  # fields of Job that decide which arrays a results file has
DAMAGE = (OSError, KeyError, ValueError, RuntimeError)  # what h5py raises for a file that is not what it should be
State = dict[str, Any]


class Checkpoints:
    """The checkpoints of one results file. Methods are collective unless they say otherwise."""

    def __init__(self, results: Path, run: Run, job: Job, world: World):
        self.folder = results.with_name(results.name + ".checkpoint")
        self.run, self.job, self.world = run, job, world
        how: tuple[str, float] = every(job.checkpoint_every) or ("never", 0.0)
        self.unit, self.period = how
        self.last = time.monotonic()
        self.round = -1  # the newest round that is safe
        self.seconds = 0.0  # that the last save took
        self.results: Path | None = None  # the results file as the restored checkpoint left it, on root

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
    def save(self, fed: Federation, state: State, recorder: Recorder | None) -> None:
        """Keep the state after the round that `fed` is in, with the results recorded so far.

        Raises:
            UserError: on every rank, where any rank could not write; the generation before is whole.
        """
        start = time.perf_counter()
        token = self.world.from_root(lambda: [np.frombuffer(secrets.token_bytes(6), np.uint8).copy()])[0]
        stem = f"{fed.round:06d}.{token.tobytes().hex()}"
        shards = [f"{stem}.{rank:05d}.shard.h5" for rank in range(self.world.size)]
        clients, shared = split(fed, state)
        with self._all_or_nobody():
            self.folder.mkdir(parents=True, exist_ok=True)
            if fed.k:
                with replacing(self.folder / shards[self.world.rank]) as path, disk.File(path, "w", **NEW) as file:
                    for name, value in clients.items():
                        write(file, name, value)
        with self._all_or_nobody():
            if recorder:
                self._commit(fed, stem, shards, clients, shared, recorder)
        self.round, self.last = fed.round, time.monotonic()
        self.seconds = time.perf_counter() - start

    def _commit(
        self,
        fed: Federation,
        stem: str,
        shards: list[str],
        clients: Mapping[str, Any],
        shared: Mapping[str, Any],
        recorder: Recorder,
    ) -> None:
        with replacing(self.folder / f"{stem}.results.h5") as path:
            recorder.copy(path)
            digest = sha256(path)
        memory = io.BytesIO()
        with h5py.File(memory, "w", **NEW) as file:
            file.attrs.update(
                run=self.run.to_json(),
                key=json.dumps(self.run.key()),
                round=fed.round,
                numerics=NUMERICS,
                job=json.dumps({name: getattr(self.job, name) for name in LAYOUT}),
                shards=json.dumps(shards),
                schema=json.dumps({name: describe(value) for name, value in clients.items()}),
                results=f"{stem}.results.h5",
                results_sha256=digest,
            )
            file["client/shard"], file["client/row"] = fed.owner, fed.row_of
            for name, value in shared.items():
                write(file, name, value)
        data = memory.getvalue()
        manifest = f"{fed.round:06d}.{hashlib.sha256(data).hexdigest()[:16]}.manifest.h5"
        with replacing(self.folder / manifest) as path:
            path.write_bytes(data)
        self._forget([manifest, *(p.name for p in self._manifests() if p.name != manifest)][:KEEP])

    def _forget(self, manifests: list[str]) -> None:
        """Delete every file of the folder that none of these manifests names."""
        wanted = set(manifests)
        for name in manifests:
            with contextlib.suppress(*DAMAGE), h5py.File(self.folder / name, "r", locking=False) as file:
                wanted |= {*json.loads(file.attrs["shards"]), str(file.attrs["results"])}
        for path in self.folder.iterdir():
            if path.name not in wanted and path.suffix in (".h5", ".part"):
                path.unlink(missing_ok=True)

    @contextmanager
    def _all_or_nobody(self) -> Iterator[None]:
        """Raise on every rank where any rank's block failed to write."""
        code = 0
        try:
            yield
        except DAMAGE as error:
            code = getattr(error, "errno", None) or find_errno(str(error))
        worst = int(self.world.spread(np.array([float(code)]))[0, 2])
        if worst:
            whole = (
                f"; the one of round {self.round} is whole, and the same command goes on from there"
                if self.round >= 0
                else ""
            )
            raise UserError(f"the checkpoint in {self.folder} cannot be written: {os.strerror(worst)}{whole}")

    def stalled(self) -> bool:
        """Return whether the start before this one began from the same round, so kept nothing; note this one. Call once."""

        def look() -> list[np.ndarray]:
            note = self.folder / "begun_from"
            before = note.read_text().strip() if note.is_file() else ""
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                note.write_text(f"{self.round}\n")
            except OSError as error:
                raise UserError(f"{note} cannot be written: {error.strerror}") from None
            return [np.array([before == str(self.round)], np.int64)]

        return bool(self.world.from_root(look)[0][0])

    def clear(self, sure: bool = False) -> None:
        """Delete all checkpoints: the run is finished, or to be started over.

        Raises:
            UserError: on every rank; not all could be deleted, and the caller must be `sure`.
        """

        def delete() -> list[np.ndarray]:
            shutil.rmtree(self.folder, ignore_errors=True)
            if sure and self.exist():
                raise UserError(f"{self.folder} cannot be removed; remove it, or choose another --out")
            return []

        self.world.from_root(delete)
        self.round = -1

    # reading -----------------------------------------------------------------------------------------------------------
    def _manifests(self) -> list[Path]:
        """Return the manifests, newest first."""
        found = [(p.stat().st_mtime_ns, p) for p in self.folder.glob("*.manifest.h5")] if self.folder.is_dir() else []
        return [p for _, p in sorted(found, key=lambda item: (item[1].name[:6], item[0]), reverse=True)]

    def restore(self, fed: Federation) -> State | None:
        """Return the state of the newest whole checkpoint and set `fed` to it; None where there is no checkpoint.

        A damaged one falls back to the one before, with a warning.

        Raises:
            UserError: on every rank; a checkpoint is of another Run, or none is whole.
        """
        manifests: list[Path] = []

        def count() -> list[np.ndarray]:
            manifests.extend(self._manifests())
            return [np.array([len(manifests)])]

        found = int(self.world.from_root(count)[0][0])
        for i in range(found):
            data = self.world.from_root(partial(self._read, manifests[i] if manifests else None))[0]
            state: State | None = None
            if len(data):
                with contextlib.suppress(*DAMAGE), h5py.File(io.BytesIO(data.tobytes()), "r") as file:
                    state = self._load(file, fed)
            if not self.world.agree(state is None):
                assert state is not None
                apply(fed, state)
                self.round = fed.round
                for damaged in manifests[:i]:  # would count as the newest until their rounds are reached again
                    damaged.unlink(missing_ok=True)
                return {"client": state["client"], "shared": state["shared"]}
            if self.world.root:
                older = "going back to the one before" if i + 1 < found else "and there is none before it"
                print(f"warning: the checkpoint {manifests[i]} is damaged; {older}", file=sys.stderr, flush=True)
        if found:
            raise UserError(f"no checkpoint in {self.folder} is whole; start over with --fresh")
        return None

    def _read(self, path: Path | None) -> list[np.ndarray]:
        """Return the bytes of a manifest, none where it is damaged; refuse one of another Run. On root."""
        assert path is not None
        damaged = [np.zeros(0, np.uint8)]
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest()[:16] != path.name.split(".")[1]:
                return damaged
            with h5py.File(io.BytesIO(data), "r") as file:
                theirs = restore(file.attrs)[1] | json.loads(str(file.attrs["job"]))
                theirs["version of the numbers"] = int(file.attrs["numerics"])
                results, digest = self.folder / str(file.attrs["results"]), str(file.attrs["results_sha256"])
        except DAMAGE:
            return damaged
        mine = (
            self.run.key() | {name: getattr(self.job, name) for name in LAYOUT} | {"version of the numbers": NUMERICS}
        )
        different = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
        if different:
            raise UserError(
                f"{self.folder} holds a checkpoint of another run (different: {', '.join(different)}); "
                "choose another --out, or start over with --fresh"
            )
        with contextlib.suppress(OSError):
            if sha256(results) == digest:
                self.results = results
                return [np.frombuffer(data, np.uint8).copy()]
        return damaged

    def _load(self, file: h5py.File, fed: Federation) -> State:
        """Return this rank's state; opens just the shards that hold its clients."""
        shard, row = file["client/shard"][()][fed.ids], file["client/row"][()][fed.ids]
        shards = json.loads(str(file.attrs["shards"]))
        schema = json.loads(str(file.attrs["schema"]))
        arrays = {name: np.empty((fed.k, *s["shape"]), s["dtype"]) for name, s in schema.items()}
        for number in np.unique(shard):
            with h5py.File(self.folder / shards[number], "r", locking=False) as part:
                for i in np.flatnonzero(shard == number):
                    for name, array in arrays.items():
                        array[i] = part[name][row[i]]
        out: State = {"client": {}, "shared": {}, "momentum": {}, "federation": {"round": int(file.attrs["round"])}}
        for name, array in arrays.items():
            group, _, short = name.partition("/")
            value: Any = array
            if schema[name]["kind"] == "tensor":
                value = torch.from_numpy(array).to(fed.device, copy=True)  # aligned as PyTorch aligns, as before
            out["client" if group == "state" else group][short] = value
        for group, into in (("state", "shared"), ("federation", "federation")):
            for short in file.get(group, {}):
                out[into][short] = read(file[group][short], fed.device)
        return out


NEW: dict[str, Any] = {"libver": ("v110", "v110")}  # checksummed metadata


def split(fed: Federation, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (client arrays `[K, ...]`, what is the same on every rank), by path: the method's state and the Federation's."""
    clients = {f"state/{name}": value for name, value in state["client"].items()}
    clients |= {f"momentum/{name}": value for name, value in fed.momentum.items()}
    clients |= {f"federation/{name}": getattr(fed, name) for name in fed.CLIENT_STATE}
    shared = {f"state/{name}": value for name, value in state["shared"].items()}
    shared |= {f"federation/{name}": getattr(fed, name) for name in fed.SHARED_STATE}
    return clients, shared


def apply(fed: Federation, state: State) -> None:
    """Set the Federation to a restored state, and its window to what Omega needs."""
    fed.begin_round(state["federation"].pop("round"))
    fed.momentum = state["momentum"]
    for name, value in state["federation"].items():
        setattr(fed, name, value)
    omega = state["shared"].get("omega")
    if isinstance(omega, CollaborationGraph):
        fed.narrow(omega)


def numpy_of(value: Any) -> np.ndarray:
    """Return a tensor or array as an array in host memory."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def describe(value: Any) -> dict[str, Any]:
    """Return what a rank without clients must know of a client array: kind, type and shape of a row."""
    array = numpy_of(value)
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    return {"kind": kind, "dtype": array.dtype.str, "shape": array.shape[1:]}


def write(file: h5py.File, name: str, value: Any) -> None:
    """Write a tensor, array, graph or scalar; one row is one checksummed chunk.

    Raises:
        TypeError: the value is of no kind that a checkpoint holds.
    """
    if isinstance(value, CollaborationGraph):
        file[f"{name}/indptr"], file[f"{name}/senders"] = value.indptr, value.senders
        file[name].attrs["kind"] = "graph"
    elif isinstance(value, torch.Tensor | np.ndarray):
        array = numpy_of(value)
        rows = (1, *array.shape[1:]) if array.ndim > 1 else array.shape
        checked = {"chunks": rows, "fletcher32": True} if array.size else {}
        file.create_dataset(name, data=array, **checked)
        file[name].attrs["kind"] = "tensor" if isinstance(value, torch.Tensor) else "array"
    elif value is None or isinstance(value, bool | int | float | str | np.generic):
        group = file.create_group(name)
        group.attrs["kind"] = "scalar"
        group.attrs["json"] = json.dumps(value.item() if isinstance(value, np.generic) else value)
    else:
        raise TypeError(
            f"a checkpoint cannot hold {name}: it is a {type(value).__name__}, not a tensor, array, graph or scalar"
        )


def read(item: Any, device: torch.device) -> Any:
    """Return what `write` wrote."""
    kind = item.attrs["kind"]
    if kind == "graph":
        return CollaborationGraph(item["indptr"][()], item["senders"][()])
    if kind == "scalar":
        return json.loads(item.attrs["json"])
    return torch.from_numpy(np.asarray(item[()])).to(device) if kind == "tensor" else item[()]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to; afterwards the file is on disk under its own, whole, or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    disk.sync_folder(path.parent)  # the new name, too


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def find_errno(text: str) -> int:
    """Return the error number in a message of HDF5, EIO where there is none."""
    match = re.search(r"errno = (\d+)", text)
    return int(match.group(1)) if match else 5
