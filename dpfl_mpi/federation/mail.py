"""`Mail`: the verbs by which models and values move between clients."""

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
    """Rows leave as attack and packing make them, and count in the ledger. Verbs are collective."""

    def __init__(
        self, members: Members, attack: Attack, mailroom: Mailroom, ledger: Ledger, sends: str
    ):
        """`sends` says which setting keeps some columns at home, for error sentences."""
        self.members, self.attack, self.mailroom, self.ledger = members, attack, mailroom, ledger
        self.packing, self.ages, self.log = mailroom.packing, mailroom.ages, mailroom.log
        self.sends = sends
        self.all_arrived = False  # whether the rows staged last came to all

    def begin(self) -> None:
        """Start a round."""
        self.mailroom.begin()
        self.ledger.begin(self.members.learners)

    def exchange(self, w_KW: Tensor, graph: CollaborationGraph) -> Received:
        """Send every row along the graph; return what arrives (Algorithm 1, line 9). Collective.

        Where both ends take part. The models are here until the next sending.
        """
        self.members.check_graph(graph, "the graph of fed.exchange")
        self.members.exclude_diverged(w_KW)
        had_all = self.had_all(w_KW)
        self._stage(w_KW)
        return self.send(w_KW, graph, had_all)

    def send(self, w_KW: Tensor, graph: CollaborationGraph, had_all: bool = False) -> Received:
        """Send the staged rows as `exchange` does. Collective.

        They do not count if `had_all`: fed.every_row has brought them.
        """
        members, log = self.members, self.log
        graph = members.among_active(graph)
        if members.reach is not None and not graph.within(members.reach):
            whom = "its receiver; fed.reachable(k) names its candidates"
            raise UserError(f"the graph of fed.exchange has an edge outside the --reach of {whom}")
        if not (had_all and log.received_noted):
            degrees = graph.degrees()[members.ids]
            log.notes["models_received"] += degrees
            log.counted_twice += degrees * had_all
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

        On every rank with clients. A method sends nothing meanwhile. Rows count for candidates.
        """
        self.log.every_row = True
        return self.rows(w_KW, candidates)

    def rows(
        self, w_KW: Tensor, candidates: Candidates | None = None, whole: bool = True
    ) -> Iterator[tuple[int, Tensor]]:
        """Do what `every_row` does, with --candidates for the nearest alone.

        Rows that must be `whole` are refused where not all columns are sent: nobody completes them.
        """
        members = self.members
        if whole and self.packing.columns is not None:
            need = "fed.every_row and losses of all models need whole ones: allowed is all"
            raise UserError(f"{self.sends}; {need}")
        members.exclude_diverged(w_KW)
        had_all = self.ledger.counts and self.had_all(w_KW)
        self._stage(w_KW)
        if not had_all and members.stopped_serve:
            self.count_all(candidates or members.candidates())
        elif not had_all:
            self.ledger.to_server(members.active)
        self.all_arrived = True
        nearest = candidates.nearest if candidates else None
        return self.mailroom.rows_of_all(np.flatnonzero(members.active), nearest)

    def tell(self, values: np.ndarray, graph: CollaborationGraph | None = None) -> np.ndarray:
        """Return on every rank `[N, ...]` of all clients, from every rank's `[K, ...]`. Collective.

        These are values, no models, and true ones, also of liars. They cost their bytes along the
        edges of the graph; without one, from all to all in reach.
        """
        members, k = self.members, len(self.members.ids)
        if graph is not None:
            members.check_graph(graph, "the graph of fed.tell")
        if self.ages.count > 1:
            stale = f"--staleness is {self.ages.count - 1}"
            brings = "what fed.tell brings is of the same round, for which all wait: allowed is 0"
            raise UserError(f"{stale}; {brings}")
        known = isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
        if not known or values.shape[:1] != (k,):
            given = f"{type(values).__name__} of shape {getattr(values, 'shape', ())}"
            takes = f"it takes a NumPy array of {k} rows, one per client of this rank"
            raise UserError(f"fed.tell was given {given}; {takes}")
        # a rank without clients can have any type and shape
        kinds = members.world.texts(json.dumps([values.dtype.str, values.shape[1:]]) if k else "")
        first, *others = dict.fromkeys(filter(None, kinds))
        if others:
            two = f"arrays of {first} on one rank, and of {others[0]} on another"
            raise UserError(f"fed.tell was given {two}")
        kind, shape = json.loads(first)
        return self.spread(values if k else np.zeros((0, *shape), kind), graph)

    def spread(self, values: np.ndarray, graph: CollaborationGraph | None = None) -> np.ndarray:
        """Do what `tell` does, with any --staleness: a search takes values of its round."""
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
        """Return what others will know of this rank's rows, `[K, W]`. Collective."""
        members = self.members
        return self.packing.leaving(self.attack.sent(w_KW), members.active, members.in_rounds)

    def altered(self) -> np.ndarray:
        """Return which of this rank's clients may send what is not their row, local numbers."""
        return np.arange(len(self.members.ids)) if self.packing.encodes else self.attack.liars

    def had_all(self, w_KW: Tensor) -> bool:
        """Return whether fed.every_row has just brought these very rows to all. Collective."""
        if not self.log.every_row:
            return False
        same = self.all_arrived and self.packing.same(
            self.packing.outgoing[: len(w_KW)], self.leaving(w_KW).detach(), self.members.active
        )
        return not self.members.world.agree(not same)

    def _stage(self, w_KW: Tensor) -> None:
        with self.log.clock("exchange"):
            self.mailroom.stage(self.leaving(w_KW))
        if self.packing.columns is not None:
            self.packing.own = w_KW
        self.all_arrived = False

    def ask(self, candidates: Candidates) -> None:
        """Let all that have room ask their candidates now. Collective."""
        self.ledger.ask(candidates.room > 0)

    def count_all(self, candidates: Candidates) -> None:
        """Count the models of all candidates, in phases of a client's room. Collective.

        Each client begins with the candidate after its own number.
        """
        phase = 0
        self.ask(candidates)
        while self.ledger.counts:
            lists = []
            for k, room in enumerate(candidates.room.tolist()):
                found = candidates.asked_by(k)
                found = np.roll(found, -np.searchsorted(found, k))
                lists.append(found[phase * room : (phase + 1) * room])
            if not any(map(len, lists)):
                return
            self.ledger.send(CollaborationGraph.from_lists(lists), self.members.in_rounds)
            self.ask(candidates)
            phase += 1

    def state(self) -> tuple[dict[str, Tensor | np.ndarray], dict[str, np.ndarray]]:
        """Return what a checkpoint stores: of this rank's clients `[K, ...]`, and of all ranks."""
        local, shared = self.packing.state()
        return local, shared | self.ledger.state()
