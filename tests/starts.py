"""How tests start runs that they then disturb: here on one rank, or mpirun in the background."""

import atexit
import contextlib
import functools
import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch import ROOT, environment, run_here
from making import labelled

from dpfl_mpi.engine.record import Record
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import to_flags
from dpfl_mpi.sweep.entries import Submission


@functools.cache
def data() -> Path:
    """Return a prepared file of 8x8 grey images in four classes, which needs no scikit-learn."""
    folder = tempfile.TemporaryDirectory(prefix="dpfl-tests-")
    atexit.register(folder.cleanup)
    return labelled(Path(folder.name) / "tiny.h5", (480, 160), (8, 8, 1), noise=90)


def small(**more: Any) -> dict[str, Any]:
    """Return a small Run: six clients, four rounds, a model of a few hundred kB."""
    fields = {"dataset": "image_folder", "data": str(data()), "augment": False, "model": "mlp"}
    fields |= {"rounds": 4, "tau_init": 1, "tau_train": 1}
    return fields | {"clients": 6, "budget": 3, "min_per_class": 2} | more


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def command(out: Path, fields: dict[str, Any] | None = None, **job: Any) -> list[str]:
    """Return the command line of one rank that computes a Run into `out`."""
    settings = {"out": out} | (small() if fields is None else fields) | job
    return [sys.executable, "-m", "dpfl_mpi", *to_flags(settings)]


HELD = """
import os, sys, time
from dpfl_mpi import __main__
from dpfl_mpi.methods import dpfl
from dpfl_mpi.storage import lock
from dpfl_mpi.survival.signals import Heard
whole = dpfl.round
def round(fed, state, t):
    if t == {t}:
        open({reached!r}, "a").close()  # no rank leaves after the round before any more
    while t == {t} and {condition}:
        time.sleep(0.02)
    return whole(fed, state, t)
dpfl.round = round
{before}
__main__.main(sys.argv[1:])
"""
UNHEARD = "not Heard.at"  # a condition for `held`: until a signal comes


def held(condition: str, out: Path, t: int = 3, before: str = "", **more: Any) -> list[str]:
    """Return the command line of a run whose round t makes a file `<out>.held` and waits."""
    program = HELD.format(t=t, condition=f"({condition})", before=before, reached=f"{out}.held")
    return [sys.executable, "-c", program, *command(out, **more)[3:]]


def of_sweep(results: Path, **changes: object) -> list[str]:
    """Return the flags of a sweep over small Runs whose results go into this folder."""
    return [*command(results, small(**changes))[4:], f"--results={results}"]


def begin(words: list[str], **more: Any) -> subprocess.Popen[str]:
    """Start a command in the background, in a process group of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    return subprocess.Popen(words, cwd=ROOT, env=environment(), start_new_session=True, **pipes)


def start(ranks: int, words: list[str]) -> subprocess.Popen[str]:
    return begin(["mpirun", "-n", str(ranks), *words])


def start_in_terminal(ranks: int, words: list[str]) -> subprocess.Popen[str]:
    """Start `mpirun -n RANKS WORDS` in a terminal: stdin is its keys, stdout what it shows."""
    code = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command = [sys.executable, "-c", code, "mpirun", "-n", str(ranks), *words]
    return begin(command, stdin=subprocess.PIPE)


@functools.cache
def open_mpi() -> bool:
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    return "Open MPI" in done.stdout


def tell(process: subprocess.Popen[str], number: int) -> None:
    """Signal a run: by mpirun, but the ranks where Open MPI's would end them on TERM and INT."""
    if open_mpi() and number != signal.SIGUSR1:
        for pid in ranks_of(process.pid):
            os.kill(pid, number)
    else:
        process.send_signal(number)


def children(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def ranks_of(mpirun: int) -> list[int]:
    """Return the processes of the ranks, rank 0 first."""
    out = {}
    for pid in children(mpirun):
        with contextlib.suppress(psutil.Error):
            set_there, words = psutil.Process(pid).environ(), psutil.Process(pid).cmdline()
            rank = set_there.get("PMI_RANK") or set_there.get("OMPI_COMM_WORLD_RANK")
            if rank and "dpfl_mpi" in " ".join(words):
                out[int(rank)] = pid
    return [out[r] for r in sorted(out)]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for an end with this exit code and return stderr."""
    try:
        out, err = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == code, f"exit code {process.returncode}, not {code}\n{out}\n{err}"
    return err


def here(out: Path, fields: dict[str, Any] | None = None, **job: Any) -> Path:
    """Compute a Run in this process, on one rank."""
    return run_here(out, small() if fields is None else fields, **job)


def checkpoint_rounds(out: Path) -> list[int]:
    """Return the rounds that have a checkpoint, oldest first."""
    names = glob.glob("*.manifest.h5", root_dir=f"{out}.checkpoint")
    return sorted(int(name[:6]) for name in names)


def times_started(out: Path) -> int:
    return len(Result(out).starts())


def wait_for(condition: Callable[[], Any], process=None, timeout: float = 240) -> None:
    """Wait until the condition holds; fail where the process ends before."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        if process is not None and process.poll() is not None:
            errors = process.communicate()[1]
            raise AssertionError(f"ended early with {process.returncode}: {errors}")
        time.sleep(0.02)


def same(a: Path, b: Path) -> bool:
    """Return whether two result files hold the same numbers, to the bit; say which differ."""
    with Result(a) as one, Result(b) as two:
        assert Result.differences(one, two) == []
        return one.finished and two.finished and one.key == two.key


class Cut(Exception):
    """What ends a run of these tests after a round."""


def cut_after(t: int, out: Path, fields: dict[str, Any] | None = None, **job: Any) -> None:
    """Compute the small run up to the records of round t, no further."""
    whole = Record.round

    def cut(record, state):
        whole(record, state)
        if record.parts.round == t:
            record.parts.close()  # MPI names windows that are open at its end
            raise Cut

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(Record, "round", cut)
        here(out, fields, **({"checkpoint_every": "1"} | job))


def lines(path: Path) -> list[str]:
    """Return the lines of a file, none where it is not there."""
    return path.read_text().splitlines() if path.exists() else []


def runs_file(path: Path, *runs: dict[str, object]) -> Path:
    """Write a file of analysis/ whose RUNS have these fields."""
    texts = [f"Run(**{fields!r})" for fields in runs]
    path.write_text(f"from dpfl_mpi.settings import Run\nRUNS = [{', '.join(texts)}]\n")
    return path


def base_and_tuned(path: Path, **changes: object) -> Path:
    """Write a file whose RUNS are a base and the Run that is tuned from it, the tuned one first."""
    return runs_file(path, *({"finetune_epochs": e, "method": "fedavg", **changes} for e in (1, 0)))


def submitted(results: Path, fields: dict[str, object], job: str, **more: object) -> Path:
    """Note that a Run went to Slurm as this job; return the folder of its logs."""
    folder = results / "sweeps" / "1"
    Submission("slurm", {Run(**fields).resolve().path(results).name: job}, **more).save(folder)
    return folder
