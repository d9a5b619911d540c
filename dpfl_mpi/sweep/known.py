"""What became of the Runs of a sweep: their result files, the jobs they went to, and what Slurm says."""

import contextlib
import functools
import json
import math
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.results.result import result_of
from dpfl_mpi.settings import Resolved
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.storage.foreign import read_end, read_json, refused_as
from dpfl_mpi.storage.lock import Lock, born
from dpfl_mpi.survival.signals import STALLED_TEXT

LOG_LINES = 6
NOISE = ("submitit ", "srun: launch/slurm", "srun: forcing", "srun: got SIGCONT", "srun: Job step aborted")
ASK_S = 10.0  # between two questions to Slurm, whose controller serves everybody
BLIND_S = 2 * ASK_S  # a job just submitted may not be in the queue that was last seen


@dataclass(frozen=True)
class Submission:
    """Which Runs, by the names of their results, went to which jobs; kept in `jobs.json` in the folder of the logs."""

    cluster: str
    jobs: Mapping[str, str]  # of this machine: processes
    born: Mapping[str, str] = field(default_factory=dict)  # when these began: a number may be used again
    stopped: Sequence[str] = ()  # Runs that the sweep itself ended, in order
    host: str = field(default_factory=socket.gethostname)
    submitted: float = field(default_factory=time.time)

    def remember(self, folder: Path) -> None:
        """Write it, whole for whoever reads it meanwhile; raise `UserError` where the disk is full, or the like."""
        path = folder / "jobs.json"
        with explained(f"{path}, the list of jobs of this sweep, cannot be written"), replacing(path) as part:
            part.write_text(json.dumps(vars(self), indent=1))


def submission_in(file: Path) -> Submission:
    """Return the submission that a `jobs.json` holds; raise `UserError` where it is damaged."""
    entry = read_json(file, follow=False)
    with refused_as(f"{file} is damaged"):
        found = Submission(**entry)
        texts = [found.host, *found.jobs, *found.born.values(), *found.stopped]
        right = all(isinstance(text, str) for text in texts) and math.isfinite(found.submitted)
        if not right or not all(re.fullmatch("[A-Za-z0-9_]{1,32}", job) for job in found.jobs.values()):
            raise ValueError
        return found


@functools.cache
def warn(text: str) -> None:
    """Say it, once."""
    complain(f"warning: {text}")


def recall(known: Sequence["Known"], sweeps: Path) -> None:
    """Fill in the newest submission of each Run."""
    found = []
    for file in sweeps.glob("*/jobs.json"):
        try:
            found.append((file.parent, submission_in(file)))
        except UserError as error:  # of one submission: the others are known
            warn(f"{error}; the jobs of that submission are not known")
    for folder, submission in sorted(found, key=lambda pair: (pair[1].submitted, pair[0])):
        for k in known:
            if k.path.name in submission.jobs:
                k.folder, k.submission = folder, submission


@dataclass(frozen=True)
class Row:
    """What is known of a Run: `round` of `rounds` is the last one recorded (-1: none), `accuracy` its mean test accuracy (nan: none)."""

    name: str
    state: str  # one word
    round: int
    rounds: int
    accuracy: float

    def cells(self) -> tuple[str, str, str, str]:
        done = f"{self.round}/{self.rounds}" if self.round >= 0 else "-"
        return self.name, self.state, done, "-" if math.isnan(self.accuracy) else f"{100 * self.accuracy:.2f}"


