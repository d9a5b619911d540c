"""`Job` says where and how a Run is computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpfl_mpi.plugins import is_path
from dpfl_mpi.settings.fields import field
from dpfl_mpi.settings.values import Every

TENSORBOARD = "tensorboard"
LOGS = f"{TENSORBOARD} or FILE.jsonl, a regular file"
FILE_NAME = "the name of a file, in UTF-8, of at most 200 bytes"


def file_name(text: str) -> bool:
    """Return whether a text can name a file that is written: no folder, and room for the endings of what lies beside it."""
    try:
        path, name = Path(text), Path(text).name
        usable = 0 < len(name.encode()) <= 200 and name != ".." and len(text.encode()) < 4096 and "\0" not in text
        return usable and not path.is_dir()
    except (OSError, ValueError):
        return False


def log_name(text: str) -> bool:
    regular = file_name(text) and (Path(text).is_file() or not Path(text).exists())
    return text == TENSORBOARD or (text.endswith(".jsonl") and regular)


@dataclass(frozen=True)
class Job:
    """Where and how a Run is computed: on CPUs nothing here changes more than the last bits (`kernels`, `block`). Checked by `fields.check`."""

    # fmt: off
    device: Literal["auto", "cpu", "cuda"] = field("auto", "job", "auto: a GPU where there is one")
    results: str = field("results", "job", "folder of the result files")
    out: str | None = field(None, "job", "result file, instead of a name from the settings", valid=file_name, what=FILE_NAME)
    save_models: bool = field(None, "job", "keep each client's best model (small ones are: 1 MB, 100 MB in all)")
    mixed: bool = field(False, "job", "score the averaged models as well (/mixed)")
    fresh: bool = field(False, "job", "run again although a result is there")
    block: int = field(0, "job", "clients per tensor program (0: all on a GPU); 2 or more: PyTorch, last bits depend on the ranks", low=0)
    kernels: Literal["auto", "native", "torch", "avx512", "avx2", "portable", "compiled"] = field(
        "auto", "job", "on a CPU: native (C), torch, or one form of native; auto: native where it can; on a GPU: torch, compiled by it, or auto: recorded")
    window_gb: float = field(4.0, "job", "most memory of a rank's RMA window, GiB", above=0)
    checkpoint_every: Every | Any = field("5min", "job", "rounds (3), time (90s, 5min, 2h) or never")
    grace: float = field(25.0, "job", "seconds that remain after USR1, USR2, TERM or INT", low=0, high=1e9, what="a number of seconds")
    watchdog: float = field(0.0, "job", "print all stacks and end after so many seconds without a round (0: never)", low=0, high=1e9, what="a number of seconds")
    quiet: bool = field(False, "job", "print nothing")
    log: str | None = field(None, "job", f"log each round to {LOGS}", valid=log_name, what=LOGS)
    callback: str | None = field(None, "job", "file NAME.py, of which on_round(result, t) is called after each round", valid=is_path, what="a file NAME.py")
    # fmt: on

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint_every", Every.parse(self.checkpoint_every))
