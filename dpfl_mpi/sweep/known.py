"""What became of the Runs of a sweep: their result files, the jobs they went to, and what Slurm says."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.storage.files import explained, replacing
from dpfl_mpi.storage.foreign import read_end, read_json, refused_as
from dpfl_mpi.survival.lock import Lock, born
from dpfl_mpi.survival.signals import stalled_text
from dpfl_mpi.sweep import interrupt
from dpfl_mpi.sweep.table import Live, Row

LOG_LINES = 6
ASK_S = 10.0  # between two questions to Slurm, whose controller serves everybody
BLIND_S = 2 * ASK_S  # a job just submitted may not be in the queue that was last seen
SETTLED_S = 2.0  # on a coarse file system a write within this leaves the time of the one before
NEVER = ("missing", -1, float("nan"))  # what is recorded of a Run that was not begun: state, round, accuracy


@dataclass
class Known:
    """A Run, its result file, and the newest submission of it: job, folder of the logs, time."""

    run: Run
    path: Path
    job_id: str = ""
    folder: str = ""
    submitted: float = 0.0
    cluster: str = ""
    born: str = ""  # when a process of this machine began, and its host: a number may be used again
    host: str = ""
    stopped: bool = False  # the sweep itself ended it, in order
    seen: tuple[int, int] = (0, 0)  # time and size of the result file when it was last looked at
    since: float = 0.0  # when it was first seen so, by the clock of this process: a file server has its own
    settled: bool = False  # and nothing can have been written to it since it was read
    recorded: tuple[str, int, float] = NEVER  # in it then: hundreds of files are looked at twice a second

    def look(self, queue: set[str]) -> Row:
        """Return what its result file, its lock and its job say: finished, running, waiting, stopped, failed, missing or unreadable.

        Who holds the lock computes it, whatever became of a job of ours: another sweep may have been quicker.
        """
        recorded, t, accuracy = self._read()
        if recorded != "finished":
            begun = self.cluster != "slurm" or recorded in ("running", "unreadable")  # here nothing queues
            alive = self.alive(queue)
            if Lock(self.path).taken() or (alive and begun):
                recorded = "running"
            elif alive:
                recorded = "waiting"
            elif self.job_id and not self.stopped:
                recorded = "failed"
            elif recorded == "running":  # its process is gone
                recorded = "stopped"
        return Row(self.path.stem, recorded, t, self.run.rounds, accuracy)

    def _read(self) -> tuple[str, int, float]:
        """Return what the result file says, which is read where it may have been written to since."""
        try:
            stat = self.path.stat()
        except OSError:
            return NEVER
        if self.seen != (stat.st_mtime_ns, stat.st_size):
            self.seen, self.since, self.settled = (stat.st_mtime_ns, stat.st_size), time.monotonic(), False
        if not self.settled:
            settled = time.monotonic() - self.since > SETTLED_S
            try:
                with Result(self.path) as result:
                    self.recorded = result.state.split()[0].rstrip(","), result.last_round, result.test_acc
            except UserError:  # torn, or being written at this moment
                return "unreadable", *self.recorded[1:]
            self.settled = settled or self.recorded[0] == "finished"
        return self.recorded

    def alive(self, queue: set[str]) -> bool:
        """Return whether its job waits or runs."""
        if not self.job_id:
            return False
        if self.cluster == "slurm":
            return self.job_id in queue or time.time() - self.submitted < BLIND_S
        if self.cluster == "debug" or self.host != socket.gethostname():  # no process of its own, or none of ours
            return Lock(self.path).taken()
        return born(int(self.job_id)) == self.born != ""

    def logs(self) -> list[Path]:
        """Return the files with the output and the errors of its newest job."""
        if not self.folder:
            return []
        return sorted(
            [*Path(self.folder).glob(f"{self.job_id}_0_log.*"), *Path(self.folder).glob(f"{self.path.stem}.log")]
        )

    def log(self) -> str:
        """Return the sentences in which the Run says what is wrong, or else the end of the job's output and errors."""
        text = ""
        for path in self.logs():
            with contextlib.suppress(UserError):
                text += read_end(path).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("submitit ")]
        said = [line for line in lines if line.startswith("error: ") or line.endswith(stalled_text())]
        if not said and self.path.exists():  # a file that was damaged since has the log of a job that finished
            try:
                Result(self.path).close()
            except UserError as error:
                said = [f"error: {error}; move it away first"]
        return "\n".join((said or lines)[-LOG_LINES:])


