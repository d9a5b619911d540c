"""`--log` and `--callback`: root tells them of each round that is new in the results file.

Both run inside rank 0, between two rounds. One that fails, or takes too long, is switched off with
a warning, and the run goes on without it.
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
from pathlib import Path

import torch

from dpfl_mpi.errors import LONGEST, UserError, complain
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import failing_as
from dpfl_mpi.plugins.code import execute, in_path
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job
from dpfl_mpi.settings.job import TENSORBOARD
from dpfl_mpi.storage.foreign import refused_as
from dpfl_mpi.survival.signals import handled

START_S = 300.0  # to import a callback, and what it imports, from a slow disk
CALL_S = 60.0  # to take in the rounds that are new
LEAVING_S = 5.0  # the same when the run is stopped
Numbers = dict[str, float]
Add = Callable[[int, Numbers], object]  # puts the numbers of a round into a log


class Followers(contextlib.AbstractContextManager["Followers"]):
    """What follows a run on root: the Job's log and callback.

    Making it is collective. Mistakes in --log and --callback are a `UserError` on every rank.
    """

    def __init__(self, path: Path, job: Job, world: World):
        self.path, self.job = path, job
        self.followers: list[Log | Callback] = []
        self.seconds = CALL_S
        if job.log or job.callback:
            world.decide(self._start)

    def _start(self) -> None:
        if self.job.log == TENSORBOARD:
            how = f"pip install 'dpfl_mpi[{TENSORBOARD}]'"
            wrong = f"--log is {TENSORBOARD}, which cannot be imported: {how}"
            with refused_as(wrong, (ImportError,)):
                importlib.import_module(TENSORBOARD)
        if self.job.log:
            self.followers.append(Log(self.job.log))
        if self.job.callback:
            self.followers.append(Callback(self.job.callback))

    def tell(self, t: int) -> None:
        """Tell of the rounds that are new in the results file; round t was computed last."""
        if not self.followers or not self.path.exists():
            return
        for follower in [*self.followers]:
            try:
                with limited(self.seconds), Result(self.path) as result:
                    follower.tell(result, t)
            except BaseException as error:  # also SystemExit: the run must not end by it
                self.followers.remove(follower)
                why = self._reason(follower.flag, error)
                complain(f"warning: {why}; the run goes on without it")

    def _reason(self, flag: str, error: BaseException) -> str:
        if isinstance(error, UserError):
            return str(error)
        if isinstance(error, TooSlow):
            return f"{flag} took more than {self.seconds:g} s"
        return f"{flag}: {type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"

    def __exit__(self, kind: object, *_: object) -> None:
        if kind:
            self.seconds = LEAVING_S
        self.tell(sys.maxsize)  # what the last rounds left in memory, or an earlier start


class Log:
    """--log: every round of a Run once, also of earlier starts."""

    def __init__(self, name: str):
        self.name, self.flag = name, f"--log={name}"
        self.last = -1  # round
        self.add: Add | None = None

    def tell(self, result: Result, t: int) -> None:
        if self.add is None:
            opened = tensorboard if self.name == TENSORBOARD else json_lines
            self.last, self.add = opened(self.name, result)
        if self.last >= result.last_round:
            return
        over = result.by_round() | {"best_test_acc": result.mean("round/best_test_acc")}
        for new in range(self.last + 1, result.last_round + 1):
            self.add(new, {name: float(values[new]) for name, values in over.items()})
            self.last = new


class Callback:
    """--callback: each round that this start computes."""

    def __init__(self, file: str):
        self.flag = f"--callback={file}"
        self.on_round = loaded(file)
        self.last: int | None = None  # round

    def tell(self, result: Result, t: int) -> None:
        if self.last is None:
            self.last = t - 1
        dtype = torch.get_default_dtype()  # a callback changes no number
        try:
            for new in range(self.last + 1, result.last_round + 1):
                self.last = new
                self.on_round(result, new)
        finally:
            torch.set_default_dtype(dtype)


def loaded(file: str) -> Callable[[Result, int], object]:
    """Return `on_round` of a file; its errors are a `UserError` with file and line."""
    flag = f"--callback is {file}"
    code = in_path(flag, Path(file))
    try:
        with limited(START_S):
            on_round = getattr(execute(flag, code)[0], "on_round", None)
    except TooSlow:
        raise UserError(f"{flag}, whose import takes more than {START_S:g} s") from None
    lazy = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(on_round) or any(kind(on_round) for kind in lazy):
        wanted = "no function on_round(result, t), without async or yield"
        raise UserError(f"{flag}, which has {wanted}")
    return failing_as(f"on_round of {file}", code)(on_round)  # type: ignore[no-any-return]


# logs ---------------------------------------------------------------------------------------------
def identity(result: Result) -> dict[str, str]:
    """Return what tells a Run's rounds from others: a Run computed anew (--fresh) has its own."""
    return {"run": result.path.stem, "since": str(result.starts()[0].get("time", ""))}


def json_lines(file: str, result: Result) -> tuple[int, Add]:
    """Return the last round of this Run in a file, -1 if none, and what adds a line of JSON.

    Runs may share a file. A last line that a kill cut short is removed.
    """
    path, who = Path(file), identity(result)
    try:
        text = path.read_text() if path.exists() else ""
        whole = re.sub(r'{"run": [^\n]*\Z', "", text)
        known = [json.loads(line) for line in whole.splitlines()]
        last = max((line["round"] for line in known if who.items() <= line.items()), default=-1)
    except (ValueError, KeyError, AttributeError, TypeError):
        wrong = f"--log is {path}, which holds other lines than those of a log"
        raise UserError(f"{wrong}; name another file") from None
    if whole != text:
        path.write_text(whole)

    def add(t: int, numbers: Numbers) -> None:
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as lines:
            lines.write(json.dumps(who | {"round": t} | finite) + "\n")

    return last, add


def tensorboard(_: str, result: Result) -> tuple[int, Add]:
    """Return the last round of this Run in its folder, -1 if none, and what adds scalars."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    name = re.sub(r"[^\w.+-]", "-", "-".join(identity(result).values()))
    folder = result.path.parent / TENSORBOARD / name
    writer = SummaryWriter(folder)
    known = EventAccumulator(str(folder)).Reload()
    last = known.Scalars("epochs")[-1].step if "epochs" in known.Tags()["scalars"] else -1

    def add(t: int, numbers: Numbers) -> None:
        for tag, value in numbers.items():
            writer.add_scalar(tag, value, t)
        writer.flush()

    return last, add


# time ---------------------------------------------------------------------------------------------
class TooSlow(BaseException):
    """Raised in a log or callback that takes too long; `except Exception` lets it pass."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in a block that takes longer; not in C, nor outside the main thread."""

    def stop(*_: object) -> None:
        raise TooSlow

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled([signal.SIGALRM], stop):
        before = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *before)
