"""Checks a method, a model or a data set of your own: `python -m dpfl_mpi.testing FILE... [--SETTING VALUE ...]`.

Small runs of it are computed on 1, 2 and 3 ranks, for several numbers of clients. What fails is one sentence that says what to mend. Flags of a run
replace the settings here, such as `--options.keep 0.7`, `--model net.py`, `--clients 7`. A data set that has `read` is checked with `--data FILE`,
which `prepare` wrote. In a test of pytest call `check_method("mine.py")`, `check_model` or `check_data`; or, for one test per check,
`@pytest.mark.parametrize("check", checks("mine.py"), ids=str)`, each of which `check()` calls.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_mpi import api, prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.engine.saved import source_of
from dpfl_mpi.errors import LONGEST, Leave, UserError, exit_with, in_a_sentence
from dpfl_mpi.evaluate import accuracies, samples
from dpfl_mpi.mpi.launcher import find_line
from dpfl_mpi.mpi.start import open_world, share_settings
from dpfl_mpi.plugins import ADMITTED, KINDS, admit, find, forget, is_path, names, short
from dpfl_mpi.plugins.code import execute, failure, in_module, in_path
from dpfl_mpi.results import Result
from dpfl_mpi.settings.command_line import SCHEMA, given, parser
from dpfl_mpi.survival.signals import Heard

if TYPE_CHECKING:
    from dpfl_mpi.mpi.world import World

# one of them tells the kind
FUNCTIONS = {"method": ("init", "round"), "model": ("build",), "dataset": ("load", "read")}
# ways to compute a Run, and what its Job says; all but those of 2 and 3 ranks in a process that starts when these have ended
ONE, TWO, THREE, AGAIN, STOPPED = "1 rank", "2 ranks", "3 ranks", "another start", "going on after stops"
TORCH, AT_ONCE = "PyTorch", "PyTorch, all clients at once"
JOBS: dict[str, dict[str, Any]] = {TORCH: {"kernels": "torch"}, AT_ONCE: {"kernels": "torch", "block": 5}}
BY_RANKS, IN_ALL_WAYS = (ONE, THREE), (ONE, AGAIN, TWO, THREE, STOPPED)
# clients and B_c: some N divide by the ranks; the last bits of a matrix product depend on the ranks in some ranges of N alone
SIZES = {5: 3, 8: 2, 12: 1, 17: "inf"}
AWAY = [[0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1]]  # who takes part in rounds 1 to 3, of each four clients
WILD = 2  # the client whose samples let its model diverge
SHAPES = {"8x8x1": 4, "17x18x3": 7, "32x32x3": 10, "12 numbers": 3, "10 tokens": 4}  # of samples, and their classes
NOT_TAKEN = re.compile("failed (for|on) samples|takes (tokens|numbers)|needs images")  # what a model may say of some
ROUNDING = 1e-4  # relative: what differs by more is no last bit
DRAW = "draw by fed.shuffle or dpfl_mpi.streams.stream"
PRODUCT = (
    "do not multiply matrices of rows (a @ rows): their last bits depend on their size; use fed.average(weights=a)"
)
MEND = {
    "method": f"sum over clients by fed.mean or fed.average, not over a rank's rows as w.mean(0) does, and {DRAW}",
    "model": "let build draw from PyTorch's generator alone, which is seeded",
    "dataset": "seed what load draws, and sort what it takes from a set or a folder",
    AGAIN: f"{DRAW}, whose numbers have keys, and sort what comes from a set",
    STOPPED: 'put what must outlive a round into state["client"] or state["shared"]; a checkpoint keeps nothing else',
    TORCH: "take --kernels torch, and report the model",
    AT_ONCE: "let forward run under torch.func.vmap, as on a GPU: no `if` on values of x, no nn.LSTM, no nn.GRU",
}


# files that the runs read --------------------------------------------------------------------------------------------------
def write_samples(path: Path, n: int, shape: str) -> None:
    """Write random samples in classes that a model can tell apart; where they are dealt to n clients, those of client `WILD` are far too large."""
    classes, axes = SHAPES[shape], tuple(int(axis) for axis in shape.split()[0].split("x"))
    rng, y = np.random.default_rng(0), np.arange(480) % classes
    owner = np.arange(480) // classes % n if n else None
    x = np.clip(rng.integers(40, 215, (classes, *axes))[y] + rng.normal(0, 60, (480, *axes)), 0, 255)
    x[owner == WILD if n else []] *= 1e25
    dtype = "int32" if "tokens" in shape else "float32" if n or len(axes) == 1 else "uint8"
    arrays = arrays_of(x.astype(dtype), y, owner)
    prepare.write(replace(arrays, mean=(128.0,), std=(64.0,)) if n else arrays, "image_folder", path)


def here(n: int) -> np.ndarray:
    """Return a table of --available for n clients, rounds by clients."""
    return np.tile(AWAY, n)[:, :n]


# the ranks -----------------------------------------------------------------------------------------------------------------
def compute(plan: str) -> None:
    """Compute the turns of a plan, a file. A turn is one task or two: the first is for so many of the ranks, the second for the others. Collective."""
    everyone = open_world()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    worlds: dict[int, World] = {}
    for turn in json.loads(Path(plan).read_text()):
        first = turn[0]["ranks"]
        if first not in worlds:
            worlds[first] = everyone.part(everyone.rank >= first)
        for task in turn[int(everyone.rank >= first) :][:1]:
            attempt(task, worlds[first])
        everyone.agree(False)  # wait for the others


def attempt(task: dict[str, Any], world: "World") -> None:
    """Compute a task, with `stop` its next round alone; write into a file what went wrong, nothing where all went well. Collective."""
    from dpfl_mpi.engine.train import train

    forget()  # as in a process of its own: nothing of a run before stays in a module
    Heard.at, Heard.name, said = time.monotonic() * task["stop"], "a check", ""
    try:
        with contextlib.suppress(Leave):
            train(*share_settings(world, lambda: api.checked(task["settings"])), world)
    except Exception as error:
        own = [code for (kind, name), code in ADMITTED.items() if name == task["settings"].get(kind)]
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
        words = failure(error, own[0]) if own else text
        said = str(error) if isinstance(error, UserError) else words
        if not world.all_stop():
            world.abort(1, f"error: {said}")
    finally:
        Heard.at = 0.0
    if world.root:
        said_of(task).write_text(said)


def said_of(task: dict[str, Any]) -> Path:
    return Path(f"{task['settings']['out']}.said")


def follow(plan: list[Any], ranks: int, file: Path) -> None:
    """Compute a plan. Where a task ends all ranks, what they say is said of its code, and another start computes what is left of other code."""
    command = [*([*find_line(), "-n", str(ranks)] if ranks > 1 else []), sys.executable, "-c"]
    command.append(f"from dpfl_mpi.testing import compute; compute({str(file)!r})")
    how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL}
    while plan:
        file.write_text(json.dumps(plan))
        done = subprocess.run(command, env=api.environment(), **how)
        plan = list(itertools.dropwhile(lambda turn: all(said_of(task).exists() for task in turn), plan))
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[-1])
        code = plan[0][0]["code"] if plan else ""
        for task in (task for turn in plan for task in turn if task["code"] == code and not said_of(task).exists()):
            said_of(task).write_text(said)
            said = f"not computed, since a run before ended all ranks: {said.partition('ranks: ')[2] or said}"
        plan = [turn for turn in plan if turn[0]["code"] != code]


# the checks ----------------------------------------------------------------------------------------------------------------
class Check:
    """A Run of somebody's code, computed in several ways; called, it is an AssertionError where these or their numbers are wrong."""

    stops: tuple[int, ...] = (3, 2)  # ranks of the starts that are told to leave after a round
    suite: "Suite"

    def __init__(self, kind: str, code: str, name: str, settings: dict[str, Any], ways: tuple[str, ...]):
        self.kind, self.code, self.name, self.ways, self.settings = kind, code, name, ways, settings | {kind: code}

    def __str__(self) -> str:
        return f"{short(self.code)}, {self.name}"

    def __call__(self) -> None:
        if said := self.complaint():
            raise AssertionError(said)

    def task(self, way: str, ranks: int, stop: bool = False) -> dict[str, Any]:
        job = {"out": str(self.file(way)), "quiet": True, "watchdog": 60.0, "save_models": True, **JOBS.get(way, {})}
        return {"settings": self.settings | job, "ranks": ranks, "stop": stop, "code": self.code}

    def file(self, way: str) -> Path:
        return self.suite.folder / f"{self.suite.checks.index(self)}-{way.replace(' ', '-')}.h5"

    def said(self, way: str) -> str:
        return said_of(self.task(way, 1)).read_text()

    def turns(self) -> tuple[list[Any], list[Any]]:
        """Return the turns of three ranks, and those of one process that starts when they have ended."""
        beside = [ONE, TWO] if TWO in self.ways else []  # at the same time
        turns = [[self.task(way, 1 + i) for i, way in enumerate(beside)], [self.task(THREE, 3)]]
        turns += [[self.task(STOPPED, ranks, stop=True)] for ranks in self.stops if STOPPED in self.ways]
        return list(filter(None, turns)), [[self.task(way, 1)] for way in self.ways if way not in (*beside, THREE)]

    def not_taken(self) -> bool:
        """Return whether these are samples that the model does not take, and there are others that it takes."""
        others = [check for check in self.suite.checks if (check.kind, check.code) == (self.kind, self.code)]
        of_shape = self.kind == "model" and NOT_TAKEN.search(self.said(ONE))
        return bool(of_shape) and not all(check.said(ONE) for check in others)

    def complaint(self) -> str:
        """Return what is wrong and what to mend, a sentence; "" where nothing is."""
        if not self.suite.computed or self.not_taken():
            return ""
        with contextlib.ExitStack() as opened:
            results: list[Result] = []
            for way in self.ways:
                if said := self.said(way):
                    return f"{self} ({way}): {said}"
                results.append(opened.enter_context(Result(self.file(way))))
                if said := self.unlike(way, results[0], results[-1]):
                    return f"{self}: its numbers by {way} are not those of {self.ways[0]} ({said}"
            said = {"method": of_method, "model": of_model}.get(self.kind, lambda result: "")(results[0])
            return f"{self}: {said}" if said else ""

    def unlike(self, way: str, a: Result, b: Result) -> str:
        """Return where two results differ, and what to mend; "" where they do not, by PyTorch but for rounding."""
        names, worst, t = Result.differences(a, b), 0.0, 0
        for x, y in ((a[name], b[name]) for name in ("round/val_loss", "round/test_loss") if name in names):
            off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.nan_to_num(np.abs(x - y) / np.abs(x), nan=1))
            worst, t = max(worst, float(off.max())), int((off > 0).any(1).argmax())
        if not names or (way in JOBS and worst < 10 * ROUNDING):
            return ""
        last_bits = self.kind == "method" and way in (TWO, THREE) and worst < ROUNDING
        where = f"losses from round {t} on, by {worst:.0e}" if worst else ", ".join(names[:3])
        return f"{where}): {PRODUCT if last_bits else MEND.get(way, MEND[self.kind])}"


