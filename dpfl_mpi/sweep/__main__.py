"""Compute many Runs: those of a file or of a grid that have no result yet, here or on Slurm.

`python -m dpfl_mpi.sweep analysis/accuracy_table.py --cluster slurm` submits a job for
each Run that is missing.
"""

import argparse
import dataclasses
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dpfl_mpi.errors import INTERRUPTED, REQUEUE, UserError, complain, exit_with
from dpfl_mpi.results.result import Result, check_current
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.command_line import given, naming_lines, run_and_job
from dpfl_mpi.settings.fields import fields
from dpfl_mpi.sweep.entries import ASK_S, Entry, load_submissions
from dpfl_mpi.sweep.local import LOOK_S, Local
from dpfl_mpi.sweep.slurm import GRACE_S, flags_of, sbatch_text, submit
from dpfl_mpi.sweep.table import Monitor, interrupts, table
from dpfl_mpi.sweep.wanted import (
    GRID,
    SLURM,
    bases,
    grid,
    only,
    parser,
    runs_of,
    trials,
    tuning_report,
)

# the smallest value of flags that take a whole number
MINIMUM = {"ranks": 1, "nodes": 1, "cpus": 1, "time": 1, "max_parallel": 0}


def main(arguments: list[str] | None = None) -> int:
    """Execute the command line; return the exit code.

    It is 0, 1 if a Run failed or was left out, 2 for a mistake, or 75 if one that was to be
    computed is not finished (on Slurm only with --watch).
    """
    # an interrupt before the flags are read has started no Runs, as with --list
    args = argparse.Namespace(cluster="", list=True)
    try:
        words = sys.argv[1:] if arguments is None else arguments
        args = argparse.Namespace(**given(words, parser(__doc__ or "")))
        with interrupts(), naming_lines(vars(args)):
            return sweep(args)
    except UserError as error:
        complain(f"error: {error}{hint(str(error))}")
        return 2
    except KeyboardInterrupt:
        if args.list:
            next_step = "run with --list to see the progress"
        else:
            on_slurm = args.cluster == "slurm"
            state = "jobs on Slurm go on" if on_slurm else "the Runs keep a checkpoint"
            command = "run the same command again to go on, or with --list to see the progress"
            next_step = f"{state}; {command}"
        complain(f"interrupted: {next_step}")
        return INTERRUPTED


def hint(error: str) -> str:
    """Return a hint for an error of a Run's flag, if a flag of the sweep was meant; else ""."""
    if error.startswith("--partition is "):
        return "; Slurm's partition is --sbatch partition=NAME"
    flags = [flag for flag, field in GRID.items() if re.match(f"--{field} is [^;]*,", error)]
    return f"; several are --{flags[0]}" if flags else ""


def sweep(args: argparse.Namespace) -> int:
    """Find, submit and report the Runs of a command line; return the exit code."""
    job, by_value = requested(args)
    runs = [run for runs in by_value.values() for run in runs]
    entries, left_out = entries_of(runs, Path(job.results), not args.file or bool(args.tune))
    for line in left_out:
        complain(line)
    load_submissions(entries, Path(job.results) / "sweeps")
    monitor = Monitor(entries)
    wanted = ("missing", "stopped", *(("failed", "unreadable") if args.retry else ()))
    todo = []
    for entry in entries:
        state = monitor.state(entry)
        if state in wanted:
            todo.append(entry)
        elif state == "finished":
            with Result(entry.path) as result:
                check_current(result, entry.run, job)
    if args.dry_run:
        print(preview(args, job, todo, entries))
        return 0
    if todo and not args.list and args.cluster == "slurm":
        submit(args, job, todo, monitor)
    elif todo and not args.list:
        Local(args, job, todo, monitor).run()
    if args.watch:
        monitor.watch(ASK_S if any(entry.on_slurm for entry in entries) else LOOK_S)
    failed, is_open = report(monitor)
    for line in left_out:  # again: the first time may be hours ago
        print(f"\n{line}")
    if args.tune:
        print(tuning_report(by_value, job, args.tune))
    if failed or left_out:
        return 1
    waited = not args.list and (args.cluster != "slurm" or args.watch)
    return REQUEUE if waited and is_open else 0


