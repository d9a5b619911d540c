"""`Run` says what decides the numbers, `Job` where and how they are computed. Both frozen, one documented field a line.

A `Run` is the key of its result: `Run(...).resolve().path("results")` is the file, on a cluster and on a laptop alike. This module
therefore imports neither torch nor MPI, and neither do the dataset and method modules that it asks for their defaults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import check, find

OLD_FIELDS = ("finetune_prox",)  # of Run, in results and command lines of earlier versions: see `old_flags`
NUMERICS = 1  # raise with every change that alters numbers: it is part of each result's name


def field(default: Any, group: str, text: str) -> Any:
    """Return a dataclass field whose help text and help group the command line shows."""
    return dataclasses.field(default=default, metadata={"group": group, "help": text})


def option(default: Any, text: str, low: float = -math.inf, high: float = math.inf, tuning: bool = False) -> Any:
    """Return a field of a method's `Options` dataclass; a number must lie from `low` to `high`.

    An option of the `tuning` alone stays at its default in a Run without --finetune_epochs.
    """
    metadata = {"group": "options", "help": text, "low": low, "high": high, "tuning": tuning}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Run:
    """Everything that decides the numbers. `None` means the value that the paper gives for the dataset (see `resolve`)."""

    # fmt: off
    dataset: str = field("digits", "data", "the data set: {names}")
    data: str | None = field(None, "data", "file made by dpfl_mpi.prepare (data/DATASET.h5)")
    partition: str | None = field(None, "data", "pathological, dirichlet, natural, fedrep, motivation or file:PATH")
    classes_per_client: int | None = field(None, "data", "classes a client holds: 3 is the paper's Patho(3)")
    dirichlet_alpha: float | None = field(None, "data", "alpha of Dir(alpha) over clients or class holders")
    min_per_class: int | None = field(None, "data", "fewest samples of a class (pathological)")
    min_samples: int | None = field(None, "data", "fewest samples of a client (dirichlet, natural)")
    missing_classes: int = field(0, "data", "classes that each natural client loses, from all three sets")
    overlap: bool = field(True, "data", "fedrep: clients share images, as in the original construction")
    clients: int | None = field(None, "data", "number of clients N")
    partition_seed: int | None = field(None, "data", "seed of the partition (that of --seed)")

    model: str | None = field(None, "model", "{names}; cnn is the paper's")
    precision: Literal["float32", "tf32", "bf16"] = field("float32", "model", "of matrix products; tf32: a GPU only")
    init: Literal["kaiming", "torch"] = field("kaiming", "model", "initial weights w: fan-in gain sqrt 2, or PyTorch's")

    method: str = field("dpfl", "method", "{names}")
    preset: Literal["paper", "authors_code"] = field("paper", "method", "defaults from the paper or its code")
    rounds: int | None = field(None, "method", "communication rounds T after preprocessing")
    tau_init: int | None = field(None, "method", "local epochs before the first graph, tau_init")
    tau_train: int | None = field(None, "method", "local epochs a round, tau_train")
    finetune_epochs: int = field(0, "method", "epochs of fine-tuning at the end: +FT is 2 tau_train")

    budget: int | str | float | None = field(None, "graph", "B_c, models averaged: a number, 0.1N, inf, uniform:2:20 or a file")
    budget_counts_self: bool = field(True, "graph", "B_c counts the client's own model")
    ggc_period: int = field(1, "graph", "P: choose anew every P-th round")
    ggc_off_rounds: Literal["reuse", "skip"] = field("reuse", "graph", "in between: average as last chosen, or not")
    ggc_repeats: int = field(1, "graph", "m: greedy searches, the best reward counts")

    reach: str | None = field(None, "limits", "geometric:R, sites:S, groups:0,1;2,3 or a file")
    participation: float = field(1.0, "limits", "share of the clients in a round")
    available: str | None = field(None, "limits", "file, 0 or 1 a client, a line a round")
    flip_share: float = field(0.0, "limits", "share of clients with labels C - 1 - y")
    flipped_run_ggc: bool = field(True, "limits", "flipped clients choose and average, too")

    lr: float | None = field(None, "optimiser", "learning rate eta")
    momentum: float = field(0.9, "optimiser", "momentum of SGD")
    momentum_state: Literal["keep", "reset"] = field("keep", "optimiser", "momentum from round to round")
    weight_decay: float | None = field(None, "optimiser", "weight decay (the paper's '1e-3 decay')")
    lr_decay: float | None = field(None, "optimiser", "factor on eta every 10 rounds")
    batch_size: int | None = field(None, "optimiser", "mini-batch size S")
    clip_norm: float = field(20.0, "optimiser", "largest gradient norm (0: any)")
    augment: bool | None = field(None, "optimiser", "crop and flip training images")

    tie: Literal["latest", "earliest"] = field("latest", "scoring", "which of equal rounds is the best")
    seed: int = field(42, "scoring", "seed of all draws but the partition")
    on_divergence: Literal["stop", "exclude"] = field("stop", "scoring", "at a model that is not finite")

    options: dict[str, Any] | None = field(None, "method options", "as --options.NAME VALUE")
    # fmt: on

    def resolve(self) -> Run:
        """Return the Run with every default filled in and every field checked.

        Raises:
            UserError: a field is out of range, or names something that does not exist; the sentence says what is allowed.
        """
        dataset = find("dataset", self.dataset)
        method = find("method", self.method)
        choices(self)
        defaults = dict(dataset.PAPER)
        if self.preset == "authors_code":
            defaults |= getattr(dataset, "AUTHORS_CODE", {})
        if (self.partition or defaults["partition"]) == "dirichlet":
            defaults["dirichlet_alpha"] = 0.1  # the paper's Dir(0.1); the data sets name the 0.5 inside Patho(3)
        if not method.preprocesses:
            # preprocessing costs DPFL two rounds; the others train them
            defaults["rounds"] = dataset.PAPER["rounds"] + 2
        values = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.partition_file and self.clients is None:
            from dpfl_mpi.storage.partition import load

            values["clients"] = load(self.partition_file).n
        values["partition_seed"] = self.seed if self.partition_seed is None else self.partition_seed
        values["data"] = self.data if self.data is not None else dataset.DATA
        values["options"] = method_options(self.method, method.options, self.options, tuned=self.finetune_epochs > 0)
        unread = {f.name: f.default for f in dataclasses.fields(self) if f.name in method.unread}
        unread |= {name: value for name, value in (("budget", 1), ("tau_init", 0)) if name in unread}
        run = dataclasses.replace(self, **(values | unread))
        check("model", str(run.model))
        run = dataclasses.replace(run, **unused(run))
        if run.partition == "motivation":
            run = dataclasses.replace(run, clients=3)
        if run.flip_share == 0:
            run = dataclasses.replace(run, flipped_run_ggc=True)
        run.check()
        return dataclasses.replace(run, budget=budget_name(run.budget, run.clients, run.budget_counts_self))

    def check(self) -> None:
        """Raise `UserError` for the first field out of its range."""
        for name, low in (
            ("clients", 1),
            ("rounds", 0),
            ("tau_init", 0),
            ("tau_train", 1),
            ("ggc_period", 1),
            ("ggc_repeats", 1),
            ("batch_size", 1),
            ("classes_per_client", 1),
            ("min_per_class", 0),
            ("min_samples", 2),
            ("missing_classes", 0),
            ("finetune_epochs", 0),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low):
                raise UserError(f"--{name} is {value}; allowed is a whole number of at least {low}")
        for name, low_open, high in (("lr", 0.0, math.inf), ("lr_decay", 0.0, 1.0), ("dirichlet_alpha", 0.0, math.inf)):
            value = getattr(self, name)
            if value is not None and not low_open < value <= high:
                raise UserError(
                    f"--{name} is {value}; allowed is a number above {low_open:g}"
                    + (f" and at most {high:g}" if high < math.inf else "")
                )
        for name, below in (("momentum", 1.0), ("weight_decay", math.inf), ("clip_norm", math.inf)):
            value = getattr(self, name)
            if value is not None and not 0 <= value < below:
                raise UserError(
                    f"--{name} is {value}; allowed is a number of at least 0"
                    + (f" and below {below:g}" if below < math.inf else "")
                )
        for name in ("seed", "partition_seed"):
            if not 0 <= getattr(self, name) < 2**32:
                raise UserError(f"--{name} is {getattr(self, name)}; allowed is a whole number from 0 to {2**32 - 1}")

        if not 0 < self.participation <= 1:
            raise UserError(f"--participation is {self.participation}; allowed is a share above 0, up to 1")
        if not 0 <= self.flip_share <= 1:
            raise UserError(f"--flip_share is {self.flip_share}; allowed is a share from 0 to 1")
        if self.finetune_epochs and not find("method", self.method).finetunes:
            raise UserError(
                f"--finetune_epochs is {self.finetune_epochs}; {self.method} is scored by more than its row, so use 0"
            )
        if self.available is not None and not Path(self.available).is_file():
            raise UserError(
                f"--available is {self.available}; there is no such file (a line of 0 and 1 a round, a column a client)"
            )
        check_reach(self.reach, self.clients)

    @property
    def others(self) -> int:
        """Most models a resolved Run lets a client receive for one average: B_c - 1 when B_c counts the client's own.

        With a budget a client this is the most that any client might have; `reach.budgets` gives each client's.
        """
        assert self.clients is not None
        if isinstance(self.budget, str) and self.budget != "inf":
            return self.clients - 1
        if self.budget == "inf":
            return self.clients - 1
        return min(int(str(self.budget)) - (1 if self.budget_counts_self else 0), self.clients - 1)

    @property
    def partition_file(self) -> str | None:
        """The path of `--partition file:PATH`, None for a partition that is drawn."""
        return str(self.partition)[5:] if str(self.partition).startswith("file:") else None

    def key(self) -> dict[str, Any]:
        """Return the fields that decide numbers and differ from the schema's defaults (so a later field orphans no result)."""
        run = self.resolve()
        out: dict[str, Any] = {}
        for f in dataclasses.fields(run):
            value = getattr(run, f.name)
            if f.name in ("preset", "data", "options") or value == f.default:
                continue
            out[f.name] = value
        options = dict(run.options or {})
        for f in dataclasses.fields(find("method", run.method).options):
            if f.metadata.get("tuning") and (value := options.pop(f.name)) != f.default:
                out[f.name] = value  # beside the fields, as the field of `Run` that it was
        out |= {"options": options} if options else {}
        dataset = find("dataset", run.dataset)
        own = getattr(dataset, "OWN_DATA", False) and Path(str(run.data)).is_file()  # not there: no result of it either
        if run.data is not None and (run.data != dataset.DATA or own):
            out["data"] = content(Path(run.data))
        if run.partition_file:
            out["partition"] = f"file:{content(Path(run.partition_file), '--partition')}"
        for name in ("budget", "reach", "available"):  # a file decides numbers by its content, not by its name
            if name in out and is_file(out[name]):
                out[name] = content(Path(out[name]), f"--{name}")
        return out

    def slug(self) -> str:
        """Return `<dataset>-<partition>-<method>-B<b>-s<seed>-<8 hex>`, the name of the result without its folder."""
        run = self.resolve()
        text = json.dumps({"numerics": NUMERICS, **self.key()}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        partition = "file" if run.partition_file else run.partition
        budget = "file" if is_file(run.budget) else str(run.budget).replace(":", "-")
        return f"{run.dataset}-{partition}-{run.method}-B{budget}-s{run.seed}-{digest}"

    def path(self, folder: str | Path = "results") -> Path:
        """Return the file that holds this Run's result."""
        return Path(folder) / f"{self.slug()}.h5"

    def to_json(self) -> str:
        """Return the fields as JSON text; `from_json` is the inverse."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Return the Run that `to_json` wrote; fields of a later schema that this version does not know are an error."""
        values = json.loads(text)
        old = {name: values.pop(name) for name in OLD_FIELDS if name in values}
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise UserError(
                f"this result was written by a later version of dpfl_mpi: it does not know {', '.join(sorted(unknown))}"
            )
        return old_flags(cls(**values), old)


@dataclass(frozen=True)
class Job:
    """Where and how a Run is computed: nothing here changes a number on CPUs."""

    # fmt: off
    device: Literal["auto", "cpu", "cuda"] = field("auto", "job", "auto: a GPU where there is one")
    results: str = field("results", "job", "folder of the result files")
    out: str | None = field(None, "job", "result file, instead of a name from the settings")
    save_models: bool = field(False, "job", "keep every client's best model in the result")
    mixed: bool = field(False, "job", "score the averaged models as well (/mixed)")
    fresh: bool = field(False, "job", "run again although a result is there")
    block: int = field(0, "job", "clients a tensor program (0: 1 on a CPU, all on a GPU)")
    cuda_graphs: bool = field(True, "job", "record a GPU's training step and replay it")
    window_gb: float = field(4.0, "job", "most memory of a rank's RMA window, GiB")
    checkpoint_every: str = field("5min", "job", "rounds (3), time (90s, 5min, 2h) or never")
    grace: float = field(25.0, "job", "seconds to live after a signal (USR1, TERM, INT)")
    watchdog: float = field(0.0, "job", "print all stacks and end after so many seconds without a round (0: never)")
    quiet: bool = field(False, "job", "print nothing")
    # fmt: on

    def check(self) -> None:
        """Raise `UserError` for the first field out of its range."""
        choices(self)
        if self.block < 0:
            raise UserError(f"--block is {self.block}; allowed is a whole number of at least 0")
        if not self.window_gb > 0:
            raise UserError(f"--window_gb is {self.window_gb}; allowed is a number above 0")
        if not every(self.checkpoint_every):
            raise UserError(
                f"--checkpoint_every is {self.checkpoint_every}; allowed are a number of rounds such as 3, "
                "a time such as 90s, 5min or 2h, or never"
            )
        for name in ("grace", "watchdog"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} is {getattr(self, name)}; allowed is a number of seconds of at least 0")


def every(text: str) -> tuple[str, float] | None:
    """Return `--checkpoint_every` as ("rounds", n), ("seconds", s) or ("never", 0); None where it is none of these."""
    if match := re.fullmatch(r"(\d+\.?\d*)\s*(s|min|h)", text.strip()):
        return "seconds", float(match.group(1)) * {"s": 1, "min": 60, "h": 3600}[match.group(2)]
    if re.fullmatch(r"[1-9]\d*", text.strip()):
        return "rounds", int(text)
    return ("never", 0) if text.strip() == "never" else None


PARTITIONS = {  # and which fields each of them reads
    "pathological": ("classes_per_client", "min_per_class", "dirichlet_alpha"),
    "dirichlet": ("min_samples", "dirichlet_alpha"),
    "natural": ("min_samples", "missing_classes"),
    "fedrep": ("classes_per_client", "overlap"),
    "motivation": (),
    "file": (),
}


def unused(run: Run) -> dict[str, Any]:
    """Return the defaults of the fields that a Run's partition does not read, so that they name no different Run.

    Raises:
        UserError: there is no such partition, or its file names no path.
    """
    kind = "file" if run.partition_file else run.partition
    if kind not in PARTITIONS or run.partition == "file":
        known = ", ".join(name for name in PARTITIONS if name != "file")
        raise UserError(f"--partition is {run.partition}; allowed are {known} or file:PATH")
    read = PARTITIONS[str(kind)]
    fields = {name for names in PARTITIONS.values() for name in names}
    return {f.name: f.default for f in dataclasses.fields(Run) if f.name in fields and f.name not in read}


def choices(settings: Run | Job) -> None:
    """Raise `UserError` where a field with named choices holds another value (the command line checks its own values already)."""
    for f in dataclasses.fields(settings):
        allowed = allowed_choices(f)
        if allowed:
            value = getattr(settings, f.name)
            if not (value in allowed or (value is None and "None" in str(f.type))):
                raise UserError(f"--{f.name} is {value!r}; allowed are {', '.join(allowed)}")


def allowed_choices(f: dataclasses.Field[Any]) -> list[str]:
    """Return the named choices of a field, or an empty list where it takes any value of its type."""
    return re.findall(r'["\'](\w+)["\']', str(f.type)) if "Literal[" in str(f.type) else []


def budget_name(budget: int | str | float | None, clients: int | None, counts_self: bool) -> int | str:
    """Return a budget as a whole number, or "inf" where it does not bind.

    A share such as "0.1N" is rounded to the nearest whole number (halves up) and is at least 1. Budgets that differ between clients
    stay as they are: "uniform:2:20", or the path of a file.
    """
    assert clients is not None
    allowed = "allowed is a whole number of at least 1, a share of the clients such as 0.1N, or inf; for a budget a client uniform:LOW:HIGH, or a file"
    text = str(budget).strip()
    if text in ("inf", ".inf", "Infinity"):
        return "inf"
    drawn = re.fullmatch(r"uniform:(\d+):(\d+)", text)
    if drawn and 1 <= int(drawn.group(1)) <= int(drawn.group(2)):
        return f"uniform:{int(drawn.group(1))}:{int(drawn.group(2))}"
    share = re.fullmatch(r"(\d*\.?\d+)\s*\*?\s*N", text)
    if share:
        value = max(1, math.floor(float(share.group(1)) * clients + 0.5))
        if float(share.group(1)) <= 0:
            raise UserError(f"--budget is {budget}; {allowed}")
    elif re.fullmatch(r"\d+", text) and int(text) >= 1:
        value = int(text)
    elif is_file(text):
        return text
    else:
        raise UserError(f"--budget is {budget}; {allowed}")
    return "inf" if value - counts_self >= clients - 1 and value > 1 else value


def check_reach(reach: str | None, clients: int | None) -> None:
    """Raise `UserError` where --reach is neither a known kind with a good number nor a file."""
    if reach is None or is_file(reach):
        return
    assert clients is not None
    kind, _, value = reach.partition(":")
    if kind == "geometric" and re.fullmatch(r"\d*\.?\d+", value) and float(value) > 0:
        return
    if kind == "sites" and value.isdecimal() and 1 <= int(value) <= clients:
        return
    if kind == "groups" and re.fullmatch(r"\d+([,;]\d+)*", value) and max(map(int, re.split("[,;]", value))) < clients:
        return
    raise UserError(
        f"--reach is {reach}; allowed are geometric:R with R above 0, sites:S with S from 1 to {clients}, groups of clients 0 to {clients - 1} "
        "such as groups:0,1;2,3, or a file of lines 'receiver sender'"
    )


def is_file(value: Any) -> bool:
    """Return whether a setting names a file that exists."""
    return isinstance(value, str) and Path(value).is_file()


def method_options(method: str, schema: type, given: dict[str, Any] | None, tuned: bool) -> dict[str, Any]:
    """Return all options of a method by name, the defaults filled in; those of the tuning as given only where the Run is `tuned`."""
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for name in given or {}:
        if name not in fields:
            valid = ", ".join(fields) if fields else "none"
            raise UserError(f"--options.{name}: the method {method} has no such option; its options: {valid}")
    out = {}
    for name, f in fields.items():
        value = (given or {}).get(name, f.default)
        kind = type(f.default)
        if kind is float and type(value) is int:
            value = float(value)
        low, high = f.metadata.get("low", -math.inf), f.metadata.get("high", math.inf)
        if type(value) is not kind or (kind in (int, float) and not low <= value <= high):
            bounds = (
                ""
                if low == -math.inf
                else f" of at least {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
            )
            what = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
            raise UserError(f"--options.{name} is {value!r}; allowed is {what}{bounds}")
        out[name] = value if tuned or not f.metadata.get("tuning") else f.default
    return out


def old_flags(run: Run, given: Mapping[str, Any]) -> Run:
    """Return the Run with a flag of earlier versions: --finetune_prox was a field of every Run before it was FedProx's option."""
    prox = given.get("finetune_prox")
    if prox is None or run.method != "fedprox":
        return run
    return dataclasses.replace(run, options={"finetune_prox": prox, **(run.options or {})})


def content(path: Path, flag: str = "--data") -> str:
    """Return the SHA-256 of a file's content: the one stored in a prepared data file, else that of its bytes."""
    if not path.is_file():
        make = "python -m dpfl_mpi.prepare" if flag == "--data" else "python -m dpfl_mpi.describe --save PATH"
        raise UserError(f"{flag} is {path}; there is no such file (make it with `{make}`)")
    if path.suffix in (".h5", ".hdf5"):
        import h5py

        try:
            with h5py.File(path, "r", locking=False) as file:
                if "sha256" in file.attrs:
                    return str(file.attrs["sha256"])
        except OSError:
            raise UserError(
                f"--data is {path}, which is not a readable HDF5 file; make it anew with `python -m dpfl_mpi.prepare`"
            ) from None
    return hashlib.sha256(path.read_bytes()).hexdigest()
