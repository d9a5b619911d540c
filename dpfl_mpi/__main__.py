"""The command line: `mpirun -n 8 python -m dpfl_mpi --dataset cifar10 --budget 10`.

Rank 0 alone parses the arguments, before MPI starts: `--help` needs no MPI, and a wrong value is one sentence. The other ranks are told the
settings, and so need neither the parser nor the libraries that it checks names and files with.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # before the imports, which take a second: `main` lets come in what waits
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))

import contextlib
import errno
import gc
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from dpfl_mpi.errors import NO_READER, RootFailed, UserError, complain, exit_with
from dpfl_mpi.settings import Job, Resolved
from dpfl_mpi.settings.command_line import given, naming_lines, parser, run_and_job
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.values import whole
from dpfl_mpi.survival.signals import SIGNALS, Leave, listen

if TYPE_CHECKING:
    from dpfl_mpi.mpi.world import World

RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MPI_RANK")
SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
FOREIGN = {"MPICH": "OMPI_COMM_WORLD_SIZE", "Open": "MPI_LOCALNRANKS"}  # set by another's mpirun
MPICH_MB, UCX_MB = 1.0615, 7.4  # of /dev/shm per rank, at the start; UCX takes its own first


def launched(names: tuple[str, ...], default: int) -> int:
    """Return the number in the first of these variables of mpirun and srun that has one, before MPI can be asked, else `default`."""
    return next((int(os.environ[n]) for n in names if whole(os.environ.get(n, ""))), default)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one sentence on the launcher's rank 0 and end this rank."""
    if launched(RANK, 0) == 0:
        complain(f"error: {message}")
    sys.exit(code)


def parse(arguments: Sequence[str]) -> tuple[Resolved, Job]:
    """Return the resolved Run and the Job of a command line; a mistake ends the program with one sentence."""
    try:
        with contextlib.redirect_stdout(sys.stdout if launched(RANK, 0) == 0 else io.StringIO()):
            said = given(arguments, parser())
            with naming_lines(said):
                asked, job = run_and_job(said)
                run = asked.resolve()
            if said.get("print_config"):  # as --config reads it
                import yaml

                # what comes from the seed, or its method does not read, comes anew where another one is said
                unsaid = [n for n in ("partition_seed", *run.found("method").unread) if getattr(asked, n) is None]
                print(yaml.safe_dump(as_dict(run) | as_dict(job) | dict.fromkeys(unsaid), sort_keys=False), end="")
                sys.exit(0)
        return run, job
    except UserError as error:
        fail(str(error))


