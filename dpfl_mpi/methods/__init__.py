"""The methods, one file each, and the contract that such a file keeps. `init` and `round` alone make a method.

What the file of a method holds:

    name                            needed  what it is
    init(fed) -> state              yes     round 0: makes the models, and scores them by fed.evaluate
    round(fed, state, t) -> state   yes     round t = 1 to T: the new state; the old one is not used again, its tensors may be changed
    METHOD = Method(...)            no      what the rest of the program must know of the method (see `Method`; every field has a default)
    Options                         no      frozen dataclass of fields `option(default, text)`: --options.NAME, read as fed.options["NAME"]
    finetune_gradient(fed, start)   no      the gradient of +FT from the rows start [K, W]; without it, or where it is None, the plain one

`fed` is the `dpfl_mpi.federation.Federation`, whose verbs are all that a method needs: it knows neither MPI nor files. The state is a dict
of two dicts, and everything that must outlive a round is in it, because a checkpoint keeps nothing else of the method:

    key                             what it is
    state["client"][NAME]           tensor or array [K, ...]: row i is client fed.ids[i]'s; goes with its client to whichever rank has it
    state["shared"][NAME]           the same on every rank: a tensor, an array, a CollaborationGraph, a number, a text or None
    state["shared"]["omega"]        CollaborationGraph Omega of round 0, the result's /graph/omega; without it a graph without edges
    state["shared"]["chosen"]       CollaborationGraph of this round, the result's /graph/chosen; without it Omega

No other name has a meaning outside the method; by custom "w" is the models. Rows that a verb takes are float32 and without gaps. `load` checks a file, `check_state` what its functions return.

Axes: N clients in all, K on this rank, W row width, T rounds.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph

State = dict[str, dict[str, Any]]
Topology = Literal["none", "server", "graph"]
CALLS = {"init": "init(fed)", "round": "round(fed, state, t)", "finetune_gradient": "finetune_gradient(fed, start)"}
HELD = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")  # by HDF5, NumPy and torch


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none."""


@dataclass(frozen=True)
class Method:
    """A method: what its file declares, and its functions, which `load` fills in."""

    title: str = ""  # as tables print it; the file's name where empty
    citation: str = ""  # BibTeX
    # between whom models move: no one; clients and a server, one up and one down per client and round; clients along a graph
    topology: Topology = "graph"
    searches: bool = True  # a graph: it is chosen by the greedy search, so the fields ggc_* count
    preprocesses: bool = False  # init trains tau_init epochs; the paper then runs two rounds fewer
    finetunes: bool = True  # the rows are all that is scored, so +FT may train them on
    # beside the verbs it computes element by element (no sums, exp or log): the native kernels then give it the same bits on all processors
    elementwise: bool = False

    init: Callable[[Any], State] = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]
    round: Callable[[Any, State, int], State] = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]
    finetune_gradient: Callable[[Any, Any], Any] | None = dataclasses.field(default=None, repr=False)
    options: type = NoOptions

    @property
    def unread(self) -> set[str]:
        """Names of the fields of `Run` that this method does not read: two Runs that differ in one of them are the same."""
        out = set() if self.preprocesses else {"tau_init"}
        if self.topology != "graph":
            out |= {"budget", "budget_counts_self", "reach", "flipped_run_ggc"}
        if self.topology != "graph" or not self.searches:
            out |= {"ggc_period", "ggc_off_rounds", "ggc_repeats"}
        return out


def load(name: str, module: ModuleType) -> Method:
    """Return the method that a module holds.

    Raises:
        UserError: the module breaks the contract; the sentence says where.
    """
    declared = getattr(module, "METHOD", Method())
    if not isinstance(declared, Method):
        raise UserError(f"METHOD of the method {name} is {declared!r}; it must be a Method(...) of dpfl_mpi.methods")
    if declared.topology not in get_args(Topology):
        allowed = ", ".join(get_args(Topology))
        raise UserError(f"METHOD of the method {name} has topology={declared.topology!r}; allowed are {allowed}")
    functions: dict[str, Any] = {call: getattr(module, call, None) for call in CALLS}
    for call, function in functions.items():
        if function is None and call == "finetune_gradient":
            continue
        if not callable(function):
            raise UserError(
                f"the method {name} has no function {call}; it must define {CALLS['init']} and {CALLS['round']}"
            )
        try:
            inspect.signature(function).bind(*CALLS[call].split(","))
        except TypeError:
            given = f"{call}{inspect.signature(function)}"
            raise UserError(f"the method {name} defines {given}, which is called as {CALLS[call]}") from None
    options = getattr(module, "Options", NoOptions)
    if not (
        isinstance(options, type)
        and dataclasses.is_dataclass(options)
        and all(f.metadata and type(f.default) in (bool, int, float, str) for f in dataclasses.fields(options))
    ):
        raise UserError(
            f"Options of the method {name} must be a dataclass; its fields are option(default, text), "
            "with true or false, a number or a text as the default"
        )
    return dataclasses.replace(declared, title=declared.title or name, options=options, **functions)


def check_state(name: str, state: Any, fed: Any) -> None:
    """Check what init (round 0) or round returned on this rank: microseconds, so after every round.

    Raises:
        UserError: it breaks the contract; the sentence says where. Not collective: it may be wrong on some ranks only.
    """
    who = f"{'round' if fed.round else 'init'} of the method {name}"
    parts = ("client", "shared")
    if not (isinstance(state, dict) and set(state) == set(parts) and all(isinstance(state[p], dict) for p in parts)):
        got = (
            f"a dict of {', '.join(map(str, state)) or 'nothing'}" if isinstance(state, dict) else type(state).__name__
        )
        raise UserError(f'{who} returned {got}; a state is {{"client": {{...}}, "shared": {{...}}}}, of two dicts')
    for key, value in state["client"].items():
        shape = tuple(getattr(value, "shape", ()))
        if not (held(value) and shape[:1] == (len(fed.ids),)):
            got = f"of shape {shape}" if held(value) else kind(value)
            raise UserError(
                f'state["client"]["{key}"] after {who} is {got}; it must be a tensor or array of {len(fed.ids)} rows, '
                "one per client of this rank"
            )
    for key, value in state["shared"].items():
        graph = isinstance(value, CollaborationGraph)
        if key in ("omega", "chosen") and not (graph and value.n == fed.n):
            got = f"a graph of {value.n} clients" if graph else kind(value)
            raise UserError(
                f'state["shared"]["{key}"] after {who} is {got}; it must be a CollaborationGraph of {fed.n} clients'
            )
        if not (graph or held(value) or value is None or isinstance(value, bool | int | float | str | np.generic)):
            raise UserError(
                f'state["shared"]["{key}"] after {who} is {kind(value)}, which a checkpoint cannot hold; allowed are a tensor or array '
                f"of {', '.join(HELD)}, a CollaborationGraph, a number, a text and None"
            )
    if fed.round == 0 and np.isnan(fed.notes["val_acc"][fed.active[fed.ids]]).any():
        raise UserError(f"{who} has scored no models; it must call fed.evaluate(w) with the rows [K, W] of round 0")


def held(value: Any) -> bool:
    """Return whether this is a tensor or array of numbers that a checkpoint can hold."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.") in HELD and hasattr(value, "shape")


def kind(value: Any) -> str:
    """Return what a value is, in words."""
    return f"a {type(value).__name__}" + (f" of {value.dtype}" if hasattr(value, "dtype") else "")