def of_method(result: Result) -> str:
    """Return what is wrong where clients are away."""
    received = result["traffic/models_received"][1:]
    gone = here(received.shape[1]) == 0 if result.run.available else np.zeros(received.shape, bool)
    for t, k in np.argwhere(received[: len(gone)] * gone[: len(received)])[:1]:
        wrong = f"client {k} is away in round {t + 1} and receives {received[t, k]} models"
        return f"{wrong}; count and send to those of fed.active alone"
    return ""


def of_model(result: Result) -> str:
    """Return what is wrong of its losses, or where a row goes back into a module, which must score as the run did."""
    import torch

    if not all(np.isfinite(result[name][-1]).all() for name in ("round/val_loss", "round/train_loss")):
        return "its loss is not finite after a round of training; mend forward, or where its parameters start"
    source = source_of(result, None)
    rows = samples(result, source, "test")
    off = np.abs(accuracies(result, source, rows, "test", torch.device("cpu")) - result["best/test_acc"])
    if (off * [len(mine) for mine in rows] < 1.5).all():  # images: of one, rounding may decide
        return ""
    return "a saved model scores otherwise than in its run; let forward use parameters, and buffers that build makes alike each time"


class Suite:
    """Checks that are computed together, when the first of them is called: by one start of three ranks, and one process after it."""

    def __init__(self, checks: list[Check]):
        self.checks = checks
        for check in checks:
            check.suite = self

    @functools.cached_property
    def folder(self) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="dpfl-testing-")
        atexit.register(folder.cleanup)
        return Path(folder.name)

    @functools.cached_property
    def computed(self) -> bool:
        """True: whoever asks for it has all that the checks need."""
        if api.started_by_launcher():
            raise UserError("the checks start mpirun themselves; start them without it")
        for i, check in enumerate(self.checks):
            for name, write in check.settings.items():
                if callable(write):
                    write(path := self.folder / f"{i}-{name}", check.settings["clients"])
                    check.settings[name] = str(path)
        turns = [check.turns() for check in self.checks]
        for i, ranks in enumerate((3, 1)):
            follow([turn for plans in turns for turn in plans[i]], ranks, self.folder / "plan.json")
        return True


