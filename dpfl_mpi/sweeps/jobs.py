"""Submitting the Runs of a sweep by submitit, on Slurm or here."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpfl_mpi.config import Job
from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.placement import visible_gpus
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.storage.files import explained
from dpfl_mpi.survival.lock import Lock, born
from dpfl_mpi.sweeps.known import Known, follow, recall, remember
from dpfl_mpi.sweeps.table import Live

LOOK_S = 0.5  # between two looks at the Runs of this machine
UNSET = "unset"  # a CUDA_VISIBLE_DEVICES that is not there: every GPU is visible
LEAVING_S = 60.0  # that interrupted Runs have to end their round


def executor(args: argparse.Namespace, folder: Path) -> Any:
    """Return submitit's executor with the resources of the command line."""
    import submitit

    try:
        out = submitit.AutoExecutor(folder=folder, cluster=args.cluster, slurm_max_num_timeout=10000)
    except RuntimeError as error:
        raise UserError(f"--cluster is {args.cluster}: {error}") from None
    if args.cluster != "slurm":
        out.update_parameters(name="dpfl", timeout_min=minutes(args.time))
        return out
    extra: dict[str, Any] = {"requeue": True}
    for item in args.sbatch:
        name, _, value = item.partition("=")
        extra[name.lstrip("-")] = value if value else True
    out.update_parameters(
        name="dpfl",
        timeout_min=minutes(args.time),
        nodes=args.nodes,
        tasks_per_node=args.ranks,
        cpus_per_task=args.cpus,
        slurm_partition=args.partition,
        slurm_account=args.account,
        slurm_gpus_per_node=args.gpus,
        slurm_array_parallelism=args.max_parallel or 256,
        slurm_srun_args=[f"--mpi={args.mpi}", f"--cpus-per-task={args.cpus}", "--kill-on-bad-exit=1"],
        slurm_setup=[f"export OMP_NUM_THREADS={args.cpus}"],
        slurm_signal_delay_s=120,
        slurm_additional_parameters=extra,
    )
    return out


def minutes(text: str) -> int:
    """Return a time limit in minutes: a number of them, or H:MM:SS, or D-H:MM:SS."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    right = len(parts) == 3 or (len(parts) == 1 and not days)
    if not right or not all(p.isdigit() for p in [*parts, days or "0"]):
        raise UserError(f"--time is {text}; allowed is a number of minutes, H:MM:SS or D-H:MM:SS")
    if len(parts) == 1:
        return int(parts[0])
    hours, mins, seconds = map(int, parts)
    return int(days or 0) * 1440 + hours * 60 + mins + -(-seconds // 60)


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
    """Return the GPUs for Runs of this machine: --gpus of them per Run, --runs_per_gpu Runs on each. Slurm hands out its own."""
    gpus = [] if args.cluster == "slurm" or job.device == "cpu" else visible_gpus()
    if args.cluster != "slurm" and args.gpus is not None and not 1 <= args.gpus <= len(gpus):
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


def submit(
    compute: Callable[[list[str]], int],
    args: argparse.Namespace,
    job: Job,
    todo: list[Known],
    known: list[Known],
    live: Live,
) -> None:
    """Submit `compute` for each of these Runs: an array on Slurm, here as many at once as there are cores and GPUs for, one with `debug`.

    Here `compute` gets two words before the flags: the number of ranks, and CUDA_VISIBLE_DEVICES (submitit would hide every GPU).
    """
    slots = slots_of(args, job)
    sweeps = Path(job.results) / "sweeps"
    with explained(f"--results is {job.results}; nothing can be written there"):
        sweeps.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=sweeps))
    jobs = executor(args, folder)
    lines = [
        to_flags(changed(k.run) | changed(dataclasses.replace(job, quiet=False, out=str(k.path.resolve()))))
        for k in todo
    ]
    if args.cluster == "slurm":
        array = jobs.map_array(compute, lines)
        remember(folder, {k.path.name: j.job_id for k, j in zip(todo, array, strict=True)}, "slurm")
        recall(known, sweeps)
        number = array[0].job_id.split("_")[0]
        what = (
            f"{len(array)} jobs as array {number}" if len(array) > 1 else f"job {number}"
        )  # submitit makes one no array
        print(f"submitted {what}; logs in {folder}", flush=True)
        return
    at_once = args.max_parallel or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    at_once = min(at_once, slots.most or at_once)
    running: list[tuple[Any, str]] = []  # job and GPUs
    begun: dict[str, str] = {}
    since: dict[str, str] = {}

    def busy(most: int) -> bool:
        running[:] = [(r, gpus) for r, gpus in running if not r.done()]
        return len(running) > most

    try:
        for k, line in zip(todo, lines, strict=True):
            gpus = slots.free([taken for _, taken in running])
            one = jobs.submit(compute, [str(args.ranks), gpus, *line])
            begun[k.path.name] = one.job_id
            since[k.path.name] = born(int(one.job_id)) if args.cluster == "local" else ""
            remember(folder, begun, args.cluster, since)
            recall(known, sweeps)
            if args.cluster == "debug":
                print(f"--- {k.path.stem}", flush=True)
                if failure := one.exception():  # computes it; .result() would open a debugger
                    print(f"{k.path.stem} failed: {failure}", file=sys.stderr, flush=True)
                continue
            running.append((one, gpus))
            follow(known, live, LOOK_S, lambda: busy(at_once - 1))
        if running:
            follow(known, live, LOOK_S, lambda: busy(0))
    except KeyboardInterrupt:
        for r, _ in running:
            r.cancel()
        end = time.monotonic() + LEAVING_S
        while any(Lock(k.path).taken() for k in todo) and time.monotonic() < end:
            time.sleep(LOOK_S)
        raise
