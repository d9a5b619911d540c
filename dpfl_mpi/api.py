"""The program in Python: `dpfl_mpi.run(method="dpfl", clients=32, ranks=8)` returns a `Result`.

`run` starts the ranks as processes of their own, in a script or a notebook that was started
without mpirun.
"""

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_mpi import batch, results
from dpfl_mpi.errors import UserError, without_inner_frames
from dpfl_mpi.mpi.launcher import OPEN_MPI, find_line
from dpfl_mpi.mpi.start import SIZE, launched
from dpfl_mpi.objects import as_files, plain
from dpfl_mpi.plugins import admitted
from dpfl_mpi.results.result import data_frame
from dpfl_mpi.results.summary import print_finished
from dpfl_mpi.results.table import of_runs, opened
from dpfl_mpi.settings import Job, Resolved
from dpfl_mpi.settings.command_line import SCHEMA, Parser, run_and_job, unknown
from dpfl_mpi.settings.fields import to_flags
from dpfl_mpi.survival.signals import handled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from dpfl_mpi.numerics.normalising import NormalisingModel


class Result(results.Result):
    """A results file, and the models in it; see `results.Result` for its arrays.

    Args:
        model, dataset: the files or modules of the user's own code that the run had. `source` and
            `model` need them in a process that did not run it: code that only a result names is
            not executed.
    """

    @without_inner_frames
    def __init__(self, path: Any, model: str | None = None, dataset: str | None = None):
        super().__init__(path)
        code = {"model": model, "dataset": dataset}
        if code := {kind: name for kind, name in code.items() if name}:
            from dpfl_mpi.engine.saved import with_code

            self.run = with_code(self.run, code)

    @without_inner_frames
    def model(self, client: int) -> "NormalisingModel":
        """Return a client's best model by validation, a `torch.nn.Module`.

        It takes raw images, uint8 `[S, H, W, C]`, normalises them itself, and returns logits. On
        the client's own test images it is as accurate as `/best/test_acc` says, except after
        `--metric batch` (means over mini-batches) and for kNN-Per and APFL, which are scored by
        more than the model. It needs the data of the run, and a result with models
        (`save_models`).
        """
        from dpfl_mpi.engine.saved import fill, network_of, with_code

        if not find_spec("torch"):
            raise UserError("a model needs torch: pip install torch")
        self.state_dict(client)  # refuses a result without models, or without this client
        if self["best/round"][client] < 0:
            raise UserError(f"client {client} of {self.path} has no model: it was never scored")
        has_run = admitted("model", self.run.model)  # in this process
        self.run = with_code(self.run, {"model": self.run.model if has_run else None})
        return fill(network_of(self, self.source), self, client)


