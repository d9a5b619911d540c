"""`Run` holds every setting that decides a number, a field each. `resolve` fills in the defaults.

A resolved Run has a key: the fields that differ from the defaults below, and hashes of the files
and of the user's own code that it names. The key decides the name of the results file; two Runs
with one key have the same numbers. A value such as the budget "0.1N" is typed as a text, which
`values.parse` turns into a `Text`.
A laptop can compute the name of a result, too, `Run(...).resolve().path("results")`: this package
imports neither torch nor MPI, and neither do the data sets and methods whose defaults it reads.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, Self

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import NAMED
from dpfl_mpi.plugins import FORMS, KINDS, admit, codes, find, parts, shipped, short
from dpfl_mpi.settings import fields as schema
from dpfl_mpi.settings.fields import as_dict, changed, check, field, fields
from dpfl_mpi.settings.files import FILES, contents, no_data, own_defaults, partition_file
from dpfl_mpi.settings.values import (
    HONEST,
    PARSED,
    SHAPES,
    Text,
    add_file,
    at_most,
    is_file,
    parse,
    written,
)

NUMERICS = 1  # raised by hand when numbers change: it is part of each result's name
HEX = 8  # digits at the end of a result's name: a hash of the key
REPEATED = ("seed", "partition_seed", "data", "preset")  # may differ between repetitions of a Run
# what a field holds that the method does not read; fields that are not here: their default
UNREAD = {"budget": 1, "tau_init": 0}
PREPARED = "prepared"  # stands for the hash of a data set's code where only `prepare` executes it
NOTHING: Mapping[str, str] = MappingProxyType({})
CONTENTS = ("preset", "data", "options", "model_options")  # their content decides, not their text
# fields that are gone, with their value in older results that can still be read
REMOVED = {"averaging": "synchronous", "missing_classes": 0, "beta1": 0.9, "beta2": 0.999}
REMOVED |= {"ggc_repeats": 1, "lr_step": 30, "lr_gamma": 0.1, "lr_final": 0.0}
DATA, MODEL, METHOD, GRAPH, LIMITS, NETWORK, OPTIMISER, SCORING = (
    partial(field, group)
    for group in ["data", "model", "method", "graph", "limits", "network", "optimiser", "scoring"]
)
# ranges of fields
SEEDS = {"low": 0, "high": 2**32 - 1}
SHARE = {"low": 0, "high": 1, "what": "a share"}
POSITIVE = {"above": 0, "high": 1, "what": "a share"}


def option(
    default: Any, text: str, tuning: bool = False, added: bool = False, **limits: float
) -> Any:
    """Return a field of the `Options` of a method, a model or a data set.

    A number lies from `low` to `high`. With `tuning` it is read with --finetune_epochs alone. An
    option that was `added` to a method with results leaves their names as they are: a resolved
    Run does not have it at its default.
    """
    return field("options", default, text, tuning=tuning, added=added, **limits)


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the numbers: a default, the text of --help and a range per field.

    A field whose default is `None` gets the data set's value when it is resolved, or is not used.
    `of` names the partitions that read a field, `when` another field and its values.
    """

    # fmt: off
    dataset: str = DATA("digits", f"the data set: {{names}}, or {FORMS}")
    data: str | None = DATA(None, "prepared file, made by dpfl_mpi.prepare (data/DATASET.h5)")
    partition: Any = DATA(None, "pathological, dirichlet, natural, fedrep, motivation or file:PATH")
    classes_per_client: int = DATA(
        None, "classes per client; 3 is the paper's Patho(3)", low=1, of=("pathological", "fedrep"))
    dirichlet_alpha: float = DATA(
        None, "alpha of Dir(alpha), over clients or the holders of a class",
        above=0, of=("pathological", "dirichlet"))
    min_per_class: int = DATA(
        None, "fewest samples of a class that a client has (pathological)",
        low=0, of=("pathological",))
    min_samples: int = DATA(
        None, "fewest samples per client (dirichlet, natural)", low=2, of=("dirichlet", "natural"))
    overlap: bool = DATA(
        True, "fedrep: clients share images, as in the original construction", of=("fedrep",))
    clients: int = DATA(None, "number of clients N", low=1)
    partition_seed: int = DATA(None, "seed of the partition (that of --seed)", **SEEDS)

    model: str = MODEL(None, f"the network: {{names}}, or {FORMS}; cnn is the paper's")
    precision: Literal["float32", "tf32", "bf16"] = MODEL(
        "float32", "precision of matrix products; tf32 needs a GPU")
    init: Literal["kaiming", "torch", "own"] = MODEL(
        "kaiming", "initial weights: fan-in with gain sqrt 2, PyTorch's, or those of the model")

    method: str = METHOD("dpfl", f"the method: {{names}}, or {FORMS}")
    preset: Literal["paper", "authors_code"] = METHOD(
        "paper", "defaults from the paper, or from its authors' code")
    rounds: int = METHOD(None, "communication rounds T after preprocessing", low=0)
    tau_init: int = METHOD(None, "local epochs before the first graph, tau_init", low=0)
    tau_train: int = METHOD(None, "local epochs per round, tau_train", low=1)
    finetune_epochs: int = METHOD(
        0, "epochs of fine-tuning at the end; the paper's +FT is 2 tau_train", low=0)

    budget: Any = GRAPH(
        None, "B_c, models per average: a number, 0.1N, inf, uniform:2:20 or a file")
    budget_counts_self: bool = GRAPH(True, "B_c counts the client's own model")
    ggc_period: int = GRAPH(1, "P: choose senders in every P-th round", low=1)
    ggc_off_rounds: Literal["reuse", "skip"] = GRAPH(
        "reuse", "other rounds: average over the last choice, or do not average")
    omega_period: Any = GRAPH("inf", "P: search Omega again every P rounds")
    candidates: Any = GRAPH("inf", "M: search Omega among only the M most similar clients")
    graphs: str | None = GRAPH(
        None, "of dpsgd, replay, random_graph: ring, grid, complete, a file of edges or a result")

    reach: Any = LIMITS(
        None, "whom a client can receive from: geometric:R, sites:S, groups:0,1;2,3 or a file")
    participation: float = LIMITS(1.0, "share of the clients that take part in a round", **POSITIVE)
    available: Any = LIMITS(None, "file with a line per round, 0 or 1 per client")
    flip_share: float = LIMITS(0.0, "share of the clients with labels C - 1 - y", **SHARE)
    flipped_run_ggc: bool = LIMITS(True, "clients with flipped labels choose and average too")
    attack: Any = LIMITS(None, "KIND:SHARE, how many clients attack, and how (docs/experiments.md)")
    drift: Any = LIMITS(None, "SHARE:ROUND, clients whose classes change in that round")
    newcomers: float = LIMITS(
        0.0, "share of the clients that join after the last round", low=0, below=1, what="a share")

    network: Any = NETWORK(
        None, "speeds and links of the clients: phones, hospitals, campus or a file")
    churn: Any = NETWORK(
        None, "clients leave and join: LEAVE:JOIN, chances per round, or a file")
    staleness: int = NETWORK(0, "S: rounds by which a received model may be late", low=0, high=16)
    codec: Any = NETWORK(None, "how models are compressed: none, int8 or topk:SHARE")
    send: Any = NETWORK(None, "layers that clients send: all, or layers=body, head or NAMES")

    lr: float = OPTIMISER(None, "learning rate eta", above=0)
    lr_schedule: Literal["constant", "cosine"] = OPTIMISER(
        "constant", "eta over the rounds; lr_decay multiplies it")
    optimizer: Literal["sgd", "adam", "adamw"] = OPTIMISER("sgd", "optimiser of local training")
    momentum: float = OPTIMISER(
        0.9, "momentum of SGD", low=0, below=1, when=("optimizer", "sgd"))
    adam_eps: float = OPTIMISER(
        1e-8, "Adam: epsilon in the denominator", above=0, when=("optimizer", "adam", "adamw"))
    momentum_state: Literal["keep", "reset"] = OPTIMISER(
        "keep", "keep momentum (Adam: its means) between rounds, or reset it")
    weight_decay: float = OPTIMISER(None, "weight decay (the paper's '1e-3 decay')", low=0)
    lr_decay: float = OPTIMISER(None, "eta is multiplied by this every 10 rounds", above=0, high=1)
    batch_size: int = OPTIMISER(None, "mini-batch size S", low=1, high=2**20)
    clip_norm: float = OPTIMISER(20.0, "largest gradient norm (0: no limit)", low=0)
    augment: bool = OPTIMISER(None, "crop and flip training images")

    metric: Literal["sample", "batch"] = SCORING(
        "sample", "scores are means over images, or over batches as in the authors' code")
    search_share: float = SCORING(
        1.0, "share of the validation images for the search; the others pick the best round "
        "(1: all do both)", **POSITIVE)
    patience: int = SCORING(
        0, "a client stops after so many rounds without a better model (0: never)", low=0)
    tie: Literal["latest", "earliest"] = SCORING("latest", "which of equally good rounds counts")
    seed: int = SCORING(42, "seed of all draws but the partition's", **SEEDS)
    on_divergence: Literal["stop", "exclude"] = SCORING(
        "stop", "when a model is not finite: stop the run, or exclude the client")

    options: dict[str, Any] = field(
        "method options", None, "as --options.NAME VALUE; --method M --help lists them")
    model_options: dict[str, Any] = field(
        "model options", None, "as --model_options.NAME VALUE; --model M --help lists them")
    # fmt: on

    def resolve(self, gone: Mapping[str, str] = NOTHING) -> "Resolved":
        """Return the Run with all defaults filled in, its fields checked and its files read.

        Files of the fields in `gone` are not read, because they are gone: it has their SHA-256. A
        value that is not allowed is a `UserError`.
        """
        # what the Run names is the package's own, or the user's code, which has a hash
        code = {kind: admit(kind, getattr(self, kind)) for kind in ("dataset", "method")}
        dataset, method = find("dataset", self.dataset), find("method", self.method)
        check(self)
        filled = fill_in(self, dataset, method)
        code["model"] = admit("model", filled["model"])
        filled["model_options"] = model_options(filled["model"], self.model_options)
        filled = reset_unread(filled)
        typed_budget = parse("budget", filled["budget"])
        parsed = parse_texts(filled, gone)
        filled = {name: schema.read(Run, name, value) for name, value in parsed.items()}
        check_method(filled, method)
        code = {kind: sha256 for kind, sha256 in code.items() if sha256}
        # Code that only prepares a file is identified by the content of that file, unless it also
        # decides the weights p_k (WEIGHTS other than "pool").
        only_prepares = code.get("dataset") and not hasattr(dataset, "load")
        if only_prepares and getattr(dataset, "WEIGHTS", "pool") == "pool":
            code["dataset"] = PREPARED
        files = contents(filled, dataset, gone)
        if files.get("graphs") == "":
            allowed = f"allowed are {', '.join(NAMED)}, a file of edges or a result"
            raise UserError(f"--graphs is {filled['graphs']}; there is no such file, {allowed}")
        declared = facts(filled, code, method, dataset)
        if typed_budget.kind == "fraction":
            declared["budget"] = {"name": typed_budget.text}
        elif "high" in filled["budget"].fields and typed_budget.kind == "file":
            declared["budget"] = {"most": filled["budget"].high}
        run = Resolved(**filled, contents=files | code, declared=declared)
        check(run)  # again: some defaults come from the module of the data set
        return run

    def untuned(self) -> "Resolved":
        """Return the same Run without fine-tuning at its end; all its rounds are the same."""
        run = self.resolve()
        return dataclasses.replace(run, finetune_epochs=0, options=run.options | run.tuning)

    def slug(self) -> str:
        """Return the name of the result: `<dataset>-<partition>-<method>-B<b>-s<seed>-<8 hex>`."""
        run = self.resolve()
        text = json.dumps({"numerics": NUMERICS, **run.key()}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:HEX]
        budget = "-Bfile" if "budget" in run.contents else f"-B{run.budget}".replace(":", "-")
        if "budget" in run.declared.get("method", {}).get("unread", ()):
            budget = ""
        names = f"{short(run.dataset)}-{run.partition.kind}-{short(run.method)}"
        return f"{names}{budget}-s{run.seed}-{digest}"

    def path(self, folder: str | Path = "results") -> Path:
        return Path(folder) / f"{self.slug()}.h5"

    def key(self) -> dict[str, Any]:
        """Return the fields that decide numbers and differ from the schema's defaults."""
        return self.resolve().key()

    def to_json(self) -> str:
        """Return the fields as JSON text; `from_json` is the inverse."""
        return json.dumps(as_dict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the Run that `to_json` wrote; a field that is unknown here is a `UserError`."""
        stored = json.loads(text)
        stored = {n: value for n, value in stored.items() if (n, value) not in REMOVED.items()}
        if unknown := ", ".join(sorted(set(stored) - {f.name for f in fields(cls)})):
            version = "this result was written by another version of dpfl_mpi"
            raise UserError(f"{version}: it does not know {unknown}")
        return cls(**stored)


@dataclasses.dataclass(frozen=True)
class Resolved(Run):
    """A Run whose fields are complete and checked, and whose files are read.

    `None` are only fields that its partition does not read, and what is not used, as `attack`.
    Rank 0 alone knows what its files hold; elsewhere, and in a Run that a result stores, asking
    for it raises a `LookupError`.
    """

    # SHA-256 of each file and of the user's own code, by the field that names it; part of the key
    contents: dict[str, str] = dataclasses.field(default_factory=dict, metadata={"derived": True})
    # what the method and the user's own code say of themselves: see `facts`
    declared: dict[str, Any] = dataclasses.field(
        default_factory=dict, compare=False, metadata={"derived": True}
    )

    def __post_init__(self) -> None:
        """Parse settings that are still texts, as in a Run that was stored or sent by rank 0."""
        for name in PARSED:
            value = getattr(self, name)
            if not isinstance(value, Text | None):
                object.__setattr__(self, name, parse(name, value))
        # the largest budget of a file that is not read here
        most = self.declared.get("budget", {}).get("most")
        if most and not self.budget.fields:
            budget = dataclasses.replace(self.budget, fields={"high": most})
            object.__setattr__(self, "budget", budget)

    def resolve(self, gone: Mapping[str, str] = NOTHING) -> Self:
        return self

    def found(self, kind: str) -> Any:
        """Return the module of its `dataset` or `model`, or its `method`, a `methods.Method`."""
        # data prepared by the user's own code are read as the data set `arrays`, without that code
        return find(kind, "arrays" if self.contents.get(kind) == PREPARED else getattr(self, kind))

    @property
    def deals_test(self) -> bool:
        """Whether the clients' test sets come from the same pool of samples as training sets."""
        path, kind = self.partition.path, self.partition.kind
        return partition_file(path).get("pooled") is True if path else kind == "fedrep"

    @property
    def most_senders(self) -> int:
        """The most other clients that any client may average with: the budget limits it."""
        return min(self.budget.most(self.clients, self.budget_counts_self), self.most_asked)

    @property
    def most_asked(self) -> int:
        """The most clients whose models a client receives in order to choose among them."""
        return int(min(self.clients - 1, self.candidates))

    @property
    def typed_budget(self) -> str:
        """B_c as it was typed, such as 0.1N, for which `budget` holds a number."""
        return str(self.declared.get("budget", {}).get("name", self.budget))

    @property
    def tuning(self) -> dict[str, Any]:
        """The defaults of the method's options that only fine-tuning reads."""
        return dict(self.declared.get("method", {}).get("tuning", {}))

    def key(self) -> dict[str, Any]:
        """Return what `Run.key` does, and the hashes of files; `UserError` if one is missing."""
        for name, sha256 in self.contents.items():
            if not sha256:
                path = str(getattr(self, name)).removeprefix("file:")
                if name == "data":
                    raise no_data(self.dataset, path)
                make = "make it with `python -m dpfl_mpi.describe --save PATH`"
                raise UserError(f"--{name} is {path}; there is no such file: {make}")
        decisive = changed(self)
        # Left out: a preset, which only set other fields, and the path of the data, whose hash is
        # in `contents`. Options count at their defaults, too, but not those of fine-tuning.
        for name in ("preset", "data", "options"):
            decisive.pop(name, None)
        for name, value in self.options.items():
            if name not in self.tuning:
                decisive.setdefault("options", {})[name] = value
            elif value != self.tuning[name]:
                decisive[name] = value
        return decisive | self.contents


# the steps of `Run.resolve`; `filled` has the fields of the Run by name ---------------------------
def fill_in(run: Run, dataset: ModuleType, method: Any) -> dict[str, Any]:
    """Return all fields of a Run; open ones are filled in from its data set and its method."""
    if run.data is not None and hasattr(dataset, "load"):
        why = f"the data set {short(run.dataset)} makes its data itself, and reads no file"
        raise UserError(f"--data is {run.data}; {why}")
    filled = {f.name: getattr(run, f.name) for f in fields(run)}
    for name in ("data", "available", "graphs"):  # always paths
        filled[name] = filled[name] and str(filled[name]).removeprefix("file:")
    for name, value in defaults_of(run, dataset, method).items():
        filled[name] = value if filled[name] is None else filled[name]
    whose = f"the method {short(run.method)}"
    options = schema.options_given("options.", whose, method.options, run.options)
    if run.finetune_epochs == 0:
        options |= of_method(method, "tuning")
    added = of_method(method, "added")
    filled["options"] = {n: value for n, value in options.items() if value != added.get(n)}
    if filled["graphs"] and "graphs" in method.unread:
        reads = "takes no given graph: leave it out, or choose dpsgd, random_graph or replay"
        raise UserError(f"--graphs is {filled['graphs']}; {short(run.method)} {reads}")
    for f in fields(run):
        if f.name in method.unread:
            filled[f.name] = UNREAD.get(f.name, f.default)
    if method.given:  # the given graph, and not the budget, limits who averages with whom
        filled |= {"budget": "inf", "graphs": filled["graphs"] or NAMED[0]}
    return filled | {"partition": parse("partition", filled["partition"])}


def of_method(method: Any, mark: str) -> dict[str, Any]:
    """Return the defaults of the method's options with this mark, such as "tuning"."""
    options = dataclasses.fields(method.options)
    return {f.name: f.default for f in options if f.metadata.get(mark)}


def model_options(model: str, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the options of a model that differ from its defaults, or None."""
    # an option that the user sets to its default thus changes no result's name
    if not given:
        return None  # without importing the model, and torch with it
    options = find("model", model).Options
    out = schema.options_given("model_options.", f"the model {short(model)}", options, given)
    defaults = {f.name: f.default for f in dataclasses.fields(options)}
    return {name: value for name, value in out.items() if value != defaults[name]} or None


def defaults_of(run: Run, dataset: ModuleType, method: Any) -> dict[str, Any]:
    """Return the values of fields that the user leaves open.

    They are the data set's (PAPER, or AUTHORS_CODE with that preset), except those that the user's
    own data, the partition or the method decide.
    """
    out = {**dataset.PAPER, "partition_seed": run.seed, "data": dataset.DATA}
    if run.preset == "authors_code":
        if not hasattr(dataset, "AUTHORS_CODE"):
            why = f"{short(run.dataset)} does not have: allowed is paper"
            raise UserError(f"--preset is authors_code, which {why}")
        out |= dataset.AUTHORS_CODE
    data = run.data or out["data"]
    if getattr(dataset, "OWN_DATA", False) and is_file(data):
        # the file decides what the data set's module does not declare itself (SAID)
        least = out["min_samples"] if run.min_samples is None else run.min_samples
        usual = out["partition"] if "partition" in dataset.SAID else "natural"
        natural = str(run.partition or usual) == "natural"
        of_file = own_defaults(str(data), natural, least)
        out |= {name: value for name, value in of_file.items() if name not in dataset.SAID}
    partition = parse("partition", run.partition or out["partition"])
    own_alpha = run.dataset not in shipped("dataset") and "dirichlet_alpha" in dataset.SAID
    if partition.kind == "dirichlet" and not own_alpha:
        out["dirichlet_alpha"] = 0.1  # the paper's Dir(0.1); PAPER has the 0.5 of Patho(3)
    if not method.preprocesses:
        out["rounds"] = dataset.PAPER["rounds"] + 2  # DPFL's preprocessing costs two rounds
    if partition.kind == "motivation":
        out["clients"] = 3
        if run.clients not in (None, 3):
            why = "--partition motivation has three: allowed is 3"
            raise UserError(f"--clients is {run.clients}; {why}")
    if partition.path and run.clients is None:
        out["clients"] = len(partition_file(partition.path)["clients"])
    return out


def reset_unread(filled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields; those that another setting makes irrelevant have their defaults."""
    kind, out = filled["partition"].kind, dict(filled)
    for f in fields(Run):
        of_another_partition = "of" in f.metadata and kind not in f.metadata["of"]
        other, *wanted = f.metadata.get("when", ("",))
        if of_another_partition or (other and out[other] not in wanted):
            out[f.name] = f.default
    if kind == "file":
        out["partition_seed"] = out["seed"]  # nothing is drawn from it
    if filled["flip_share"] == 0 and not str(filled["attack"]).startswith("label_flip"):
        out["flipped_run_ggc"] = True
    return out


def without_effect(given: Run, run: Resolved) -> str:
    """Return a warning that names the given settings that change nothing in a Run, or ""."""
    unread, found = set(run.declared["method"]["unread"]), []
    if run.found("method").given:  # the given graph limits who averages with whom
        unread.add("budget")
    for f in fields(Run):
        asked, used = getattr(given, f.name), written(getattr(run, f.name))
        is_reset = used == f.default or f.name in unread
        says_nothing = asked in (None, "none", "all", "layers=all") or f.name in CONTENTS
        if is_reset and not says_nothing and str(written(asked)) != str(used):
            found.append(f"--{f.name}")
    shares = {"flip_share": run.flip_share, "newcomers": run.newcomers}
    shares |= {n: text.share for n in ("drift", "attack") if (text := getattr(run, n))}
    for name, share in shares.items():
        if share > 0 and at_most(share, run.clients) == 0:
            found.append(f"--{name} (of {run.clients} clients none)")
    return f"without effect in this Run: {', '.join(found)}" if found else ""


def parse_texts(filled: Mapping[str, Any], gone: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields with texts parsed, and the files read that they name, but for `gone`."""
    n, rounds, flips = filled["clients"], filled["rounds"], filled["flip_share"]
    bounds = {"reach": n, "drift": rounds}  # the largest number that each may name
    out = dict(filled)
    for name in PARSED:
        if filled[name] is not None or name in ("omega_period", "candidates"):
            out[name] = parse(name, filled[name], bounds.get(name))
    out["budget"] = out["budget"].resolved(n, filled["budget_counts_self"])
    for name in SHAPES:
        if out[name] and out[name].kind == "file" and name not in gone:
            in_seconds = name == "churn" and filled["network"]  # simulated time, not rounds
            out[name] = add_file(name, out[name], n, -1 if in_seconds else rounds)
    if out["candidates"] >= n - 1:  # it leaves out nobody
        out["candidates"] = math.inf
    if (attack := out["attack"]) and flips > 0:
        why = "both draw the same clients: use one"
        raise UserError(f"--attack is {attack} and --flip_share is {flips:g}; {why}")
    return out


def check_method(filled: Mapping[str, Any], method: Any) -> None:
    """Raise `UserError` where fields exclude each other, or the method cannot do what one asks."""
    name, on_graph = short(filled["method"]), method.topology == "graph"
    asks_to_choose = on_graph and (method.searches or method.asks_all)
    falsifies = filled["attack"] and filled["attack"].falsifies
    needs_whole_models = method.asks_all or method.every_row
    few_candidates = filled["candidates"] < math.inf
    # the rest of the sentence "--FIELD is VALUE; METHOD ..."
    asks_nobody = "asks for no models to choose: allowed is inf"
    steps = f"takes steps of its own, allowed is {', '.join(method.optimizers)}"
    honest = f"sends more than models; allowed are {', '.join(HONEST)}"
    more = "sends more than models, of the same round: allowed is 0"
    whole_models = "scores models as they come, which needs whole ones: allowed is all"
    clocks = "--network is not given: without clocks nothing is late, allowed is 0"
    # a field, whether a value that is not its empty one is a mistake, and the sentence
    rules = [
        ("candidates", few_candidates and not asks_to_choose, asks_nobody),
        ("optimizer", filled["optimizer"] not in method.optimizers, steps),
        ("finetune_epochs", not method.finetunes, "is scored by more than its model: allowed is 0"),
        ("attack", falsifies and not method.sends_models, honest),
        ("staleness", not filled["network"], clocks),
        ("staleness", method.topology == "server", "has a server that waits for all: allowed is 0"),
        ("staleness", not method.sends_models, more),
        ("send", method.sends, "says itself what it sends: allowed is all"),
        ("codec", not on_graph, "sends nothing along a graph: allowed is none"),
        ("send", not on_graph, "sends nothing along a graph: allowed is all"),
        ("send", needs_whole_models, whole_models),
    ]
    for flag, is_mistake, why in rules:
        if filled[flag] and is_mistake:
            why = f" and {why}" if why is clocks else f"; {name} {why}"
            raise UserError(f"--{flag} is {filled[flag]}{why}")


def facts(
    filled: Mapping[str, Any], code: Mapping[str, str], method: Any, dataset: ModuleType
) -> dict[str, dict[str, Any]]:
    """Return what a result stores of its method and the user's own code, by kind of code."""
    # readers of the result need it, and do not execute that code
    out: dict[str, dict[str, Any]] = {k: {"name": short(filled[k])} for k in ("method", *code)}
    attributes = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    out["method"] |= {n: value for n, value in attributes.items() if isinstance(value, str | int)}
    out["method"] |= {"unread": sorted(method.unread), "tuning": of_method(method, "tuning")}
    for kind in codes(code):
        out[kind]["parts"] = parts(kind, filled[kind])  # hashes of its functions and classes
    if "dataset" in out:
        out["dataset"]["title"] = dataset.TITLE
    return out


def stored_run(attributes: Mapping[str, Any]) -> tuple[Resolved, dict[str, Any]]:
    """Return the Run and the key that a result keeps; damaged ones are a `ValueError`."""
    key = json.loads(str(attributes["key"]))
    declared = json.loads(str(attributes.get("declared", "{}")))
    run = Resolved.from_json(str(attributes["run"]))
    try:
        check(run, ranges=False)
    except UserError as error:
        raise ValueError(str(error)) from None
    # a key has hashes in place of the fields that name files and the user's own code
    names = [name for name in (*FILES, *KINDS) if name in key]
    hashes = {name: key[name] for name in names if key[name] != written(getattr(run, name))}
    return dataclasses.replace(run, contents=hashes, declared=declared), key
