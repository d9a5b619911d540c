"""`Run` says what decides the numbers, in one documented field per line. `resolve` makes it a value: filled in, checked, found, read.

A `Run` is the key of its result: `Run(...).resolve().path("results")` is the file, on a cluster and on a laptop alike. This room therefore
imports neither torch nor MPI, and neither do the data set and method modules that it asks for their defaults.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, Self

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import FORMS, KINDS, admit, find, shipped, short
from dpfl_mpi.settings.fields import (
    as_dict,
    changed,
    check,
    field,
    fields,
    method_options,
    model_options,
    read,
)
from dpfl_mpi.settings.files import FILES, contents, no_data, own_defaults, partition_file
from dpfl_mpi.settings.values import (
    HONEST,
    PARSED,
    Attack,
    Budget,
    Dealing,
    Drift,
    Reach,
    Text,
    is_file,
    written,
)

NUMERICS = 1  # raised by hand with every change that alters numbers: it is part of each result's name
REPEATED = ("seed", "partition_seed", "data", "preset")  # fields in which repetitions of one Run may differ
UNREAD = {"budget": 1, "tau_init": 0}  # values of fields that a method does not read; any other has its default
NOTHING: Mapping[str, str] = MappingProxyType({})
REMOVED = {"averaging": "synchronous"}  # fields of older results, with the one value that is computed still


def option(default: Any, text: str, tuning: bool = False, **limits: float) -> Any:
    """Return a field of a method's `Options`; a number lies from `low` to `high`; one of the `tuning` is read with --finetune_epochs alone."""
    return field(default, "options", text, tuning=tuning, **limits)


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the numbers. A field whose default is `None` has the paper's value for the dataset once it is resolved."""

    # fmt: off
    dataset: str = field("digits", "data", f"the data set: {{names}}, or {FORMS}")
    data: str | None = field(None, "data", "file made by dpfl_mpi.prepare (data/DATASET.h5)")
    partition: Dealing | Any = field(None, "data", "pathological, dirichlet, natural, fedrep, motivation or file:PATH")
    classes_per_client: int = field(None, "data", "classes a client holds: 3 is the paper's Patho(3)", low=1, of=("pathological", "fedrep"))
    dirichlet_alpha: float = field(None, "data", "alpha of Dir(alpha) over clients or class holders", above=0, of=("pathological", "dirichlet"))
    min_per_class: int = field(None, "data", "fewest samples of a class (pathological)", low=0, of=("pathological",))
    min_samples: int = field(None, "data", "fewest samples of a client (dirichlet, natural)", low=2, of=("dirichlet", "natural"))
    missing_classes: int = field(0, "data", "classes that each natural client loses, from all three sets", low=0, of=("natural",))
    overlap: bool = field(True, "data", "fedrep: clients share images, as in the original construction", of=("fedrep",))
    clients: int = field(None, "data", "number of clients N", low=1)
    partition_seed: int = field(None, "data", "seed of the partition (that of --seed)", low=0, high=2**32 - 1)

    model: str = field(None, "model", f"{{names}}, or {FORMS}; cnn is the paper's")
    precision: Literal["float32", "tf32", "bf16"] = field("float32", "model", "of matrix products; tf32 needs a GPU")
    init: Literal["kaiming", "torch", "own"] = field(
        "kaiming", "model", "initial weights w: fan-in gain sqrt 2, PyTorch's, or as the model is built")

    method: str = field("dpfl", "method", f"{{names}}, or {FORMS}")
    preset: Literal["paper", "authors_code"] = field("paper", "method", "defaults from the paper or its code")
    rounds: int = field(None, "method", "communication rounds T after preprocessing", low=0)
    tau_init: int = field(None, "method", "local epochs before the first graph, tau_init", low=0)
    tau_train: int = field(None, "method", "local epochs per round, tau_train", low=1)
    finetune_epochs: int = field(0, "method", "epochs of fine-tuning at the end: +FT is 2 tau_train", low=0)

    budget: Budget | Any = field(None, "graph", "B_c, models averaged: a number, 0.1N, inf, uniform:2:20 or a file")
    budget_counts_self: bool = field(True, "graph", "B_c counts the client's own model")
    ggc_period: int = field(1, "graph", "P: choose anew every P-th round", low=1)
    ggc_off_rounds: Literal["reuse", "skip"] = field("reuse", "graph", "in between: average over the last choice, or not")
    ggc_repeats: int = field(1, "graph", "m: searches per choice; the best reward counts", low=1, high=999)
    omega_period: float | Any = field("inf", "graph", "search Omega anew every so many rounds")
    candidates: float | Any = field("inf", "graph", "M: search Omega among the M whose sketches of what they learnt are nearest")
    graphs: str | None = field(None, "graph", "result whose graphs are taken: replay, random_graph")

    reach: Reach | Any = field(None, "limits", "geometric:R, sites:S, groups:0,1;2,3 or a file")
    participation: float = field(1.0, "limits", "share of the clients in a round", above=0, high=1, what="a share")
    available: Any = field(None, "limits", "file: a line per round, 0 or 1 per client")
    flip_share: float = field(0.0, "limits", "share of clients with labels C - 1 - y", low=0, high=1, what="a share")
    flipped_run_ggc: bool = field(True, "limits", "flipped clients choose and average, too")
    attack: Attack | Any = field(None, "limits", "KIND:SHARE of clients that lie, see docs/controls.md")
    drift: Drift | Any = field(None, "limits", "SHARE:ROUND, clients whose classes change then")
    newcomers: float = field(0.0, "limits", "share of clients that come after the last round", low=0, below=1, what="a share")

    network: Any = field(None, "network", "clocks and links of the clients: phones, hospitals, campus or a file")
    churn: Any = field(None, "network", "who comes and leaves: LEAVE:JOIN, chances in a round, or a file")
    staleness: int = field(0, "network", "S: rounds that a neighbour's model may be old", low=0, high=16)
    codec: Any = field(None, "network", "what is sent: none, int8 or topk:SHARE")
    send: Any = field(None, "network", "what leaves a client: all, layers=body or layers=NAMES")

    lr: float = field(None, "optimiser", "learning rate eta", above=0)
    lr_schedule: Literal["constant", "step", "cosine"] = field("constant", "optimiser", "eta over the rounds; lr_decay comes on top")
    lr_step: int = field(30, "optimiser", "step: rounds between two steps", low=1, when=("lr_schedule", "step"))
    lr_gamma: float = field(0.1, "optimiser", "step: factor on eta at each step", above=0, high=1, when=("lr_schedule", "step"))
    lr_final: float = field(0.0, "optimiser", "cosine: share of eta it goes down to", low=0, high=1, what="a share", when=("lr_schedule", "cosine"))
    optimizer: Literal["sgd", "adam", "adamw"] = field("sgd", "optimiser", "of local training")
    momentum: float = field(0.9, "optimiser", "momentum of SGD", low=0, below=1, when=("optimizer", "sgd"))
    beta1: float = field(0.9, "optimiser", "Adam: decay of the mean gradient", low=0, below=1, when=("optimizer", "adam", "adamw"))
    beta2: float = field(0.999, "optimiser", "Adam: decay of the mean squared gradient", low=0, below=1, when=("optimizer", "adam", "adamw"))
    adam_eps: float = field(1e-8, "optimiser", "Adam: epsilon in the denominator", above=0, when=("optimizer", "adam", "adamw"))
    momentum_state: Literal["keep", "reset"] = field("keep", "optimiser", "whether momentum (Adam: its means) outlives a round")
    weight_decay: float = field(None, "optimiser", "weight decay (the paper's '1e-3 decay')", low=0)
    lr_decay: float = field(None, "optimiser", "factor on eta every 10 rounds", above=0, high=1)
    batch_size: int = field(None, "optimiser", "mini-batch size S", low=1, high=2**20)
    clip_norm: float = field(20.0, "optimiser", "largest gradient norm (0: any)", low=0)
    augment: bool = field(None, "optimiser", "crop and flip training images")

    metric: Literal["sample", "batch"] = field("sample", "scoring", "means over images, or over mini-batches as in the authors' code")
    search_share: float = field(1.0, "scoring", "share of validation images for the search alone", above=0, high=1, what="a share")
    patience: int = field(0, "scoring", "a client stops after so many rounds no better (0: never)", low=0)
    tie: Literal["latest", "earliest"] = field("latest", "scoring", "which of equal rounds is the best")
    seed: int = field(42, "scoring", "seed of all draws but the partition", low=0, high=2**32 - 1)
    on_divergence: Literal["stop", "exclude"] = field("stop", "scoring", "what to do about a model that is not finite")

    options: dict[str, Any] = field(None, "method options", "as --options.NAME VALUE; --method M --help lists them")
    model_options: dict[str, Any] = field(None, "model options", "as --model_options.NAME VALUE; --model M --help lists them")
    # fmt: on

    def resolve(self, gone: Mapping[str, str] = NOTHING) -> "Resolved":
        """Return the Run with every default filled in, every field checked, and the files that it names read, but those of `gone`.

        That is what files held that are not here, as `Resolved.contents` of a result has it. What is not allowed is a `UserError`.
        """
        code = {kind: admit(kind, getattr(self, kind)) for kind in ("dataset", "method")}
        dataset, method = find("dataset", self.dataset), find("method", self.method)
        check(self)
        filled = filled_in(self, dataset, method)
        code["model"] = admit("model", filled["model"])
        filled["model_options"] = model_options(filled["model"], self.model_options)
        filled = only_read(filled)
        budget = str(Budget.parse(filled["budget"]))
        filled = {name: read(Run, name, value) for name, value in valued(filled, gone).items()}
        check_method(filled, method)
        code = {kind: sha for kind, sha in code.items() if sha}
        held = contents(filled, dataset, gone)
        if held.get("graphs") == "":
            raise UserError(f"--graphs is {filled['graphs']}; there is no such file (a result, whose graphs are taken)")
        told = facts(filled, code, method, dataset) | ({"budget": {"name": budget}} if budget.endswith("N") else {})
        run = Resolved(**filled, contents=held | code, declared=told)
        check(run)  # once more: now with the defaults, of which the data set's module gives some
        return run

    def untuned(self) -> "Resolved":
        """Return the Run without fine-tuning: its rounds are this one's."""
        run = self.resolve()
        return dataclasses.replace(run, finetune_epochs=0, options=run.options | run.tuning)

    def slug(self) -> str:
        """Return `<dataset>-<partition>-<method>-B<b>-s<seed>-<8 hex>`, the name of the result without its folder; `-B<b>` where it has a budget."""
        run = self.resolve()
        text = json.dumps({"numerics": NUMERICS, **run.key()}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        budget = "-Bfile" if "budget" in run.contents else f"-B{run.budget}".replace(":", "-")
        budget = "" if "budget" in run.declared.get("method", {}).get("unread", ()) else budget
        return f"{short(run.dataset)}-{run.partition.kind}-{short(run.method)}{budget}-s{run.seed}-{digest}"

    def path(self, folder: str | Path = "results") -> Path:
        return Path(folder) / f"{self.slug()}.h5"

    def key(self) -> dict[str, Any]:
        """Return the fields that decide numbers and differ from the schema's defaults (so a later field orphans no result); it needs its files."""
        return self.resolve().key()

    def to_json(self) -> str:
        """Return the fields as JSON text; `from_json` is the inverse."""
        return json.dumps(as_dict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the Run that `to_json` wrote; fields that this version does not know are an error."""
        stored = {name: value for name, value in json.loads(text).items() if (name, value) not in REMOVED.items()}
        if unknown := ", ".join(sorted(set(stored) - {f.name for f in fields(cls)})):
            raise UserError(f"this result was written by another version of dpfl_mpi: it does not know {unknown}")
        return cls(**stored)


@dataclasses.dataclass(frozen=True)
class Resolved(Run):
    """A Run that is a value: every field is filled in and checked, the files that it names were read, and no method reads them again.

    `None` are only the fields that its partition does not read, and files that it does not name. To change a field, change the Run and
    resolve it again.
    """

    # SHA-256 of the files and of the code that it names, by field, as `key` has them
    contents: dict[str, str] = dataclasses.field(default_factory=dict, metadata={"derived": True})
    # what readers of its result must know of its method, and of code that is not shipped, which they do not execute: see `facts`
    declared: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, metadata={"derived": True})

    def __post_init__(self) -> None:
        """Parse what is written as a text: of a Run that was stored, or told by root, without the content of its files."""
        for name, parse in PARSED.items():
            if not isinstance(value := getattr(self, name), Text | None):
                object.__setattr__(self, name, parse(value))

    def resolve(self, gone: Mapping[str, str] = NOTHING) -> Self:
        return self

    def found(self, kind: str) -> Any:
        """Return its `dataset`, `method` or `model` (which imports torch); code that nobody has named in this process is a `UserError`."""
        return find(kind, getattr(self, kind))

    @property
    def most_senders(self) -> int:
        """The most senders that any client may average with: B_c - 1 when B_c counts the client's own model, of those that it asks."""
        return min(self.budget.most(self.clients, self.budget_counts_self), self.asked)

    @property
    def asked(self) -> int:
        """Of how many clients one asks for the models before it chooses, at most."""
        return int(min(self.clients - 1, self.candidates))

    @property
    def said_budget(self) -> str:
        """B_c as it was typed: a share of the clients, or else as `budget` has it."""
        return str(self.declared.get("budget", {}).get("name", self.budget))

    @property
    def tuning(self) -> dict[str, Any]:
        """The defaults of its method's options that concern the tuning alone."""
        return dict(self.declared.get("method", {}).get("tuning", {}))

    def key(self) -> dict[str, Any]:
        for name in (name for name, held in self.contents.items() if not held):
            path = str(getattr(self, name)).removeprefix("file:")
            if name == "data":
                raise no_data(self.dataset, path)
            make = "make it with `python -m dpfl_mpi.describe --save PATH`"
            raise UserError(f"--{name} is {path}; there is no such file: {make}")
        decisive = {n: v for n, v in changed(self).items() if n not in ("preset", "data", "options")}
        tuning = {n: v for n, v in self.options.items() if v != self.tuning.get(n, v)}  # beside the fields
        options = {n: v for n, v in self.options.items() if n not in self.tuning}
        return decisive | tuning | ({"options": options} if options else {}) | self.contents


# the steps of `Run.resolve`; fields are dicts here, by name ------------------------------------------------------------------
def filled_in(run: Run, dataset: ModuleType, method: Any) -> dict[str, Any]:
    """Return all fields of a Run, what it leaves open from its data set and its method."""
    if run.data is not None and hasattr(dataset, "load"):
        name = short(run.dataset)
        raise UserError(f"--data is {run.data}; the data set {name} makes its data itself, and reads no file")
    filled = {f.name: getattr(run, f.name) for f in fields(run)}
    for name in ("data", "available", "graphs"):  # always paths
        filled[name] = filled[name] and str(filled[name]).removeprefix("file:")
    filled |= {name: value for name, value in defaults_of(run, dataset, method).items() if filled[name] is None}
    filled["options"] = method_options(short(run.method), method.options, run.options, tuned=run.finetune_epochs > 0)
    filled |= {f.name: UNREAD.get(f.name, f.default) for f in fields(run) if f.name in method.unread}
    return filled | {"partition": Dealing.parse(filled["partition"])}


def defaults_of(run: Run, dataset: ModuleType, method: Any) -> dict[str, Any]:
    """Return what the fields are that a Run leaves open."""
    out = {**dataset.PAPER, "partition_seed": run.seed, "data": dataset.DATA}
    if run.preset == "authors_code":
        if not hasattr(dataset, "AUTHORS_CODE"):
            raise UserError(f"--preset is authors_code, which {short(run.dataset)} does not have: allowed is paper")
        out |= dataset.AUTHORS_CODE
    if getattr(dataset, "OWN_DATA", False) and is_file(run.data or out["data"]):
        least = out["min_samples"] if run.min_samples is None else run.min_samples
        dealt = str(run.partition or (out["partition"] if "partition" in dataset.SAID else "natural"))
        known = own_defaults(str(run.data or out["data"]), dealt == "natural", least)
        out |= {name: value for name, value in known.items() if name not in dataset.SAID}
    dealing = Dealing.parse(run.partition or out["partition"])
    own_alpha = run.dataset not in shipped("dataset") and "dirichlet_alpha" in dataset.SAID
    if dealing.kind == "dirichlet" and not own_alpha:
        out["dirichlet_alpha"] = 0.1  # the paper's Dir(0.1); the shipped data sets name the 0.5 inside Patho(3)
    if not method.preprocesses:
        out["rounds"] = dataset.PAPER["rounds"] + 2  # preprocessing costs DPFL two rounds; the others train them
    if dealing.kind == "motivation":
        out["clients"] = 3
        if run.clients not in (None, 3):
            raise UserError(f"--clients is {run.clients}; --partition motivation has three: allowed is 3")
    if dealing.path and run.clients is None:
        out["clients"] = len(partition_file(dealing.path)["clients"])
    return out


def only_read(filled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, with its default for each that this Run does not read: it names no different Run."""
    schema, kind, out = fields(Run), filled["partition"].kind, dict(filled)
    out |= {f.name: f.default for f in schema if kind not in f.metadata.get("of", (kind,))}
    for f in (f for f in schema if "when" in f.metadata):
        other, *wanted = f.metadata["when"]
        out[f.name] = out[f.name] if out[other] in wanted else f.default
    if kind == "file":
        out["partition_seed"] = out["seed"]  # nothing is drawn from it
    if filled["flip_share"] == 0 and not str(filled["attack"]).startswith("label_flip"):
        out["flipped_run_ggc"] = True
    return out


def valued(filled: Mapping[str, Any], gone: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields with those that are texts as values, the files that they name read, but those of `gone`."""
    n, rounds, flips = filled["clients"], filled["rounds"], filled["flip_share"]
    whole = {"reach": (n,), "drift": (rounds,)}  # what their sentences say is allowed
    given = {n: parse for n, parse in PARSED.items() if filled[n] is not None or n in ("omega_period", "candidates")}
    out = dict(filled) | {name: parse(filled[name], *whole.get(name, ())) for name, parse in given.items()}
    context = {"budget": (n, filled["budget_counts_self"]), "reach": (n,), "available": (n, rounds)}
    context |= {"network": (n,), "churn": (n, -1 if filled["network"] else rounds)}
    for name, known in context.items():  # without a file a budget alone depends on them
        if out[name] and name not in gone and (out[name].path or name in ("budget", "available")):
            out[name] = out[name].resolved(*known)
    if out["candidates"] >= n - 1:  # it leaves out nobody
        out["candidates"] = math.inf
    if (attack := out["attack"]) and flips > 0:
        raise UserError(f"--attack is {attack} and --flip_share is {flips:g}; both draw the same clients: use one")
    return out


def check_method(filled: Mapping[str, Any], method: Any) -> None:
    """Raise `UserError` where the filled-in fields of a Run do not go together, or ask something of its method that it does not do."""
    name, graph = short(filled["method"]), method.topology == "graph"
    asks, lies = graph and (method.searches or method.asks_all), filled["attack"] and filled["attack"].falsifies
    rules = [  # a field, when the value that it has is a mistake, and what the sentence says behind the value
        ("candidates", filled["candidates"] < math.inf and not asks, f"; {name} asks for no models to choose: allowed is inf"),
        ("optimizer", filled["optimizer"] not in method.optimizers, f"; {name} takes steps of its own, allowed is {', '.join(method.optimizers)}"),
        ("finetune_epochs", not method.finetunes, f"; {name} is scored by more than its model: allowed is 0"),
        ("attack", lies and not method.sends_models, f"; {name} sends more than models; allowed are {', '.join(HONEST)}"),
        ("staleness", not filled["network"], " and --network is not given: without clocks nothing is late, allowed is 0"),
        ("staleness", method.topology == "server", f"; the server of {name} waits for all: allowed is 0"),
        ("staleness", not method.sends_models, f"; {name} sends more than models, of the same round: allowed is 0"),
        ("send", method.sends, f"; {name} says itself what it sends: allowed is all"),
        ("codec", not graph, f"; {name} sends nothing along a graph: allowed is none"),
        ("send", not graph, f"; {name} sends nothing along a graph: allowed is all"),
        ("send", method.asks_all or method.every_row, f"; {name} scores models as they come, which needs whole ones: allowed is all"),
    ]  # fmt: skip
    for flag, wrong, why in rules:
        if filled[flag] and wrong:
            raise UserError(f"--{flag} is {filled[flag]}{why}")


def facts(
    filled: Mapping[str, Any], code: Mapping[str, str], method: Any, dataset: ModuleType
) -> dict[str, dict[str, Any]]:
    """Return what readers of a result must know without executing its code: the short name of what is not shipped, its title, what `Method` says.

    `unread` are the fields of `Run` that it does not read, `tuning` the defaults of its options that concern the tuning alone.
    """
    out: dict[str, dict[str, Any]] = {kind: {"name": short(filled[kind])} for kind in ("method", *code)}
    told = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    tuning = {f.name: f.default for f in dataclasses.fields(method.options) if f.metadata.get("tuning")}
    out["method"] |= {n: v for n, v in told.items() if isinstance(v, str | int)}
    out["method"] |= {"unread": sorted(method.unread), "tuning": tuning}
    if "dataset" in out:
        out["dataset"]["title"] = dataset.TITLE
    return out


def stored_run(attributes: Mapping[str, Any]) -> tuple[Resolved, dict[str, Any]]:
    """Return the Run and the key that a result or a checkpoint keeps; damaged ones are a `ValueError`, those of a later version a `UserError`."""
    key, told = json.loads(str(attributes["key"])), json.loads(str(attributes.get("declared", "{}")))
    run = Resolved.from_json(str(attributes["run"]))
    try:
        check(run, ranges=False)
    except UserError as error:
        raise ValueError(str(error)) from None
    facts = {"name": str, "title": str, "tuning": dict}
    if not all(isinstance(of.get(name, kind()), kind) for of in told.values() for name, kind in facts.items()):
        raise ValueError(f"declared is {told}")
    held = {name: key[name] for name in (*FILES, *KINDS) if name in key and key[name] != written(getattr(run, name))}
    return dataclasses.replace(run, contents=held, declared=told), key
