"""What became of the Runs of a sweep: their result files, the jobs they went to, and what Slurm says."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpfl_mpi.config import Run
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.storage.files import replacing
from dpfl_mpi.survival.lock import Lock, born
from dpfl_mpi.sweeps.table import Live, Row

LOG_LINES = 6
BLIND_S = 60  # a job just submitted may not be in the queue yet


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

    def look(self, queue: set[str]) -> Row:
        """Return what its result file and its job say: finished, running, stopped, waiting, failed, missing or unreadable."""
        recorded, t, accuracy = "missing", -1, float("nan")
        if self.path.exists():
            try:
                with Result(self.path) as result:
                    recorded, t, accuracy = result.state.split()[0].rstrip(","), result.last_round, result.test_acc
            except (UserError, OSError, KeyError, RuntimeError):  # torn, or being written at this moment
                recorded = "unreadable"
        if recorded != "finished" and self.job_id:
            begun = self.cluster != "slurm" or recorded in ("running", "unreadable")  # here nothing queues
            recorded = "failed" if not self.alive(queue) else "running" if begun else "waiting"
        return Row(self.path.stem, recorded, t, self.run.rounds, accuracy)

    def alive(self, queue: set[str]) -> bool:
        """Return whether its job waits or runs."""
        if not self.job_id:
            return False
        if self.cluster == "slurm":
            return self.job_id in queue or time.time() - self.submitted < BLIND_S
        if self.cluster == "debug" or self.host != socket.gethostname():  # no process of its own, or none of ours
            return Lock(self.path).taken()
        return born(int(self.job_id)) == self.born != ""

    def log(self) -> str:
        """Return the sentences in which the Run says what is wrong, or else the end of the job's output and errors."""
        text = ""
        for path in sorted(Path(self.folder).glob(f"{self.job_id}_0_log.*")) if self.folder else []:
            text += path.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("submitit ")]
        said = [line for line in lines if line.startswith("error: ")]
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


def remember(folder: Path, jobs: dict[str, str], cluster: str, since: dict[str, str] | None = None) -> None:
    """Write which Run went to which job beside the logs, and when the processes of this machine began."""
    entry = {"cluster": cluster, "submitted": time.time(), "jobs": jobs}
    entry |= {"host": socket.gethostname(), "born": since or {}}
    with replacing(folder / "jobs.json") as part:  # whole, for whoever reads it meanwhile
        part.write_text(json.dumps(entry, indent=1))


def recall(known: list[Known], sweeps: Path) -> None:
    """Fill in the newest submission of each Run."""
    of = {k.path.name: k for k in known}
    entries = [(json.loads(file.read_text()), str(file.parent)) for file in sweeps.glob("*/jobs.json")]
    for entry, folder in sorted(entries, key=lambda e: e[0]["submitted"]):
        for name, job_id in entry["jobs"].items():
            if k := of.get(name):
                k.job_id, k.folder, k.submitted, k.cluster = job_id, folder, entry["submitted"], entry["cluster"]
                k.born, k.host = entry["born"].get(name, ""), entry["host"]


def follow(known: list[Known], live: Live, pause: float, busy: Callable[[], bool] | None = None) -> None:
    """Show the table every `pause` seconds, until `busy` says no; without it, until no Run waits or runs."""
    queue = queued(known)
    while True:
        going = busy() if busy else None
        rows = [k.look(queue) for k in known]
        live.show(rows)
        if not (any(row.state in ("waiting", "running") for row in rows) if going is None else going):
            return
        time.sleep(pause)
        queue = queued(known, queue)
