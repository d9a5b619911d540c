"""The methods, one file each, by the contract of docs/own-method.md: `load` checks a file, `engine/checks.py` what its functions return.

Axes: N clients in all, K on this rank, W row width, T rounds.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings.fields import NoOptions, options_of

if TYPE_CHECKING:  # names for annotations, for which nothing is loaded: a laptop without PyTorch lists methods
    from torch import Tensor as Tensor

    from dpfl_mpi.federation import Federation as Federation
    from dpfl_mpi.federation.candidates import Candidates as Candidates
    from dpfl_mpi.numerics.backend import Gradient as Gradient
    from dpfl_mpi.numerics.backend import Predict as Predict
    from dpfl_mpi.transport.passes import Received as Received
else:
    Candidates = Federation = Gradient = Predict = Received = Tensor = Any
State = dict[str, dict[str, Any]]
Topology = Literal["none", "server", "graph"]
CALLS = {"init": "fed", "round": "fed, state, t", "finetune_gradient": "fed, start", "newcomer": "fed, state"}
OPTIONAL = ("finetune_gradient", "newcomer")
OWN_GRAPH = ("omega_period", "graphs")  # fields that a method does not read whose graph is new in each round


@dataclasses.dataclass(frozen=True)
class Newcomer:
    """How clients start that come after the last round: their rows, and how these are trained and scored (see `Federation`'s verbs)."""

    start: Any  # rows [K, W], trained in place
    gradient: Any = None
    trained: Any = None  # bool [W]: the columns that are not frozen
    predict: Any = None


@dataclasses.dataclass(frozen=True)
class Method:
    """A method: what its file declares, and its functions, which `load` fills in."""

    title: str = ""  # as tables print it; the file's name where empty
    citation: str = ""  # BibTeX
    # in figures: "#RRGGBB" (hashed from the name where empty), and a curve's style and marker, as matplotlib names them
    colour: str = ""
    line: str = "-"
    marker: str = "o"
    # between whom models move: no one; clients and a server, one up and one down per client and round; clients along a graph
    topology: Topology = "graph"
    searches: bool = True  # a graph: it is chosen by the greedy search, so the fields ggc_* count
    asks_all: bool = False  # a graph: a choice receives and scores the model of each client in reach, whole ones
    ignores: tuple[str, ...] = ()  # of a graph: fields that it does not read, of OWN_GRAPH
    preprocesses: bool = False  # init trains tau_init epochs; the paper then runs two rounds fewer
    finetunes: bool = True  # the rows are all that is scored, so +FT may train them on
    models: int = 1  # that each client trains, tau_train epochs each, in a round
    sends_models: bool = True  # and nothing else, so --attack can falsify what leaves a client
    sends: str = ""  # a graph: what leaves a client, as --send layers=; "": all
    # what is planned counts these two
    every_row: int = 0  # how often a round calls fed.every_row, by which all rows come to all ranks, whole ones
    optimizers: tuple[str, ...] = ("sgd", "adam", "adamw")  # fewer where it takes steps of its own
    # beside the verbs it computes element by element (no sums, exp or log): the native kernels then give it the same bits on all processors
    elementwise: bool = False
    init: Callable[[Any], State] = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]
    round: Callable[[Any, State, int], State] = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]
    finetune_gradient: Callable[[Any, Any], Any] | None = dataclasses.field(default=None, repr=False)
    newcomer: Callable[[Any, State], Newcomer] | None = dataclasses.field(default=None, repr=False)
    options: type = NoOptions

    @property
    def unread(self) -> set[str]:
        """Names of the fields of `Run` that this method does not read: two Runs that differ in one of them are the same."""
        out = set(self.ignores) | (set() if self.preprocesses else {"tau_init"})
        if self.topology != "graph":
            out |= {"budget", "budget_counts_self", "reach", "flipped_run_ggc", "omega_period", "graphs"}
        if self.topology == "none":
            out |= {"staleness"}
        if self.topology != "graph" or not self.searches:
            out |= {"ggc_period", "ggc_off_rounds", "ggc_repeats"}
        return out


def load(name: str, module: ModuleType) -> Method:
    """Return the method that a module holds; where it breaks the contract, the `UserError` says how."""
    declared = getattr(module, "METHOD", Method())
    if not isinstance(declared, Method):
        raise UserError(f"METHOD of the method {name} is {declared!r}; it must be a Method(...) of dpfl_mpi.methods")
    kinds = {str: "texts", bool: "True and False"}
    plain = [f for f in dataclasses.fields(Method) if type(f.default) in kinds]
    rules = {f.name: (type(getattr(declared, f.name)) is type(f.default), kinds[type(f.default)]) for f in plain}
    rules |= {
        "topology": (declared.topology in get_args(Topology), ", ".join(get_args(Topology))),
        "colour": (bool(re.fullmatch("(#[0-9A-Fa-f]{6})?", str(declared.colour))), "#RRGGBB"),
    }
    for field, low in (("models", 1), ("every_row", 0)):
        value = getattr(declared, field)
        rules[field] = type(value) is int and low <= value <= 1000, f"whole numbers from {low} to 1000"
    for field, known in (("ignores", OWN_GRAPH), ("optimizers", Method.optimizers)):
        value = getattr(declared, field)
        rules[field] = isinstance(value, tuple) and {*value} <= {*known}, f"tuples of {', '.join(known)}"
    for field, (fits, allowed) in rules.items():
        if not fits:
            value = getattr(declared, field)
            raise UserError(f"METHOD of the method {name} has {field}={value!r}; allowed are {allowed}")
    functions: dict[str, Any] = {call: getattr(module, call, None) for call in CALLS}
    for call, function in functions.items():
        if function is None and call in OPTIONAL:
            continue
        if not callable(function):
            must = "it must define init(fed) and round(fed, state, t)"
            raise UserError(f"the method {name} has no function {call}; {must}")
        try:
            inspect.signature(function).bind(*CALLS[call].split(","))
        except TypeError:
            given = f"{call}{inspect.signature(function)}"
            raise UserError(f"the method {name} defines {given}, which is called as {call}({CALLS[call]})") from None
    options = options_of(f"the method {name}", module)
    return dataclasses.replace(declared, title=declared.title or name, options=options, **functions)
