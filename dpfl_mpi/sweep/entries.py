"""How far the Runs of a sweep are: `Entry.status` finds out for one Run.

It looks at the result file, at the lock that the computing process holds, and at the job or process
to which the Run was given last. A submission is one call of a sweep that gave Runs to jobs; the
folder of its logs has a list of them, `jobs.json`.
"""

import contextlib
import functools
import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.results.result import result_of
from dpfl_mpi.settings import Resolved
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.storage.foreign import read_bytes, read_json, refused_as
from dpfl_mpi.storage.lock import Lock, born
from dpfl_mpi.survival.signals import GOES_ON, STALLED_TEXT

LOG_LINES = 6  # shown of a failed Run
NOISE = (  # how lines of a log begin that say nothing of the Run
    "submitit ",
    "srun: launch/slurm",
    "srun: forcing",
    "srun: got SIGCONT",
    "srun: Job step aborted",
)
ASK_S = 10.0  # seconds between two questions to Slurm, whose controller serves everybody
# a job submitted less than this ago is alive, even if Slurm's last answer lacks it
BLIND_S = 2 * ASK_S


@dataclass(frozen=True)
class Submission:
    """Which Runs went to which jobs: the content of `jobs.json`. Keys are names of results."""

    cluster: str  # "slurm" or "local"
    jobs: Mapping[str, str]  # numbers of the jobs of Slurm, or of processes on this machine
    # when each process started: a later process may get the same number
    born: Mapping[str, str] = field(default_factory=dict)
    stopped: Sequence[str] = ()  # Runs that the sweep itself stopped
    host: str = field(default_factory=socket.gethostname)
    submitted: float = field(default_factory=time.time)

    def save(self, folder: Path) -> None:
        """Write the file; raise `UserError` if that fails, as on a full disk."""
        path = folder / "jobs.json"
        what = f"{path}, the list of jobs of this sweep, cannot be written"
        with explained(what), replacing(path) as part:
            part.write_text(json.dumps(vars(self), indent=1))


def read_submission(file: Path) -> Submission:
    """Return what a `jobs.json` holds; raise `UserError` if it is damaged."""
    values = read_json(file)
    with refused_as(f"{file} is damaged"):
        submission = Submission(**values)
        texts = submission.host, *submission.jobs, *submission.born.values(), *submission.stopped
        are_numbers = [re.fullmatch("[A-Za-z0-9_]{1,32}", job) for job in submission.jobs.values()]
        fits = all(are_numbers) and all(isinstance(text, str) for text in texts)
        if not fits or not math.isfinite(submission.submitted):
            raise ValueError
        return submission


@functools.cache
def warn(text: str) -> None:
    """Print a warning, each text once."""
    complain(f"warning: {text}")


def load_submissions(entries: Sequence["Entry"], sweeps: Path) -> None:
    """Give each entry its newest submission; `sweeps` is the folder of all submissions' folders."""
    submissions = []
    for file in sweeps.glob("*/jobs.json"):
        try:
            submissions.append((file.parent, read_submission(file)))
        except UserError as error:
            warn(f"{error}; the jobs of that submission are not known")
    # the oldest first, so that the newest overwrites
    for folder, submission in sorted(submissions, key=lambda pair: (pair[1].submitted, pair[0])):
        for entry in entries:
            if entry.path.name in submission.jobs:
                entry.folder, entry.submission = folder, submission


@dataclass(frozen=True)
class Status:
    """How far a Run is."""

    name: str
    state: str  # finished, running, waiting, stopped, failed, missing or unreadable
    round: int  # the last one recorded, -1: none
    rounds: int  # that the Run has in all
    accuracy: float  # mean test accuracy, nan: none
    warning: str = ""  # of its last start


@dataclass(eq=False)
class Entry:
    """A Run, its result file, and its newest submission with the folder of its logs."""

    run: Resolved
    path: Path
    folder: Path | None = None
    submission: Submission | None = None
    error: str = ""  # why the result file could not be read
    # the status that `recorded` read last, and the file that it was read from: inode, time and size
    _file: tuple[int, ...] = ()
    _recorded: Status | None = None

    @property
    def job(self) -> str:
        """The number of its job or process, "" if there was none."""
        return self.submission.jobs[self.path.name] if self.submission else ""

    @property
    def on_slurm(self) -> bool:
        return self.submission is not None and self.submission.cluster == "slurm"

    def status(self, jobs: set[str]) -> Status:
        """Return how far the Run is; `jobs` are the numbers of those that Slurm still has."""
        # If the lock is taken, some process computes the Run, maybe another sweep's. Lock and job
        # are asked before the file is read, so a Run that ends in between is seen as finished.
        locked, alive = Lock(self.path).taken(), self.alive(jobs)
        recorded = self.recorded()
        state = recorded.state
        if state == "finished":
            return recorded
        begun = not self.on_slurm or state in ("running", "unreadable")
        if locked or (alive and begun):
            return replace(recorded, state="running")
        if alive:
            return replace(recorded, state="waiting")
        # a sweep that was killed notes no stops: then the last line of the log tells
        stopped = self.submission and self.path.name in self.submission.stopped
        if self.submission and not stopped and not self.log().endswith(GOES_ON):
            return replace(recorded, state="failed")
        return replace(recorded, state="stopped") if state == "running" else recorded

    def recorded(self) -> Status:
        """Return what the result file says. It is read only if it has changed, to save time."""
        nothing = Status(self.path.stem, "missing", -1, self.run.rounds, math.nan)
        self.error = ""
        try:
            stat = self.path.stat()
        except OSError:
            return nothing
        file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if self._recorded and self._file == file:
            return self._recorded
        try:
            with result_of(self.run.key(), self.path) as result:
                state = result.state.split()[0].rstrip(",")
                done, accuracy = result.last_round, result.test_acc
                warning = result.warning
        except UserError as error:
            self.error = f"error: {error}; move it away first"
            return replace(self._recorded or nothing, state="unreadable")
        recorded = replace(nothing, state=state, round=done, accuracy=accuracy, warning=warning)
        self._recorded, self._file = recorded, file
        return recorded

    def alive(self, jobs: set[str]) -> bool:
        """Return whether its job or process goes on. For a process on another host it is False."""
        if self.submission is None:
            return False
        if self.on_slurm:
            return self.job in jobs or 0 <= time.time() - self.submission.submitted < BLIND_S
        on_this_host = self.submission.host == socket.gethostname()
        return on_this_host and born(self.job) == self.submission.born.get(self.path.name) != ""

    def log(self) -> str:
        """Return the Run's own error messages, or else the end of its log."""
        folder = self.folder or Path(os.devnull)
        text = ""
        for name in (f"{self.job}_0_log.out", f"{self.job}_0_log.err", f"{self.path.stem}.log"):
            path = folder / name
            with contextlib.suppress(UserError):
                text += read_bytes(path, last=2**20).decode(errors="replace")
        lines = [ln for ln in text.splitlines() if ln.strip() and not ln.startswith(NOISE)]
        errors = [ln for ln in lines if ln.startswith("error: ") or ln.endswith(STALLED_TEXT)]
        if not errors and self.error:  # damaged after its job had finished
            errors = [self.error]
        return "\n".join((errors or lines)[-LOG_LINES:])
