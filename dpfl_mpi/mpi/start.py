"""The start of a run on every rank, and how all ranks end when one of them fails.

`__main__` calls `start`, which sets the environment, parses the command line, starts MPI and shares
the settings; then it calls the engine inside `all_or_none`. Root (rank 0) parses before MPI starts,
so `--help` needs no MPI, and an error is one sentence. A launcher is mpirun, srun or the like; it
sets environment variables, such as each rank's number. A Run has what decides the results.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from dpfl_mpi.errors import NO_MPI, NO_READER, Leave, RootFailed, UserError, complain

if TYPE_CHECKING:
    from dpfl_mpi.mpi.world import World
    from dpfl_mpi.settings import Job, Resolved

    Finished = Callable[[Resolved, Job], bool]

# environment variables of launchers, the first that is set counts; PALS, Flux, jsrun: untried
RANK = (
    *("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MPI_RANK"),
    *("PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK"),
)
SIZE = (
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"),
    *("FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE"),
)
LOCAL_SIZE = (
    *("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"),
    *("PMI_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
)
# by MPI library, a variable that only the mpirun of the other library sets
OTHER_MPIRUN = {"MPICH": "OMPI_COMM_WORLD_SIZE", "Open": "MPI_LOCALNRANKS"}
MPICH_MB = 1.0615  # of /dev/shm that MPICH needs per rank
UCX_MB = 7.4  # of /dev/shm that UCX, MPICH's network layer, takes per rank before MPICH does
LAUNCHER_S = 5  # head start of root to print: some launchers end all ranks with the first


def whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def launched(names: tuple[str, ...], default: int) -> int:
    """Return the first whole number in these environment variables, or `default`."""
    return next((int(os.environ[n]) for n in names if whole(os.environ.get(n, ""))), default)


def threads_of_rank() -> int:
    """Return how many threads each rank has: OMP_NUM_THREADS, or 1."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # of a list, per nested level
    return max(1, int(threads)) if whole(threads) else 1


def set_environment() -> None:
    """Set what threads, MPICH and UCX need. Call it before MPI and torch start."""
    os.environ["OMP_NUM_THREADS"] = str(threads_of_rank())
    # MPICH's pipelined ring is 50 times slower on shared cores
    os.environ.setdefault("MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE", "0")
    # at the end of a whole run UCX warns of objects that MPICH left in its pool
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    # no buffer is on a GPU, and MPICH would start CUDA before a rank has its device
    os.environ.setdefault("MPIR_CVAR_ENABLE_GPU", "0")
    if launched(LOCAL_SIZE, 1) > len(os.sched_getaffinity(0)):
        # more ranks than cores: one that waits lets others compute, instead of asking in a loop
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


@contextlib.contextmanager
def modules_by_name() -> Iterator[None]:
    """Make `import torch` in this block cheaper for a file system shared by thousands of ranks.

    torch calls `inspect.getmodule` for each operator that it registers, which looks up the paths of
    all modules: 12,000 of the 18,000 look-ups of its import. Here the frame's own name decides.
    """
    import inspect

    def getmodule(thing: Any, filename: str | None = None) -> Any:
        if inspect.isframe(thing):
            return sys.modules.get(thing.f_globals.get("__name__", ""))
        return original(thing, filename)

    original = inspect.getmodule
    inspect.getmodule = getmodule  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = original


def check_shm() -> None:
    """Keep UCX out of a small /dev/shm; `UserError` where it cannot hold a run of one node."""
    ranks, shm = launched(LOCAL_SIZE, 1), os.statvfs("/dev/shm")
    size, free = (blocks * shm.f_frsize / 1e6 for blocks in (shm.f_blocks, shm.f_bavail))
    if free < ranks * (MPICH_MB + UCX_MB):
        os.environ.setdefault("UCX_TLS", "^posix")  # lets UCX do without /dev/shm
    # all ranks are here; by size, not by what is free: some have taken their share already
    if ranks == launched(SIZE, 1) and size < ranks * MPICH_MB:
        need = f"MPICH needs {ranks * MPICH_MB:.1f} for -n {ranks}"
        mend = "enlarge it (docker run --shm-size), or start fewer"
        raise UserError(f"/dev/shm has {size:.1f} MB ({free:.1f} free), {need}; {mend}")


