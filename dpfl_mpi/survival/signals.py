"""Signals, end of the allocation, and hangs: when a run must leave, and how.

The round is the unit: the ranks agree at its end to keep a checkpoint and leave, or end at once where it would outlast `--grace`; the next start
replays it, which is exact because every draw is keyed.
"""

import contextlib
import faulthandler
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from dpfl_mpi.errors import REQUEUE, STALLED
from dpfl_mpi.mpi.launcher import output
from dpfl_mpi.mpi.slurm import job_number
from dpfl_mpi.settings import Job

if TYPE_CHECKING:
    from dpfl_mpi.mpi.world import World

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)  # USR2: the warning of a sweep's job on Slurm
ALLOCATION = "end of the allocation"  # heard in place of a signal
STALLED_TEXT = "two starts in a row kept no new checkpoint: give more time (--time), or let a checkpoint come sooner (--checkpoint_every 1)"
CLEAR_S = 5.0  # before the end of an allocation, for the launcher to end and the script to requeue the job
ASK_S = 20  # that squeue has for an answer
HANGS = 2  # of a Slurm job after which it is started again
ABORT_S = 60.0  # that the end of a run that hangs may take: its file system may hang, too
STEP_BEHIND = 1.0  # seconds by which the other ranks let root speak and abort first


class Heard:
    """What the process was told since `listen`: written by the signal handler, read by everyone."""

    at = 0.0  # monotonic time of the first signal, 0 before it
    name = ""


def hear(name: str) -> None:
    """Raise the flag. Slurm sends CONT right after its warning: nothing lowers the flag again."""
    if not Heard.at:
        Heard.at, Heard.name = time.monotonic(), name


def handler(number: int, _: object) -> None:
    hear(signal.Signals(number).name)


def listen() -> None:
    """Let USR1, USR2, TERM and INT raise the flag from now on instead of ending the process. Main thread only."""
    for number in SIGNALS:
        signal.signal(number, handler)


