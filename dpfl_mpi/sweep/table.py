"""The Runs of a sweep as a table: one line each, refreshed in place on a terminal; in a log one line per change, and all at the end."""

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TextIO

from dpfl_mpi.survival.signals import handled
from dpfl_mpi.sweep.known import Known, Queue, Row

HEADER = ("run", "state", "round", "test %")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_arrived: list[int] = []
NARROWEST = 12  # columns that a name keeps, however narrow the terminal


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.state for row in rows)
    return ", ".join(f"{n} {state}" for state, n in sorted(counts.items())) + f" of {len(rows)}"


def lines(rows: Sequence[Row], width: int | None = None) -> list[str]:
    """Return header and rows in columns, none wider than `width`: a name that is too long loses its beginning, its end is its own."""
    cells = [HEADER, *(row.cells() for row in rows)]
    names, states, rounds, tests = ([len(c[i]) for c in cells] for i in range(4))
    others = max(states) + max(rounds) + max(tests) + 6
    room = max(names) if width is None else min(max(names), max(width - 1 - others, NARROWEST))
    return [
        f"{name if len(name) <= room else '…' + name[len(name) - room + 1 :]:<{room}}  {state:<{max(states)}}  "
        f"{done:>{max(rounds)}}  {test:>{max(tests)}}"
        for name, state, done, test in cells
    ]


def screen(rows: Sequence[Row], width: int, height: int) -> list[str]:
    """Return what a terminal of this size shows: where not all Runs fit, those that move, and how many are left out."""
    room = max(height - 4, 1)  # header, what is left out, summary, cursor
    order = sorted(range(len(rows)), key=lambda i: (rows[i].state != "running", rows[i].state == "finished", i))
    shown = [rows[i] for i in sorted(order[:room])]
    left = [f"… and {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
    return [*lines(shown, width), *left, summary(rows)[: width - 1]]


class Live:
    """The table while the Runs go on, on this file."""

    def __init__(self, out: TextIO):
        self.out = out
        self.terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self.drawn: list[str] = []
        self.states: dict[str, str] = {}

    def show(self, rows: Sequence[Row]) -> None:
        """Draw the table over the one before, or print which Runs changed their state."""
        if self.terminal:
            self._draw(screen(rows, *shutil.get_terminal_size()))
            return
        for row in rows:
            if self.states.get(row.name, row.state) != row.state:
                name, state, done, test = row.cells()
                reached = "" if done == "-" else f"  round {done}  test {test} %"
                print(f"{time.strftime('%H:%M:%S')}  {name}  {state}{reached}", file=self.out, flush=True)
            self.states[row.name] = row.state

    def end(self, rows: Sequence[Row]) -> None:
        """Leave the whole table behind, with all Runs."""
        if self.terminal:
            self._draw([*lines(rows, shutil.get_terminal_size().columns), summary(rows)])
        else:
            print("\n".join([*lines(rows), summary(rows)]), file=self.out, flush=True)

    def _draw(self, text: list[str]) -> None:
        """Put these lines in the place of those drawn before: \\x1b[A goes up a line, \\x1b[2K clears one, \\x1b[J the rest of the screen."""
        if text != self.drawn:
            up = f"\x1b[{len(self.drawn)}A\r" if self.drawn else ""
            write = type(self.out).write  # which `errors.spell_out` has left alone
            write(self.out, up + "".join(f"\x1b[2K{line}\n" for line in text) + "\x1b[J")
            self.out.flush()
            self.drawn = text


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, TERM and the end of the terminal alike; a signal that is ignored (nohup) stays so.

    One may arrive while Python runs a destructor, which drops every exception: it is noted too, and `follow` raises it again.
    """

    def interrupt(number: int, _: object) -> NoReturn:
        _arrived.append(number)
        raise KeyboardInterrupt

    _arrived.clear()
    with handled([n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN], interrupt):
        yield


def follow(known: list[Known], live: Live, queue: Queue, pause: float, busy: Callable[[], bool] | None = None) -> None:
    """Show the table every `pause` seconds, until `busy` says no; without it, until no Run waits or runs."""
    while True:
        if _arrived:
            raise KeyboardInterrupt
        going = busy() if busy else None
        rows = [k.look(queue.jobs) for k in known]
        live.show(rows)
        if not (any(row.state in ("waiting", "running") for row in rows) if going is None else going):
            return
        queue.pause(pause)
