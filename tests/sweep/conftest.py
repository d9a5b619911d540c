"""What the tests of sweeps share: a fake Slurm that writes down what it is asked."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import starts
from starts import script

from dpfl_mpi.sweep import __main__ as sweep
from dpfl_mpi.sweep import entries, local, table


@pytest.fixture
def fakes(tmp_path, monkeypatch) -> Path:
    """The first folder of PATH: a Slurm that takes a job as number 41; its queue is a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script(folder / "sbatch", f'cp "$1" {folder}/script; echo "Submitted batch job 41"')
    script(folder / "squeue", f"test ! -e {folder}/broken && cat {folder}/queue")
    script(folder / "scontrol", f'echo "$@" >> {folder}/asked')
    for name in ("srun", "sacct", "scancel"):
        script(folder / name, "exit 1")
    (folder / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def no_blind_time(monkeypatch):
    """A job just submitted that is not in the queue is gone at once."""
    monkeypatch.setattr(entries, "BLIND_S", 0)


@pytest.fixture
def pauses(monkeypatch) -> Callable[[Callable[[float], Any]], list[float]]:
    """A function that replaces the sleep of sweeps and returns the list of their pauses."""

    def replace(sleep: Callable[[float], Any]) -> list[float]:
        slept: list[float] = []
        own = {"sleep": lambda seconds: (slept.append(seconds), sleep(seconds))}
        clock = SimpleNamespace(**vars(time) | own)
        for module in (table, local):
            monkeypatch.setattr(module, "time", clock)
        return slept

    return replace


@pytest.fixture
def swept(tmp_path, capfd) -> Callable[..., SimpleNamespace]:
    """A function that runs a sweep of small Runs into `tmp_path`; returns code, out and err."""

    def run(*words: str | Path, **changes: object) -> SimpleNamespace:
        capfd.readouterr()
        code = sweep.main([*map(str, words), *starts.of_sweep(tmp_path, **changes)])
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run
