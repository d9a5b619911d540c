"""The exceptions of this package, and how a command prints them and ends.

Each `main` of a command is wrapped by `in_a_sentence` and started by `exit_with`.
"""

import errno
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, ParamSpec

P = ParamSpec("P")
HERE = Path(__file__).resolve().parent
LONGEST = 1000  # characters that are shown of the text of another library's error
# exit codes
INTERRUPTED = 130  # of a command that Ctrl-C ended: 128 + SIGINT, as in a shell
REQUEUE = 75  # of a run that goes on when it is started again: EX_TEMPFAIL
STALLED = 76  # of a run that gets no further when it is started again
NO_MPI = 3  # of a run whose MPI is missing, or did not start
NO_READER = 141  # of a command whose output nobody reads any more: 128 + SIGPIPE, as in a shell
# control characters, except \t, \n and a first \r, with which the line of a download begins
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|(?<!^)\r")


def printable(text: str) -> str:
    """Return a text with its control characters spelled out: a terminal would obey them."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def spell_out(stream: Any) -> None:
    """Let a stream print texts as `printable` returns them."""
    if hasattr(stream, "reconfigure"):  # a terminal of another encoding shows a code instead
        stream.reconfigure(errors="backslashreplace")
    write = stream.write
    stream.write = lambda text: write(printable(text))


class UserError(Exception):
    """A mistake, or a situation, that only the user can mend: one sentence, never a traceback."""


class Nobody(UserError):
    """There is no mean: no client takes part, or all that do have diverged."""


class Leave(Exception):
    """The run stopped in order, on all ranks, with an exit code and a sentence for the user."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class Damaged(Exception):
    """A model did not arrive as it was sent, not even the second time: every rank knows."""


class RootFailed(Exception):
    """Root ended with an error, which it reports; a rank that waits for root cannot go on."""


def complain(text: str) -> None:
    """Print a line to stderr. If that cannot be written to, this line and later ones are lost."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: Any) -> None:
    """Discard what is still printed to a stream."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def own_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return " (FILE, line N)" of the first frame in the user's code, "" if there is none."""
    # that is code neither of PyTorch nor of this package, but for the models of this package
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        in_package = path.is_relative_to(HERE) and path.parent.name != "models"
        if not in_package and "-packages/torch/" not in str(path):
            return f" ({path.name}, line {line})"
    return ""


def without_inner_frames(call: Callable[P, Any]) -> Callable[P, Any]:
    """Return a function whose `UserError` has a traceback with one frame of this package."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return call(*args, **kwargs)
        except UserError as error:
            raise type(error)(printable(str(error))) from None

    return wrapper


def in_a_sentence(main: Callable[P, int | None]) -> Callable[P, int]:
    """Return a main function that prints a `UserError` as its sentence and returns exit code 2."""

    @functools.wraps(main)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except UserError as error:
            sys.stdout.flush()  # so that earlier output appears before the error
            complain(f"error: {error}")
            return 2

    return wrapper


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """End the process with the exit code of a command."""
    # nothing is printed if the reader of its output, such as `head`, has left
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed, and a file opened next would replace it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    spell_out(sys.stdout)
    spell_out(sys.stderr)
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse has printed its help
            code = end.code  # type: ignore[assignment]
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        drop(sys.stdout)
        code = NO_READER
    except OSError as error:
        if error.errno == errno.ENOSPC:
            drop(sys.stdout)  # it may lie on the full disk
        elif error.errno not in (errno.EACCES, errno.ENAMETOOLONG):  # these name a user's path
            raise
        complain(f"error: {error}")
        code = 2
    sys.exit(code)
