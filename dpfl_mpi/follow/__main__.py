"""Tell others of each round of a run: `python -m dpfl_mpi.follow RESULT --log wandb --callback mine.py`, while it goes on or afterwards.

A run with `--log` or `--callback` starts this beside rank 0 (`engine.beside`). It only reads the results file, so it can change no number, and the
ranks do not wait for it. Where compute nodes have no network, start it by hand on a login node.
"""

import argparse
import importlib
import inspect
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dpfl_mpi import api
from dpfl_mpi.errors import LONGEST, UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.plugins import failing_as
from dpfl_mpi.plugins.code import execute, in_path
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import curves
from dpfl_mpi.settings.fields import as_dict, to_flags
from dpfl_mpi.settings.job import DONE, LIBRARIES, LOGS, log_name
from dpfl_mpi.storage.foreign import refused_as
from dpfl_mpi.survival.signals import SIGNALS

Numbers = dict[str, float]
Log = tuple[int, Callable[[int, Numbers], object]]  # the last round that it has, -1: none; and what adds a round


def to_lines(path: Path, who: dict[str, str]) -> Log:
    """A line of JSON per round; Runs may share a file."""
    try:
        text = path.read_text() if path.exists() else ""
        whole = re.sub(r'{"run": [^\n]*\Z', "", text)  # a kill may have cut its last line short
        known = [json.loads(line) for line in whole.splitlines()]
        last = max((line["round"] for line in known if who.items() <= line.items()), default=-1)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"--log is {path}, which holds other lines than those of a log; name another file") from None
    if whole != text:
        path.write_text(whole)

    def add(t: int, numbers: Numbers) -> None:
        line = who | {"round": t} | {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    return last, add


def to_tensorboard(name: str, result: Result) -> Log:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    folder = result.path.parent / "tensorboard" / name
    writer, held = SummaryWriter(folder), EventAccumulator(str(folder)).Reload()
    last = held.Scalars("epochs")[-1].step if "epochs" in held.Tags()["scalars"] else -1

    def add(t: int, numbers: Numbers) -> None:
        for tag, value in numbers.items():
            writer.add_scalar(tag, value, t)
        writer.flush()

    return last, add


def to_wandb(name: str, result: Result) -> Log:
    import wandb

    run = wandb.init(project="dpfl_mpi", id=name, name=result.path.stem, resume="allow", config=as_dict(result.run))
    return run.step - 1, lambda t, numbers: run.log(numbers, step=t)


def to_mlflow(name: str, result: Result) -> Log:
    import mlflow

    mlflow.set_experiment("dpfl_mpi")
    known = mlflow.search_runs(filter_string=f"tags.dpfl_mpi = '{name}'", output_format="list")
    run = mlflow.start_run(run_id=known[0].info.run_id if known else None, run_name=result.path.stem)
    held = mlflow.MlflowClient().get_metric_history(run.info.run_id, "epochs") if known else []
    if not known:
        mlflow.set_tag("dpfl_mpi", name)
        mlflow.log_params(as_dict(result.run))
    return max((one.step for one in held), default=-1), lambda t, numbers: mlflow.log_metrics(numbers, step=t)


def opened(log: str, result: Result) -> Log:
    """Return the log of a result; one that was computed anew (--fresh) has another."""
    who = {"run": result.path.stem, "since": str(result.starts()[0].get("time", ""))}
    if log not in LIBRARIES:
        return to_lines(Path(log), who)
    to = {"tensorboard": to_tensorboard, "wandb": to_wandb, "mlflow": to_mlflow}[log]
    return to(re.sub(r"[^\w.+-]", "-", "-".join(who.values())), result)


def follow(path: Path, log: str | None, on_round: Callable[[Result, int], object] | None, ticks: Iterator[int]) -> None:
    """Tell at each tick of the rounds that are new: a log of those that it lacks, `on_round` from the round of the first tick on."""
    logged, add, called = -1, None, -1
    for first in ticks:
        if not path.exists():
            continue  # the run ended before it had begun
        with api.Result(path) as result:
            if add is None:
                logged, add = opened(log, result) if log else (-1, lambda t, numbers: None)
                called = first - 1
            over = {}  # by round what `Result.curves` has, and the mean over clients of their best models so far
            if log and logged < result.last_round:
                over = curves(result) | {"best_test_acc": result.mean("round/best_test_acc")}
            for t in range(min(logged, called) + 1, result.last_round + 1):
                if t > logged:
                    add(t, {name: float(values[t]) for name, values in over.items()})
                if t > called and on_round:
                    on_round(result, t)
            logged, called = max(logged, result.last_round), max(called, result.last_round)


def beside() -> Iterator[int]:
    """Yield the number of a round as it ends, as the run tells; after a kill the next start tells what is left."""
    while told := os.read(0, 65536):
        yield int(told.split()[0])


def by_hand(path: Path) -> Iterator[int]:
    running = True
    while running:
        with Result(path) as result:
            running = result.state.startswith("running")
        yield 0
        time.sleep(running)


def loaded(callback: str) -> Callable[[Result, int], object]:
    """Return `on_round` of a file, whose errors are sentences."""
    code = in_path(f"--callback is {callback}", Path(callback))
    on_round = getattr(execute(f"--callback is {callback}", code)[0], "on_round", None)
    lazy = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(on_round) or any(kind(on_round) for kind in lazy):
        what = "no function on_round(result, t), without async or yield"
        raise UserError(f"--callback is {callback}, which has {what}")
    return failing_as(f"on_round of {callback}", code)(on_round)  # type: ignore[no-any-return]


@in_a_sentence
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m dpfl_mpi.follow", description=__doc__, allow_abbrev=False)
    parser.add_argument("result", type=Path, metavar="RESULT", help="result file, finished or running")
    parser.add_argument("--log", help=LOGS)
    parser.add_argument("--callback", help="a file NAME.py with on_round(result, t)")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.beside:
        for number in SIGNALS:  # they are the run's; this ends with it
            signal.signal(number, signal.SIG_IGN)
        os.nice(5)
    flags, ready = " ".join(to_flags({"log": args.log, "callback": args.callback})), False
    try:
        if not flags:
            raise UserError("give --log or --callback")
        if args.log and not log_name(args.log):
            raise UserError(f"--log is {args.log}; allowed is {LOGS}")
        if args.log in LIBRARIES:
            how = f"pip install 'dpfl_mpi[{args.log}]'"
            with refused_as(f"--log is {args.log}, which cannot be imported: {how}", (ImportError,)):
                importlib.import_module(args.log)
        on_round = loaded(args.callback) if args.callback else None
        ready = args.beside and os.write(0, b"ready\n") > 0
        follow(args.result, args.log, on_round, beside() if args.beside else by_hand(args.result))
    except Exception as error:  # of a library, a disk or the user's own file: the run does not know of it
        text = f"{flags}: {type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
        said = str(error) if isinstance(error, UserError) else text
        if not args.beside:
            raise UserError(said) from None
        if ready:
            complain(f"warning: {said}; the run goes on without it")
        else:
            os.write(0, said.encode(errors="replace"))
        return 2
    return DONE if args.beside else 0


if __name__ == "__main__":
    exit_with(main)
