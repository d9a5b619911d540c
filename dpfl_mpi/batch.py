"""Batch systems: the job that this process belongs to, its ranks, and the time that it has left.

Each system says so by environment variables and by a command; `SYSTEMS` lists them. PBS, LSF and
Flux follow their manuals and are untried.
"""

import contextlib
import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ANSWER_S = 20  # seconds that a batch system has for an answer


class System(NamedTuple):
    """A batch system, by the environment variables of its jobs and the answer of a command."""

    name: str
    job: str  # variable with the number of the job
    tasks: str  # variable with the number of ranks, or the path of a file with a line per rank
    array: str  # variable with the number of the task in an array of jobs
    left: str  # command that says when a job ends
    answer: str  # pattern of what it prints, with groups days, hours, minutes and seconds


# fmt: off
SYSTEMS = (
    System(
        "Slurm", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_ARRAY_TASK_ID", "squeue -h -j {job} -o %L",
        r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)$"),
    System(
        "PBS", "PBS_JOBID", "PBS_NODEFILE", "PBS_ARRAY_INDEX", "qstat -f {job}",
        r"(?=.*Resource_List\.walltime = (?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)$)"
        r"(?=.*\sstime = (?P<start>[^\n]+))"),
    System(
        "LSF", "LSB_JOBID", "LSB_DJOB_NUMPROC", "", "bjobs -noheader -o time_left {job}",
        r"(?P<hours>\d+):(?P<minutes>\d+) L$"),  # E would be an estimate
    # in the script of `flux batch`, which does not know how many ranks are wanted, and in its ranks
    System("Flux", "FLUX_URI", "", "FLUX_JOB_CC", "flux job timeleft", r"(?P<seconds>\d+)$"),
)
# fmt: on
OUTSIDE = System("", "", "", "", "", "")


def system() -> System:
    """Return the batch system whose job this process is in, or OUTSIDE."""
    return next((s for s in SYSTEMS if os.environ.get(s.job)), OUTSIDE)


def number() -> str:
    """Return the number of this job, ARRAY_TASK of one of Slurm's arrays, "" outside of a job."""
    # the last task of an array has the number of the whole array as its own
    if task := os.environ.get("SLURM_ARRAY_TASK_ID", ""):
        array = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
        return f"{array}_{task}"
    return os.environ.get(system().job, "")


def first() -> str:
    """Return the number of this job, or of the one that pbs/train.pbs submitted again."""
    return os.environ.get("DPFL_JOB") or number()


def restarts() -> int:
    """Return how often this job was started again, on root; not every launcher tells all ranks."""
    counts = (os.environ.get(name) for name in ("SLURM_RESTART_COUNT", "DPFL_RESTARTS"))
    return int(next(filter(None, counts), 0))


def tasks() -> list[int]:
    """Return how many ranks this job starts, on each node where that is known, else as one number.

    DPFL_RANKS comes before what the batch system says. The list is empty if neither says it.
    """
    ranks = os.environ.get("DPFL_RANKS") or os.environ.get(system().tasks, "")
    if ranks.isascii() and ranks.isdecimal():
        return [int(ranks)]
    with contextlib.suppress(OSError):
        return list(Counter(Path(ranks).read_text().split()).values())
    return []


def seconds_left() -> float | None:
    """Return the seconds until this job ends; None if it has no end, or none that is known."""
    # Slurm sets this variable from version 23.02 on; a job of an older one asks squeue
    if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        return int(end) - time.time()
    if (batch_system := system()) is OUTSIDE:
        return None
    command = batch_system.left.format(job=number()).split()
    answer = output(command, ANSWER_S).strip()
    found = re.match(batch_system.answer, answer, re.DOTALL | re.MULTILINE)
    if not found:  # such as UNLIMITED
        return None
    parts = found.groupdict()
    start = parts.pop("start", None)
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
    left = float(sum(units[name] * int(value or 0) for name, value in parts.items()))
    if start:  # the answer is the whole limit, from then on
        left -= time.time() - time.mktime(time.strptime(start, "%a %b %d %H:%M:%S %Y"))
    return left


def output(command: list[str], seconds: float) -> str:
    """Return the stdout and stderr of a command, "" if it fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""
