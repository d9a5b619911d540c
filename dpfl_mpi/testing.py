"""Check your own method, model or data set:
`python -m dpfl_mpi.testing FILE... [--SETTING VALUE ...]`.

Small runs are computed on 1, 2 and 3 ranks, and must have equal numbers. A
check fails with one sentence. Flags of a run replace the settings of the
checks: `--options.keep 0.7`, `--model net.py`, `--clients 7`. A data set with
`read` needs `--data FILE`, written by `prepare`.

In pytest call `check_method("mine.py")`, `check_model` or `check_data`. For
one test per check use `@pytest.mark.parametrize("check", checks("mine.py"),
ids=str)` and call `check()`.
"""

import functools
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi import api, prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.errors import UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.objects import plain
from dpfl_mpi.plugins import KINDS, admit, find, shipped, short
from dpfl_mpi.plugins.code import code_named, execute
from dpfl_mpi.results import Result
from dpfl_mpi.settings.command_line import SCHEMA, given, parser

# the functions by which a file is known to be a method, a model or a data set
FUNCTIONS = {"method": ("init", "round"), "model": ("build",), "dataset": ("load", "read")}
# settings of the checks
SMALL: dict[str, Any] = {"clients": 5, "tau_init": 1, "tau_train": 2}
SMALL |= {"min_per_class": 2, "augment": False}
BUDGETS = {2: "inf", 8: "inf", 5: 2}  # B_c by clients; two clients leave a rank empty
# which of every four clients are present in rounds 1, 2 and 3, for --available
PRESENT = [[0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1]]
# kinds of samples to try, and their number of classes; a model may refuse some of them
SHAPES = {"8x8x1": 4, "28x28x1": 10, "32x32x3": 10, "12 numbers": 3, "10 tokens": 4}
# what errors say if a model refuses a kind of samples
NOT_TAKEN = re.compile("failed (for|on) samples|takes (tokens|numbers)|needs images|return logits")
# what to change if numbers depend on the number of ranks
ADVICE = {
    "method": "sum over clients by fed.mean or fed.average, not over the rows of a rank "
    "(w.mean(0), a @ w); draw by fed.shuffle or dpfl_mpi.streams.stream",
    "model": "let build draw only from PyTorch's generator, which is seeded",
    "dataset": "seed what load draws, and sort what comes from a set or a folder",
}


def shapes_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return the kinds of samples to try one after the other; "" stands for the user's data."""
    return ("",) if {"dataset", "data"} & {*settings} else tuple(SHAPES)


def write_samples(path: Path, shape: str) -> None:
    """Write a prepared file of 480 random samples; those of a class are alike."""
    classes, axes = SHAPES[shape], tuple(map(int, shape.split()[0].split("x")))
    rng, y = np.random.default_rng(0), np.arange(480) % SHAPES[shape]
    means = rng.integers(40, 215, (classes, *axes))
    x = np.clip(means[y] + rng.normal(0, 60, (480, *axes)), 0, 255)
    dtype = {"numbers": "float32", "tokens": "int32"}.get(shape.split()[-1], "uint8")
    prepare.write(arrays_of(x.astype(dtype), y), "image_folder", path)


def write_present(path: Path, clients: int, rounds: int = len(PRESENT)) -> None:
    """Write a table for --available, rounds by clients; a client alone is always present."""
    table = np.tile(PRESENT, (rounds, clients))[:rounds, :clients]
    np.savetxt(path, table if clients > 1 else np.ones_like(table), "%d")


@dataclass(frozen=True)
class Check:
    """A Run of your code; called, it raises an AssertionError if its numbers are wrong."""

    kind: str
    code: str
    name: str
    settings: dict[str, Any]
    shapes: Sequence[str] = ("",)  # kinds of samples: the first that is not refused counts
    away: bool = False  # some clients are absent in some rounds, as PRESENT says

    def __str__(self) -> str:
        return f"{short(self.code)}, {self.name}"

    def __call__(self) -> None:
        if complaint := self.complaint():
            raise AssertionError(complaint)

    def complaint(self) -> str:
        """Return what is wrong and what to change, as one sentence; "" if nothing is."""
        refusals = []
        for shape in self.shapes:
            complaint = self.compute(shape)
            if not NOT_TAKEN.search(complaint):
                return complaint
            refusals.append(complaint)
        return "; ".join(dict.fromkeys(refusals))

    def compute(self, shape: str) -> str:
        """Return how the runs on 1, 2 and 3 ranks fail or differ; "" if they are equal."""
        results: list[Result] = []
        with tempfile.TemporaryDirectory(prefix="dpfl-testing-") as folder:
            settings: dict[str, Any] = {self.kind: self.code, "quiet": True} | self.settings
            if shape:
                settings |= {"dataset": "image_folder", "data": f"{folder}/data"}
                write_samples(Path(settings["data"]), shape)
            if self.away:
                settings["available"] = f"{folder}/available"
                write_present(Path(settings["available"]), settings["clients"], settings["rounds"])
            for ranks in (1, 2, 3):
                try:
                    results.append(api.run(ranks=ranks, out=f"{folder}/{ranks}.h5", **settings))
                except UserError as error:
                    return f"{self}: on {ranks} rank{'s' * (ranks > 1)}: {error}"
                if ranks == 1 and (warning := results[0].warning):
                    complain(f"warning: {self}: {warning}")
                arrays = ", ".join(Result.differences(results[0], results[-1])[:3])
                if arrays:
                    differ = f"{ranks} ranks give other numbers than 1 ({arrays})"
                    return f"{self}: {differ}; {ADVICE[self.kind]}"
        return ""