def kinds_of(code: str) -> list[str]:
    """Return what a name, a file or MODULE:OBJECT is: "method", "model", "dataset", or several of them; of own code by the functions that it has."""
    if known := [kind for kind in KINDS if code in names(kind)]:
        return known
    found: Any = execute(code, in_path(code, Path(code)) if is_path(code) else in_module(code, code))[1]
    kinds = [kind for kind, functions in FUNCTIONS.items() if any(hasattr(found, name) for name in functions)]
    if not (kinds := kinds or ["model"] * callable(found)):
        what = "init and round (a method), build (a model), load or read (a data set)"
        raise UserError(f"{code} has none of the functions {what}")
    return kinds


def made_of(kind: str, code: str, settings: dict[str, Any]) -> list[Check]:
    """Return the checks of one kind of code; `settings` win over those of the checks."""
    admit(kind, code)
    found: dict[str, Check] = {}
    data_given = {"dataset", "data"} & {*settings}

    def add(name: str, fields: dict[str, Any], ways: tuple[str, ...] = BY_RANKS) -> None:
        fields = {n: v for n, v in fields.items() if not (data_given and n in ("dataset", "data"))} | settings
        name = name.format(**fields) + ", a rank has none" * (kind == "method" and fields["clients"] < 3)
        found.setdefault(name, Check(kind, code, name, fields, ways))

    small: dict[str, Any] = {"clients": 5, "tau_init": 1, "tau_train": 2, "min_per_class": 2, "augment": False}
    small["dataset"] = "image_folder"
    if kind == "method":
        small |= {"data": lambda path, n: write_samples(path, 0, "8x8x1"), "model": "mlp", "rounds": len(AWAY)}
        wild = {"data": lambda path, n: write_samples(path, n, "8x8x1"), "partition": "natural", "clip_norm": 0.0}
        graph = find(kind, code).topology == "graph"
        said = "{clients} clients" + ", B_c = {budget}" * graph
        for n, budget in (SIZES | {2: "inf"}).items():
            limited = small | {"clients": n} | ({"budget": budget} if graph else {})
            add(said, limited, IN_ALL_WAYS if n == 5 else BY_RANKS)
            if n == 5:
                add(f"{said}, some away", limited | {"available": lambda path, n: np.savetxt(path, here(n), "%d")})
                if not data_given:
                    add(f"{said}, one of them diverges", limited | wild | {"on_divergence": "exclude"})
    elif kind == "model":
        for shape, classes in SHAPES.items():
            data = {"data": lambda path, n, shape=shape: write_samples(path, 0, shape)}
            name = "its data" if data_given else f"samples of {shape}, {classes} classes"
            ways = (*BY_RANKS, TORCH) if settings.get("block") == 1 else (*BY_RANKS, TORCH, AT_ONCE)
            add(name, small | data | {"method": "fedavg", "rounds": 1}, ways)
    else:
        few = {"method": "local", "rounds": 0, "tau_train": 1}
        add("as a run takes it", few)
        for partition in ("pathological", "dirichlet"):
            add("{partition}, {clients} clients", few | {"partition": partition, "clients": 3})
    return list(found.values())


