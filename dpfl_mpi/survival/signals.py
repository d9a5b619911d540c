"""When a run must end early, and how: signals, the end of a batch job's time, and hangs.

A run is asked to leave by a signal, or shortly before its allocation (the time that the batch
system gives it) ends. The ranks then leave at the end of the round, with a checkpoint. If the round
would outlast --grace, a thread of each rank, the `Watch`, ends them at once, and the next start
computes the round again. The `Watch` also ends a run that hangs (--watchdog). `__main__` calls
`listen`; the loop over rounds (engine/train.py) makes the `Watch`.
"""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from dpfl_mpi import batch
from dpfl_mpi.errors import REQUEUE, STALLED

if TYPE_CHECKING:
    from dpfl_mpi.mpi.world import World
    from dpfl_mpi.settings import Job

# a sweep's job on Slurm is warned by USR2
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
ALLOCATION = "end of the allocation"  # in place of a signal's name
GOES_ON = "goes on from there"  # ends the sentence of a run that stopped in order
STALLED_TEXT = (
    "two starts in a row kept no new checkpoint: give more time (--time), "
    "or let a checkpoint come sooner (--checkpoint_every 1)"
)
CLEAR_S = 5.0  # the last seconds of an allocation are the launcher's and the batch script's
HANGS = 2  # a batch job that hung more often is not started again
ABORT_S = 60.0  # time limit for ending a run that hangs: its file system may hang, too
ROOT_FIRST_S = 1.0  # head start of root, to print and end all ranks
POLL_MS = 200  # between two looks at the clock; a signal is seen at once


class Heard:
    """The first request to leave. It stays: Slurm's CONT after its warning is no leave to go on."""

    at = 0.0  # monotonic time of the request, 0 before it
    name = ""  # of the signal, or ALLOCATION


def hear(name: str) -> None:
    """Note a request to leave, unless there was one before."""
    if not Heard.at:
        Heard.at, Heard.name = time.monotonic(), name


def handler(number: int, _: object) -> None:
    """Handle a signal: note it as a request to leave."""
    hear(signal.Signals(number).name)


def listen() -> None:
    """Let USR1, USR2, TERM and INT ask the run to leave. Call it in the main thread."""
    for number in SIGNALS:
        signal.signal(number, handler)