@without_inner_frames
def run(*, ranks: int | None = None, **settings: Any) -> Result:
    """Compute a Run, or find its finished result, and return the result.

    Args:
        ranks: MPI ranks to start. By default one per `threads_per_client` cores of this machine,
            at most one per client; in a batch job one per task.
        settings: the fields of `Run` and `Job` by name, as on the command line:
            `method="dpfl", clients=32, quiet=True`. A method may also be a module or a function
            `round(fed, state, t)`, a model a class called as `NAME(shape, classes)`, and data
            `(x, y)`, `(x, y, client)` or `(x, y, client, group)`, as `data.own.arrays_of` takes
            them. Their content is part of the Run.

    Raises:
        UserError: a setting is wrong, or the run ended with an error, which is its sentence.
        KeyboardInterrupt: after Ctrl-C, once the ranks have written a checkpoint and ended; the
            same call goes on from there. A second Ctrl-C ends them at once.
    """
    if launched(SIZE, 1) > 1 or {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & {*os.environ}:
        instead = "start this script without mpirun, or use `mpirun -n 8 python -m dpfl_mpi`"
        raise UserError(f"dpfl_mpi.run starts the ranks itself; {instead}")
    settings = as_files(settings)
    resolved, job = checked(settings)
    if ranks is None:
        tasks = sum(batch.tasks())
        most = max(1, len(os.sched_getaffinity(0)) // job.threads_per_client)
        ranks = tasks or min(most, resolved.clients)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UserError(f"ranks is {ranks!r}; allowed is a whole number of at least 1")
    if not print_finished(resolved, job):
        start(ranks, settings)
    return Result(job.out or resolved.path(job.results))


@without_inner_frames
def sweep(**settings: Any) -> list[Result]:
    """Return the results of every combination of the settings that are lists or ranges.

    `sweep(method=["local", "dpfl"], seed=[1, 2], clients=8)` returns four, which `run` computes
    or finds one after the other; the last list changes fastest.
    """
    lists = {name: value for name, value in settings.items() if isinstance(value, list | range)}
    combinations = itertools.product(*lists.values())
    each = [settings | dict(zip(lists, values, strict=True)) for values in combinations]
    if settings.get("out") and len(each) > 1:
        raise UserError("out is for one Run; of a sweep, name the folder with results")
    for chosen in each:  # all mistakes come before the first Run
        checked(as_files({name: v for name, v in chosen.items() if name != "ranks"}))
    return [run(**chosen) for chosen in each]


@without_inner_frames
def table(given: Any) -> "pd.DataFrame":
    """Return a row per Run of results, of paths, or of a folder, as `results.table` says."""
    is_single = isinstance(given, str | os.PathLike | results.Result)
    found = opened([given] if is_single else given)
    if not found:
        raise UserError("table was given no result")
    return data_frame(of_runs(found), "run")


@without_inner_frames
def plot(result: results.Result, figure: str = "learning_curves", **flags: Any) -> "Figure":
    """Return a figure of `analysis/` of one result, with its flags as keywords.

    `plot(result, "graph_evolution", rounds=[0, 10])` is an example.
    """
    if not isinstance(result, results.Result):
        raise UserError(f"plot takes a result, not {result!r}; dpfl_mpi.Result(PATH) opens one")
    try:
        import matplotlib.pyplot as plt

        from dpfl_mpi.figures.frames import of_results
        from dpfl_mpi.figures.style import STYLE
    except (ImportError, SystemExit):  # frames ends the process if a library is missing
        needs = "a figure needs matplotlib, pandas and more"
        raise UserError(f"{needs}: pip install 'dpfl_mpi[analysis]'") from None
    try:
        module = importlib.import_module(f"dpfl_mpi.figures.{figure}")
        draw = module.draw
    except (ImportError, AttributeError):
        allowed = "allowed are the names of analysis/, such as graph_evolution"
        raise UserError(f"there is no figure {figure}; {allowed}") from None
    parser = Parser(prog=figure)
    for name, keywords in getattr(module, "OPTIONS", {}).items():
        parser.add_argument(f"--{name}", **keywords)
    given = {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple | range) else value
        for name, value in flags.items()
        if value is not False  # a switch that is off
    }
    chosen = vars(parser.parse_args(to_flags(given)))
    with plt.rc_context(STYLE):
        drawn: Figure | None = draw(of_results([result]), **chosen).figure
    if drawn is None:
        how = f"python analysis/{figure}.py {result.path}"
        raise UserError(f"{figure} is a table or a page: {how}")
    plt.close(drawn)  # a notebook would show it twice
    return drawn


def checked(settings: Mapping[str, Any]) -> tuple[Resolved, Job]:
    """Return the resolved Run and the Job of settings by name, checked."""
    for name in settings:
        if name not in SCHEMA:
            raise unknown(name, f"there is no setting {name}", "")
    given, job = run_and_job(plain(settings))
    return given.resolve(), job


def start(ranks: int, settings: Mapping[str, Any]) -> None:
    """Compute the Run on new ranks, print what they print, and raise the error that ends them."""
    launcher = [*find_line(), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "dpfl_mpi", *to_flags(plain(settings))]
    errors: list[str] = []
    with subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
    ) as process:
        assert process.stdout and process.stderr
        reader = threading.Thread(target=read_errors, args=(process.stderr, errors), daemon=True)
        reader.start()
        try:
            with passing_on(process) as signals:
                for text in process.stdout:
                    print(text, end="", flush=True)
                process.wait()
        finally:
            reader.join()
    if signals:
        signal.raise_signal(signals[0])  # KeyboardInterrupt, or the caller's own handler
    if process.returncode:
        unexplained = f"the run ended with exit code {process.returncode}; it printed why"
        raise UserError(errors[0] if errors else unexplained)


def environment() -> dict[str, str]:
    """Return the environment of the ranks: this one, with this package on the path.

    On a single machine it also has what Open MPI needs there.
    """
    paths = [os.environ.get("PYTHONPATH", "")]
    package = Path(__file__).resolve().parents[1]
    if not package.name.endswith("-packages"):  # it is not installed
        paths.append(str(package))
    defaults = {} if batch.number() else OPEN_MPI
    return defaults | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_errors(stderr: Iterable[str], errors: list[str]) -> None:
    """Collect the sentences that the ranks end with, and print the rest of stderr."""
    for text in stderr:
        if text.startswith("error: "):
            errors.append(text.removeprefix("error: ").rstrip())
        else:
            print(text, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def passing_on(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Pass INT and TERM on to the ranks inside, and yield the numbers of the signals that came.

    The first one is passed on as USR1, which every mpirun and srun forwards: the ranks leave
    after a checkpoint. A second one, or an error inside, kills them.
    """
    signals: list[int] = []

    def handler(number: int, _: object) -> None:
        signals.append(number)
        with contextlib.suppress(ProcessLookupError):
            if len(signals) == 1:
                process.send_signal(signal.SIGUSR1)
            else:
                os.killpg(process.pid, signal.SIGKILL)

    ends = (signal.SIGINT, signal.SIGTERM)
    with handled([n for n in ends if signal.getsignal(n) != signal.SIG_IGN], handler):
        try:
            yield signals
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