def queued(known: list[Known], before: set[str] | None = None) -> set[str]:
    """Return the jobs that Slurm still has, array tasks as JOB_TASK; none where no Run was submitted to it.

    Raises:
        UserError: Slurm does not answer, and there is no answer from `before` to go by.
    """
    if not any(k.cluster == "slurm" for k in known):
        return set()
    try:
        command = ["squeue", "--me", "-h", "-r", "-o", "%i %F_%K"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return set(done.stdout.split())
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if before is None:
        raise UserError(
            f"squeue does not say which of the submitted jobs are alive ({reason}); try again when it answers"
        )
    return before


class Queue:
    """The jobs that Slurm still has. Where it does not answer again, what it said last holds.

    Raises:
        UserError: Slurm does not answer the first time.
    """

    def __init__(self, known: list[Known]):
        self.known, self.unasked = known, 0.0
        self.jobs = queued(known)

    def ask(self) -> None:
        """Ask again."""
        self.jobs, self.unasked = queued(self.known, self.jobs), 0.0

    def pause(self, seconds: float) -> None:
        """Let this time pass, and ask again where the answer is old."""
        time.sleep(seconds)
        self.unasked += seconds
        if self.unasked >= ASK_S:
            self.ask()


def remember(
    folder: Path,
    jobs: dict[str, str],
    cluster: str,
    since: dict[str, str] | None = None,
    stopped: Collection[str] = (),
) -> None:
    """Write which Run went to which job beside the logs, when the processes of this machine began, and which the sweep itself ended.

    Raises:
        UserError: the disk is full, or the like.
    """
    entry = {"cluster": cluster, "submitted": time.time(), "jobs": jobs}
    entry |= {"host": socket.gethostname(), "born": since or {}, "stopped": sorted(stopped)}
    path = folder / "jobs.json"
    # whole, for whoever reads it meanwhile
    with explained(f"{path}, the list of jobs of this sweep, cannot be written"), replacing(path) as part:
        part.write_text(json.dumps(entry, indent=1))


@functools.cache
def warn(text: str) -> None:
    """Say it, once."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def entry_of(file: Path) -> dict[str, Any]:
    """Return what `remember` wrote.

    Raises:
        UserError: the file is damaged.
    """
    entry = read_json(file, follow=False)
    with refused_as(f"{file} is damaged"):
        right = math.isfinite(entry["submitted"]) and isinstance(entry["host"], str)
        right = right and entry["cluster"] in ("slurm", "local", "debug")
        for name, text in (*entry["jobs"].items(), *entry["born"].items()):
            right = right and isinstance(name, str) and isinstance(text, str)
        # of a process, or a job's name
        number = r"[0-9]{1,10}" if entry["cluster"] == "local" else r"[A-Za-z0-9_]{1,32}"
        right = right and isinstance(entry.setdefault("stopped", []), list)
        if not (right and all(re.fullmatch(number, job) for job in entry["jobs"].values())):
            raise ValueError
        return dict(entry)


def recall(known: list[Known], sweeps: Path) -> None:
    """Fill in the newest submission of each Run."""
    of = {k.path.name: k for k in known}
    entries = []
    for file in sorted(sweeps.glob("*/jobs.json")):
        try:
            entries.append((entry_of(file), str(file.parent)))
        except UserError as error:  # of one submission: the others are known
            warn(f"{error}; the jobs of that submission are not known")
    for entry, folder in sorted(entries, key=lambda e: e[0]["submitted"]):
        for name, job_id in entry["jobs"].items():
            if k := of.get(name):
                k.job_id, k.folder, k.submitted, k.cluster = job_id, folder, entry["submitted"], entry["cluster"]
                k.born, k.host = entry["born"].get(name, ""), entry["host"]
                k.stopped = name in entry["stopped"]


def follow(known: list[Known], live: Live, queue: Queue, pause: float, busy: Callable[[], bool] | None = None) -> None:
    """Show the table every `pause` seconds, until `busy` says no; without it, until no Run waits or runs."""
    while True:
        interrupt.check()
        going = busy() if busy else None
        rows = [k.look(queue.jobs) for k in known]
        live.show(rows)
        if not (any(row.state in ("waiting", "running") for row in rows) if going is None else going):
            return
        queue.pause(pause)
