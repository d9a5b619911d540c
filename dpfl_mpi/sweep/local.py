"""Computes the Runs of a sweep on this machine: an mpirun for each, as many as fit at once.

A fine-tuned Run begins when its base, the same Run without fine-tuning, has ended: it goes on from
the base's models. An `Entry` is a Run with its result file, and knows how far the Run is.
"""

import contextlib
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen

from dpfl_mpi.errors import REQUEUE, UserError
from dpfl_mpi.mpi.launcher import mpirun
from dpfl_mpi.mpi.node import visible_gpus
from dpfl_mpi.settings import Job
from dpfl_mpi.storage.files import explained
from dpfl_mpi.storage.lock import Lock, born
from dpfl_mpi.sweep.entries import Entry, Submission, load_submissions
from dpfl_mpi.sweep.slurm import flags_of, new_folder
from dpfl_mpi.sweep.table import Monitor
from dpfl_mpi.sweep.wanted import bases

LOOK_S = 0.5  # seconds between two looks at the Runs
LEAVING_S = 60.0  # seconds that interrupted Runs have to end their round


def gpu_groups(args: Namespace, job: Job) -> list[str]:
    """Return which GPUs Runs may use, as values of CUDA_VISIBLE_DEVICES; [] without GPUs."""
    # each value has as many GPUs as --gpus says
    gpus = [] if job.device == "cpu" else visible_gpus()
    if args.gpus is not None and not 1 <= args.gpus <= len(gpus):
        allowed = f"allowed is 1 up to the number of GPUs visible here, {len(gpus)}"
        raise UserError(f"--gpus is {args.gpus}; {allowed}")
    per_run = args.gpus or 1
    if gpus:
        cores = "--device cpu uses the cores"
        print(f"GPUs visible here: {len(gpus)}; per Run {per_run}; {cores}", flush=True)
    return [",".join(gpus[i : i + per_run]) for i in range(0, len(gpus) - per_run + 1, per_run)]


class Process:
    """The mpirun of a Run.

    It has a session of its own, so that Ctrl-C reaches the sweep alone: mpirun would end its ranks
    on it. The sweep sends USR1 instead, which mpirun passes on.
    """

    def __init__(self, entry: Entry, flags: list[str], gpus: str, args: Namespace, log: Path):
        self.entry, self.gpus = entry, gpus
        env = dict(os.environ)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus
        if args.cpus > 1:
            env["OMP_NUM_THREADS"] = str(args.cpus)
        if "SLURM_JOB_ID" in env:  # MPICH uses srun, which waits for the cores of the Run before
            env["SLURM_OVERLAP"] = "1"
        # Open MPI would bind one or two ranks to the first cores, which all Runs would then share
        launch = [mpirun(), "--bind-to", "none", "-n", str(args.ranks)]
        command = [*launch, sys.executable, "-m", "dpfl_mpi", *flags]
        with explained("mpirun cannot be started"), open(log, "ab") as out:
            self.process = Popen(
                command, env=env, stdin=DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.born = born(self.process.pid)
        self.leaving = False

    def goes_on(self) -> bool:
        return self.process.poll() is None

    def leave(self) -> None:
        """Tell it to keep a checkpoint at the end of the round and leave."""
        self.leaving = True
        self.process.send_signal(signal.SIGUSR1)

    @property
    def stopped(self) -> bool:
        """Whether it left after a checkpoint, or is about to."""
        return self.leaving or self.process.poll() == REQUEUE


class Local:
    """Computes Runs here: those in `left` have not begun, those in `begun` have a process."""

    def __init__(self, args: Namespace, job: Job, todo: Sequence[Entry], monitor: Monitor):
        self.args, self.job, self.monitor = args, job, monitor
        self.entries = monitor.entries
        self.groups = gpu_groups(args, job)
        cores_of_run = args.ranks * max(args.cpus, job.threads_per_client)
        most = args.max_parallel or max(1, len(os.sched_getaffinity(0)) // cores_of_run)
        self.at_once = min(most, len(self.groups)) if self.groups else most
        self.base_of = bases(self.entries)
        self.left = sorted(todo, key=lambda entry: entry not in self.base_of.values())
        self.folder = new_folder(job)
        self.begun: list[Process] = []
        self.stopped = 0  # how many processes were stopped when `save` was called last

    def run(self) -> None:
        """Begin each Run as soon as there is room and its base is there; wait for all to end."""
        # if an error or an interrupt ends the sweep, its Runs keep a checkpoint and leave
        try:
            while self.left:
                self.monitor.watch(LOOK_S, self.full)
                for entry in self.ready()[:1]:  # none if another sweep took up its base meanwhile
                    self.left.remove(entry)
                    if self.may_begin(entry):
                        self.begin(entry)
            self.monitor.watch(LOOK_S, lambda: bool(self.going()))
        except BaseException:
            self.leave()
            raise

    def full(self) -> bool:
        """Return whether nothing can begin: there is no room, or every base is still computed."""
        return len(self.going()) >= self.at_once or not self.ready()

    def going(self) -> list[Process]:
        """Return the processes that go on."""
        stopped = sum(process.stopped for process in self.begun)
        if stopped != self.stopped:
            self.stopped = stopped
            self.save()  # or the table would call them failed
        return [process for process in self.begun if process.goes_on()]

    def ready(self) -> list[Entry]:
        """Return the Runs that may begin: their base, if they have one, has ended."""
        active = ("running", "waiting")
        not_ended = [base for base in self.base_of.values() if self.monitor.state(base) in active]
        not_ended += self.left
        return [entry for entry in self.left if self.base_of.get(entry.path.name) not in not_ended]

    def may_begin(self, entry: Entry) -> bool:
        """Return whether no other sweep has begun a Run meanwhile, and its base has not failed."""
        load_submissions(self.entries, self.folder.parent)
        if self.monitor.state(entry) in ("finished", "running", "waiting"):
            return False
        base = self.base_of.get(entry.path.name)
        state = self.monitor.state(base) if base else ""
        if base and state in ("failed", "stopped", "missing"):
            why = f"it goes on from {base.path.stem}, {state}"
            print(f"{entry.path.stem} is not begun: {why}", flush=True)
            return False
        return True

    def begin(self, entry: Entry) -> None:
        """Begin a Run on the GPUs with the fewest Runs."""
        taken = [process.gpus for process in self.going()]
        gpus = min(self.groups, key=taken.count, default="")
        flags = flags_of(entry, self.job, self.base_of)
        log = self.folder / f"{entry.path.stem}.log"
        self.begun.append(Process(entry, flags, gpus, self.args, log))
        self.save()

    def save(self) -> None:
        """Write down which process computes which Run, for other sweeps and the next call."""
        by_name = {process.entry.path.name: process for process in self.begun}
        numbers = {name: str(process.process.pid) for name, process in by_name.items()}
        born = {name: process.born for name, process in by_name.items()}
        stopped = [name for name, process in by_name.items() if process.stopped]
        Submission("local", numbers, born, stopped).save(self.folder)
        load_submissions(self.entries, self.folder.parent)

    def leave(self) -> None:
        """Tell every Run to keep a checkpoint and leave, and wait for that, `LEAVING_S` at most."""
        for process in self.going():
            process.leave()
        with contextlib.suppress(UserError):  # it may be this that failed
            self.save()
        end = time.monotonic() + LEAVING_S
        while time.monotonic() < end and any(
            Lock(process.entry.path).taken() or process.goes_on() for process in self.begun
        ):
            time.sleep(LOOK_S / 5)
