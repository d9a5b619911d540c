"""The process beside rank 0 that tells others of each round (`--log`, `--callback`; see `follow`)."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job

LAST_S, LEAVING_S = 60.0, 5.0  # for what is still to be told, at the end of a run and where it must leave


class Beside(contextlib.AbstractContextManager["Beside"]):
    """A context with that process, where the Job asks for one; collective at its start, where its mistakes are a `UserError`."""

    def __init__(self, path: Path, job: Job, world: World):
        self.process: subprocess.Popen[bytes] | None = None
        flags = [f"--{name}={value}" for name in ("log", "callback") if (value := getattr(job, name))]
        if flags:
            world.decide(lambda: self.start([str(path), *flags]))

    def start(self, words: list[str]) -> None:
        self.line, its = socket.socketpair()
        env = {name: v for name, v in os.environ.items() if not name.startswith(("PMI", "OMPI"))}  # it is no rank
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "dpfl_mpi.follow", "--beside", *words]
        with its:
            self.process = subprocess.Popen(command, stdin=its.fileno(), env=env, start_new_session=True)
        if (said := self.line.recv(65536).decode()) != "ready\n":
            self.line.close()
            self.process.wait()
            raise UserError(said or "the process of --log and --callback could not start; it printed why")
        self.line.setblocking(False)  # of a slow one, each word that arrives tells of all rounds so far

    def tell(self, t: int) -> None:
        if self.process:
            with contextlib.suppress(OSError):  # it has ended, and said why
                self.line.send(b"%d\n" % t)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process:
            self.tell(sys.maxsize)  # the rest, of which no round is new to a callback
            self.line.close()
            try:
                self.process.wait(LEAVING_S if kind else LAST_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
