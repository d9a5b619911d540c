"""How tests start a run: in this process on one rank, or with mpirun on several."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from dpfl_mpi.engine.build import build
from dpfl_mpi.engine.train import train
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import Federation
from dpfl_mpi.models import mlp
from dpfl_mpi.mpi.launcher import OPEN_MPI
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job, Run

ROOT = Path(__file__).resolve().parents[1]


def refused(words: str, call, *arguments, **named) -> str:
    """Return the sentence that refuses a call, which has these words; "..." stands for any."""
    with pytest.raises(UserError) as error:
        call(*arguments, **named)
    sentence = str(error.value)
    pattern = ".*".join(map(re.escape, words.split("...")))
    assert re.search(pattern, sentence) and "\n" not in sentence, sentence
    return sentence


def script(path: Path):
    """Return a file that is in no package as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def text_file(path: Path, text: str) -> str:
    """Write a text and return the path of its file, as a field of a Run has it."""
    path.write_text(text)
    return str(path)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a start: this package, one thread, no launcher or job around it."""
    around = "PMI", "SLURM_", "_PYTEST_MPI"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(around)}
    folders = [str(ROOT), str(ROOT / "tests"), clean.get("PYTHONPATH")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"}
    return clean | OPEN_MPI | own | more


def ended(*words: object, timeout: float = 280, cwd: Path = ROOT, **env: str):
    """Return the finished process of a command; the package is the one beside these tests."""
    how = {"cwd": cwd, "env": environment(**env), "timeout": timeout}
    return subprocess.run([*map(str, words)], capture_output=True, text=True, **how)


def mpirun(ranks: int, *command: object, **how):
    """Return the finished process of `mpirun -n RANKS python COMMAND`."""
    return ended("mpirun", "-n", ranks, sys.executable, "-W", "error", *command, **how)


def run_many(ranks: int, folder: Path, runs: dict, before="", sentences=False, stops=(), **jobs):
    """Compute runs by name with one start of the ranks; return the result files by name.

    Args:
        before: code that every rank executes first: it changes something of the package.
        sentences: return the errors that refuse the runs, not their files; else none may fail.
        stops: ranks of starts that leave after one round, before the start that goes on to the end.
        jobs: by the name of a run, the fields of its Job, and `ranks`: the first few compute it.
    """
    folder.mkdir(exist_ok=True)
    out = {name: folder / f"{name}.h5" for name in runs}
    tasks = []
    for name, fields in runs.items():
        job = {"quiet": True, "out": str(out[name])} | jobs.get(name, {})
        last = job.pop("ranks", ranks)
        starts = [(n, True) for n in stops] + [(last, False)]
        tasks += [{"ranks": n, "stop": stop, "settings": fields | job} for n, stop in starts]
    plan = folder / "plan.json"
    plan.write_text(json.dumps(tasks))
    program = f"{before}\nfrom many import compute\ncompute({str(plan)!r})\n"
    (folder / "program.py").write_text(program)
    done = mpirun(ranks, "-m", "mpi4py", folder / "program.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    errors = {name: Path(f"{path}.error").read_text() for name, path in out.items()}
    assert sentences or errors == dict.fromkeys(runs, ""), errors
    return errors if sentences else out


def run_here(out: Path, fields: dict[str, object], **job: object) -> Path:
    """Run `fields` of a Run in this process, on one rank, and return the result file `out`."""
    job = {"quiet": True, "out": str(out)} | job
    return train(Run(**fields).resolve(), Job(**job), World(MPI.COMM_SELF))


def federation(fields: dict[str, object], **job: object):
    """Return a Federation of one rank, in this process, which also has its parts' attributes."""

    class Open(Federation, contextlib.AbstractContextManager):
        def __getattr__(self, name: str):
            places = self._parts, self._parts.members, self._parts.backend
            return getattr(next((at for at in places if hasattr(at, name)), object()), name)

        def __exit__(self, *error: object) -> None:
            self.close()

    parts = build(Run(**fields).resolve(), Job(**job), World(MPI.COMM_SELF))
    parts.fed = Open(parts)
    return parts.fed


def training_rows(fed, k: int) -> slice:
    """Return where client k's training samples are among those of its rank."""
    return slice(*fed.clients.start[fed.row_of[k] :][:2].tolist())


def validation(fed, k: int):
    """Return client k's normalised validation images (channels first) and labels of the digits."""
    first = int(fed.clients.score_start[fed.row_of[k]])
    rows = slice(first, first + int(fed.clients.n_val[fed.row_of[k]]))
    images = (fed.clients.score_x[rows].float() / 255 - 0.305) / 0.376
    return images.permute(0, 3, 1, 2), fed.clients.score_y[rows]


def reward_of(fed, k: int):
    """Return R of client k on the digits by a plain perceptron: the twin of `Scoring.reward`."""
    (x, y), module = validation(fed, k), mlp.build((8, 8, 1), 10)

    @torch.no_grad()
    def R(w):
        row = torch.from_numpy(w.astype("float32"))
        torch.nn.utils.vector_to_parameters(row, module.parameters())
        losses = torch.nn.functional.cross_entropy(module(x), y, reduction="none")
        return -float(losses.double().mean())

    return R


def differences(a: Path, b: Path) -> list[str]:
    """Return the names of the values in which two results differ; seconds and machines may."""
    with Result(a) as one, Result(b) as two:
        return Result.differences(one, two)