def checks(*codes: str, **settings: Any) -> list[Check]:
    """Return the checks of files, shipped names or MODULE:OBJECT, of whatever kind each is; all are computed when the first is called.

    `settings` are fields of a Run, in place of those of the checks: `clients=7`, `options={"keep": 0.7}`, `model="net.py"`.
    """
    settings = api.in_python(settings)
    found = [check for code in map(str, codes) for kind in kinds_of(code) for check in made_of(kind, code, settings)]
    return Suite(found).checks


def check_all(kind: str, code: str, **settings: Any) -> None:
    """Raise an AssertionError with a sentence for each check that a method ("method"), a model or a data set fails; `settings` as in `checks`."""
    said = [check.complaint() for check in Suite(made_of(kind, str(code), api.in_python(settings))).checks]
    if any(said):
        raise AssertionError("\n".join(filter(None, said)))


check_method, check_model, check_data = (functools.partial(check_all, kind) for kind in FUNCTIONS)


@in_a_sentence
def main(arguments: list[str] | None = None) -> int:
    """Check what a command line names; return the exit code, 1 where a check fails."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not (codes := list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))):
        about = f"{__doc__}\nFlags of a run: python -m dpfl_mpi --help"
        print("\n\n".join(textwrap.fill(part, 80) for part in about.split("\n\n")))
        return 0 if {"-h", "--help"} & {*arguments} else 2
    start, failed = time.monotonic(), 0
    said = given(arguments[len(codes) :], parser())
    found = checks(*codes, **{name: value for name, value in said.items() if name in SCHEMA})
    for check in found:
        complaint = check.complaint()
        failed += bool(complaint)
        print(f"FAIL {complaint}" if complaint else f"ok   {check}" + ", not taken" * check.not_taken(), flush=True)
    print(f"{len(found) - failed} of {len(found)} checks passed in {time.monotonic() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    exit_with(main)
