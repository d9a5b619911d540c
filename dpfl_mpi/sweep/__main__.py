"""Many Runs: `python -m dpfl_mpi.sweep analysis/accuracy_table.py --cluster slurm` submits one job for each Run that has no result yet."""

import argparse
import dataclasses
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dpfl_mpi.errors import INTERRUPTED, UserError, complain, exit_with
from dpfl_mpi.results.result import Result, check_current
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings.command_line import given, naming_lines, run_and_job
from dpfl_mpi.settings.fields import fields
from dpfl_mpi.sweep import here
from dpfl_mpi.sweep.jobs import GRACE_S, flags_of, minutes, sbatch_text, submit
from dpfl_mpi.sweep.known import ASK_S, Known, Queue, recall
from dpfl_mpi.sweep.table import Live, ended_as_by_ctrl_c, follow
from dpfl_mpi.sweep.wanted import GRID, bases, choose, grid, only, parser, runs_of, trials


def show_text(args: argparse.Namespace, job: Job, todo: list[Known], known: list[Known]) -> None:
    """Print what would be submitted: the sbatch text, or the commands."""
    base_of = bases(known)
    if args.cluster == "slurm" and todo:  # those that wait for others are jobs of their own
        print(sbatch_text(args, max(1, sum(base_of.get(k.path.name) not in todo for k in todo))))
    if not todo:
        print("nothing to submit; --list says how far the Runs are")
    for k in todo:
        line = shlex.join(flags_of(k, job, base_of))
        print(f"# {'task' if args.cluster == 'slurm' else f'mpirun -n {args.ranks}'}: python -m dpfl_mpi {line}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 1 where a Run failed or was left out."""
    args = argparse.Namespace(cluster="", list=True)
    try:
        flags = parser(__doc__ or "")
        args = argparse.Namespace(**given(sys.argv[1:] if arguments is None else arguments, flags))
        with ended_as_by_ctrl_c(), naming_lines(vars(args)):
            return sweep(args)
    except UserError as error:
        more = "; Slurm's partition is --slurm_partition" if str(error).startswith("--partition is ") else ""
        several = (flag for flag, field in GRID.items() if re.match(f"--{field} is [^;]*,", str(error)))
        more += "".join(f"; several are --{flag}" for flag in several)
        complain(f"error: {error}{more}")
        return 2
    except KeyboardInterrupt:
        going = "jobs on Slurm go on" if args.cluster == "slurm" else "the Runs keep a checkpoint each"
        again = "the same command goes on, with --list it says how far they are"
        said = "--list says how far they are" if args.list else f"{going}; {again}"
        complain(f"interrupted: {said}")
        return INTERRUPTED


def sweep(args: argparse.Namespace) -> int:
    """Find, submit and report the Runs of a command line; return the exit code."""
    job, values = asked_for(args)
    runs = [run for some in values.values() for run in some]
    known, left_out = known_of(runs, Path(job.results), whole=not args.file or bool(args.tune))
    for line in left_out:
        complain(line)
    recall(known, Path(job.results) / "sweeps")
    queue, live = Queue(known), Live(sys.stdout)
    wanted = ("missing", "stopped", "failed", "unreadable") if args.retry else ("missing", "stopped")
    state = {k: k.look(queue.jobs).state for k in known}
    for k in known:
        if state[k] == "finished":
            with Result(k.path) as result:
                check_current(result, k.run, job)
    todo = [k for k in known if state[k] in wanted]
    if args.dry_run:
        show_text(args, job, todo, known)
        return 0
    if todo and not args.list and args.cluster == "slurm":
        submit(args, job, todo, known, queue.jobs)
        queue = Queue(known)  # what was said before knows nothing of these jobs
    elif todo and not args.list:
        here.Computing(args, job, todo, known, live, queue).run()
    if args.watch:
        follow(known, live, queue, ASK_S if any(k.on_slurm for k in known) else here.LOOK_S)
    failed = report(known, live, queue)
    for line in left_out:  # again: the first time was hours ago
        print(f"\n{line}")
    if args.tune:
        print(choose(values, job, args.tune))
    return 1 if failed or left_out else 0


def asked_for(args: argparse.Namespace) -> tuple[Job, dict[str, list[Resolved]]]:
    """Return how the Runs are computed, and the Runs: by the value of --tune that they have, without it all of them under ""."""
    for flag, least in (("ranks", 1), ("nodes", 1), ("cpus", 1), ("max_parallel", 0), ("runs_per_gpu", 1)):
        if getattr(args, flag) < least:
            raise UserError(f"--{flag} is {getattr(args, flag)}; allowed is a whole number of at least {least}")
    if args.cluster == "slurm" and args.runs_per_gpu > 1:
        raise UserError("--runs_per_gpu is for Runs here; jobs on Slurm share a GPU by --sbatch gres=shard:1")
    if args.time:
        minutes(args.time)
    for name in (name for name in ("fresh", "out") if vars(args).get(name)):  # a printed --config has both
        raise UserError(f"--{name} is for one Run; of a sweep, delete or move the results to compute them anew")
    for flag, field in GRID.items():
        if getattr(args, flag) and field in vars(args):
            if field not in args.config:
                raise UserError(f"--{flag} and --{field} are given; allowed is one of them")
            delattr(args, field)  # a flag wins over a file
    base, job = run_and_job(vars(args))
    if args.cluster == "slurm" and job.grace == Job.grace:
        job = dataclasses.replace(job, grace=GRACE_S)
    wanted = only(runs_of(args.file), args) if args.file else grid(args, base)
    if args.file:  # what was said, also where it is the default
        said = {f.name: getattr(base, f.name) for f in fields(Run) if f.name in vars(args)}
        wanted = [dataclasses.replace(run, **said) for run in wanted]
    tried = trials(wanted, args.tune) if args.tune else {"": wanted}
    return job, {value: [run.resolve() for run in runs] for value, runs in tried.items()}


def report(known: Sequence[Known], live: Live, queue: Queue) -> bool:
    """Print how far all Runs are and the log of each that failed; return whether one did."""
    queue.ask()
    rows = [k.look(queue.jobs) for k in known]
    live.end(rows)
    failed = [(k, row.state) for k, row in zip(known, rows, strict=True) if row.state in ("failed", "unreadable")]
    for k, state in failed:
        how = f"failed (job {k.job_id}, --retry submits it again)" if state == "failed" else "is unreadable"
        print(f"\n{k.path.stem} {how}:\n{k.log()}")
    return bool(failed)


def known_of(runs: Sequence[Resolved], results: Path, whole: bool) -> tuple[list[Known], list[str]]:
    """Return the Runs, each once, and a sentence on those of a file of RUNS that cannot be named: a file that they read is not there.

    That is an error where it is so of all of them, or of one where the `whole` is wanted.
    """
    known: dict[Path, Known] = {}
    missing: Counter[str] = Counter()
    for run in runs:
        try:
            path = run.path(results)
            known[path] = Known(run, path)
        except UserError as error:
            missing[str(error)] += 1
    if missing and (whole or not known):
        raise UserError(next(iter(missing)))
    return list(known.values()), [f"left out {n} of {len(runs)} Runs: {why}" for why, n in missing.items()]


if __name__ == "__main__":
    exit_with(main)