def told(arguments: list[str]) -> tuple[Resolved, Job] | int:
    """Return the settings of a command line, or the exit code of one that ends here (root has said why)."""
    try:
        return parse(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except BrokenPipeError:
        return NO_READER
    except Exception as error:  # a root that ends here leaves the others in MPI_Init
        if getattr(error, "errno", 0) == errno.ENOSPC:
            complain(f"error: {error}")
            return 2
        traceback.print_exc()
        return 1


def shared(world: World, tell: Callable[[], tuple[Resolved, Job] | int]) -> tuple[Resolved, Job]:
    """Return on every rank the settings that `tell` returns on root; an exit code ends all ranks with it. Collective.

    They travel as texts; root keeps its own Run, which alone has what the files hold that it names.
    """
    mine: list[tuple[Resolved, Job]] = []

    def packed() -> dict[str, Any]:
        said = tell()
        if isinstance(said, int):
            return {"exit": said}
        mine.append(said)
        run, job = said
        return {"run": as_dict(run) | {"contents": run.contents, "declared": run.declared}, "job": as_dict(job)}

    settings = world.decide(packed)
    if "exit" in settings:
        sys.exit(settings["exit"])
    return mine[0] if mine else (Resolved(**settings["run"]), Job(**settings["job"]))


def before_mpi() -> None:
    """Set what must be set before MPI and torch start: one thread per rank, and MPICH's yielding where ranks outnumber cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is of nested levels
    os.environ["OMP_NUM_THREADS"] = threads if whole(threads) and int(threads) else "1"
    # MPICH's pipelined ring is 50 times slower on shared cores
    os.environ.setdefault("MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE", "0")
    # at the end of a whole run UCX warns of objects that MPICH left in its pool
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    if launched(LOCAL_SIZE, 1) > len(os.sched_getaffinity(0)):
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")  # MPICH spins while it waits


def check_shm() -> None:
    """Let MPICH start in a small /dev/shm; raise `UserError` where it cannot, on one node."""
    ranks, shm = launched(LOCAL_SIZE, 1), os.statvfs("/dev/shm")
    size, free = (blocks * shm.f_frsize / 1e6 for blocks in (shm.f_blocks, shm.f_bavail))
    if free < ranks * (MPICH_MB + UCX_MB):
        os.environ.setdefault("UCX_TLS", "^posix")  # it has other ways
    # not by what is free: the first ranks have their share before the last ones look
    if ranks == launched(SIZE, 1) and size < ranks * MPICH_MB:
        has = f"/dev/shm has {size:.1f} MB ({free:.1f} free), MPICH needs {ranks * MPICH_MB:.1f}"
        raise UserError(f"{has} for -n {ranks}; enlarge it (docker run --shm-size), or start fewer")


def open_world() -> World:
    """Start MPI and return the world of all ranks; without an MPI, or where it sees one of many, that is a `UserError`."""
    before_mpi()
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # some starts end the process
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        how = "load your site's MPI module, or install one with pip install -e '.[mpich]'"
        raise UserError(f"MPI could not be loaded ({error}); {how}") from None
    version = MPI.Get_library_version()
    tasks = max(launched((name,), 1) for name in SIZE)
    alone = tasks > 1 and FOREIGN.get(version.split()[0], "") in os.environ
    if not (alone or MPI.Is_initialized()):
        if "ch4" in version and os.path.isdir("/dev/shm"):  # MPICH from 3.4 on
            check_shm()
        MPI.Init_thread()
    if alone or (tasks > 1 and MPI.COMM_WORLD.size == 1):
        why = f"the launcher started {tasks} tasks, but MPI sees one: each would train alone"
        how = "Use the mpirun of mpi4py's MPI, or srun --mpi=pmi2 (MPICH) or pmix (Open MPI)"
        raise UserError(f"{why}. {how}")
    from dpfl_mpi.mpi.world import World, tell_script

    world = World(MPI.COMM_WORLD)
    if world.root:
        tell_script("MPI has started")  # from here on an error is ours
    return world


@contextlib.contextmanager
def all_or_none(world: World) -> Iterator[None]:
    """Let an error end all ranks, or be raised on every rank: no rank waits for one that has left.

    `UserError` and `Leave` are raised, on every rank alike. A mistake on some ranks only, such as a file that one node lacks, and
    everything else end all ranks here, once it is told.
    """
    again = "the same command, without --fresh, goes on from what it kept"
    try:
        yield
    except Leave:
        raise
    except UserError as error:
        if not world.all_stop():
            world.abort(2, f"error: {error}")
        raise
    except BrokenPipeError:
        world.abort(NO_READER, f"error: nobody reads the output of this run any more; {again}")
    except RootFailed:
        time.sleep(1)  # root says what happened, and ends all
        world.abort(1)
    except BaseException as error:
        if getattr(error, "errno", 0) == errno.ENOSPC:  # errors of its files are a `UserError`
            world.abort(2, f"error: {error}; make room, and {again}")
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which a start that ended early has not imported
            how = "more ranks on more GPUs, a smaller --block, --kernels torch, a smaller --batch_size"
            world.abort(2, f"error: the GPU's memory is full ({str(error).split('. ')[0]}); allowed: {how}")
        world.abort(1, f"rank {world.rank} of {world.size}:\n{traceback.format_exc()}")


def main(arguments: list[str] | None = None, before_abort: Callable[[int], None] | None = None) -> None:
    """Run the command line and end the process with its exit code; `before_abort` is called with it where all ranks are ended at once."""
    listen()  # first of all: a warning that comes before would end this rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.disable()  # until everything is imported: modules are no garbage, and looking through them takes time
    before_mpi()  # before root parses, too: a method of one's own may import torch
    arguments = sys.argv[1:] if arguments is None else arguments
    alone = launched(SIZE, 1) == 1  # or the launcher does not say: then every rank parses
    said = told(arguments) if alone or launched(RANK, 0) == 0 else None
    if alone and isinstance(said, int):
        sys.exit(said)
    try:
        world = open_world()
    except UserError as error:
        if launched(RANK, 0):
            time.sleep(5)  # some launchers end all ranks with the first: root says why before
        fail(str(error), 3)
    if before_abort:
        world.before_abort = before_abort
    run, job = shared(world, lambda: told(arguments) if said is None else said)
    try:
        with all_or_none(world):
            import torch

            from dpfl_mpi.engine.train import train
            from dpfl_mpi.results.summary import summary

            gc.freeze()  # neither a collection nor the end of the interpreter looks through torch again: 0.4 s of a core
            gc.enable()
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            path = train(run, job, world)
            lines = "" if job.quiet else world.decide(lambda: summary(path))
    except (UserError, Leave) as end:
        if world.root:
            complain(str(end) if isinstance(end, Leave) else f"error: {end}")
        sys.exit(end.code if isinstance(end, Leave) else 2)
    if world.root and lines:
        print(lines)


if __name__ == "__main__":
    exit_with(main)