def kinds_of(code: str) -> list[str]:
    """Return what a name, a file or MODULE:OBJECT is: "method", "model", "dataset", or several."""
    if kinds := [kind for kind in KINDS if code in shipped(kind)]:
        return kinds
    found: Any = execute(code, code_named(code, code))[1]
    kinds = [kind for kind, names in FUNCTIONS.items() if any(hasattr(found, n) for n in names)]
    return kinds or ["model"] * callable(found)


def of_method(code: str, settings: dict[str, Any]) -> list[Check]:
    """Return checks with several numbers of clients, and with some clients away."""
    small = SMALL | {"model": "mlp", "rounds": len(PRESENT)}
    shapes = shapes_of(settings)
    out = {}
    for clients, budget in BUDGETS.items():
        fields = small | {"clients": clients}
        if find("method", code).topology == "graph":
            fields["budget"] = budget
        fields |= settings
        name = f"{fields['clients']} clients"
        out[name] = Check("method", code, name, fields, shapes)
    away = Check("method", code, f"{name}, some away", fields, shapes, away=True)
    return [*out.values(), away]


def of_model(code: str, settings: dict[str, Any]) -> list[Check]:
    """Return one check, with the first of `SHAPES` that the model takes, or with given data."""
    fields = SMALL | {"method": "fedavg", "rounds": 1} | settings
    return [Check("model", code, "a run", fields, shapes_of(settings))]


def of_dataset(code: str, settings: dict[str, Any]) -> list[Check]:
    """Return checks with the partition that a run takes, and with two others."""
    few = {"method": "local", "rounds": 0, "tau_train": 1}
    changes: dict[str, dict[str, Any]] = {"as a run takes it": {}}
    for partition in ("pathological", "dirichlet"):
        changes[partition] = {"partition": partition, "clients": 3}
    return [Check("dataset", code, name, few | c | settings) for name, c in changes.items()]


def made_of(kind: str, code: str, settings: dict[str, Any]) -> list[Check]:
    """Return the checks of one kind of code; `settings` replace those of the checks."""
    admit(kind, code)
    make = {"method": of_method, "model": of_model, "dataset": of_dataset}[kind]
    return make(code, plain(settings))


def checks(*codes: str, **settings: Any) -> list[Check]:
    """Return the checks of files, shipped names or MODULE:OBJECT, of whatever kind each is.

    `settings` are fields of a Run and replace those of the checks: `clients=7`,
    `options={"keep": 0.7}`, `model="net.py"`.
    """
    out = []
    for code in map(str, codes):
        kinds = kinds_of(code)
        if not kinds:
            needed = "init and round (a method), build (a model), load or read (a data set)"
            raise UserError(f"{code} has none of the functions {needed}")
        out += [check for kind in kinds for check in made_of(kind, code, settings)]
    return out


def check_all(kind: str, code: str, **settings: Any) -> None:
    """Raise an AssertionError with a sentence for each check that fails."""
    complaints = [check.complaint() for check in made_of(kind, str(code), settings)]
    if any(complaints):
        raise AssertionError("\n".join(filter(None, complaints)))


check_method = functools.partial(check_all, "method")
check_model = functools.partial(check_all, "model")
check_data = functools.partial(check_all, "dataset")


@in_a_sentence
def main(arguments: list[str] | None = None) -> int:
    """Check what a command line names; return the exit code, 1 if a check fails."""
    arguments = sys.argv[1:] if arguments is None else arguments
    codes = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not codes:
        print(f"{__doc__}\nFlags of a run: python -m dpfl_mpi --help")
        return 0 if {"-h", "--help"} & {*arguments} else 2
    start, failed = time.monotonic(), 0
    settings = given(arguments[len(codes) :], parser())
    all_checks = checks(*codes, **{name: v for name, v in settings.items() if name in SCHEMA})
    for check in all_checks:
        complaint = check.complaint()
        failed += bool(complaint)
        print(f"FAIL {complaint}" if complaint else f"ok   {check}", flush=True)
    seconds = time.monotonic() - start
    count = len(all_checks)
    print(f"{count - failed} of {count} checks passed in {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    exit_with(main)
