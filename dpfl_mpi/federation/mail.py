"""`Mail`: the verbs of `fed` by which models and values move between clients.

`Mailroom` (transport/mailroom.py) moves the rows, i.e. models. `Ledger` (transport/ledger.py)
counts what that costs on a network. `Attack` (attack.py) has attackers send false rows. `Packing`
(transport/packing.py) sends only some columns, or encodes rows. A sending is any exchange of rows.
"""

import json
import math
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.federation.members import Candidates, Members
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.transport.ledger import Ledger
from dpfl_mpi.transport.mailroom import Mailroom, Received


class Mail:
    """The mail of this rank's clients. Its verbs are collective."""

    def __init__(
        self, members: Members, attack: Attack, mailroom: Mailroom, ledger: Ledger, sends: str
    ):
        """`sends` names the setting that keeps columns from being sent; errors begin with it."""
        self.members, self.attack, self.mailroom, self.ledger = members, attack, mailroom, ledger
        self.packing, self.ages, self.log = mailroom.packing, mailroom.ages, mailroom.log
        self.sends = sends
        self.all_arrived = False  # whether the rows that were sent last came to all clients

    def begin(self) -> None:
        """Begin a round: who was absent in the last one has none of its rows."""
        self.all_arrived = False
        self.mailroom.begin()

    def exchange(self, w_KW: Tensor, graph: CollaborationGraph) -> Received:
        """Send rows along the graph; return the models received (Algorithm 1, line 9). Collective.

        Both ends of an edge must take part. The models are valid until the next sending.
        """
        self.members.check_graph(graph, "the graph of fed.exchange")
        self.members.exclude_diverged(w_KW)
        all_have_them = self.had_all(w_KW)
        self._stage(w_KW)
        return self.send(w_KW, graph, all_have_them)

    def send(
        self, w_KW: Tensor, graph: CollaborationGraph, all_have_them: bool = False
    ) -> Received:
        """Send the staged rows along a graph. Collective.

        Rows that fed.every_row has brought to all clients before (`all_have_them`) are not counted
        again where fed.note_received says what was received.
        """
        members, log = self.members, self.log
        makes = "fed.collect makes one graph of what each rank chose"
        arrays = graph.indptr, graph.senders
        self.mailroom.check_alike("the graph of fed.exchange is", arrays, makes)
        graph = members.among_active(graph)
        if members.reach is not None and not graph.within(members.reach):
            whom = "its receiver; fed.reachable(k) names its candidates"
            raise UserError(f"the graph of fed.exchange has an edge outside the --reach of {whom}")
        if not (all_have_them and log.received_noted):
            degrees = graph.degrees()[members.ids]
            log.notes["models_received"] += degrees
            log.counted_twice += degrees * all_have_them
            self.ledger.send(graph, members.in_rounds)
        try:
            return Received(self.mailroom, w_KW, graph)
        except UserError:
            members.check_budget(graph, "the graph of fed.exchange")  # the likelier cause
            raise

    def every_row(
        self, w_KW: Tensor, candidates: Candidates | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield `(j, copy of its row [W])` of every active client, in client order. Collective.

        All ranks with clients get them. Send nothing else until the iteration ends. On a network
        the rows of each client's `candidates` count as sent to it.
        """
        self.log.every_row_called = True
        return self.rows(w_KW, candidates)

    def rows(
        self, w_KW: Tensor, candidates: Candidates | None = None, whole: bool = True
    ) -> Iterator[tuple[int, Tensor]]:
        """Do what `every_row` does, except that --candidates limits the rows to the nearest.

        Rows that must be `whole` are a `UserError` where only some columns are sent.
        """
        members = self.members
        if whole and self.packing.columns is not None:
            need = "fed.every_row and losses of all models need whole ones: allowed is all"
            raise UserError(f"{self.sends}; {need}")
        members.exclude_diverged(w_KW)
        had_all = self.ledger.counts and self.had_all(w_KW)
        self._stage(w_KW)
        # on a network each candidate sends its row, or a server all of them if the method has one
        if not had_all and members.stopped_serve:
            self.count_all(candidates or members.candidates())
        elif not had_all:
            self.ledger.to_server(members.active)
        self.all_arrived = True
        nearest = candidates.nearest if candidates else None
        return self.mailroom.rows_of_all(np.flatnonzero(members.active), nearest)

    def tell(self, values: np.ndarray, graph: CollaborationGraph | None = None) -> np.ndarray:
        """Return the values of all clients, `[N, ...]`, from this rank's `[K, ...]`. Collective.

        Attackers send true values here. On a network the values cost their bytes along the edges
        of the graph; without one, from every client to all that can reach it.
        """
        members, k = self.members, len(self.members.ids)
        if graph is not None:
            members.check_graph(graph, "the graph of fed.tell")
        if self.ages.count > 1:
            stale = f"--staleness is {self.ages.count - 1}"
            brings = "fed.tell brings values of the same round, for which all wait: allowed is 0"
            raise UserError(f"{stale}; {brings}")
        known = isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
        if not known or values.shape[:1] != (k,):
            given = f"{type(values).__name__} of shape {getattr(values, 'shape', ())}"
            takes = f"it takes a NumPy array of {k} rows, one per client of this rank"
            raise UserError(f"fed.tell was given {given}; {takes}")
        # a rank without clients takes type and shape of the others
        kinds = members.world.texts(json.dumps([values.dtype.str, values.shape[1:]]) if k else "")
        first, *others = dict.fromkeys(filter(None, kinds))
        if others:
            two = f"arrays of {first} on one rank, and of {others[0]} on another"
            raise UserError(f"fed.tell was given {two}")
        kind, shape = json.loads(first)
        return self.spread(values if k else np.zeros((0, *shape), kind), graph)

    def spread(self, values: np.ndarray, graph: CollaborationGraph | None = None) -> np.ndarray:
        """Return the values of all clients, `[N, ...]`, as `tell` does, without its checks.

        The search calls it also under --staleness, and its values are of the same round. The graph
        decides only what they cost.
        """
        members = self.members
        if self.ledger.counts:
            if graph is None:
                reachable = map(members.reachable, range(members.n))
                graph = CollaborationGraph.from_lists(reachable)
            size = values.itemsize * math.prod(values.shape[1:])
            self.ledger.tell(members.among_active(graph), size)
        with self.log.clock("exchange"):
            return members.of_all(values)

    def narrow(self, graph: CollaborationGraph) -> None:
        """Give the window just the slots that a graph needs; free the old one first. Collective."""
        self.members.check_graph(graph, "the graph of fed.narrow")
        alive = self.members.alive
        if not alive.all():  # a client that has diverged sends and receives no more
            graph = graph.only(alive[graph.receivers()] & alive[graph.senders])
        self.mailroom.narrow(graph)

    def leaving(self, w_KW: Tensor) -> Tensor:
        """Return this rank's rows as others will receive them, `[K, W]`. Collective."""
        members = self.members
        return self.packing.leaving(self.attack.sent(w_KW), members.active, members.in_rounds)

    def had_all(self, w_KW: Tensor) -> bool:
        """Return whether fed.every_row was the last to send, and sent these rows. Collective."""
        if not self.log.every_row_called:
            return False
        same = self.all_arrived and self.packing.same(
            self.packing.outgoing[: len(w_KW)], self.leaving(w_KW).detach(), self.members.active
        )
        return not self.members.world.agree(not same)

    def _stage(self, w_KW: Tensor) -> None:
        """Copy the rows, as others will receive them, to be sent. Collective."""
        with self.log.clock("exchange"):
            self.mailroom.stage(self.leaving(w_KW))
        if self.packing.columns is not None:
            self.packing.local_rows = w_KW
        self.all_arrived = False

    def ask(self, candidates: Candidates) -> None:
        """Let clients that may choose any ask for models now, on the ledger's clock. Collective."""
        self.ledger.ask(candidates.room > 0)

    def count_all(self, candidates: Candidates) -> None:
        """Let the ledger count the models of all candidates as sent. Collective.

        In each phase a client gets as many as it has room for. It begins with the candidate after
        its own number, so that not all ask the same one at once.
        """
        phase = 0
        self.ask(candidates)
        while self.ledger.counts:
            lists = []
            for k, room in enumerate(candidates.room.tolist()):
                asked = candidates.asked_by(k)
                asked = np.roll(asked, -np.searchsorted(asked, k))
                lists.append(asked[phase * room : (phase + 1) * room])
            if not any(map(len, lists)):
                return
            self.ledger.send(CollaborationGraph.from_lists(lists), self.members.in_rounds)
            self.ask(candidates)
            phase += 1

    def state(self) -> tuple[dict[str, Tensor | np.ndarray], dict[str, np.ndarray]]:
        """Return what a checkpoint stores: of this rank's clients `[K, ...]`, and of all ranks."""
        local, shared = self.packing.state()
        return local, shared | self.ledger.state()
