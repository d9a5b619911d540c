"""The process beside rank 0 that tells others of each round (`--log`, `--callback`; see `follow`)."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job
from dpfl_mpi.settings.fields import to_flags
from dpfl_mpi.settings.job import DONE

START_S = 300.0  # to import a callback, and what it imports, from a slow disk
LEAVING_S, MORE_S = 5.0, 60.0  # to finish when the run leaves; more when it has ended


class Beside(contextlib.AbstractContextManager["Beside"]):
    """A context with that process, where the Job asks for one; collective at its start, where its mistakes are a `UserError`."""

    def __init__(self, path: Path, job: Job, world: World):
        self.process: subprocess.Popen[bytes] | None = None
        self.flags, self.quiet = to_flags({"log": job.log, "callback": job.callback}), job.quiet
        self.path = str(path)
        if self.flags:
            world.decide(self.start)

    def start(self) -> None:
        self.line, its = socket.socketpair()
        env = {name: v for name, v in os.environ.items() if not name.startswith(("PMI", "OMPI"))}  # it is no rank
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "dpfl_mpi.follow", "--beside", self.path, *self.flags]
        with its:
            self.process = subprocess.Popen(command, stdin=its.fileno(), env=env, start_new_session=True)
        self.line.settimeout(START_S)
        try:
            answer = self.line.recv(65536).decode() or f"{' '.join(self.flags)} ended before the run began"
        except TimeoutError:
            answer = f"{' '.join(self.flags)} did not start in {START_S:g} s"
        if answer != "ready\n":
            self.line.close()
            self.process.kill()
            self.process.wait()
            raise UserError(answer)
        self.line.setblocking(False)  # of a slow one, each word that arrives tells of all rounds so far

    def tell(self, t: int) -> None:
        if self.process:
            with contextlib.suppress(OSError):  # it has ended, and said why
                self.line.send(b"%d\n" % t)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process:
            self.tell(sys.maxsize)  # the rest, of which no round is new to a callback
            self.line.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LEAVING_S)
            if self.process.poll() is None and not kind:
                if not self.quiet:
                    print(f"waiting up to {MORE_S:g} s for", *self.flags, flush=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(MORE_S)
            if self.process.poll() != DONE:
                self.process.kill()
                self.process.wait()
                flags = " ".join(self.flags)
                again = f"python -m dpfl_mpi.follow {self.path} {flags} does it again"
                complain(f"warning: {flags} did not get through all rounds; {again}")
