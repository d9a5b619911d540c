"""`Job` says where and how a Run is computed."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dpfl_mpi.plugins import is_path
from dpfl_mpi.settings.fields import field
from dpfl_mpi.settings.values import parse

TENSORBOARD = "tensorboard"
LOGS = f"{TENSORBOARD} or FILE.jsonl, a regular file"
FILE_NAME = "the name of a file, in UTF-8, of at most 200 bytes"


JOB = partial(field, "job")
SECONDS = {"low": 0, "high": 1e9, "what": "a number of seconds"}


def file_name(text: str) -> bool:
    """Return whether a text can name a file to write, with room for a longer ending."""
    try:
        path, size = Path(text), len(Path(text).name.encode())
        short = 0 < size <= 200 and len(text.encode()) < 4096
        return short and path.name != ".." and "\0" not in text and not path.is_dir()
    except (OSError, ValueError):
        return False


def log_name(text: str) -> bool:
    regular = file_name(text) and (Path(text).is_file() or not Path(text).exists())
    return text == TENSORBOARD or (text.endswith(".jsonl") and regular)


@dataclass(frozen=True)
class Job:
    """Where and how a Run is computed. `fields.check` checks it.

    No field changes the numbers, but for their last bits (`device`, `kernels`).
    """

    # fmt: off
    device: Literal["auto", "cpu", "cuda"] = JOB("auto", "auto: a GPU where there is one")
    results: str = JOB("results", "folder of the result files")
    out: str | None = JOB(
        None, "result file, instead of a name made from the settings",
        valid=file_name, what=FILE_NAME)
    save_models: bool = JOB(
        None, "keep each client's best model (default: if small, 1 MB each, 100 MB in all)")
    mixed: bool = JOB(False, "score the averaged models, too (/mixed)")
    fresh: bool = JOB(False, "compute again although there is a result")
    kernels: Literal["auto", "native", "torch", "avx512", "avx2", "portable"] = JOB(
        "auto", "native, torch (PyTorch), auto: native if it can; on a CPU also a form of native")
    threads_per_client: int = JOB(
        1, "threads of a rank that compute one client together, by the native kernels on a CPU; "
        "each needs a core", low=1, high=64)
    window_gb: float = JOB(4.0, "most memory of a rank's RMA window, GiB", above=0)
    exchange: Literal["auto", "rma", "sendrecv"] = JOB(
        "auto", "how models travel: rma (windows), sendrecv (messages); "
        "auto: rma if a trial passes")
    window: Literal["allocate", "create"] = JOB(
        "allocate", "which call of MPI makes the windows: MPI_Win_allocate or MPI_Win_create")
    checkpoint_every: Any = JOB("5min", "rounds (3), time (90s, 5min, 2h) or never")
    grace: float = JOB(25.0, "seconds to end the round in after USR1, USR2, TERM or INT", **SECONDS)
    watchdog: float = JOB(
        0.0, "end, with all stacks printed, after so many seconds without a round (0: never)",
        **SECONDS)
    quiet: bool = JOB(False, "print nothing")
    log: str | None = JOB(None, f"log each round to {LOGS}", valid=log_name, what=LOGS)
    callback: str | None = JOB(
        None, "file NAME.py; its on_round(result, t) is called after each round",
        valid=is_path, what="a file NAME.py")
    # fmt: on

    def __post_init__(self) -> None:
        every = parse("checkpoint_every", self.checkpoint_every)
        object.__setattr__(self, "checkpoint_every", every)
