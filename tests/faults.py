"""An MPI that fails once, or always, at one place: what `python -m faults PROGRAM` runs over.

FAULT says where: "RANK KIND FILE:LINE:CALL TIMES", such as "1 error world.py:70:Dup 1". SITES is a
file to which the places are added that the package called.
"""

import os
import runpy
import sys
import time
from functools import wraps
from pathlib import Path

import mpi4py

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
from mpi4py import MPI  # noqa: E402

from dpfl_mpi.mpi.start import RANK as RANK_NAMES  # noqa: E402
from dpfl_mpi.mpi.start import launched  # noqa: E402

RANK, KIND, PLACE, TIMES = (os.environ.get("FAULT") or "-1 none none 0").split()
PACKAGE = str(Path(__file__).resolve().parents[1] / "dpfl_mpi")
left = int(TIMES)  # how often it still fails
# before which of the next calls of Fence a Put is done: the next sending's first; where the row of
# the next exchange has been put, but for the Fence that ends it
LATE = {"late": 2, "older": 5}
held = []  # such a number, and what is done then
kept = []  # the memory of messages that were copied
places = set()


def place(name):
    """Return where the package calls, "" where another does."""
    frame = sys._getframe(2)
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}:{name}" if file.startswith(PACKAGE) else ""


def copied(buffer, turned=0):
    """Return a copy of what is sent, with these bits of a byte in the middle turned."""
    data, *kind = buffer if isinstance(buffer, list) else [buffer]
    copy = data.copy()
    copy.view("u1")[copy.nbytes // 2] ^= turned
    kept.append(copy)
    return [copy, *kind] if kind else copy


def failing(name, call):
    @wraps(call)
    def wrapper(*arguments, **named):
        global left
        at = place(name)
        if at and at not in places:
            places.add(at)
            if "SITES" in os.environ:
                with open(os.environ["SITES"], "a") as file:
                    file.write(f"{at}\n")
        if left and at == PLACE and int(RANK) == launched(RANK_NAMES, 0):
            left -= 1
            if KIND == "error":
                raise MPI.Exception(MPI.ERR_OTHER)
            if KIND == "hang":
                time.sleep(1000)
            if KIND in ("flip", *LATE):
                self, buffer, *rest = arguments
                arguments = [self, copied(buffer, KIND == "flip"), *rest]
            if KIND in LATE:
                held.append([LATE[KIND], lambda: call(*arguments, **named)])
            if KIND in ("drop", *LATE):
                return MPI.REQUEST_NULL
        for item in held if name == "Fence" else ():
            item[0] -= 1
            if item[0] == 0:
                item[1]()
        out = call(*arguments, **named)
        for kind in (Comm, Request, Type):
            if type(out) in kind.__mro__[1:-1] and type(out) is not MPI.Comm:
                return kind(out)
        return out

    return wrapper


def made(base, *names):
    """Return a class of MPI whose methods of these names may fail."""
    return type(
        base.__name__, (base,), {name: failing(name, getattr(base, name)) for name in names}
    )


COLLECTIVES = "Allgather", "Allgatherv", "Allreduce", "Barrier", "Bcast", "Gatherv", "Ibarrier"
Comm = made(MPI.Intracomm, *COLLECTIVES, "Isend", "Irecv", "Dup", "Split_type", "Free", "Abort")
Request = made(MPI.Request, "Test")
Request.Waitall = staticmethod(failing("Waitall", MPI.Request.Waitall))
Type = made(MPI.Datatype, "Create_contiguous", "Commit", "Free")
Win = made(MPI.Win, "Fence", "Put", "Free", "tomemory")
for name in ("Allocate", "Create"):
    setattr(Win, name, staticmethod(failing(name, getattr(Win, name))))
MPI.Win, MPI.Request, MPI.BYTE = Win, Request, Type(MPI.BYTE)
MPI.Get_processor_name = failing("Get_processor_name", MPI.Get_processor_name)
begin = MPI.Init_thread


def begin_failing():
    begin()
    MPI.COMM_WORLD = Comm(MPI.COMM_WORLD)


MPI.Init_thread = failing("Init_thread", begin_failing)

if __name__ == "__main__":
    program, sys.argv = sys.argv[1], sys.argv[1:]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
