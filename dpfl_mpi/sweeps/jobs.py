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
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.storage.files import explained
from dpfl_mpi.survival.lock import Lock, born
from dpfl_mpi.sweeps.known import Known, follow, recall, remember
from dpfl_mpi.sweeps.table import Live

LOOK_S = 0.5  # between two looks at the Runs of this machine
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


def submit(
    compute: Callable[[list[str]], int],
    args: argparse.Namespace,
    job: Job,
    todo: list[Known],
    known: list[Known],
    live: Live,
) -> None:
    """Submit `compute` for each of these Runs: an array on Slurm, here as many at once as there are cores for, one with `debug`."""
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
    running: list[Any] = []
    begun: dict[str, str] = {}
    since: dict[str, str] = {}

    def busy(most: int) -> bool:
        running[:] = [r for r in running if not r.done()]
        return len(running) > most

    try:
        for k, line in zip(todo, lines, strict=True):
            one = jobs.submit(compute, [str(args.ranks), *line])
            begun[k.path.name] = one.job_id
            since[k.path.name] = born(int(one.job_id)) if args.cluster == "local" else ""
            remember(folder, begun, args.cluster, since)
            recall(known, sweeps)
            if args.cluster == "debug":
                print(f"--- {k.path.stem}", flush=True)
                if failure := one.exception():  # computes it; .result() would open a debugger
                    print(f"{k.path.stem} failed: {failure}", file=sys.stderr, flush=True)
                continue
            running.append(one)
            follow(known, live, LOOK_S, lambda: busy(at_once - 1))
        if running:
            follow(known, live, LOOK_S, lambda: busy(0))
    except KeyboardInterrupt:
        for r in running:
            r.cancel()
        end = time.monotonic() + LEAVING_S
        while any(Lock(k.path).taken() for k in todo) and time.monotonic() < end:
            time.sleep(LOOK_S)
        raise
