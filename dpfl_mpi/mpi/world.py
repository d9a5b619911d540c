"""`World`: the ranks of a run, and what all of them do together or end together.

A collective is a call that every rank must make at the same point of the program; a rank without
clients then has arrays of length 0. Root is rank 0. `open_world` in start.py makes the `World`, and
all of the program uses it. Only this folder imports mpi4py. Only buffers are sent, never pickles.
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
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from mpi4py import MPI

from dpfl_mpi.errors import REQUEUE, RootFailed, UserError, complain
from dpfl_mpi.mpi.node import node_memory

T = TypeVar("T")
PATIENCE_S = 5.0  # how long a rank that failed waits for others
RANK_DELAY_S = 0.25  # how much later than the rank before it each rank prints
LIBRARY = "{} {}".format(MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1])))
PIECE = 2**30  # bytes of one broadcast: before MPI 4 a count is an int of 32 bits


class World:
    """The ranks of a run and their collectives."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.root = comm.rank == 0  # writes files and messages
        self.bytes_collective = 0  # that this rank put into sums and gathers in this round
        self.code = REQUEUE  # where MPI or a signal ends the run; STALLED: do not start it again
        self.stuck = False  # whether a thread of a rank hangs in MPI
        try:
            self.node = comm.Split_type(MPI.COMM_TYPE_SHARED)
            # for `all_stop` alone: other ranks may be in a collective of `comm`
            self.farewell = comm.Dup()
        except MPI.Exception as error:
            self.abort_for(error)
        self.local_rank = self.node.rank

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Return on every rank what `choose` returns on root, through JSON. Collective.

        A `UserError` of `choose` is raised on every rank. If it raises anything else, root raises
        that, and the other ranks raise `RootFailed`.
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
        """Return what `make` returns on this rank; all raise the first `UserError`. Collective."""
        result: Any = None
        mistake = ""
        try:
            result = make()
        except UserError as error:
            where = "" if self.root else f"rank {self.rank} on {MPI.Get_processor_name()}: "
            mistake = f"{where}{error}"
        if first := self.first(mistake):
            raise UserError(first)
        return result

    def share(self, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return on every rank the arrays by name that `make` returns on root. Collective."""
        arrays: dict[str, np.ndarray] = {}

        def layouts() -> list[tuple[str, str, tuple[int, ...]]]:
            arrays.update({name: np.ascontiguousarray(array) for name, array in make().items()})
            return [(name, array.dtype.str, array.shape) for name, array in arrays.items()]

        for name, dtype, shape in self.decide(layouts):
            if not self.root:
                arrays[name] = np.empty(shape, dtype)
            data = as_bytes(arrays[name])
            for start in range(0, len(data), PIECE):
                self.comm.Bcast(data[start : start + PIECE], root=0)
        return arrays

    def texts(self, text: str) -> list[str]:
        """Return the text of every rank. Collective."""
        data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([len(data)], np.int64), lengths)
        out = np.empty(lengths.sum(), np.uint8)
        self.comm.Allgatherv(data, [out, lengths, MPI.BYTE])
        return [part.tobytes().decode() for part in np.split(out, np.cumsum(lengths)[:-1])]

    def first(self, text: str) -> str:
        """Return on every rank the text of the lowest rank that has one, else "". Collective."""
        return next(filter(None, self.texts(text)), "")

    def unlike(self, settings: Mapping[str, Any]) -> list[str]:
        """Return on every rank the names of the settings that differ between ranks. Collective."""
        digests = [hashlib.sha256(repr(value).encode()).hexdigest() for value in settings.values()]
        digests_of_ranks = [text.split() for text in self.texts(" ".join(digests))]
        by_setting = zip(settings, *digests_of_ranks, strict=True)
        return [name for name, *of_ranks in by_setting if len(set(of_ranks)) > 1]

    def meet(self, place: str) -> None:
        """Wait until every rank is at this place; raise `UserError` where one is at another."""
        places = self.texts(place)
        if other := next((r for r in range(self.size) if places[r] != places[0]), 0):
            at = f"rank 0 is at {places[0]}, rank {other} at {places[other]}"
            raise UserError(f"{at}: every rank must call the same verbs of fed, in the same order")

    def agree(self, flag: bool) -> bool:
        """Return on every rank whether `flag` is true on any. Collective."""
        out = np.zeros(1, np.int64)
        self.comm.Allreduce(np.array([flag], np.int64), out, MPI.MAX)
        return bool(out[0])

    def sum_int64(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over ranks of int64 arrays, which is exact. Collective."""
        out = np.empty_like(values)
        self.bytes_collective += values.nbytes
        self.comm.Allreduce(np.ascontiguousarray(values), out, MPI.SUM)
        return out

    def gather(self, rows: np.ndarray, owner: np.ndarray, everywhere: bool = False) -> np.ndarray:
        """Return the rows `[K, ...]` of all ranks, rank by rank, `[N, ...]`, on root. Collective.

        Other ranks get none, unless `everywhere`. `owner` `[N]` is the rank of each row.
        """
        rows = np.ascontiguousarray(rows)
        size = int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.itemsize
        self.bytes_collective += rows.nbytes
        receives = everywhere or self.root
        out = np.empty((len(owner) if receives else 0, *rows.shape[1:]), rows.dtype)
        if size == 0:
            return out
        # counts and offsets are in rows, not bytes: before MPI 4 they are ints of 32 bits
        row = MPI.BYTE.Create_contiguous(size).Commit()
        sent: Any = [as_bytes(rows), len(rows), row]
        counts = np.bincount(owner, minlength=self.size)
        received: Any = [as_bytes(out), counts, row] if receives else None
        try:
            if everywhere:
                self.comm.Allgatherv(sent, received)
            else:
                self.comm.Gatherv(sent, received, root=0)
        finally:
            row.Free()
        return out

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return minimum, mean and maximum over ranks of float64 `[n]`, `[n, 3]`. Collective."""
        out = [np.empty_like(values) for _ in range(3)]
        for op, result in zip((MPI.MIN, MPI.SUM, MPI.MAX), out, strict=True):
            self.comm.Allreduce(values, result, op)
        return np.stack([out[0], out[1] / self.size, out[2]], -1)

    def hosts(self) -> list[str]:
        """Return the host name of every rank. Collective."""
        return self.texts(MPI.Get_processor_name())

    def check_memory(self, need: int, advice: str, shared: bool = True) -> None:
        """Raise `UserError`, ending with `advice`, if a node lacks what its ranks need. Collective.

        `need` is in bytes, of this rank. If there were less `shared` memory, the first write to it
        would end the job by SIGBUS.
        """
        total = np.zeros(1, np.int64)
        self.node.Allreduce(np.array([need], np.int64), total)
        limit, what = node_memory(shared)
        mistake = ""
        if total[0] > limit:
            node = f"a node of {limit / 2**30:.2f} GiB ({what})"
            windows = "RMA windows" if shared else "slots for models"
            mistake = f"the {windows} need {total[0] / 2**30:.2f} GiB on {node}; {advice}"
        if first := self.first(mistake):
            raise UserError(first)

    def all_stop(self) -> bool:
        """Return whether every rank calls this within `PATIENCE_S`; else some wait in vain."""
        end = time.monotonic() + PATIENCE_S
        try:
            request = self.farewell.Ibarrier()
            while not request.Test():
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
        except MPI.Exception:  # the rank has another reason to end
            return False
        return True

    def abort(self, code: int, text: str = "", last: Callable[[], None] = lambda: None) -> None:
        """Print a text (lower ranks first), call `last`, and end all ranks with this exit code."""
        if text:
            time.sleep(min(RANK_DELAY_S * self.rank, PATIENCE_S))
            complain(text)
            until_read(sys.stderr)
        last()  # after the text: until here another thread of this rank goes on
        note_for_script(f"ended with {code}")  # srun makes 137 of it
        try:
            self.comm.Abort(code)
        finally:
            os._exit(code)  # Abort may return, or fail

    def abort_for(self, error: MPI.Exception) -> None:
        """End all ranks after an error of MPI: another start goes on from the last checkpoint."""
        frames = traceback.extract_tb(error.__traceback__)
        # the innermost line of this folder, else of a user's method: mpi4py's own are no help
        here = [frame for frame in frames if Path(frame.filename).parent == Path(__file__).parent]
        frame = (here or frames)[-1]
        where = f"rank {self.rank} of {self.size} ({Path(frame.filename).name}:{frame.lineno})"
        why = f"{LIBRARY} failed on {where}: {error.Get_error_string()}"
        again = "the same command, without --fresh, goes on from the last checkpoint"
        self.abort(self.code, f"error: {why}; {again}")

    def free(self) -> None:
        """Free what MPI keeps of this world. Collective."""
        for comm in (self.node, self.farewell, self.comm):
            comm.Free()


def note_for_script(text: str) -> None:
    """Write a line for the batch script's launcher.py, which reads it when all ranks have ended."""
    if (begun := Path(os.environ.get("DPFL_BEGUN", ""))).is_file():
        with contextlib.suppress(OSError):
            begun.write_text(f"{text}\n")


def until_read(stream: IO[str], seconds: float = PATIENCE_S) -> None:
    """Wait until the launcher has read this pipe: once it ends its ranks, it reads no further."""
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):  # no descriptor, or the reader has gone
        pipe = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return
        # FIONREAD: the number of unread bytes, as 4 bytes
        while time.monotonic() < end and any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
            time.sleep(0.01)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array, as a view."""
    return array.view(np.uint8).reshape(-1)
