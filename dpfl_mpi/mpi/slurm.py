"""The Slurm job that this process is part of: its number, and how it is started again."""

import os
import subprocess

from dpfl_mpi.errors import complain

ANSWER_S = 60  # that squeue and scontrol have for an answer


def job_number() -> str:
    """Return the number of this Slurm job, ARRAY_TASK of an array, "" outside of a job.

    The last task of an array has the array's own number as its job number, which names all tasks.
    """
    if task := os.environ.get("SLURM_ARRAY_TASK_ID", ""):
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def requeue(failed: str = "submit it again to go on") -> None:
    """Let Slurm start this job again. A cancelled job is no longer RUNNING and stays cancelled.

    Where Slurm does not answer, one sentence says so, and ends with `failed`.
    """
    job = job_number()
    ask = ["squeue", "-h", "-j", job, "-o", "%T"]
    try:
        state = subprocess.run(ask, capture_output=True, text=True, timeout=ANSWER_S)
        if state.stdout.strip() == "RUNNING":
            subprocess.run(["scontrol", "requeue", job], timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        complain(f"error: job {job} could not be requeued ({error}); {failed}")
