"""The program in Python: `dpfl_mpi.run(method="dpfl", clients=32, ranks=8)` computes a Run and returns its `dpfl_mpi.Result`.

In a script or a notebook `run` starts mpirun by itself, and the ranks are processes of their own. In a script that mpirun or srun has
started it is a collective call: every rank makes it, with the same settings, and every rank gets the result.
"""

import contextlib
import functools
import hashlib
import html
import importlib
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_mpi import results
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Source, open_source, verify
from dpfl_mpi.errors import Leave, UserError, complain, printable, without_inner_frames
from dpfl_mpi.mpi.launcher import OPEN_MPI, find_line
from dpfl_mpi.mpi.start import RANK, SIZE, all_or_none, launched, open_world, share_settings
from dpfl_mpi.plugins import admitted, short
from dpfl_mpi.plugins.given import text_of
from dpfl_mpi.prepare import packed
from dpfl_mpi.results import summary
from dpfl_mpi.results.schema import ARRAYS
from dpfl_mpi.settings import Job, Resolved
from dpfl_mpi.settings.command_line import SCHEMA, run_and_job, unknown
from dpfl_mpi.settings.fields import to_flags
from dpfl_mpi.settings.values import whole
from dpfl_mpi.storage.files import explained, write
from dpfl_mpi.storage.foreign import Unreadable, read_bytes, refused_as
from dpfl_mpi.survival.signals import SIGNALS, handled, handler

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from dpfl_mpi.mpi.world import World
    from dpfl_mpi.numerics.normalising import NormalisingModel

# of a function round(fed, state, t); what it says of itself beyond this takes a file
METHOD = """from dpfl_mpi.methods import Method

METHOD = Method(title={name!r}, searches=False)


def init(fed):
    w = fed.common_row()
    fed.evaluate(w)
    return {{"client": {{"w": w}}, "shared": {{}}}}


{text}

round = {name}
"""
MODEL = """{text}

HEAD = {head!r}
given = {name}


def build({takes}):
    return given({takes})
"""
TAKES = {"method": "a function of fed, state and t", "model": "a class, or a function of shape and classes"}