@dataclass(eq=False)  # each is one of its Run
class Known:
    """A Run, its result file, and the newest submission of it with the folder of the logs."""

    run: Resolved
    path: Path
    folder: Path | None = None
    submission: Submission | None = None
    seen: tuple[int, ...] = ()  # which result file was read last, which is replaced whole
    recorded: Row | None = None  # in it then: hundreds of files are looked at twice a second
    wrong: str = ""  # with the file that was read last

    @property
    def job_id(self) -> str:
        """The job or process, "" where there was none."""
        return self.submission.jobs[self.path.name] if self.submission else ""

    @property
    def on_slurm(self) -> bool:
        return self.submission is not None and self.submission.cluster == "slurm"

    def look(self, queue: set[str]) -> Row:
        """Return what its result file, its lock and its job say: finished, running, waiting, stopped, failed, missing or unreadable.

        Who holds the lock computes it, whatever became of a job of ours: another sweep may have been quicker.
        """
        # asked before the file is read: of a process that is gone it is the last word
        taken, alive = Lock(self.path).taken(), self.alive(queue)
        row = self._read()
        if row.state == "finished":
            return row
        begun = not self.on_slurm or row.state in ("running", "unreadable")  # here nothing queues
        if taken or (alive and begun):
            return replace(row, state="running")
        if alive:
            return replace(row, state="waiting")
        if self.submission and self.path.name not in self.submission.stopped:
            return replace(row, state="failed")
        return replace(row, state="stopped") if row.state == "running" else row  # its process is gone

    def _read(self) -> Row:
        """Return what the result file says, which is read where it may have been written to since."""
        name, rounds, self.wrong = self.path.stem, self.run.rounds, ""
        try:
            stat = self.path.stat()
        except OSError:
            return Row(name, "missing", -1, rounds, math.nan)
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if self.recorded is None or self.seen != seen:
            try:
                with result_of(self.run, self.path) as result:
                    state = result.state.split()[0].rstrip(",")
                    self.recorded, self.seen = Row(name, state, result.last_round, rounds, result.test_acc), seen
            except UserError as error:
                self.wrong = f"error: {error}; move it away first"
                return replace(self.recorded or Row(name, "", -1, rounds, math.nan), state="unreadable")
        return self.recorded

    def alive(self, queue: set[str]) -> bool:
        """Return whether its job on Slurm waits or runs, or its process on this machine; of one elsewhere only the lock tells."""
        if not self.submission:
            return False
        if self.on_slurm:
            return self.job_id in queue or time.time() - self.submission.submitted < BLIND_S
        here = self.submission.host == socket.gethostname()
        return here and born(self.job_id) == self.submission.born.get(self.path.name) != ""

    def log(self) -> str:
        """Return the sentences in which the Run says what is wrong, or else the end of the job's output and errors."""
        text, folder = "", self.folder or Path(os.devnull)
        errors = folder.glob(f"{self.job_id}_*_log.err")  # behind the output, whose rounds would hide them
        for path in (folder / f"{self.job_id}_0_log.out", *sorted(errors), folder / f"{self.path.stem}.log"):
            with contextlib.suppress(UserError):
                text += read_end(path).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(NOISE)]
        said = [line for line in lines if line.startswith("error: ") or line.endswith(STALLED_TEXT)]
        said = said or list(filter(None, [self.wrong]))  # since a job that finished
        return "\n".join((said or lines)[-LOG_LINES:])


class Queue:
    """The jobs that Slurm still has, array tasks as JOB_TASK; none where no Run was submitted to it.

    It must answer the first time. Where it does not answer again, what it said last holds.
    """

    def __init__(self, known: Sequence[Known]):
        self.known, self.answered = known, False
        self.jobs: set[str] = set()
        self.ask()

    def ask(self) -> None:
        self.unasked = 0.0
        if not any(k.on_slurm and k._read().state != "finished" for k in self.known):
            return
        try:
            command = ["squeue", "--me", "-h", "-r", "-o", "%i %F_%K"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if done.returncode == 0:
                self.jobs, self.answered = set(done.stdout.split()), True
                return
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        if not self.answered:
            raise UserError(f"squeue does not say which jobs are alive ({reason}); try again when it answers")

    def pause(self, seconds: float) -> None:
        """Let this time pass, and ask again where the answer is old."""
        time.sleep(seconds)
        self.unasked += seconds
        if self.unasked >= ASK_S:
            self.ask()
