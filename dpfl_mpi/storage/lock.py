"""One run at a time on a results file: a lock file beside it, taken over where its owner is surely gone."""

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

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.files import boot, explained, pid_space, system, time_at
from dpfl_mpi.storage.foreign import SMALL, read_text

UNTOUCHED = 600.0  # seconds after which the lock of another host is abandoned: its owner touches it every BEAT
BEAT = 30.0  # seconds between two touches
# seconds that a new run waits for the lock: a killed one needs a moment to die, since its launcher goes first
PATIENCE = 5.0


def myself() -> dict[str, Any]:
    """Return who would own a lock: a process, the start of the machine and the container that count it, and the Slurm job."""
    me = {"host": socket.gethostname(), "pid": os.getpid(), "born": born(os.getpid())}
    me["space"] = f"{pid_space()} {boot()}"  # two machines or containers may have one host name
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0)
    return me | {"slurm_job": os.environ.get("SLURM_JOB_ID", ""), "restarts": restarts}


def born(pid: int | str) -> str:
    """Return when a process started, in ticks since boot, "" where there is none: a number may be used again by another process."""
    fields = system(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""  # a zombie writes no more


def gone(pid: int, since: str) -> bool:
    """Return whether the process that was `born` then is no more; one that /proc hides from us lives."""
    if now := born(pid):
        return now != since
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True  # a zombie


def content(path: Path) -> str:
    """Return what is in a small file, such as a lock, "" where there is none, or it cannot be read at this moment."""
    with contextlib.suppress(UserError):
        return read_text(path, SMALL, follow=False)
    return ""


def owner_of(text: str) -> dict[str, Any]:
    """Return who a lock file's text says owns it, as `myself` does; nothing where it is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        owner = json.loads(text)
        kinds = {name: type(value) for name, value in myself().items()}
        right = isinstance(owner, dict) and all(type(owner.get(name)) is kind for name, kind in kinds.items())
        if right and 0 < owner["pid"] < 2**31:
            return dict(owner)
    return {}


class Lock:
    """A lock file, made with O_EXCL. On root only.

    `on_lost` is called with a sentence where another run has taken the lock that is held here: from `check`, or from the thread that
    touches the file. It ends the run, which would otherwise write beside the other one.
    """

    def __init__(self, results: Path, on_lost: Callable[[str], None] = lambda text: None):
        self.on_lost = on_lost
        self.results = results
        self.path = results.with_name(results.name + ".lock")
        self.stop = threading.Event()
        self.held = False
        self.text = ""  # in the file, while it is ours

    def acquire(self, patience: float = PATIENCE) -> None:
        """Take the lock; raise `UserError` where another run holds it, which the sentence names."""
        with explained(f"{self.path.parent}, the folder for the result (--results, --out), cannot be made"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + patience
        with explained(f"the lock file {self.path} cannot be written"):
            while not self._make():
                text = content(self.path)
                if self._abandoned(text):
                    self._move_away(text)
                elif time.monotonic() > end:
                    raise UserError(f"{self._taken_by(text)}; wait for it, or remove {self.path} if it is gone")
                else:
                    time.sleep(0.1)
        self.held = True
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _taken_by(self, text: str) -> str:
        owner = owner_of(text)
        job = f", Slurm job {owner['slurm_job']}" if owner.get("slurm_job") else ""
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}{job}"
        return f"{self.results} is being written by another run ({who})"

    def taken(self) -> bool:
        """Return whether a run that may live holds the lock."""
        return self.path.exists() and not self._abandoned(content(self.path))

    def _make(self) -> bool:
        self.text = json.dumps(myself())
        with contextlib.suppress(FileExistsError), open(self.path, "x") as out:
            out.write(self.text)
            return True
        return False

    def _move_away(self, text: str) -> None:
        """Remove the file with this abandoned text; where another run was quicker, the file is that one's and comes back."""
        away = self.path.with_name(f"{self.path.name}.{socket.gethostname()}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # of other errors `acquire` tells
            os.rename(self.path, away)
            if content(away) != text:
                with contextlib.suppress(OSError):
                    os.link(away, self.path)
            away.unlink()

    def _abandoned(self, text: str) -> bool:
        """Return whether the owner is surely gone: this job before it was requeued, a dead process of this host, or long silent elsewhere.

        A process of this host is asked for: it may have slept, or been stopped, for longer than any lock stays untouched.
        """
        owner, me = owner_of(text), myself()
        try:
            found = self.path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):
            return False  # none of ours, and not ours to remove
        if owner:
            if me["slurm_job"] and me["slurm_job"] == owner["slurm_job"] and me["restarts"] > owner["restarts"]:
                return True
            if (owner["host"], owner["space"]) == (me["host"], me["space"]):
                if not gone(owner["pid"], owner["born"]):
                    return False
                if boot():  # a machine that does not name its start may be another one
                    return True
        # An empty lock: its owner was killed before it wrote. A damaged one may be readable later.
        silent = time_at(self.path) - found.st_mtime  # last, as it makes a file
        return silent > (UNTOUCHED if found.st_size else PATIENCE)

    def check(self) -> bool:
        """Return whether no other run has taken the lock that is held; call `on_lost` where one has.

        A lock that cannot be read at this moment, or is no more, is nobody else's yet: it is looked at again.
        """
        text = content(self.path)
        if not self.held or text == self.text or not owner_of(text):  # `held` after reading: `release` lowers it first
            return True
        silent = f"which took {self.path} while this one was silent; this one ends and changes nothing more"
        self.on_lost(f"{self._taken_by(text)}, {silent}")
        return False

    def _beat(self) -> None:
        """Touch the lock file every `BEAT` seconds while it is held: from other hosts an untouched one counts as abandoned. The thread's function."""
        while not self.stop.wait(BEAT) and self.check():  # not ours: we slept so long that another run took it over
            if content(self.path) == self.text:
                with contextlib.suppress(OSError):
                    os.utime(self.path, follow_symlinks=False)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self.held:
            self.stop.set()
            self.held = False
            if content(self.path) == self.text:
                with contextlib.suppress(OSError):  # why the run ends is told, not this
                    self.path.unlink()