def parse(arguments: Sequence[str]) -> tuple[Resolved, Job]:
    """Return the Run and the Job of a command line; a mistake is a `UserError`."""
    from dpfl_mpi.settings.command_line import given, naming_lines, parser, run_and_job
    from dpfl_mpi.settings.fields import as_dict
    from dpfl_mpi.settings.run import without_effect

    with contextlib.redirect_stdout(sys.stdout if launched(RANK, 0) == 0 else io.StringIO()):
        flags = given(arguments, parser())
        with naming_lines(flags):
            given_run, job = run_and_job(flags)
            run = given_run.resolve()
        if flags.get("print_config"):
            import yaml

            own = getattr(run.found("dataset"), "OWN_DATA", False)
            if own and not os.path.isfile(str(run.data)) and launched(RANK, 0) == 0:
                usual = "the model, partition and clients below are those of unknown data"
                complain(f"warning: there is no {run.data} yet; {usual}")
            # printed empty: values that depend on the seed or that the method does not read
            names = ("partition_seed", *run.found("method").unread)
            empty = dict.fromkeys(n for n in names if getattr(given_run, n) is None)
            # of the Job what is given: other places have other defaults, as --grace in a batch job
            of_job = {name: value for name, value in as_dict(job).items() if name in flags}
            settings = as_dict(run) | empty | of_job
            print(yaml.safe_dump(settings, sort_keys=False), end="")
            sys.exit(0)
    if (text := without_effect(given_run, run)) and launched(RANK, 0) == 0 and not job.quiet:
        complain(f"warning: {text}")
    return run, job


def parse_or_code(arguments: Sequence[str], finished: Finished) -> tuple[Resolved, Job] | int:
    """Return the settings of a command line, or an exit code: 0 if its Run is finished."""
    try:
        settings = parse(arguments)
        # False if this is a rank of unknown many: others may wait in MPI_Init
        known = launched(SIZE, 0) or launched(RANK, -1) < 0
        return 0 if known and finished(*settings) else settings
    except SystemExit as end:
        return int(end.code or 0)
    except UserError as error:
        if launched(RANK, 0) == 0:
            complain(f"error: {error}")
        return 2
    except MemoryError as error:
        complain(f"error: {memory_full(error)}")
        return 2
    except BrokenPipeError:
        return NO_READER
    except Exception as error:
        if getattr(error, "errno", 0) == errno.ENOSPC:
            complain(f"error: {error}")
            return 2
        traceback.print_exc()
        return 1


def memory_full(error: MemoryError) -> str:
    """Return the sentence for memory that does not suffice, without "error: "."""
    how = "smaller numbers, as of clients, epochs and steps, or a larger machine"
    return f"the memory does not suffice ({error}); allowed: {how}"


def share_settings(
    world: World, read: Callable[[], tuple[Resolved, Job] | int]
) -> tuple[Resolved, Job] | int:
    """Return on every rank the settings, or the exit code, that `read` returns on root. Collective.

    Root keeps its own Run, which alone has the contents of the files that settings name; the others
    receive the settings as text.
    """
    on_root: list[tuple[Resolved, Job]] = []

    def packed() -> dict[str, Any]:
        settings = read()
        if isinstance(settings, int):
            return {"exit": settings}
        on_root.append(settings)
        from dpfl_mpi.settings.fields import as_dict

        run, job = settings
        derived = {"contents": run.contents, "declared": run.declared}
        return {"run": as_dict(run) | derived, "job": as_dict(job)}

    received = world.decide(packed)
    if "exit" in received:
        return int(received["exit"])
    from dpfl_mpi.settings import Job, Resolved

    return on_root[0] if on_root else (Resolved(**received["run"]), Job(**received["job"]))


def start(arguments: Sequence[str], finished: Finished) -> tuple[World, Resolved, Job]:
    """Return the world and the settings, or end with an exit code: 0 if a Run is `finished`."""
    unknown_size = launched(SIZE, 1) == 1  # one rank, or the launcher does not say: all ranks parse
    parses = unknown_size or launched(RANK, 0) == 0
    settings = parse_or_code(arguments, finished) if parses else None
    if unknown_size and isinstance(settings, int):
        sys.exit(settings)
    try:
        world = open_world()
    except UserError as error:
        end_before_mpi(f"error: {error}", NO_MPI, isinstance(error, Singletons))
    except Exception:
        end_before_mpi(traceback.format_exc(), 1)
    # MPI may number ranks otherwise than the launcher: then its root has not parsed yet
    read = partial(parse_or_code, arguments, finished)
    with all_or_none(world):
        shared = share_settings(world, read if settings is None else lambda: settings)
    if isinstance(shared, int):
        sys.exit(shared)
    return world, *shared


