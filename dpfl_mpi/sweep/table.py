"""The states of a sweep's Runs: a line when one changes, and a table of all."""

import contextlib
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from dpfl_mpi.survival.signals import handled
from dpfl_mpi.sweep.entries import Entry, Queue, Status

HEADER = ("run", "state", "round", "test %")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []


def cells(status: Status) -> tuple[str, str, str, str]:
    """Return the columns of a Run's line, a dash for what is not there yet."""
    done = f"{status.round}/{status.rounds}" if status.round >= 0 else "-"
    accuracy = "-" if math.isnan(status.accuracy) else f"{100 * status.accuracy:.2f}"
    return status.name, status.state, done, accuracy


def table(statuses: Sequence[Status]) -> str:
    """Return a line for each Run, in columns under a header, and the count of each state."""
    rows = [HEADER, *map(cells, statuses)]
    name, state, done, test = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{n:<{name}}  {s:<{state}}  {d:>{done}}  {t:>{test}}" for n, s, d, t in rows]
    counts = sorted(Counter(status.state for status in statuses).items())
    counted = ", ".join(f"{count} {state}" for state, count in counts)
    return "\n".join([*lines, f"{counted} of {len(statuses)}"])


class Monitor:
    """Looks at the Runs of a sweep; prints a line whenever one changes its state."""

    def __init__(self, entries: Sequence[Entry]):
        self.entries, self.queue = entries, Queue(entries)
        self.states: dict[str, str] = {}  # by the name of the Run, as last shown

    def state(self, entry: Entry) -> str:
        return entry.status(self.queue.jobs).state

    def statuses(self) -> list[Status]:
        return [entry.status(self.queue.jobs) for entry in self.entries]

    def watch(self, pause_s: float, busy: Callable[[], bool] | None = None) -> None:
        """Print changes until `busy` returns False; by default until no Run waits or runs."""
        while True:
            if _received:
                raise KeyboardInterrupt
            going = busy() if busy else None
            statuses = self.statuses()
            self.show(statuses)
            if going is None:
                going = any(status.state in ("waiting", "running") for status in statuses)
            if not going:
                return
            self.queue.pause(pause_s)

    def show(self, statuses: Sequence[Status]) -> None:
        for status in statuses:
            if self.states.get(status.name, status.state) != status.state:
                name, state, done, test = cells(status)
                reached = "" if done == "-" else f"  round {done}  test {test} %"
                print(f"{time.strftime('%H:%M:%S')}  {name}  {state}{reached}", flush=True)
            self.states[status.name] = status.state


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on TERM and HUP, too; an ignored signal (nohup) stays ignored.

    Python drops an exception that is raised in a destructor: `Monitor.watch` raises it again.
    """

    def interrupt(number: int, _: object) -> NoReturn:
        _received.append(number)
        raise KeyboardInterrupt

    _received.clear()
    with handled([n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN], interrupt):
        yield
