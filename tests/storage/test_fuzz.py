"""Every reader of files against damaged and hostile ones: it works, or one sentence says what is wrong. No traceback, no hang, no crash.

`pytest` tries a few cases per reader; `python tests/storage/test_fuzz.py --cases 5000` tries that many in all, and prints what went wrong by reader.
A case is (reader, number): the number seeds all of its draws, so that it can be repeated. Cases run in a forked process, which tells the
number before it begins: a crash or an endless loop in a library is a case, too, and the next process goes on behind it.
"""

import argparse
import collections
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pytest
from fuzzing import READERS, damage

SECONDS, MEMORY = 20, 2**31  # that a case may take; address space beyond that of the process when it starts


class Hang(BaseException):
    """A case took too long; no reader catches it."""


def stop(*_: object) -> None:
    """End the case."""
    raise Hang


def outcome(reader, folder: Path, number: int) -> str:
    """Return "" where a damaged file was read or refused in one sentence, else what happened instead."""
    rng = np.random.default_rng((number, *reader.name.encode()))
    for file, data in reader.files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    damage(reader, folder, rng)
    try:
        reader.read(folder)
    except (reader.sentence, SystemExit) as error:
        text = "" if isinstance(error, SystemExit) else str(error)
        return "exit code" if text == "" and error.code != 2 else "several lines" if "\n" in text else ""
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        mine = [f for f in where if "dpfl_mpi" in f.filename and "tests" not in f.filename] or where
        return f"{type(error).__name__} in {Path(mine[-1].filename).name}:{mine[-1].name}"
    return ""


def process(reader, numbers: list[int], out: int) -> None:
    """Run the cases one after the other; tell a number before, and "number what" after one that went wrong."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    signal.signal(signal.SIGALRM, stop)
    for number in numbers:
        os.write(out, f"{number}\n".encode())
        with tempfile.TemporaryDirectory() as folder:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            what = outcome(reader, Path(folder), number)
            signal.setitimer(signal.ITIMER_REAL, 0)
        if what:
            os.write(out, f"{number} {what}\n".encode())


def fuzz(reader, numbers: list[int]) -> dict[int, str]:
    """Return what went wrong, by the number of the case."""
    wrong: dict[int, str] = {}
    left = list(numbers)
    while left:
        theirs, mine = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                process(reader, left, mine)
            finally:
                os._exit(0)
        os.close(mine)
        last, text, hung = left[0], b"", False
        while True:
            if not select.select([theirs], [], [], 3 * SECONDS)[0]:
                hung = True
                os.kill(pid, signal.SIGKILL)
            part = os.read(theirs, 65536)
            text += part
            if not part:
                break
        os.close(theirs)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for line in text.decode().splitlines():
            number, _, what = line.partition(" ")
            last = int(number)
            if what:
                wrong[last] = what
        if code:
            wrong[last] = "hang in a library" if hung else f"crash by {signal.Signals(-code).name}"
        left = left[left.index(last) + 1 :] if code else []
    return wrong


@pytest.mark.parametrize("name", READERS)
def test_no_damaged_file_is_a_traceback(name, tmp_path):
    reader = READERS[name](tmp_path)
    assert fuzz(reader, list(range(reader.few))) == {}


def main() -> int:
    """Try many cases and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000, help="of all readers together")
    parser.add_argument("--readers", default=",".join(READERS), help="some of them, separated by commas")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    names, bad = args.readers.split(","), 0
    for i, name in enumerate(names):
        cases = args.cases // len(names) + (i < args.cases % len(names))
        with tempfile.TemporaryDirectory() as folder:
            wrong = fuzz(READERS[name](Path(folder)), list(range(args.first, args.first + cases)))
        bad += len(wrong)
        print(f"{name:12s} {len(wrong):5d} of {cases}", flush=True)
        for what, count in collections.Counter(wrong.values()).most_common():
            example = next(n for n, w in wrong.items() if w == what)
            print(f"    {count:5d}  {what}  (such as case {example})", flush=True)
    print(f"{'all':12s} {bad:5d} of {args.cases}")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
