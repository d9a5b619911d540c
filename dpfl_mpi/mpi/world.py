"""`World`: the ranks of a run and their collectives on arrays.

Only this room imports mpi4py. Only buffers are sent, never pickles. Every rank reaches every
collective; a rank without clients has arrays of length 0.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
from mpi4py import MPI

from dpfl_mpi.errors import RootFailed, UserError, complain
from dpfl_mpi.mpi.placement import node_memory

T = TypeVar("T")
PATIENCE = 5.0  # seconds until a rank that failed gives up the others
PIECE = 2**30  # bytes of one broadcast: before MPI 4 a count is an int of 32 bits
STEP_BEHIND = 0.25  # seconds by which each rank lets the one before it speak


class World:
    """The ranks of a run and the collectives it uses; counts the bytes that this rank puts into them."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.root = comm.rank == 0  # writes files and messages
        self.node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.farewell = comm.Dup()  # for `all_stop` alone: other ranks may be in the middle of a collective of `comm`
        self.local_rank = self.node.rank
        self.bytes_collective = 0
        self.before_abort: Callable[[int], None] = lambda code: None  # called on the rank that aborts

    def part(self, which: bool) -> "World":
        """Return the world of those ranks that give the same as this one. Collective."""
        return World(cast(MPI.Intracomm, self.comm.Split(int(which))))

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Return on every rank what `choose` returns on root, as JSON carries it: a tuple arrives as a list, on root as well. Collective.

        Raises:
            UserError: on every rank; `choose` raised it on root.
            RootFailed: on the other ranks, where `choose` raised anything else on root, which root raises again.
        """
        text, bug = "", None
        if self.root:
            try:
                text = json.dumps({"value": choose()})
            except UserError as mistake:
                text = json.dumps({"mistake": str(mistake)})
            except BaseException as error:
                text, bug = "{}", error
        answer = json.loads(self.first(text))
        if bug:
            raise bug
        if not answer:
            raise RootFailed
        if "mistake" in answer:
            raise UserError(answer["mistake"])
        return answer["value"]

    def each_rank(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on this rank. Where it raises `UserError` on any, every rank has the sentence of the first. Collective."""
        made: Any = None
        mistake = ""
        try:
            made = make()
        except UserError as error:
            mistake = str(error) if self.root else f"rank {self.rank} on {MPI.Get_processor_name()}: {error}"
        if said := self.first(mistake):
            raise UserError(said)
        return made

    def share(self, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return on every rank the arrays by name that `make` returns on root; errors as in `decide`. Collective."""
        made: dict[str, np.ndarray] = {}

        def look() -> list[tuple[str, str, tuple[int, ...]]]:
            made.update({name: np.ascontiguousarray(array) for name, array in make().items()})
            return [(name, array.dtype.str, array.shape) for name, array in made.items()]

        for name, dtype, shape in self.decide(look):
            if not self.root:
                made[name] = np.empty(shape, dtype)
            data = as_bytes(made[name])
            for start in range(0, len(data), PIECE):
                self.comm.Bcast(data[start : start + PIECE], root=0)
        return made

    def texts(self, mine: str, comm: MPI.Comm | None = None) -> list[str]:
        """Return the text of every rank, of this node where `comm` is `self.node`. Collective."""
        comm = self.comm if comm is None else comm
        data = np.frombuffer(mine.encode("utf-8", "replace"), np.uint8)
        lengths = np.empty(comm.size, np.int64)
        comm.Allgather(np.array([len(data)], np.int64), lengths)
        out = np.empty(lengths.sum(), np.uint8)
        comm.Allgatherv(data, [out, lengths, MPI.BYTE])
        return [part.tobytes().decode() for part in np.split(out, np.cumsum(lengths)[:-1])]

    def first(self, text: str) -> str:
        """Return on every rank the text of the lowest rank that has one, "" where none has. Collective."""
        return next(filter(None, self.texts(text)), "")

    def unlike(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the names of those settings that are not the same on every rank, by the hash of each; the names are. Collective."""
        digests = [hashlib.sha256(repr(value).encode()).hexdigest() for value in settings.values()]
        theirs = zip(*(text.split() for text in self.texts(" ".join(digests))), strict=True)
        return [name for name, values in zip(settings, theirs, strict=True) if len(set(values)) > 1]

    def meet(self, place: str) -> None:
        """Return once every rank is at this place; where some is at another, all have a `UserError` that names both. Collective."""
        places = self.texts(place)
        if other := next((r for r, at in enumerate(places) if at != places[0]), 0):
            at = f"rank 0 is at {places[0]}, rank {other} at {places[other]}"
            raise UserError(f"{at}: every rank must call the same verbs of fed, in the same order")

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raises the flag."""
        out = np.zeros(1, np.int64)
        self.comm.Allreduce(np.array([flag], np.int64), out, MPI.MAX)
        return bool(out[0])

    def sum_int64(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over ranks of int64 arrays: exact, the same for any number of ranks."""
        out = np.empty_like(values)
        self.bytes_collective += values.nbytes
        self.comm.Allreduce(np.ascontiguousarray(values), out, MPI.SUM)
        return out

    def gather(self, rows: np.ndarray, owner: np.ndarray, everywhere: bool = False) -> np.ndarray | None:
        """Return `[N, ...]`, rank by rank, from every rank's `[K, ...]`, whose ranks are `owner` `[N]`: on root, or on all ranks."""
        rows = np.ascontiguousarray(rows)
        size = int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.itemsize
        self.bytes_collective += rows.nbytes
        out = np.empty((len(owner), *rows.shape[1:]), rows.dtype) if everywhere or self.root else None
        if size == 0:
            return out
        # counted in rows: before MPI 4 a count is an int of 32 bits, and so is where a rank's rows begin
        row = MPI.BYTE.Create_contiguous(size).Commit()
        mine: Any = [as_bytes(rows), len(rows), row]
        all_rows: Any = None if out is None else [as_bytes(out), np.bincount(owner, minlength=self.size), row]
        try:
            if everywhere:
                self.comm.Allgatherv(mine, all_rows)
            else:
                self.comm.Gatherv(mine, all_rows, root=0)
        finally:
            row.Free()
        return out

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return min, mean and max over ranks of float64 values `[n]`, as `[n, 3]`."""
        out = [np.empty_like(values) for _ in range(3)]
        for op, result in zip((MPI.MIN, MPI.SUM, MPI.MAX), out, strict=True):
            self.comm.Allreduce(values, result, op)
        return np.stack([out[0], out[1] / self.size, out[2]], -1)

    def hosts(self) -> list[str]:
        """Return the host name of every rank. Collective."""
        return self.texts(MPI.Get_processor_name())

    def most_alike(self, text: str) -> int:
        """Return the largest number of ranks of one node that give the same text; "" does not count. Collective."""
        alike = self.texts(text, self.node).count(text) * bool(text)
        return int(self.spread(np.array([float(alike)]))[0, 2])

    def check_memory(self, need: int, advice: str) -> None:
        """Raise `UserError` on every rank where the ranks of a node together need more shared memory than it has; the sentence ends with `advice`.

        `Win.Allocate` of far too much succeeds and ends the job by SIGBUS at the first touch, so this is asked before.
        """
        total = np.zeros(1, np.int64)
        self.node.Allreduce(np.array([need], np.int64), total)
        limit, what = node_memory()
        need_gb, gb = total[0] / 2**30, limit / 2**30
        said = f"the RMA windows need {need_gb:.2f} GiB on a node of {gb:.2f} GiB ({what}); {advice}"
        if said := self.first(said if total[0] > limit else ""):
            raise UserError(said)

    def all_stop(self) -> bool:
        """Return whether every rank gets here in time, so that all can end; else the others wait for this rank in vain."""
        request = self.farewell.Ibarrier()
        end = time.monotonic() + PATIENCE
        while not request.Test():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def abort(self, code: int, text: str = "", last: Callable[[], None] = lambda: None) -> None:
        """End all ranks at once, after this text on stderr, and `last`. Of ranks that fail together the lowest speaks: the others are ended first."""
        self.before_abort(code)
        if text:
            time.sleep(min(STEP_BEHIND * self.rank, PATIENCE))
            complain(text)
            until_read(sys.stderr)
        last()  # not before what is said: until here another thread of this rank goes on
        note_for_script(f"ended with {code}")  # srun makes 137 of it
        self.comm.Abort(code)
        os._exit(code)  # Abort may return, once the launcher is told: nothing runs after it


def note_for_script(text: str) -> None:
    """Write a line into the file that slurm/train.sbatch reads when srun has ended, where the run was started by it."""
    if (begun := Path(os.environ.get("DPFL_BEGUN", ""))).is_file():
        with contextlib.suppress(OSError):
            begun.write_text(f"{text}\n")


def until_read(stream: IO[str], seconds: float = PATIENCE) -> None:
    """Wait until the other end of a pipe has taken what was written: a launcher that is told to end its ranks reads no further."""
    with contextlib.suppress(OSError):  # no descriptor, or the reader has gone
        pipe = stream.fileno() if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) else None
        end = time.monotonic() + seconds
        while pipe is not None and time.monotonic() < end and any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
            time.sleep(0.01)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array, as a view."""
    return array.view(np.uint8).reshape(-1)
