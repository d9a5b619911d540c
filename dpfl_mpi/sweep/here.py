"""The Runs of a sweep on this machine: mpirun for each, as many at once as there are cores and GPUs for."""

import contextlib
import io
import os
import shlex
import signal
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen

from dpfl_mpi.errors import REQUEUE, UserError, complain
from dpfl_mpi.mpi.launcher import mpirun
from dpfl_mpi.mpi.node import visible_gpus
from dpfl_mpi.settings import Job
from dpfl_mpi.storage.files import explained
from dpfl_mpi.storage.lock import Lock, born
from dpfl_mpi.sweep.jobs import flags_of, minutes, new_folder
from dpfl_mpi.sweep.known import Known, Queue, Submission, recall
from dpfl_mpi.sweep.table import Live, follow
from dpfl_mpi.sweep.wanted import bases

LOOK_S = 0.5  # between two looks at the Runs of this machine
LEAVING_S = 60.0  # that interrupted Runs have to end their round


def gpu_groups(args: Namespace, job: Job) -> list[str]:
    """Return the values of CUDA_VISIBLE_DEVICES that Runs of this machine take turns in, --gpus GPUs in each; [] where GPUs are no matter."""
    gpus = [] if job.device == "cpu" else visible_gpus()
    if args.gpus is not None and not 1 <= args.gpus <= len(gpus):
        raise UserError(f"--gpus is {args.gpus}; allowed is 1 up to the number of GPUs visible here, {len(gpus)}")
    each = args.gpus or 1
    if gpus and args.cluster == "local":
        shares = f"per Run {each}, Runs on each {args.runs_per_gpu}"
        print(f"GPUs visible here: {len(gpus)}; {shares}; --device cpu uses the cores", flush=True)
    # a daemon of CUDA's Multi-Process Service: kernels of several processes then run side by side
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control"
    if gpus and args.runs_per_gpu > 1 and not mps.exists():
        complain("warning: Runs that share a GPU take turns: CUDA's MPS does not run here")
    return [",".join(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)]


