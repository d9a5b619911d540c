"""The Runs of a sweep on this machine: mpirun for each, as many at once as there are cores and GPUs for."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dpfl_mpi.config import Job
from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.placement import visible_gpus
from dpfl_mpi.storage.files import explained
from dpfl_mpi.survival.lock import Lock, born
from dpfl_mpi.survival.signals import REQUEUE
from dpfl_mpi.sweeps import interrupt
from dpfl_mpi.sweeps.jobs import flags_of, minutes, new_folder
from dpfl_mpi.sweeps.known import Known, Queue, follow, recall, remember
from dpfl_mpi.sweeps.table import Live
from dpfl_mpi.sweeps.wanted import bases

LOOK_S = 0.5  # between two looks at the Runs of this machine
UNSET = "unset"  # a CUDA_VISIBLE_DEVICES that is not there: every GPU is visible
LEAVING_S = 60.0  # that interrupted Runs have to end their round
TAKEN = ("finished", "running", "waiting")  # states of a Run that is, or was, somebody's


# GPUs --------------------------------------------------------------------------------------------------------------------
class Slots:
    """Which GPUs of this machine each Run computes on. Without any, every Run keeps the environment of the sweep.

    `groups` are values of CUDA_VISIBLE_DEVICES, as many GPUs in each as a Run has.
    """

    def __init__(self, gpus: list[str], per_run: int, runs_per_gpu: int):
        self.groups = [",".join(gpus[i : i + per_run]) for i in range(0, len(gpus) - per_run + 1, per_run)]
        self.most = len(self.groups) * runs_per_gpu  # Runs at once; 0: GPUs are no limit

    def free(self, taken: list[str]) -> str:
        """Return the group with the fewest Runs, the first of them; `taken` holds the group of each Run that goes on."""
        return min(self.groups, key=taken.count, default=os.environ.get("CUDA_VISIBLE_DEVICES", UNSET))


def slots_of(args: argparse.Namespace, job: Job) -> Slots:
    """Return the GPUs for Runs of this machine: --gpus of them per Run, --runs_per_gpu Runs on each."""
    gpus = [] if job.device == "cpu" else visible_gpus()
    if args.gpus is not None and not 1 <= args.gpus <= len(gpus):
        raise UserError(
            f"--gpus is {args.gpus}; a Run can have 1 or more of the GPUs that are visible here ({len(gpus)})"
        )
    out = Slots(gpus, args.gpus or 1, args.runs_per_gpu)
    if gpus and args.cluster == "local":
        print(
            f"GPUs visible here: {len(gpus)}; per Run {args.gpus or 1}, Runs on each {args.runs_per_gpu}; --device cpu uses the cores",
            flush=True,
        )
    if gpus and args.runs_per_gpu > 1 and not mps_runs():
        print(
            "warning: Runs that share a GPU take turns on it; CUDA's MPS does not run here", file=sys.stderr, flush=True
        )
    return out


def mps_runs() -> bool:
    """Return whether a daemon of CUDA's Multi-Process Service listens here: kernels of several processes then run side by side."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


# Runs --------------------------------------------------------------------------------------------------------------------
class Begun:
    """A Run that this sweep has begun: its mpirun, in a session of its own.

    Ctrl-C and a closed terminal are for the sweep: mpirun may end its ranks on them, but passes USR1 on.
    """

    def __init__(self, k: Known, flags: list[str], gpus: str, ranks: int, log: Path | None, limit: float):
        self.known, self.gpus = k, gpus
        env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
        if gpus == UNSET:
            del env["CUDA_VISIBLE_DEVICES"]
        # Open MPI binds one or two ranks to the first cores: all Runs at once would share those
        self.command = ["mpirun", "--bind-to", "none", "-n", str(ranks), sys.executable, "-m", "dpfl_mpi", *flags]
        with explained("mpirun cannot be started"), contextlib.ExitStack() as stack:
            out = stack.enter_context(open(log, "ab")) if log else None
            self.process = subprocess.Popen(
                self.command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
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


def compute(
    args: argparse.Namespace, job: Job, todo: list[Known], known: list[Known], live: Live, queue: Queue
) -> None:
    """Compute these Runs. A base comes before the Runs that go on from its models, which wait for it.

    Before a Run is begun it is looked at again: several sweeps over the same Runs share them. Where an error ends the sweep, as where somebody
    interrupts it, the Runs that it began are asked to keep a checkpoint and leave: nobody would look after them.
    """
    slots = slots_of(args, job)
    at_once = args.max_parallel or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    foreground = args.cluster == "debug"
    at_once = 1 if foreground else min(at_once, slots.most or at_once)
    limit = 60.0 * minutes(args.time) if args.time else float("inf")
    base_of = bases(known)
    needed = {base.path.name for base in base_of.values()}
    left = sorted(todo, key=lambda k: k.path.name not in needed)
    before = {k.path.name: (k.folder, k.job_id) for k in todo}
    folder = new_folder(job)
    begun: list[Begun] = []

    def going() -> list[Begun]:
        return [run for run in begun if run.goes_on()]

    def ready(k: Known) -> bool:
        base = base_of.get(k.path.name)
        return base is None or (base not in left and base.look(queue.jobs).state not in ("running", "waiting"))

    def wait(busy: Callable[[], bool]) -> None:
        if not foreground:
            return follow(known, live, queue, LOOK_S, busy)
        while busy():
            interrupt.check()
            queue.pause(LOOK_S)

    def note() -> None:
        named = {run.known.path.name: run for run in begun}
        pids, since = {n: str(r.process.pid) for n, r in named.items()}, {n: r.born for n, r in named.items()}
        remember(folder, pids, args.cluster, since, [n for n, r in named.items() if r.stopped])
        recall(known, folder.parent)

    try:
        while left:
            wait(lambda: len(going()) >= at_once or not any(map(ready, left)))
            if not (k := next(filter(ready, left), None)):
                continue  # its base was taken up by another sweep at this moment
            left.remove(k)
            recall(known, folder.parent)
            if k.look(queue.jobs).state in TAKEN or (k.folder, k.job_id) != before[k.path.name]:
                continue  # by another sweep
            if (base := base_of.get(k.path.name)) and base.look(queue.jobs).state == "failed":
                print(f"{k.path.stem} is not begun: {base.path.stem}, which it goes on from, failed", flush=True)
                continue
            if foreground:
                print(f"--- {k.path.stem}", flush=True)
            log = None if foreground else folder / f"{k.path.stem}.log"
            gpus = slots.free([run.gpus for run in going()])
            begun.append(Begun(k, flags_of(k, job, k.path.name in needed), gpus, args.ranks, log, limit))
            note()
            if foreground and (code := begun[-1].process.wait()):
                said = f"{shlex.join(begun[-1].command)} ended with exit code {code}"
                print(f"{k.path.stem} failed: {said}", file=sys.stderr, flush=True)
        wait(lambda: bool(going()))
        note()
    except BaseException:  # also where nobody reads the table any more
        for run in going():
            run.leave()
        with contextlib.suppress(UserError):  # it may be this that failed
            note()
        end = time.monotonic() + LEAVING_S
        while any(Lock(run.known.path).taken() or run.goes_on() for run in begun) and time.monotonic() < end:
            time.sleep(LOOK_S / 5)
        with contextlib.suppress(UserError):
            note()
        raise
