"""Which launch line starts one MPI world here: `python -m dpfl_mpi.mpi.launcher` prints it, for `$(python -m dpfl_mpi.mpi.launcher) python -m dpfl_mpi`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dpfl_mpi.errors import UserError, complain, exit_with

# in one piece: lines of ranks mix
TRY = "import os; from mpi4py import MPI; os.write(1, b'world of %d\\n' % MPI.COMM_WORLD.size)"
SECONDS = 60  # a mismatched pair may wait for ever
OPEN_MPI = {  # what Open MPI must be told on a single machine to start as MPICH does, which ignores it
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same for version 4
    "OMPI_MCA_osc": "^ucx",  # its one-sided calls over UCX fail where there is no such network
}
SRUN = ("pmi2", "pmix", "pmix_v5", "pmix_v4", "pmix_v3", "cray_shasta")


def candidates() -> list[list[str]]:
    """Return the launch lines that could work here, the first choice first."""
    out: list[list[str]] = []
    if os.environ.get("SLURM_JOB_ID") and shutil.which("srun"):
        offered = output(["srun", "--mpi=list"]).split()
        out += [["srun", f"--mpi={kind}", "--kill-on-bad-exit=1"] for kind in SRUN if kind in offered]
    if shutil.which(found := mpirun()):
        out.append([found, "--bind-to", "none"] if os.environ.get("SLURM_JOB_ID") else [found])
    return out


def mpirun() -> str:
    """Return the mpirun of the search path, where there is none that beside Python: of an environment that was not activated."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() and not shutil.which("mpirun") else "mpirun"


def works(line: list[str], tasks: int) -> bool:
    """Return whether the line starts one world of this many tasks: one of the wrong kind mostly starts each alone, and says nothing."""
    few = [*line, "-n", str(tasks), sys.executable, "-c", TRY]
    return output(few).count(f"world of {tasks}") == tasks


def output(command: list[str], seconds: float = 0) -> str:
    """Return what a command prints, to stdout first; nothing where it fails, or takes more than so many seconds (`SECONDS`)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds or SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def find_line() -> list[str]:
    """Return the launch line for this place; outside a Slurm job mpirun is taken at its word. Raise `UserError` where none works."""
    lines = candidates()
    if os.environ.get("SLURM_JOB_ID"):
        tasks = min(2, int(os.environ.get("SLURM_NTASKS", "1") or 1))
        lines = [line for line in lines if works(line, tasks)][:1] if tasks > 1 else lines[:1]
    if not lines:
        raise UserError("neither srun nor mpirun starts one MPI world of two tasks; load the module of mpi4py's MPI")
    return lines[0]


def main() -> int:
    """Print the launch line, or with --open_mpi the settings that Open MPI needs on a single machine; return the exit code."""
    if sys.argv[1:] == ["--open_mpi"]:
        print(" ".join(f"{name}={value}" for name, value in OPEN_MPI.items()))
        return 0
    try:
        print(" ".join(find_line()))
    except UserError as error:
        complain(f"error: {error}")
        return 3
    return 0


if __name__ == "__main__":
    exit_with(main)
