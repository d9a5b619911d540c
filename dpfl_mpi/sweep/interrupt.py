"""Ctrl-C, TERM and the end of the terminal interrupt a sweep alike, so that the Runs of this machine keep a checkpoint each.

A signal may arrive while Python runs a destructor, which drops every exception. So it is noted too, and `check` raises it again.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_arrived: list[int] = []


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt where one of the signals arrives; a signal that is ignored (nohup) stays so."""

    def interrupt(number: int, _: object) -> NoReturn:
        _arrived.append(number)
        raise KeyboardInterrupt

    _arrived.clear()
    before = {n: signal.signal(n, interrupt) for n in NUMBERS if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check() -> None:
    """Raise KeyboardInterrupt where a signal has arrived."""
    if _arrived:
        raise KeyboardInterrupt
