"""Top-k sending: a client sends the largest changes of its model since it sent last; what it keeps back is sent when it has grown.

The simulation puts whole rows: a real network would carry 2 * share of what `models received` counts, numbers and their places.
`--codec topk:SHARE` does the like for every method along a graph, and counts the bytes.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Method
from dpfl_mpi.settings import option

METHOD = Method(title="Top-k", topology="graph", searches=False)


@dataclass(frozen=True)
class Options:
    share: float = option(0.1, "share of its numbers that a client sends", above=0, high=1)


def init(fed):
    """The graph stays: a receiver adds up all that its senders have sent."""
    w = fed.common_row()
    fed.evaluate(w)
    graph = fed.collect([fed.shuffle(k, fed.reachable(k), 0)[: fed.most_senders[k]] for k in fed.ids])
    return {"client": {"w": w, "known": w.clone()}, "shared": {"chosen": graph}}


def round(fed, state, t):
    known, graph = state["client"]["known"], state["shared"]["chosen"]
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)
    change = w - known
    largest = change.abs().topk(max(1, int(fed.options["share"] * w.shape[1])), dim=1).indices
    known = known.scatter_add(1, largest, change.gather(1, largest))
    w = fed.average(w, graph, fed.exchange(known, graph))
    return {"client": {"w": w, "known": known}, "shared": {"chosen": graph}}
