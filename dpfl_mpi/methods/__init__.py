"""The methods, one file each (docs/extend-methods.md). `load` checks what a file declares.

The engine calls a file's functions with a `Federation`, `fed`, whose verbs train, send and average.
Axes: K clients on this rank, W row width.
"""

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings.fields import NoOptions, allowed, field_types, fits, options_of

if TYPE_CHECKING:  # for annotations alone: a laptop without PyTorch lists methods
    from torch import Tensor as Tensor

    from dpfl_mpi.federation import Federation as Federation
    from dpfl_mpi.federation.members import Candidates as Candidates
    from dpfl_mpi.numerics.backend import Gradient as Gradient
    from dpfl_mpi.numerics.backend import Predict as Predict
    from dpfl_mpi.transport.mailroom import Received as Received
else:
    Candidates = Federation = Gradient = Predict = Received = Tensor = Any
State = dict[str, dict[str, Any]]
Topology = Literal["none", "server", "graph"]
PARAMETERS = {  # of the functions that a method's file defines
    "init": "fed",
    "round": "fed, state, t",
    "finetune_gradient": "fed, start",
    "newcomer": "fed, state",
}
OPTIONAL = ("finetune_gradient", "newcomer")
OWN_GRAPH = ("omega_period", "graphs")  # settings that a graph drawn anew in each round ignores
# what some methods do not read (`Method.unread`): of the budget, of any graph, of the search
OF_BUDGET = {"budget", "budget_counts_self"}
OF_GRAPHS = {*OF_BUDGET, "reach", "flipped_run_ggc", *OWN_GRAPH}
OF_SEARCH = {"ggc_period", "ggc_off_rounds"}
OPTIMIZERS = ("sgd", "adam", "adamw")
MOST_PER_ROUND = 1000  # of `Method.models` and of `Method.every_row`


@dataclasses.dataclass(frozen=True)
class Newcomer:
    """How a client starts that joins after the last round; see the verbs of `Federation`."""

    start: Any  # rows [K, W], trained in place
    gradient: Any = None
    trained: Any = None  # bool [W]: the columns that are not frozen
    predict: Any = None


@dataclasses.dataclass(frozen=True)
class Method:
    """A method: what its file declares, and its functions, which `load` fills in."""

    title: str = ""  # in tables; empty: the file's name
    citation: str = ""  # BibTeX
    look: str = ""  # in figures: "#RRGGBB -- s", see docs/extend-methods.md
    # between whom models move: nobody, clients and a server, or clients along a graph
    topology: Topology = "graph"
    searches: bool = True  # of a graph: the greedy search chooses it, so ggc_* are read
    asks_all: bool = False  # of a graph: to choose, a client receives and scores all in reach
    ignores: tuple[str, ...] = ()  # of a graph: settings of OWN_GRAPH that it does not read
    given: bool = False  # of a graph: that of --graphs, so the budget is what it takes
    preprocesses: bool = False  # init trains tau_init epochs, and a run has two rounds fewer
    finetunes: bool = True  # only the rows are scored, so +FT may train them
    # that each client trains in a round, tau_train epochs each
    models: int = dataclasses.field(default=1, metadata={"low": 1, "high": MOST_PER_ROUND})
    # only models leave a client, so --attack can falsify all that does; False: sketches, say, too
    sends_models: bool = True
    sends: str = ""  # of a graph: the layers that leave a client, as --send layers=; empty: all
    # calls of fed.every_row in a round
    every_row: int = dataclasses.field(default=0, metadata={"low": 0, "high": MOST_PER_ROUND})
    optimizers: tuple[str, ...] = OPTIMIZERS  # fewer where it takes steps of its own
    # Besides the verbs it computes without sums, exp or log, so the kernels give it the same bits
    # on all processors.
    elementwise: bool = False
    init: Callable[[Any], State] = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]
    round: Callable[[Any, State, int], State] = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]
    finetune_gradient: Callable[[Any, Any], Any] | None = dataclasses.field(
        default=None, repr=False
    )
    newcomer: Callable[[Any, State], Newcomer] | None = dataclasses.field(default=None, repr=False)
    options: type = NoOptions

    @property
    def unread(self) -> set[str]:
        """Names of settings that this method does not read, so they do not tell Runs apart."""
        out = set(self.ignores)
        if not self.preprocesses:
            out.add("tau_init")
        if self.topology != "graph":
            out |= OF_GRAPHS
        if self.given:
            out |= OF_BUDGET
        if self.topology == "none":
            out.add("staleness")
        if self.topology != "graph" or not self.searches:
            out |= OF_SEARCH
        return out


def load(name: str, module: ModuleType) -> Method:
    """Return the method of a module; a `UserError` names what breaks the contract."""
    declared = getattr(module, "METHOD", Method())
    if not isinstance(declared, Method):
        must = "it must be a Method(...) of dpfl_mpi.methods"
        raise UserError(f"METHOD of the method {name} is {declared!r}; {must}")
    for f in dataclasses.fields(Method):
        value, field_type = getattr(declared, f.name), field_types(Method)[f.name]
        right, may = fits(value, field_type, f.metadata), allowed(f, field_type)
        if of := {"ignores": OWN_GRAPH, "optimizers": OPTIMIZERS}.get(f.name):
            right = isinstance(value, tuple) and {*value} <= {*of}
            may = f"are tuples of {', '.join(of)}"
        if not right:
            raise UserError(f"METHOD of the method {name} has {f.name}={value!r}; allowed {may}")
    functions = {call: function_of(name, module, call) for call in PARAMETERS}
    options = options_of(f"the method {name}", module)
    title = declared.title or name
    return dataclasses.replace(declared, title=title, options=options, **functions)


def function_of(name: str, module: ModuleType, call: str) -> Any:
    """Return a module's function of this name; None where it may be missing."""
    function = getattr(module, call, None)
    if function is None and call in OPTIONAL:
        return None
    if not callable(function):
        must = "it must define init(fed) and round(fed, state, t)"
        raise UserError(f"the method {name} has no function {call}; {must}")
    try:
        inspect.signature(function).bind(*PARAMETERS[call].split(","))
    except TypeError:
        defined = f"{call}{inspect.signature(function)}"
        called = f"{call}({PARAMETERS[call]})"
        raise UserError(
            f"the method {name} defines {defined}, which is called as {called}"
        ) from None
    return function
