"""Find the launch line that starts one MPI world here, and start a Run with it in a batch job.

A launch line is a command such as `srun --mpi=pmi2`, to which -n, the number of tasks (ranks), and
a program are added. `python -m dpfl_mpi.mpi.launcher` prints the line. With `run FLAGS`, as in
slurm/train.sbatch, it starts a Run, tries again where MPI does not start, and has the job requeued
where the Run is not finished. With `--open_mpi` it prints what Open MPI needs on a single machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dpfl_mpi import batch
from dpfl_mpi.errors import NO_MPI, REQUEUE, STALLED, UserError, complain, exit_with
from dpfl_mpi.mpi.start import launched

# a program for a trial; it writes in one piece, as the outputs of ranks mix
TRY = "import os; from mpi4py import MPI; os.write(1, b'world of %d\\n' % MPI.COMM_WORLD.size)"
TRY_S = 60  # time limit of a trial: a launcher of another MPI may wait for ever
OPEN_MPI = {  # environment in which Open MPI starts on a single machine as MPICH does
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same for version 4
    "OMPI_MCA_osc": "^ucx",  # its one-sided calls over UCX fail where there is no such network
}
SRUN = ("pmi2", "pmix", "pmix_v5", "pmix_v4", "pmix_v3", "cray_shasta")
UNBOUND = "mpirun --bind-to none"  # else Open MPI binds one or two ranks to a core each
# launch lines by batch system, the first choice first; those of PBS, LSF and Flux are untried
LAUNCHERS = {
    "": ("mpirun",),
    "Slurm": (*(f"srun --mpi={kind} --kill-on-bad-exit=1" for kind in SRUN), UNBOUND),
    # for the mpiexec of PALS; any other refuses these flags
    "PBS": ("mpiexec --ppn {per_node} --depth {threads} --cpu-bind depth", UNBOUND),
    "LSF": ("jsrun --tasks_per_rs 1 --cpu_per_rs {threads}", UNBOUND),  # -n: sets of resources
    "Flux": ("flux run --cores-per-task={threads}", UNBOUND),
}
# a start of MPI that takes longer is considered hung
START_S = launched(("DPFL_START_S",), 600)
STARTS = 3  # how often MPI is started, which fails or hangs once in a while
# exit codes of a Run that finished, was refused or stopped
IN_ORDER = (0, 2, NO_MPI, REQUEUE, STALLED)
ANSWER_S = 60  # time limit of squeue and scontrol


def candidates() -> list[list[str]]:
    """Return the launch lines that could work here, the first choice first."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    names = {"per_node": (batch.tasks() or [1])[0], "threads": threads}
    lines = []
    for line in LAUNCHERS[batch.system().name]:
        name, *words = line.format(**names).split()
        lines.append([mpirun() if name == "mpirun" else name, *words])
    return [line for line in lines if shutil.which(line[0])]


def mpirun() -> str:
    """Return mpirun from PATH or, if the environment was not activated, from beside Python."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() and not shutil.which("mpirun") else "mpirun"


def works(line: list[str], tasks: int) -> bool:
    """Return whether a line starts one world of so many tasks, not as many worlds of one."""
    words = [*line, "-n", str(tasks), sys.executable, "-c", TRY]
    return batch.output(words, TRY_S).count(f"world of {tasks}") == tasks


def find_line() -> list[str]:
    """Return the launch line for this place, tried with at most two tasks in a batch job."""
    tasks = min(2, sum(batch.tasks()) or 1)
    for line in candidates():
        if not batch.number() or works(line, tasks):
            return line
    why = "no launcher starts one MPI world here"
    raise UserError(f"{why}; load your site's MPI module, or pip install -e '.[mpich]'")


def requeue() -> None:
    """Requeue this Slurm job, unless it was cancelled and so is no longer RUNNING.

    Under other batch systems users cannot requeue; the exit code lets the system, or the script,
    start it again.
    """
    if batch.system().name != "Slurm":
        return
    job = batch.number()
    ask = ["squeue", "-h", "-j", job, "-o", "%T"]
    try:
        state = subprocess.run(ask, capture_output=True, text=True, timeout=ANSWER_S, check=True)
        if state.stdout.strip() == "RUNNING":
            subprocess.run(["scontrol", "requeue", job], timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        complain(f"error: job {job} could not be requeued ({error}); submit it again to go on")


class Ranks:
    """The ranks of a Run. A signal to this process is a warning: all ranks get it as USR1."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.warned = False
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._warn)

    def _warn(self, *_: object) -> None:
        self.warned = True
        if self.process:
            self.process.send_signal(signal.SIGUSR1)

    def compute(self, command: list[str], report: "Report") -> int:
        """Start the ranks; end them if MPI does not start in time. Return their exit code."""
        self.process = subprocess.Popen(command)
        if self.warned:  # before there was a process
            self._warn()
        try:
            code = self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            if not report.started():
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(ANSWER_S)
                self.process.kill()  # if it ignores TERM
            code = self.process.wait()
        return code if code >= 0 else 128 - code


