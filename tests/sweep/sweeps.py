"""Short ways of the tests of sweeps."""

from pathlib import Path

from dpfl_mpi.settings import Run
from dpfl_mpi.sweep import known


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
    known.Submission("slurm", {Run(**fields).resolve().path(results).name: job}, **more).remember(folder)
    return folder