class Begun:
    """A Run that this sweep has begun: its mpirun, in a session of its own.

    Ctrl-C and a closed terminal are for the sweep: mpirun may end its ranks on them, but passes USR1 on.
    """

    def __init__(self, k: Known, flags: list[str], gpus: str, args: Namespace, log: Path | None, limit: float):
        self.known, self.gpus = k, gpus
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        env |= {"OMP_NUM_THREADS": str(args.cpus)} if args.cpus > 1 else {}
        # in a job on Slurm MPICH starts its proxy by srun, which else waits for the cores of the Run before
        env |= {"SLURM_OVERLAP": "1"} if "SLURM_JOB_ID" in env else {}
        # Open MPI binds one or two ranks to the first cores: all Runs at once would share those
        self.command = [mpirun(), "--bind-to", "none", "-n", str(args.ranks), sys.executable, "-m", "dpfl_mpi", *flags]
        with explained("mpirun cannot be started"), open(log or os.devnull, "ab") as file:
            out = file if log else None
            self.process = Popen(self.command, env=env, stdin=DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self.born = born(self.process.pid)
        self.ends = time.monotonic() + limit
        self.asked = False

    def goes_on(self) -> bool:
        """Return whether it computes; one that has used up its time is asked to leave."""
        if time.monotonic() > self.ends:
            self.leave()
        return self.process.poll() is None

    def leave(self) -> None:
        """Ask for the end of the round and a checkpoint, once."""
        if not self.asked:
            self.asked = True
            self.process.send_signal(signal.SIGUSR1)

    @property
    def stopped(self) -> bool:
        """Whether it left in order, or is about to."""
        return self.asked or self.process.poll() == REQUEUE


class Computing:
    """Runs that are computed on this machine: those that are `left` to begin, of all that are `known`, and those that have `begun`."""

    def __init__(self, args: Namespace, job: Job, todo: list[Known], known: list[Known], live: Live, queue: Queue):
        self.args, self.job, self.known, self.queue = args, job, known, queue
        self.groups = gpu_groups(args, job)
        self.foreground = args.cluster == "debug"
        shown = Live(io.StringIO()) if self.foreground else live
        self.follow = partial(follow, known, shown, queue, LOOK_S)  # while something is busy
        room = args.max_parallel or max(1, len(os.sched_getaffinity(0)) // (args.ranks * args.cpus))
        room = min(room, len(self.groups) * args.runs_per_gpu) if self.groups else room
        self.at_once = 1 if self.foreground else room
        self.limit = 60.0 * minutes(args.time) if args.time else float("inf")
        self.base_of = bases(known)
        self.left = sorted(todo, key=lambda k: k not in self.base_of.values())
        self.before = {k.path: (k.folder, k.job_id) for k in todo}
        self.folder = new_folder(job)
        self.begun: list[Begun] = []
        self.stopped = 0  # of them, as far as it is written down

    def run(self) -> None:
        """Begin every Run that is left, as soon as there is room and its base is there, and wait until all have ended.

        Where an error ends the sweep, as where somebody interrupts it, the Runs that it began keep a checkpoint and leave.
        """
        try:
            while self.left:
                self.follow(lambda: len(self.going()) >= self.at_once or not any(map(self.ready, self.left)))
                k = next(filter(self.ready, self.left), None)
                if k is None:
                    continue  # its base was taken up by another sweep at this moment
                self.left.remove(k)
                if self.may_begin(k):
                    self.begin(k)
            self.follow(lambda: bool(self.going()))
        except BaseException:  # also where nobody reads the table any more
            self.leave()
            raise

    def going(self) -> list[Begun]:
        going = [run for run in self.begun if run.goes_on()]
        if (stopped := sum(run.stopped for run in self.begun)) != self.stopped:
            self.stopped = stopped  # before the note, which may fail
            self.note()  # or the table would call them failed
        return going

    def state(self, k: Known) -> str:
        return k.look(self.queue.jobs).state

    def ready(self, k: Known) -> bool:
        """Return whether a Run's base, if it has one, is no longer computed or waited for."""
        base = self.base_of.get(k.path.name)
        return base is None or (base not in self.left and self.state(base) not in ("running", "waiting"))

    def may_begin(self, k: Known) -> bool:
        """Return whether a Run is still nobody's and its base has not failed; it is looked at again, as several sweeps may share their Runs."""
        recall(self.known, self.folder.parent)
        if self.state(k) in ("finished", "running", "waiting") or (k.folder, k.job_id) != self.before[k.path]:
            return False  # by another sweep
        base = self.base_of.get(k.path.name)
        if base and (state := self.state(base)) in ("failed", "stopped", "missing"):
            print(f"{k.path.stem} is not begun: it goes on from {base.path.stem}, {state}", flush=True)
            return False
        return True

    def begin(self, k: Known) -> None:
        """Begin a Run; in the foreground, stay until it has ended."""
        if self.foreground:
            print(f"--- {k.path.stem}", flush=True)
        log = None if self.foreground else self.folder / f"{k.path.stem}.log"
        taken = [run.gpus for run in self.going()]
        gpus = min(self.groups, key=taken.count, default="")  # the first of those with the fewest Runs
        run = Begun(k, flags_of(k, self.job, self.base_of), gpus, self.args, log, self.limit)
        self.begun.append(run)
        self.note()
        while self.foreground and run.goes_on():
            time.sleep(LOOK_S / 5)
        if self.foreground and (code := run.process.wait()) and not run.stopped:
            said = f"{shlex.join(run.command)} ended with exit code {code}"
            complain(f"{k.path.stem} failed: {said}")

    def note(self) -> None:
        """Write down which process computes which Run, for other sweeps and the next call."""
        runs = {run.known.path.name: run for run in self.begun}
        pids = {name: str(run.process.pid) for name, run in runs.items()}
        began = {name: run.born for name, run in runs.items()}
        stopped = [name for name, run in runs.items() if run.stopped]
        Submission(self.args.cluster, pids, began, stopped).remember(self.folder)
        recall(self.known, self.folder.parent)

    def leave(self) -> None:
        """Ask every Run for a checkpoint, and wait a minute at most until they have left: nobody would look after them."""
        for run in self.going():
            run.leave()
        with contextlib.suppress(UserError):  # it may be this that failed
            self.note()
        end = time.monotonic() + LEAVING_S
        while any(Lock(run.known.path).taken() or run.goes_on() for run in self.begun) and time.monotonic() < end:
            time.sleep(LOOK_S / 5)
