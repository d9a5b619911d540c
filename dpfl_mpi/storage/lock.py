"""`Lock`: a file next to a results file, so that one run at a time writes the results.

Its text says who the owner is: process, machine and batch job. The owner touches it every `BEAT`
seconds. Another run takes the lock over if the owner has surely ended. Root (rank 0) of a run holds
the lock; engine/train.py acquires it.
"""

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpfl_mpi import batch
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.files import explained, place, proc_text, time_at
from dpfl_mpi.storage.foreign import read_text

BEAT = 30.0  # seconds between two touches of a lock by its owner
UNTOUCHED = 600.0  # after so many seconds without a touch the lock of another host is abandoned
PATIENCE = 5.0  # seconds that a new run waits: ranks of a killed run may outlive its launcher


def myself() -> dict[str, Any]:
    """Return who would own a lock: the process, machine and container, and the batch job."""
    return {
        "host": socket.gethostname(),
        "place": place(),  # the machine and container: two of them may have one host name
        "pid": os.getpid(),
        "born": born(os.getpid()),
        "job": batch.first(),
        "restarts": batch.restarts(),
    }


def born(pid: int | str) -> str:
    """Return when a process started, in clock ticks since boot; "" if there is none."""
    fields = proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""  # a zombie writes no more


def gone(pid: int, since: str) -> bool:
    """Return whether the process that started then has ended; False where /proc hides it."""
    if now := born(pid):
        return now != since  # else another process has its number by now
    try:
        os.kill(pid, 0)  # sends nothing, but fails if there is no such process
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True  # a zombie


def content(path: Path) -> str:
    """Return the text of a small file; "" if there is none or it cannot be read now."""
    with contextlib.suppress(UserError):
        return read_text(path)
    return ""


def owner_of(text: str) -> dict[str, Any]:
    """Return the owner in a lock file's text, as `myself` does; {} if the text is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        owner = json.loads(text)
        kinds = {name: type(value) for name, value in myself().items()}
        right = isinstance(owner, dict) and {n: type(owner.get(n)) for n in kinds} == kinds
        return owner if right and 0 < owner["pid"] < 2**31 else {}
    return {}


class Lock:
    """The lock file of a results file. On root only.

    If another run takes the lock that is held, `on_lost` is called with a sentence to end this one.
    """

    def __init__(self, results: Path, on_lost: Callable[[str], None] = lambda text: None):
        self.results, self.on_lost = results, on_lost
        self.path = results.with_name(results.name + ".lock")
        self.stop = threading.Event()
        self.held = False
        self.text = ""  # of the file, if we made it

    def acquire(self, patience: float = PATIENCE) -> None:
        """Take the lock; if another run holds it, a `UserError` names that run."""
        folder = f"{self.path.parent}, the folder for the result (--results, --out)"
        with explained(f"{folder}, cannot be made"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + patience
        with explained(f"the lock file {self.path} cannot be written"):
            while not self._make():
                text = content(self.path)
                if self._abandoned(text):
                    self._move_away(text)
                elif time.monotonic() > end:
                    how = f"wait for it, or remove {self.path} if that run has ended"
                    raise UserError(f"{self._taken_by(text)}; {how}")
                else:
                    time.sleep(0.1)
        self.held = True
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _taken_by(self, text: str) -> str:
        owner = owner_of(text)
        job = f", job {owner['job']}" if owner.get("job") else ""
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}{job}"
        return f"{self.results} is being written by another run ({who})"

    def taken(self) -> bool:
        """Return whether a run that may live holds the lock."""
        return self.path.exists() and not self._abandoned(content(self.path))

    def _make(self) -> bool:
        """Make the lock file; return False if there is one."""
        self.text = json.dumps(myself())
        # "x" makes the file or fails if it exists, in one step
        with contextlib.suppress(FileExistsError), open(self.path, "x") as out:
            return bool(out.write(self.text))
        return False

    def _move_away(self, text: str) -> None:
        """Remove the lock file with this text; put it back if it has another owner by now."""
        away = self.path.with_name(f"{self.path.name}.{socket.gethostname()}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, away)
            if content(away) != text:
                with contextlib.suppress(OSError):
                    os.link(away, self.path)
            away.unlink()

    def _abandoned(self, text: str) -> bool:
        """Return whether the owner in this text has surely ended.

        It has if it is an earlier start of this batch job, a process of this host that is gone (not
        one that is suspended), or one of another host that has not touched the lock for long.
        """
        owner, me = owner_of(text), myself()
        try:
            found = self.path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):
            return False  # a link or a device was not made by a run, and is not removed
        if owner:
            same_job = me["job"] and me["job"] == owner["job"]
            if same_job and me["restarts"] > owner["restarts"]:
                return True
            if owner["place"] == me["place"]:
                return gone(owner["pid"], owner["born"])
        # last, as `time_at` makes a file. The owner of an empty lock was killed before it wrote.
        silent = time_at(self.path) - found.st_mtime
        return silent > (UNTOUCHED if found.st_size else PATIENCE)

    def check(self) -> bool:
        """Return whether the lock that is held is still ours or missing; else call `on_lost`."""
        text = content(self.path)
        # `held` is read after the file, as `release` sets it before it removes the file
        if not self.held or text == self.text or not owner_of(text):
            return True
        end = "this one ends and changes nothing more"
        why = f"which took {self.path} while this one was silent; {end}"
        self.on_lost(f"{self._taken_by(text)}, {why}")
        return False

    def _beat(self) -> None:
        """Touch the lock file every BEAT seconds while it is held. This is a thread's body."""
        while not self.stop.wait(BEAT) and self.check():
            if content(self.path) == self.text:
                with contextlib.suppress(OSError):
                    os.utime(self.path, follow_symlinks=False)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self.held:
            self.stop.set()
            self.held = False
            if content(self.path) == self.text:
                with contextlib.suppress(OSError):  # the run's own end is reported, not this
                    self.path.unlink()