@contextlib.contextmanager
def handled(numbers: Iterable[int], by: Callable[[int, Any], object]) -> Iterator[None]:
    """Let `by` handle these signals in the block; does nothing outside of the main thread."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, by) for number in numbers if main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Watch:
    """A thread of every rank, `_watch`, that ends all ranks if a round ends too late, or never.

    The rank that ends them all calls `on_abort` and, if the run hangs, `count_hang`, which returns
    how often this job has hung. Making a `Watch` is collective.
    """

    def __init__(
        self,
        job: "Job",
        world: "World",
        on_abort: Callable[[], None] = lambda: None,
        count_hang: Callable[[], int] = lambda: 1,
    ):
        self.job, self.world = job, world
        self.on_abort, self.count_hang = on_abort, count_hang
        self.round = 0
        self.started = time.monotonic()  # when this round began
        self.last = 0.0  # how many seconds the round before took
        self.grace = job.grace
        self.ends = float("inf")  # monotonic time at which all ranks must be gone
        left = world.decide(batch.seconds_left)
        if left is not None and left > 0:
            left -= min(CLEAR_S, left / 10)
            self.ends = self.started + left
            self.grace = min(job.grace, left / 2)  # else a short job would leave before it began
        world.code = REQUEUE
        self.leaving = False
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._arm()
        # a pipe that Python writes each signal's number to, also while the main thread is in MPI
        # and runs no handler
        self._out, self._into = os.pipe()
        os.set_blocking(self._into, False)
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.set_wakeup_fd(self._into, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.leaving = True
        if self.job.watchdog:
            faulthandler.cancel_dump_traceback_later()
        if self._main:
            signal.set_wakeup_fd(self._before)
        os.write(self._into, b"\0")
        self._thread.join()
        os.close(self._into)
        os.close(self._out)

    def begin(self, t: int) -> None:
        """Mark the start of round t."""
        self.last = self._seconds()
        self.round = t
        self.started = time.monotonic()
        self._arm()

    def _seconds(self) -> float:
        """Return the seconds since this round began; 0 in preprocessing, before round 1."""
        return time.monotonic() - self.started if self.round > 0 else 0.0

    def _arm(self) -> None:
        """Let faulthandler, in C, end this rank if it hangs so that no thread of Python runs."""
        if self.job.watchdog:
            faulthandler.dump_traceback_later(self.job.watchdog + 5, exit=True)

    def stop(self, more: bool, spare: float) -> bool:
        """Return whether this rank wishes to leave at the end of this round."""
        # it does if `more` rounds follow, and one as long as this and `spare` s ends too late
        if more and time.monotonic() + self._seconds() + spare > self.ends:
            hear(ALLOCATION)
        return self._requested() > 0

    def _requested(self) -> float:
        """Return when the run was first asked to leave, 0 where it was not."""
        if time.monotonic() > self.ends - self.grace:
            hear(ALLOCATION)
        return Heard.at

    def _watch(self) -> None:
        """Wait for a signal, the end of the grace time or a hang; then end all ranks."""
        poll = select.poll()  # not select, which knows 1024 open files
        poll.register(self._out, select.POLLIN)
        while not self.leaving:
            now = time.monotonic()
            if requested := self._requested():
                # the round is too late, or will be if it lasts as long as the one before
                deadline = min(requested + self.grace, self.ends)
                if now >= deadline or (self.last and self.started + self.last > deadline):
                    return self._end_round()
            if self.job.watchdog and now >= self.started + self.job.watchdog:
                return self._end_hang()
            if poll.poll(POLL_MS):
                for number in os.read(self._out, 64):  # signals; 0 from `__exit__`
                    if number in SIGNALS and signal.getsignal(number) is handler:
                        handler(number, None)

    def _end_round(self) -> None:
        """End all ranks in a round that would last too long, unless root or the run does first."""
        world = self.world
        if not world.root:
            time.sleep(ROOT_FIRST_S)
        if self.leaving:
            return
        late = f"round {self.round} would outlast --grace {self.grace:g}, stopped at once"
        again = f"{again_text(self.job)} replays it from the last checkpoint"
        if world.code == STALLED:
            again = STALLED_TEXT
        world.abort(world.code, f"{Heard.name}: {late}; {again}", self.on_abort)

    def _end_hang(self) -> None:
        """Print where this rank stands, and end all ranks with 75, or the third time with 76."""
        faulthandler.cancel_dump_traceback_later()
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            stacks = file.read()
        late = f"rank {self.world.rank} of {self.world.size} has not finished round {self.round}"
        text = f"--watchdog: {late} in {self.job.watchdog:g} s; it is at\n{stacks}"
        with contextlib.suppress(OSError):  # a full disk: the ranks end all the same
            print(text, file=sys.stderr, flush=True)
        # the other ranks print theirs
        time.sleep(2 if self.world.root else 2 + ROOT_FIRST_S)
        if self.leaving:
            return
        faulthandler.dump_traceback_later(ABORT_S, exit=True)
        code = REQUEUE if self.count_hang() <= HANGS else STALLED
        again = f"{again_text(self.job)} goes on from the last checkpoint, if there is one"
        why = f"the run hung; {again}"
        if code == STALLED:
            why = f"the run hung more than {HANGS} times in this job: it is not started again"
        self.world.abort(code, why, self.on_abort)


def again_text(job: "Job") -> str:
    """Return which command goes on from a checkpoint; with --fresh it would delete it."""
    return "the same command without --fresh" if job.fresh else "the same command"
