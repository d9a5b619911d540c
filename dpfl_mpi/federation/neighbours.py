"""`Neighbours`: what clients learn of one another outside of the search for collaborators.

`candidates` leaves each client the most similar others (--candidates). The verbs of `fed` are
`losses_of_all`, on clients' validation images, and `repaired`, after some joined or left (--churn).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.federation.members import Candidates
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics.sketches import nearest, sketches
from dpfl_mpi.transport.mailroom import Received

# what a repair costs, and the note that counts it
COSTS = {"repair_models": "models_received", "repair_evaluations": "evaluations"}


class Neighbours:
    def __init__(
        self, scoring: Scoring, mail: Mail, start_W: Tensor, *, most: float, seed: int, churn: bool
    ):
        """`start_W` `[W]`: the common initial row; `most`: M of --candidates, infinite if unset."""
        self.scoring, self.mail, self.start = scoring, mail, start_W
        self.members, self.log = mail.members, mail.log
        self.most, self.seed, self.churn = most, seed, churn

    def candidates(self, w_KW: Tensor, given: Candidates | None) -> Candidates:
        """Return whom clients with these rows may ask, of the candidates given or all. Collective.

        With --candidates M these are the M most similar. To compare themselves clients exchange
        sketches: a few bytes that stand for how their row differs from the common initial row.
        """
        members = self.members
        members.exclude_diverged(w_KW)  # a client that diverges now is no candidate
        found = members.candidates(given.room, given.stays) if given else members.candidates()
        if math.isinf(self.most):
            return found
        sketches_NE = self._sketches(w_KW, found)
        with self.log.clock("graph"):
            lists = nearest(members.ids, sketches_NE, found.asked_by, int(self.most))
        return replace(found, nearest=members.collect(lists))

    def _sketches(self, w_KW: Tensor, candidates: Candidates) -> np.ndarray:
        """Return the sketches of all clients, E entries each, int8 `[N, E]`. Collective."""
        mail, members = self.mail, self.members
        columns = mail.packing.columns
        sent = slice(mail.packing.ensemble.size) if columns is None else columns
        along = None
        if mail.ledger.counts:  # only the count of bytes needs to know who asked whom
            mail.ask(candidates)
            along = CollaborationGraph.from_lists(map(candidates.asked_by, range(members.n)))
        with self.log.clock("graph"):
            rows, active = mail.leaving(w_KW)[:, sent], members.active[members.ids]
            return mail.spread(sketches(rows, self.start[sent], active, self.seed), along)

    def losses_of_all(self, w_KW: Tensor, candidates: Candidates | None = None) -> np.ndarray:
        """Return the loss of every candidate's model for each local client, `[K, N]`. Collective.

        It is taken on the validation images that the search sees, and NaN for other clients. Counts
        evaluations, and no models received.
        """
        return self.losses_of(w_KW, self.candidates(w_KW, candidates))

    def losses_of(self, w_KW: Tensor, candidates: Candidates) -> np.ndarray:
        """Return what `losses_of_all` does, of just these candidates. Collective."""
        ids = self.members.ids
        losses = np.full((len(ids), self.members.n), np.nan)
        asks = np.zeros(losses.shape, bool)
        for i, k in enumerate(ids):
            asks[i, candidates.asked_by(k)] = True
        for j, row_W in self.mail.every_row(w_KW, candidates):
            with self.log.clock("graph"):
                losses[:, j] = self.scoring.losses(row_W, asks[:, j])
        return losses

    def losses_of_received(self, received: Received) -> np.ndarray:
        """Return the loss of every model that each local client received, else NaN, `[K, N]`."""
        losses = np.full((len(self.members.ids), self.members.n), np.nan)
        for i, senders, w_mW in received.models():
            losses[i, senders] = self.scoring.validation_losses(i, w_mW)
        return losses

    def repaired(
        self, graph: CollaborationGraph, choose: Callable[[Candidates], CollaborationGraph]
    ) -> CollaborationGraph:
        """Return the graph without clients that have left, and with new edges. Collective.

        A client that has joined chooses all its senders anew. One that lost senders chooses as many
        others.
        `choose(candidates)` returns the new edges: at most `candidates.room` for each client.
        """
        members, notes = self.members, self.log.notes
        if not self.churn:
            return graph
        receivers, learners = graph.receivers(), members.learners
        # by edge; absent clients keep theirs until they are back
        gone = members.yet_to_choose[receivers] | ~members.joined[graph.senders]
        staying = graph.only(~(gone & learners[receivers]))
        budget = members.most_senders
        lost = np.minimum(graph.degrees() - staying.degrees(), budget)
        room = np.where(members.yet_to_choose & learners, budget, lost)
        members.yet_to_choose &= ~learners
        if not room.any():
            return staying
        # what the repair costs is counted among all costs, and also by itself
        before = {note: notes[note].copy() for note in COSTS.values()}
        with self.log.clock("graph"):
            found = choose(members.candidates(room, staying))
        for cost, note in COSTS.items():
            notes[cost] += notes[note] - before[note]
        return staying | found
