"""Prints how far the Runs of a sweep are: a line when one changes its state, and a table of all.

`Monitor` knows which jobs Slurm still has. An `Entry` is a Run with its result file, and a `Status`
says how far that is.
"""

import contextlib
import math
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.survival.signals import handled
from dpfl_mpi.sweep.entries import ASK_S, Entry, Status

HEADER = ("run", "state", "round", "test %")
ANSWER_S = 60  # seconds that squeue has for an answer
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []


def cells(status: Status) -> tuple[str, str, str, str]:
    """Return the cells of a Run's line, a dash for what is not there yet."""
    done = f"{status.round}/{status.rounds}" if status.round >= 0 else "-"
    accuracy = "-" if math.isnan(status.accuracy) else f"{100 * status.accuracy:.2f}"
    return status.name, status.state, done, accuracy


def table(statuses: Sequence[Status]) -> str:
    """Return a table with a line for each Run, the count of each state, and warnings."""
    rows = [HEADER, *map(cells, statuses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:  # texts to the left, numbers to the right
        padded = [*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]
        lines.append("  ".join(padded))
    counts = sorted(Counter(status.state for status in statuses).items())
    counted = ", ".join(f"{count} {state}" for state, count in counts)
    # each warning is shown once, with how many Runs have it
    warnings = Counter(status.warning for status in statuses if status.warning)
    shown = [f"warning: {text} ({count} of {len(statuses)})" for text, count in warnings.items()]
    return "\n".join([*lines, f"{counted} of {len(statuses)}", *shown])


class Monitor:
    """Looks at the Runs of a sweep; prints a line whenever one changes its state.

    Slurm is asked only if a Run went there. It must answer the first time; if it is silent later,
    its last answer holds.
    """

    def __init__(self, entries: Sequence[Entry]):
        self.entries = entries
        self.states: dict[str, str] = {}  # by the name of the Run, as last shown
        self.jobs: set[str] = set()  # that Slurm still has; array tasks are JOB_TASK
        self.answered = False
        self.ask()

    def ask(self) -> None:
        """Ask Slurm for its jobs."""
        self.age_s = 0.0  # of the answer
        if not any(e.on_slurm and e.recorded().state != "finished" for e in self.entries):
            return
        command = ["squeue", "--me", "-h", "-r", "-o", "%i %F_%K"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        except FileNotFoundError:  # results that were copied from a cluster
            if not self.answered:
                complain("warning: there is no squeue here; jobs of Slurm count as ended")
            self.answered = True
            return
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        else:
            if done.returncode == 0:
                self.jobs = set(done.stdout.split())
                self.answered = True
                return
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        if not self.answered:
            what = f"squeue does not say which jobs are alive ({reason})"
            raise UserError(f"{what}; try again when it answers")

    def state(self, entry: Entry) -> str:
        return entry.status(self.jobs).state

    def statuses(self) -> list[Status]:
        return [entry.status(self.jobs) for entry in self.entries]

    def watch(self, pause_s: float, busy: Callable[[], bool] | None = None) -> None:
        """Print changes until `busy` returns False; by default until no Run waits or runs."""
        while True:
            if _received:
                raise KeyboardInterrupt
            goes_on = busy() if busy else None
            statuses = self.statuses()
            self.show(statuses)
            if goes_on is None:
                goes_on = any(status.state in ("waiting", "running") for status in statuses)
            if not goes_on:
                return
            time.sleep(pause_s)
            self.age_s += pause_s
            if self.age_s >= ASK_S:
                self.ask()

    def show(self, statuses: Sequence[Status]) -> None:
        """Print a line for each Run whose state is another than the last time."""
        for status in statuses:
            if self.states.get(status.name, status.state) != status.state:
                name, state, done, test = cells(status)
                reached = "" if done == "-" else f"  round {done}  test {test} %"
                print(f"{time.strftime('%H:%M:%S')}  {name}  {state}{reached}", flush=True)
            self.states[status.name] = status.state


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on TERM and HUP, too; an ignored signal (nohup) stays ignored."""
    # Python drops an exception that is raised in a destructor: `Monitor.watch` raises it again

    def interrupt(number: int, _: object) -> NoReturn:
        _received.append(number)
        raise KeyboardInterrupt

    _received.clear()
    with handled([n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN], interrupt):
        yield
