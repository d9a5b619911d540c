"""Find the launch line that starts one MPI world here, and start a Run with it in a Slurm job.

`python -m dpfl_mpi.mpi.launcher` prints the line. With `run FLAGS`, as in slurm/train.sbatch, it
starts a Run. With `--open_mpi` it prints the settings that Open MPI needs on a single machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dpfl_mpi.errors import REQUEUE, STALLED, UserError, complain, exit_with

# written in one piece: lines of ranks mix
TRY = "import os; from mpi4py import MPI; os.write(1, b'world of %d\\n' % MPI.COMM_WORLD.size)"
TRY_S = 60  # a launcher of another MPI may wait for ever
OPEN_MPI = {  # lets Open MPI start on a single machine as MPICH does, which ignores these
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same for version 4
    "OMPI_MCA_osc": "^ucx",  # its one-sided calls over UCX fail where there is no such network
}
SRUN = ("pmi2", "pmix", "pmix_v5", "pmix_v4", "pmix_v3", "cray_shasta")
# a start of MPI that takes longer is considered hung
START_S = float(os.environ.get("DPFL_START_S", "600"))
STARTS = 3  # of MPI, which fails or hangs once in a while
IN_ORDER = (0, 2, 3, REQUEUE, STALLED)  # exit codes of a Run that finished, was refused or stopped
NO_MPI = 3  # exit code where MPI is missing
ANSWER_S = 60  # that squeue and scontrol have for an answer


# the launch line ----------------------------------------------------------------------------------
def candidates() -> list[list[str]]:
    """Return the launch lines that could work here, the first choice first."""
    lines: list[list[str]] = []
    in_job = bool(os.environ.get("SLURM_JOB_ID"))
    if in_job and shutil.which("srun"):
        offered = output(["srun", "--mpi=list"]).split()
        kinds = [kind for kind in SRUN if kind in offered]
        lines += [["srun", f"--mpi={kind}", "--kill-on-bad-exit=1"] for kind in kinds]
    if shutil.which(found := mpirun()):
        lines.append([found, "--bind-to", "none"] if in_job else [found])
    return lines


def mpirun() -> str:
    """Return mpirun from PATH or, if the environment was not activated, from beside Python."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() and not shutil.which("mpirun") else "mpirun"


def works(line: list[str], tasks: int) -> bool:
    """Return whether a line starts one world of so many tasks; a wrong one starts each alone."""
    words = [*line, "-n", str(tasks), sys.executable, "-c", TRY]
    return output(words).count(f"world of {tasks}") == tasks


def output(command: list[str], seconds: float = 0) -> str:
    """Return the stdout and stderr of a command, "" if it fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds or TRY_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def find_line() -> list[str]:
    """Return the launch line for this place, tried with two tasks in a Slurm job."""
    tasks = min(2, int(os.environ.get("SLURM_NTASKS") or 1))
    tried = bool(os.environ.get("SLURM_JOB_ID")) and tasks > 1
    for line in candidates():
        if not tried or works(line, tasks):
            return line
    why = "neither srun nor mpirun starts one MPI world of two tasks"
    raise UserError(f"{why}; load the module of mpi4py's MPI")


# a Run in a Slurm job -----------------------------------------------------------------------------
def job_number() -> str:
    """Return the number of this Slurm job, ARRAY_TASK of an array, "" outside of a job."""
    # the last task of an array has the number of the whole array as its own
    if task := os.environ.get("SLURM_ARRAY_TASK_ID", ""):
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def requeue(failed: str = "submit it again to go on") -> None:
    """Requeue this Slurm job, unless it was cancelled and so is no longer RUNNING.

    If Slurm does not answer, complain in a sentence that ends with `failed`.
    """
    job = job_number()
    ask = ["squeue", "-h", "-j", job, "-o", "%T"]
    try:
        state = subprocess.run(ask, capture_output=True, text=True, timeout=ANSWER_S)
        if state.stdout.strip() == "RUNNING":
            subprocess.run(["scontrol", "requeue", job], timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        complain(f"error: job {job} could not be requeued ({error}); {failed}")


class Ranks:
    """The ranks of a Run, started by srun or mpirun. A warning reaches all of them as USR1."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.warned = False  # by a signal
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._warn)

    def _warn(self, *_: object) -> None:
        self.warned = True
        if self.process:
            self.process.send_signal(signal.SIGUSR1)

    def compute(self, command: list[str], report: "Report") -> int:
        """Start the ranks, wait for their end and return the exit code, as a shell has it."""
        self.process = subprocess.Popen(command)
        if self.warned:  # before there was a process
            self._warn()
        try:
            code = self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            if not report.started():
                self.process.terminate()
            code = self.process.wait()
        return code if code >= 0 else 128 - code


class Report:
    """The file in which rank 0 says that MPI has started, and with which code all ranks end."""

    def __init__(self) -> None:
        self.path: Path | None = None  # cannot be written: MPI is taken to have started
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(prefix="dpfl-")
            os.close(handle)
            Path(name).write_text("is there room?")
            Path(name).write_text("")
            self.path = Path(name)
            os.environ["DPFL_BEGUN"] = name  # where the ranks find it

    def started(self) -> bool:
        try:
            return self.path is None or self.path.stat().st_size > 0
        except OSError:  # a cleaner of /tmp was here
            return True

    def end(self, code: int) -> int:
        """Remove the file; return the exit code.

        If srun killed the remaining ranks (137), return the code that rank 0 noted: REQUEUE or
        STALLED.
        """
        if self.path is None:
            return code
        words = []
        with contextlib.suppress(OSError):
            words = self.path.read_text().split()
            self.path.unlink()
        reported = int(words[-1]) if words and words[-1] in (str(REQUEUE), str(STALLED)) else code
        return reported if code > 128 else code


def run(flags: list[str]) -> int:
    """Compute a Run in this Slurm job; return its exit code.

    Slurm starts it again for a checkpoint (75), or if it was warned before the ranks could listen.
    """
    if not (tasks := os.environ.get("SLURM_NTASKS")):
        why = "SLURM_NTASKS is not set, as in a heterogeneous job"
        allowed = "a job of one component, with --ntasks or --ntasks-per-node"
        complain(f"error: {why}; allowed is {allowed}")
        return 2
    threads = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    os.environ |= {"OMP_NUM_THREADS": threads, "SRUN_CPUS_PER_TASK": threads}
    ranks = Ranks()
    try:
        line = find_line()
    except UserError as error:
        complain(f"error: {error}")
        return NO_MPI
    command = [*line, "-n", tasks, sys.executable, "-m", "dpfl_mpi", *flags]
    report = Report()
    for attempt in range(1, STARTS + 1):
        code = ranks.compute(command, report)
        if code in IN_ORDER or ranks.warned or report.started():
            break
        complain(f"MPI did not start (exit code {code}), try {attempt} of {STARTS}")
    code = report.end(code)
    if code == REQUEUE or (ranks.warned and code > 128):
        requeue()
    return code


def main() -> int:
    """Execute the command line and return the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        task = os.environ.get("SLURM_ARRAY_TASK_ID")  # the seed, unless a later flag names one
        return run([*(["--seed", task] if task else []), *arguments[1:]])
    if arguments == ["--open_mpi"]:
        print(" ".join(f"{name}={value}" for name, value in OPEN_MPI.items()))
        return 0
    try:
        print(" ".join(find_line()))
    except UserError as error:
        complain(f"error: {error}")
        return NO_MPI
    return 0


if __name__ == "__main__":
    exit_with(main)