class Result(results.Result):
    """A results file, finished or running: its arrays by name (`result["round/test_acc"]`), tables of them, and its models."""

    def __repr__(self) -> str:
        run, accuracy = self.run, f"{100 * self.test_acc:.2f} %" if np.isfinite(self.test_acc) else "not known yet"
        budget = f"B_c = {run.said_budget}, " if self.method.topology == "graph" else ""
        return printable(
            f"<{short(run.method)} on {short(run.dataset)}, {run.partition}, {run.clients} clients, {budget}{run.rounds} rounds, "
            f"seed {run.seed}: {self.state}, test accuracy {accuracy}, {self.path}>"
        )

    def _repr_html_(self) -> str:
        figures = summary.texts(summary.outcome(self)) if self.last_round >= 0 else {}
        lines = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in figures.items())
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table>{lines}</table>"

    def plot(self, figure: str = "learning_curves", **flags: Any) -> "Figure":
        """Return a figure of `analysis/` by its name, of this result alone, with its flags as keywords: `plot("graph_evolution", rounds=[0, 10])`."""
        try:
            import matplotlib.pyplot as plt

            from dpfl_mpi.figures.frames import of_results
            from dpfl_mpi.figures.style import STYLE
        except (ImportError, SystemExit):  # it ends where a library is missing
            raise UserError("a figure needs matplotlib, pandas and more: pip install 'dpfl_mpi[analysis]'") from None
        try:
            draw = importlib.import_module(f"dpfl_mpi.figures.{figure}").draw
        except (ImportError, AttributeError):
            names = "names of analysis/, as graph_evolution"
            raise UserError(f"there is no figure {figure}; allowed are {names}") from None
        with plt.rc_context(STYLE):
            drawn: Figure | None = draw(of_results([self]), **flags).figure
        if drawn is None:
            raise UserError(f"{figure} is a table or a page: python analysis/{figure}.py {self.path}")
        plt.close(drawn)  # a notebook would show it twice
        return drawn

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row per client: each array `/client/NAME` of one number per client as NAME, of `/best` and `/last` as best_NAME and last_NAME.

        Accuracies are from 0 to 1. Beside them stand collaborators (senders in the last graph) and models_received (over the whole run).
        """
        columns = {}
        for name in self.names():
            group, _, rest = name.partition("/")
            if group in ("client", "best", "last") and getattr(ARRAYS.get(name), "axes", "") == "N":
                columns[rest if group == "client" else f"{group}_{rest}"] = self[name]
        if self.last_round >= 0:
            columns["collaborators"] = self.chosen(self.last_round).degrees()
            columns["models_received"] = self["traffic/models_received"].sum(0)
        return table(columns, "client")

    def curves(self) -> "pd.DataFrame":
        """Return one row per round (0 is after preprocessing): means over benign clients of losses and accuracies (0 to 1), and what it cost.

        epochs are the local epochs of a client so far, of all its models together, edges those of the round's graph, models_received the mean over clients,
        seconds those of a rank, waiting included. With --network there are simulated hours since the start, where bytes are counted bytes_sent.
        """
        return table(summary.curves(self), "round")

    @functools.cached_property
    def source(self) -> Source:
        """The data of the run, in the file of the name that the run has; other data there are a `UserError`. Images are read when they are asked for."""
        verify(source := open_source(self.run))
        if source.sha256 != self.fact("data_sha256"):
            raise UserError(f"{self.run.data} does not hold the data of {self.path}")
        return source

    def model(self, client: int, code: str | None = None) -> "NormalisingModel":
        """Return a client's best model by validation: a `torch.nn.Module` that takes raw images, uint8 `[S, H, W, C]`, and returns logits.

        It normalises them itself. On the client's own test images it is as accurate as `/best/test_acc` says, with two exceptions. Of methods that
        are scored by more than their models (kNN-Per, APFL) it is the model alone. With `--metric batch` that array holds means over
        mini-batches, and not over images. The data of the run must be here, and `save_models` given.

        Args:
            code: the file or module of a network of one's own, unless this process ran it: what a result names is not executed.
        """
        from dpfl_mpi.engine.saved import fill, network_of, with_code

        self.state_dict(client)  # says so where no models were saved, or there is no such client
        if self["best/round"][client] < 0:
            raise UserError(f"client {client} of {self.path} has no model: it was never scored")
        known = self.run.model if admitted("model", self.run.model) else None  # this process has executed it
        self.run = with_code(self.run, {"model": code or known})
        return fill(network_of(self, self.source), self, client)


def table(columns: Mapping[str, Any], index: str) -> "pd.DataFrame":
    """Return the columns as a data frame, whose index has this name."""
    try:
        import pandas as pd
    except ImportError:
        raise UserError("a table needs pandas: pip install pandas") from None
    return pd.DataFrame(columns).rename_axis(index)


for _name in ("__init__", "__getitem__", "chosen", "curves", "graph", "model", "plot", "state_dict"):
    setattr(Result, _name, without_inner_frames(getattr(Result, _name)))


@without_inner_frames
def run(*, ranks: int | None = None, **settings: Any) -> Result:
    """Compute a Run, or find its finished result, and return that.

    Args:
        ranks: MPI ranks to start. Without it one per core of this machine, but no more than clients; in a Slurm job one per task of it.
            Under mpirun or srun the ranks are there.
        settings: the fields of `Run` and `Job` by name, as on the command line: `method="dpfl", clients=32, quiet=True`. A method may also be a
            module or a function `round(fed, state, t)`, a model a class that is made as `NAME(shape, classes)`, and data `(x, y)` or `(x, y, client)`,
            as `data.own.arrays_of` takes them: they become files below the folder of the results, and are part of the Run as such.

    Raises:
        UserError: a setting is wrong, or the run ended with an error, which is its sentence. Under mpirun every rank raises it.
        KeyboardInterrupt: after Ctrl-C, once the ranks have kept a checkpoint and ended; the same call goes on from there. A second
            Ctrl-C ends them at once.
        SystemExit: under mpirun, on every rank after a signal, with the exit code of the command line (75: the same command goes on).
    """
    if started_by_launcher():
        return Result(here(ranks, settings))
    settings = as_files(settings)
    chosen, job = checked(settings)
    if ranks is None:
        tasks = os.environ.get("SLURM_NTASKS", "")
        ranks = int(tasks) if whole(tasks) else min(len(os.sched_getaffinity(0)), chosen.clients)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UserError(f"ranks is {ranks!r}; allowed is a whole number of at least 1")
    in_processes(ranks, settings)
    return Result(job.out or chosen.path(job.results))


@without_inner_frames
def sweep(**settings: Any) -> list[Result]:
    """Return the results of every combination of the settings that are lists or ranges, which `run` computes or finds one after the other.

    `sweep(method=["local", "dpfl"], seed=[1, 2], clients=8)` returns four; the last list changes fastest.
    """
    lists = {name: value for name, value in settings.items() if isinstance(value, list | range)}
    return [run(**settings | dict(zip(lists, each, strict=True))) for each in itertools.product(*lists.values())]


def as_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings where modules, functions, classes and arrays are paths of files, made below `results` by their content where there are none."""
    _, job = run_and_job(in_python({n: value for n, value in settings.items() if n == "results"}))
    out, folder = dict(settings), Path(job.results) / "given"
    for kind, given in ((kind, settings.get(kind)) for kind in ("method", "model")):
        if isinstance(given, ModuleType):
            out[kind] = getattr(given, "__file__", None) or given.__name__
        elif inspect.isfunction(given) or inspect.isclass(given):
            if given.__name__ == "<lambda>":
                raise UserError(f"--{kind} is a lambda, which has no source of its own; write it as a function by def")
            name, text = given.__name__, text_of(f"--{kind} is {given.__name__}", given)
            with refused_as(f"--{kind} is {name}; give {TAKES[kind]}", (ValueError,)):
                names = inspect.signature(given).parameters
            takes = "shape, classes" + ", vocabulary" * ("vocabulary" in names)
            form = METHOD if kind == "method" else MODEL
            text = form.format(name=name, text=text, head=getattr(given, "HEAD", ""), takes=takes)
            out[kind] = put(folder, f"{name}.py", text.encode())
        elif callable(given):
            raise UserError(f"--{kind} is a {type(given).__name__} that is made already; give {TAKES[kind]}")
    if isinstance(data := settings.get("data"), list | tuple | np.ndarray):
        allowed = "a path, (x, y) and (x, y, client), arrays with a row per sample"
        said = f"--data is a {type(data).__name__}; allowed are {allowed}"
        with refused_as(said, (TypeError, ValueError)):
            arrays = arrays_of(*(data if isinstance(data, tuple) and len(data) < 4 else ()))
        out["data"] = put(folder, "arrays.h5", packed(arrays, "arrays", {}, own=True))
        out.setdefault("dataset", "arrays")
    return out