class Report:
    """The file in which rank 0 says that MPI has started, and with which code all ranks end."""

    def __init__(self) -> None:
        # None if it cannot be written: then `started` is always true
        self.path: Path | None = None
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(prefix="dpfl-")
            os.close(handle)
            Path(name).write_text("is there room?")
            Path(name).write_text("")
            self.path = Path(name)
            os.environ["DPFL_BEGUN"] = name  # where the ranks find it

    def started(self) -> bool:
        """Return whether rank 0 has said that MPI has started."""
        try:
            return self.path is None or self.path.stat().st_size > 0
        except OSError:  # /tmp was cleaned
            return True

    def end(self, code: int) -> int:
        """Remove the file; return the Run's exit code; `code` is the launcher's.

        When rank 0 ends all ranks, srun may kill the others and end with a code above 128. Then the
        code is the one that rank 0 reported, if that is REQUEUE or STALLED.
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
    """Compute a Run in this batch job; return its exit code.

    The job is requeued if the Run left a checkpoint (75), or was warned before it could listen.
    """
    tasks = batch.tasks()
    mixed = os.environ.get("SLURM_HET_SIZE", "1") not in ("", "0", "1") or len(set(tasks)) > 1
    if mixed or not sum(tasks):
        why = "is heterogeneous" if mixed else "has no number of tasks"
        allowed = "with as many tasks on each node, such as by --ntasks-per-node or mpiprocs"
        complain(f"error: this job {why}; allowed is one component, {allowed}")
        return 2
    threads = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("OMP_NUM_THREADS", "1")
    os.environ |= {"OMP_NUM_THREADS": threads, "SRUN_CPUS_PER_TASK": threads}
    ranks = Ranks()
    try:
        line = find_line()
    except UserError as error:
        complain(f"error: {error}")
        return NO_MPI
    command = [*line, "-n", str(sum(tasks)), sys.executable, "-m", "dpfl_mpi", *flags]
    report = Report()
    for attempt in range(1, STARTS + 1):
        code = ranks.compute(command, report)
        if code in IN_ORDER or ranks.warned or report.started():
            break
        complain(f"MPI did not start (exit code {code}), try {attempt} of {STARTS}")
    begun = report.started()
    code = report.end(code)
    # mpirun ends with its own code, such as 10, if the warning ends ranks that do not listen yet
    too_early = ranks.warned and not begun and code not in IN_ORDER
    if code == REQUEUE or too_early or (ranks.warned and code > 128):
        requeue()
    return code


def main() -> int:
    """Execute the command line and return the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        # an array's task is the seed, if no flag gives one; last, as what follows --config wins
        task = os.environ.get(batch.system().array)
        is_named = any(word.split("=")[0] == "--seed" for word in arguments)
        return run(arguments[1:] + (["--seed", task] if task and not is_named else []))
    if arguments not in ([], ["--open_mpi"]):
        print(__doc__)
        return 0 if {"-h", "--help"} & {*arguments} else 2
    if arguments:
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
