"""`--log` and `--callback`: the two followers of a run, to which rank 0 reports each new round.

The loop in `engine.train` makes `Followers` and calls `tell` after each round. A follower takes its
numbers from the results file, which is written at most once a second: it may get several rounds at
once. One that fails, or takes too long, is switched off with a warning; the run goes on without it.
"""

import contextlib
import importlib
import inspect
import json
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from dpfl_mpi.errors import LONGEST, UserError, complain
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import failing_as
from dpfl_mpi.plugins.code import code_in_file, execute, folder_kept
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job
from dpfl_mpi.settings.job import TENSORBOARD
from dpfl_mpi.storage.foreign import refused_as
from dpfl_mpi.survival.signals import handled

CALL_S = 60.0  # that a follower may take for the rounds that are new
LEAVING_S = 5.0  # the same when the run is stopped
Add = Callable[[Result, range], object]  # reports these rounds of a result
# `Begin` is called once, with the result and the round that was computed last: it returns the last
# round that an earlier start reported, -1 for none, and the function that reports later ones.
Begin = Callable[[Result, int], tuple[int, Add]]


class Followers(contextlib.AbstractContextManager["Followers"]):
    """The log and the callback of a Job, on root. Making it is collective.

    Mistakes in --log and --callback are a `UserError` on every rank.
    """

    def __init__(self, path: Path, job: Job, world: World):
        self.path, self.job = path, job
        self.begins: dict[str, Begin] = {}  # by the flag, as warnings name it
        # of those that have begun, the last round that each was told of, and what reports more
        self.told: dict[str, tuple[int, Add]] = {}
        self.seconds = CALL_S
        if job.log or job.callback:
            world.decide(self._start)

    def _start(self) -> None:
        log, callback = self.job.log, self.job.callback
        if log == TENSORBOARD:
            how = f"pip install 'dpfl_mpi[{TENSORBOARD}]'"
            with refused_as(f"--log is {log}, which cannot be imported: {how}", (ImportError,)):
                importlib.import_module(TENSORBOARD)
            self.begins[f"--log={log}"] = tensorboard
        elif log:
            self.begins[f"--log={log}"] = partial(json_lines, Path(log))
        if callback:
            self.begins[f"--callback={callback}"] = on_round_of(callback)

    def tell(self, t: int) -> None:
        """Tell each follower the rounds that are new in the results file. Round t is the last."""
        if not self.begins or not self.path.exists():
            return
        for flag, begin in [*self.begins.items()]:
            try:
                with limited(self.seconds), folder_kept(), Result(self.path) as result:
                    last, add = self.told.get(flag) or begin(result, t)
                    self.told[flag] = max(last, result.last_round), add
                    if rounds := range(last + 1, result.last_round + 1):
                        add(result, rounds)
                continue
            except UserError as error:
                why = str(error)
            except TooSlow:
                why = f"{flag} took more than {self.seconds:g} s"
            except BaseException as error:  # also SystemExit: the run must not end by it
                why = f"{flag}: {type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
            del self.begins[flag]
            complain(f"warning: {why}; the run goes on without it")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind:
            self.seconds = LEAVING_S
        self.tell(sys.maxsize)  # rounds not reported yet, also those of an earlier start


def on_round_of(file: str) -> Begin:
    """Return the `Begin` of the function `on_round` in a file, the user's callback."""
    # it is told only of rounds that this start computes
    flag = f"--callback is {file}"
    code = code_in_file(flag, Path(file))
    on_round = getattr(execute(flag, code)[0], "on_round", None)
    lazy = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(on_round) or any(kind(on_round) for kind in lazy):
        wanted = "no function on_round(result, t), without async or yield"
        raise UserError(f"{flag}, which has {wanted}")
    call = failing_as(f"on_round of {file}", code)(on_round)

    def add(result: Result, rounds: range) -> None:
        dtype = torch.get_default_dtype()  # the callback may change it, the run must not notice
        try:
            for t in rounds:
                call(result, t)
        finally:
            torch.set_default_dtype(dtype)

    return lambda result, t: (t - 1, add)  # the rounds before t count as told


# Logs: they have every round of a Run once, also those that earlier starts computed ---------------
def identity(result: Result) -> dict[str, str]:
    """Return what tells the rounds of a run from others in one log: its name, and when it began."""
    return {"run": result.path.stem, "since": str(result.starts()[0].get("time", ""))}


def numbers_of(result: Result, rounds: range) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each round and its numbers by name: means over clients, and costs."""
    by_round = result.by_round() | {"best_test_acc": result.mean("round/best_test_acc")}
    for t in rounds:
        yield t, {name: float(values[t]) for name, values in by_round.items()}


def json_lines(path: Path, result: Result, _: int) -> tuple[int, Add]:
    """Begin to append a JSON line for each round to a file; see `Begin`."""
    run = identity(result)
    once = {"warning": result.warning} if result.warning else {}
    try:
        text = path.read_text() if path.exists() else ""
        # Runs may share a file; a kill may have left half of the last line
        end, begin = text[text.rfind("\n") + 1 :], '{"run": '
        torn = end.startswith(begin) or begin.startswith(end)
        whole = text.removesuffix(end) if torn else text
        lines = [json.loads(line) for line in whole.splitlines()]
        of_run = [line["round"] for line in lines if run.items() <= line.items()]
        last = max(of_run, default=-1)
    except (ValueError, KeyError, AttributeError, TypeError):
        wrong = f"--log is {path}, which holds other lines than those of a log"
        raise UserError(f"{wrong}; name another file") from None
    if whole != text:
        path.write_text(whole)

    def add(result: Result, rounds: range) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for t, numbers in numbers_of(result, rounds):
            finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
            with path.open("a") as file:
                file.write(json.dumps(run | {"round": t} | finite | once) + "\n")
            once.clear()  # the warning stands in the first line only

    return last, add


def tensorboard(result: Result, _: int) -> tuple[int, Add]:
    """Begin to add the numbers of each round to a folder for TensorBoard; see `Begin`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    name = re.sub(r"[^\w.+-]", "-", "-".join(identity(result).values()))
    folder = result.path.parent / TENSORBOARD / name
    writer = SummaryWriter(folder)
    earlier = EventAccumulator(str(folder)).Reload()
    last = earlier.Scalars("epochs")[-1].step if "epochs" in earlier.Tags()["scalars"] else -1

    def add(result: Result, rounds: range) -> None:
        for t, numbers in numbers_of(result, rounds):
            for tag, value in numbers.items():
                writer.add_scalar(tag, value, t)
        writer.flush()

    return last, add


class TooSlow(BaseException):
    """Raised inside a follower that takes too long, whose `except Exception` must not catch it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the block after so many seconds, in the main thread and outside of C."""

    def stop(*_: object) -> None:
        raise TooSlow

    main = threading.current_thread() is threading.main_thread()
    with handled([signal.SIGALRM], stop):
        signal.setitimer(signal.ITIMER_REAL, seconds if main else 0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