@contextlib.contextmanager
def handled(numbers: Iterable[int], by: Callable[[int, Any], object]) -> Iterator[None]:
    """Let `by` handle these signals inside; only the main thread can change who does, in another one nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, by) for number in numbers if main}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


class Watch:
    """Beside the main thread of every rank: ends all ranks where waiting for the round's end would be too late, or no end is near.

    Use with `with`; `begin` marks each round. The rank that ends them all calls `on_abort` and,
    where the run hangs, `count_hang`, which returns how often this job has hung. Making it is
    collective.
    """

    def __init__(
        self,
        job: Job,
        world: "World",
        on_abort: Callable[[], None] = lambda: None,
        count_hang: Callable[[], int] = lambda: 1,
    ):
        self.job, self.world = job, world
        self.on_abort, self.count_hang = on_abort, count_hang
        self.round = 0
        self.started, self.last = time.monotonic(), 0.0  # of this round; seconds of the one before
        self.grace = job.grace
        self.ends = float("inf")  # monotonic time at which all ranks must be gone
        left = world.decide(seconds_left)
        if left is not None and left > 0:
            left -= min(CLEAR_S, left / 10)
            self.ends = self.started + left
            self.grace = min(job.grace, left / 2)  # a short job would otherwise leave before it began
        self.code = REQUEUE
        self.leaving = False
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._arm()
        # readable after each signal, even while the main thread waits inside MPI, and so runs no handler
        self._out, self._into = os.pipe()
        os.set_blocking(self._into, False)
        self._main = threading.current_thread() is threading.main_thread()
        self._before = signal.set_wakeup_fd(self._into, warn_on_full_buffer=False) if self._main else -1
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
        self.last = self._length()
        self.round, self.started = t, time.monotonic()
        self._arm()

    def _length(self) -> float:
        """Return the seconds since this round began; starting and preprocessing tell nothing about a round."""
        return time.monotonic() - self.started if self.round > 0 else 0.0

    def _arm(self) -> None:
        """Print this rank's stack and end it from C, should it hang where no other Python thread can run."""
        if self.job.watchdog:
            faulthandler.dump_traceback_later(self.job.watchdog + 5, exit=True)

    def stop(self, more: bool, spare: float) -> bool:
        """Return whether this rank wishes to leave at the end of this round.

        `more` says that a round would follow; it is not begun where it and `spare` seconds would outlast the allocation.
        """
        if more and time.monotonic() + self._length() + spare > self.ends:
            hear(ALLOCATION)
        return self._asked() > 0

    def _asked(self) -> float:
        """Return when to leave was first asked for, 0 where it was not."""
        if time.monotonic() > self.ends - self.grace:
            hear(ALLOCATION)
        return Heard.at

    def _watch(self) -> None:
        """Wait for a signal, the end of the grace time, or a round that hangs, whichever is first; then end all ranks. The thread's function."""
        heard = select.poll()  # not select, which knows 1024 open files
        heard.register(self._out, select.POLLIN)
        while not self.leaving:
            now = time.monotonic()
            wait = 3600.0  # at most: poll takes no more than 24 days
            if asked := self._asked():
                deadline = min(asked + self.grace, self.ends)
                if now >= deadline or (self.last and self.started + self.last > deadline):
                    replay = f"{again_text(self.job)} replays it from the last checkpoint"
                    again = replay if self.code == REQUEUE else STALLED_TEXT
                    late = f"round {self.round} would outlast --grace {self.grace:g}, stopped at once"
                    return self._end(self.code, f"{Heard.name}: {late}; {again}")
                wait = min(wait, deadline - now)
            elif self.ends < float("inf"):
                wait = min(wait, self.ends - self.grace - now + 0.01)
            if self.job.watchdog:
                hung = self.started + self.job.watchdog
                if now >= hung:
                    return self._hung()
                wait = min(wait, hung - now)
            if heard.poll(1000 * max(wait, 0.01)):
                for number in os.read(self._out, 64):
                    if number in SIGNALS and signal.getsignal(number) is handler:
                        handler(number, None)

    def _end(self, code: int, text: str = "") -> None:
        """End all ranks after this text, unless root has done so or the run has ended meanwhile."""
        if not self.world.root:
            time.sleep(STEP_BEHIND)
        if not self.leaving:
            self.world.abort(code, text, self.on_abort)

    def _hung(self) -> None:
        """Print where this rank stands, and end all ranks: with 75, or 76 the third time."""
        faulthandler.cancel_dump_traceback_later()
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read()
        late = f"rank {self.world.rank} of {self.world.size} has not finished round {self.round}"
        said = f"--watchdog: {late} in {self.job.watchdog:g} s; it is at\n{text}"
        with contextlib.suppress(OSError):  # a full disk: the ranks end all the same
            print(said, file=sys.stderr, flush=True)
        time.sleep(2 if self.world.root else 2 + STEP_BEHIND)  # for the other ranks to print theirs
        if self.leaving:
            return
        faulthandler.dump_traceback_later(ABORT_S, exit=True)
        code = REQUEUE if self.count_hang() <= HANGS else STALLED
        text = f"the run hung; {again_text(self.job)} goes on from the last checkpoint"
        if code == STALLED:
            text = f"the run hung more than {HANGS} times in this job: Slurm does not start it again"
        self.world.abort(code, text, self.on_abort)

    def _hung(self) -> None:
        """Print where this rank stands, and end all ranks: with 75, or 76 the third time."""
        faulthandler.cancel_dump_traceback_later()
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read()
        late = f"rank {self.world.rank} of {self.world.size} has not finished round {self.round}"
        said = f"--watchdog: {late} in {self.job.watchdog:g} s; it is at\n{text}"
        with contextlib.suppress(OSError):  # a full disk: the ranks end all the same
            print(said, file=sys.stderr, flush=True)
        time.sleep(2 if self.world.root else 2 + STEP_BEHIND)  # for the other ranks to print theirs
        if self.leaving:
            return
        faulthandler.dump_traceback_later(ABORT_S, exit=True)
        code = REQUEUE if self.count_hang() <= HANGS else STALLED
        again = f"{again_text(self.job)} goes on from the last checkpoint"
        often = f"{HANGS} times before in this job, which is not started again"
        text = f"the run hung; {again}" if code == REQUEUE else f"the run hung, as {often}"
        self.world.abort(code, text, self.on_abort)


def seconds_left() -> float | None:
    """Return the seconds until Slurm ends this job, None outside a job and where nothing ends it.

    Slurm says when in SLURM_JOB_END_TIME from version 23.02 on; before, squeue is asked. Only root asks: a controller serves everybody.
    """
    if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        return int(end) - time.time()
    if not (job := job_number()):
        return None
    said = output(["squeue", "-h", "-j", job, "-o", "%L"], ASK_S).partition("\n")[0].strip()
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", said)  # else UNLIMITED and the like
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def again_text(job: Job) -> str:
    """Return which command goes on from a checkpoint: repeated with --fresh, outside of a requeued job, it would delete it."""
    return "the same command without --fresh" if job.fresh else "the same command"