def put(folder: Path, name: str, content: bytes) -> Path:
    """Write a file alone in a folder named by its content; `UserError`: something else is there."""
    path = folder / hashlib.sha256(content).hexdigest()[:12] / name
    for link in (part for part in (folder, path.parent) if part.is_symlink()):
        raise UserError(f"{link} is a link, which its owner could turn to other code; remove it")
    with explained(f"{path} cannot be written"):
        if not os.path.lexists(path):
            write(path, content)
        # code would import what lies beside it
        beside = [p for p in path.parent.iterdir() if p != path and not p.name.startswith(".")]
    with contextlib.suppress(Unreadable):
        if not beside and read_bytes(path, len(content), follow=False) == content:
            return path
    raise UserError(f"{(beside or [path])[0]} is not what this call writes; remove {path.parent}")


def checked(settings: Mapping[str, Any]) -> tuple[Resolved, Job]:
    for name in settings:
        if name not in SCHEMA:
            raise unknown(name, f"there is no setting {name}", "")
    asked, job = run_and_job(in_python(settings))
    return asked.resolve(), job


def in_python(value: Any) -> Any:
    """Return settings by name, or one of them, with paths as texts and NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {name: in_python(held) for name, held in value.items()}
    return str(value) if isinstance(value, Path) else value.item() if isinstance(value, np.generic) else value


# under mpirun or srun: this process is a rank -----------------------------------------------------------------------
def started_by_launcher() -> bool:
    loaded = sys.modules.get("mpi4py.MPI")
    several = loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.size > 1
    ranked = any(name in os.environ for name in RANK if name.startswith(("PMI", "OMPI")))
    return several or ranked or launched(SIZE, 1) > 1


world = functools.cache(open_world)  # one for all calls, because communicators are few


def here(ranks: int | None, settings: Mapping[str, Any]) -> Path:
    """Compute the Run on the ranks that are there, and return the path of its result. Collective: a wrong setting is an error on every rank."""
    everyone = world()

    def decided() -> tuple[Resolved, Job]:
        if ranks not in (None, everyone.size):
            raise UserError(f"ranks is {ranks}, but the launcher has started {everyone.size}; leave it out")
        return checked(settings)

    try:
        with handled(SIGNALS, handler), all_or_none(everyone):
            settings = everyone.each_rank(lambda: as_files(settings))
            compare(settings, everyone)
            run, job = share_settings(everyone, decided)
            import torch

            from dpfl_mpi.engine.train import train

            threads = torch.get_num_threads()
            # by default as many as cores: ranks would crowd each other out
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            try:
                return train(run, job, everyone)
            finally:
                torch.set_num_threads(threads)
    except Leave as leave:
        if everyone.root:
            complain(str(leave))
        raise SystemExit(leave.code) from None


def compare(settings: Mapping[str, Any], world: "World") -> None:
    """Raise `UserError` on every rank where the call of one has other settings than that of root. Collective."""
    names = world.decide(lambda: sorted(settings))
    unlike = world.unlike({name: settings.get(name) for name in names} | {"": sorted(settings)})
    if unlike:
        text = ", ".join(filter(None, unlike)) or "some ranks have more of them"
        raise UserError(f"the ranks were given different settings ({text}); every rank makes the same call")


# in a script or a notebook: the ranks are processes of their own ----------------------------------------------------
def in_processes(ranks: int, settings: Mapping[str, Any]) -> None:
    """Compute the Run on ranks that are started for it; what they print is printed here, and the error that ends them is raised."""
    line = [*find_line(), "-n", str(ranks)] if ranks > 1 else []
    command = [*line, sys.executable, "-m", "dpfl_mpi", *to_flags(in_python(settings))]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # in a session of its own: Ctrl-C of a terminal or a notebook comes here alone, and is passed on once
    how: dict[str, Any] = {"text": True, "errors": "replace", "start_new_session": True}
    errors: list[str] = []
    with subprocess.Popen(command, env=environment(), **pipes, **how) as process:
        assert process.stdout and process.stderr
        reader = threading.Thread(target=read_errors, args=(process.stderr, errors), daemon=True)
        reader.start()
        try:
            with passing_on(process) as heard:
                for text in process.stdout:
                    print(text, end="", flush=True)
                process.wait()
        finally:
            reader.join()
    if heard:
        signal.raise_signal(heard[0])  # KeyboardInterrupt, or what the caller has chosen for it
    if process.returncode:
        raise UserError(errors[0] if errors else f"the run ended with exit code {process.returncode}; it printed why")


def environment() -> dict[str, str]:
    """Return the environment of the ranks: this one, this package where it is not installed, and on a single machine what Open MPI needs."""
    package = Path(__file__).resolve().parents[1]
    paths = [os.environ.get("PYTHONPATH", ""), "" if package.name.endswith("-packages") else str(package)]
    single = {} if os.environ.get("SLURM_JOB_ID") else OPEN_MPI
    return single | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_errors(stderr: Iterable[str], errors: list[str]) -> None:
    """Keep the sentences that the ranks end with, and print the rest of what they write to stderr."""
    for text in stderr:
        if text.startswith("error: "):
            errors.append(text.removeprefix("error: ").rstrip())
        else:
            print(text, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def passing_on(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Tell the ranks once to leave, where this process is told to; a second time ends them. Yields the numbers of the signals that came.

    They are told by USR1, which every mpirun and srun passes on; the ranks take it as they take INT. Whatever else ends the block ends them.
    """
    heard: list[int] = []

    def tell(number: int, _: object) -> None:
        heard.append(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1) if len(heard) == 1 else os.killpg(process.pid, signal.SIGKILL)

    ends = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    with handled(ends, tell):
        try:
            yield heard
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
