"""Top-k sending: a client sends the largest changes of its model since it last sent.

Smaller changes are sent when they have grown. The simulation still puts whole rows; a network
would carry 2 * share of `models received`, values and indices. `--codec topk:SHARE` does the same
for every method with a graph, and counts the bytes.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Method
from dpfl_mpi.settings import option

METHOD = Method(title="Top-k", topology="graph", searches=False)


@dataclass(frozen=True)
class Options:
    share: float = option(0.1, "share of the parameters that a client sends", above=0, high=1)


def init(fed):
    """Choose the graph, which stays: a receiver adds up what its senders send."""
    w = fed.common_row()
    fed.evaluate(w)
    senders = [fed.shuffle(k, fed.reachable(k), 0)[: fed.most_senders[k]] for k in fed.ids]
    graph = fed.collect(senders)
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