def requested(args: argparse.Namespace) -> tuple[Job, dict[str, list[Resolved]]]:
    """Return the Job, and the Runs that a command line asks for, by the value of --tune or ""."""
    for flag, minimum in MINIMUM.items():
        if (value := getattr(args, flag)) < minimum:
            allowed = f"allowed is a whole number of at least {minimum}"
            raise UserError(f"--{flag} is {value}; {allowed}")
    for_slurm = [flag for flag, default in SLURM.items() if getattr(args, flag) != default]
    if for_slurm and args.cluster != "slurm":
        raise UserError(f"--{for_slurm[0]} is for Slurm; allowed only with --cluster slurm")
    for name in ("fresh", "out"):
        if vars(args).get(name):
            instead = "of a sweep, delete or move the results to compute them anew"
            raise UserError(f"--{name} is for one Run; {instead}")
    for flag, field in GRID.items():
        if getattr(args, flag) and field in vars(args):
            if field not in args.config:
                raise UserError(f"--{flag} and --{field} are given; allowed is one of them")
            delattr(args, field)  # a flag wins over a file
    base, job = run_and_job(vars(args))
    for item in args.sbatch:
        if (name := item.partition("=")[0].lstrip("-")) in ("", "array", "signal", "time"):
            instead = "use --time" if name == "time" else "allowed is NAME=VALUE of another option"
            raise UserError(f"--sbatch is {item}; {instead}")
    if args.cluster == "slurm" and "grace" not in vars(args):
        job = dataclasses.replace(job, grace=GRACE_S)
    runs = only(runs_of(args.file), args) if args.file else grid(args, base)
    if args.file:  # flags of a Run replace what the file says, also if they give the default
        given_fields = {f.name: getattr(base, f.name) for f in fields(Run) if f.name in vars(args)}
        runs = [dataclasses.replace(run, **given_fields) for run in runs]
    by_value = trials(runs, args.tune) if args.tune else {"": runs}
    return job, {value: [run.resolve() for run in runs] for value, runs in by_value.items()}


def entries_of(
    runs: Sequence[Resolved], results: Path, whole: bool
) -> tuple[list[Entry], list[str]]:
    """Return an entry for each Run, and a sentence about Runs whose data are not there."""
    # a `UserError` if these are all Runs, or any at all where the `whole` sweep is wanted
    entries: dict[Path, Entry] = {}
    missing: Counter[str] = Counter()
    for run in runs:
        try:
            path = run.path(results)
            entries[path] = Entry(run, path)
        except UserError as error:
            missing[str(error)] += 1
    if missing and (whole or not entries):
        raise UserError(next(iter(missing)))
    left_out = [f"left out {n} of {len(runs)} Runs: {why}" for why, n in missing.items()]
    return list(entries.values()), left_out


def preview(
    args: argparse.Namespace, job: Job, todo: Sequence[Entry], entries: Sequence[Entry]
) -> str:
    """Return what would be submitted: the text for sbatch, and the command of each Run."""
    if not todo:
        return "nothing to submit; --list shows the progress of the Runs"
    base_of = bases(entries)
    launcher, lines = f"mpirun -n {args.ranks}", []
    if args.cluster == "slurm":  # Runs that wait for others are jobs of their own
        in_array = sum(base_of.get(entry.path.name) not in todo for entry in todo)
        launcher, lines = "task", [sbatch_text(args, max(1, in_array))]
    for entry in todo:
        flags = shlex.join(flags_of(entry, job, base_of))
        lines.append(f"# {launcher}: python -m dpfl_mpi {flags}")
    return "\n".join(lines)


def report(monitor: Monitor) -> tuple[bool, bool]:
    """Print how far all Runs are; return whether one failed, and whether one is not finished."""
    monitor.ask()
    statuses = monitor.statuses()
    print(table(statuses), flush=True)
    failed = False
    for entry, status in zip(monitor.entries, statuses, strict=True):
        if status.state in ("failed", "unreadable"):
            failed = True
            what = "is unreadable"
            if status.state == "failed":
                what = f"failed (job {entry.job}, --retry submits it again)"
            print(f"\n{entry.path.stem} {what}:\n{entry.log() or 'its job left no log'}")
    return failed, any(status.state != "finished" for status in statuses)


if __name__ == "__main__":
    exit_with(main)