class Singletons(UserError):
    """Each rank sees itself alone, as MPI is not the launcher's."""


def end_before_mpi(text: str, code: int, alike: bool = False) -> NoReturn:
    """Print why MPI does not start, and end all ranks.

    Root alone prints a text that is `alike` on all ranks. Others name their rank: in front of a
    traceback (code 1), or after the "error: " of a sentence.
    """
    if rank := launched(RANK, 0):
        time.sleep(LAUNCHER_S)
        text = f"rank {rank}: {text}" if code == 1 else text.replace(": ", f": rank {rank}: ", 1)
    if not (rank and alike):
        complain(text)
    with contextlib.suppress(KeyError, ValueError, OSError):
        if "HYDI_CONTROL_FD" in os.environ:  # MPICH's launcher would wait for the other ranks
            time.sleep(1)  # until it has read the text
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    sys.exit(code)


def open_world() -> World:
    """Start MPI and return the world of all ranks; `UserError` if there is none."""
    set_environment()
    try:
        import mpi4py

        # not at the import: MPI_Init is called below, after the checks
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        how = "load your site's MPI module, or install one with pip install -e '.[mpich]'"
        raise UserError(f"MPI could not be loaded ({error}); {how}") from None
    version = MPI.Get_library_version()
    tasks = max(launched((name,), 1) for name in SIZE)
    # started by the mpirun of another library, this one would see one rank, or end the process
    alone = tasks > 1 and OTHER_MPIRUN.get(version.split()[0], "") in os.environ
    if not (alone or MPI.Is_initialized()):
        if "ch4" in version and os.path.isdir("/dev/shm"):  # MPICH from 3.4 on
            check_shm()
        try:
            MPI.Init_thread()
        except MPI.Exception as error:
            raise UserError(f"MPI did not start: {error.Get_error_string()}") from None
    if alone or (tasks > 1 and MPI.COMM_WORLD.size == 1):
        why = f"the launcher started {tasks} tasks, but MPI sees one: each would train alone"
        how = "Use the mpirun of mpi4py's MPI, or srun --mpi=pmi2 (MPICH) or pmix (Open MPI)"
        raise Singletons(f"{why}. {how}")
    from dpfl_mpi.mpi.world import World, note_for_script

    world = World(MPI.COMM_WORLD)
    if world.root:
        note_for_script("MPI has started")  # from here on an error is ours
    return world


@contextlib.contextmanager
def all_or_none(world: World) -> Iterator[None]:
    """End all ranks if only some leave the block by an error, as others would wait for ever."""
    from mpi4py import MPI

    again = "the same command, without --fresh, goes on from the last checkpoint"
    try:
        yield
    except MPI.Exception as error:
        world.abort_for(error)
    except Leave:  # raised on all ranks
        raise
    except UserError as error:
        if not world.all_stop():  # other ranks did not raise it
            world.abort(2, f"error: {error}")
        raise
    except BrokenPipeError:
        world.abort(NO_READER, f"error: nobody reads the output of this run any more; {again}")
    except RootFailed:
        time.sleep(1)  # root prints what happened, and ends all
        world.abort(1)
    except BaseException as error:
        if getattr(error, "errno", 0) == errno.ENOSPC:  # errors of its files are a `UserError`
            world.abort(2, f"error: {error}; make room, and {again}")
        if isinstance(error, MemoryError):
            world.abort(2, f"error: {memory_full(error)}")
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be imported yet
            full = f"the GPU's memory is full ({str(error).split('. ')[0]})"
            how = "more ranks on more GPUs, --kernels torch"
            world.abort(2, f"error: {full}; allowed: {how}, a smaller --batch_size")
        world.abort(1, f"rank {world.rank} of {world.size}:\n{traceback.format_exc()}")
