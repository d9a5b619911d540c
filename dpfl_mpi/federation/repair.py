"""`Repair`: what --churn changes in a collaboration graph."""

from collections.abc import Callable

import numpy as np

from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.members import Members
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.transport.log import Log

# what a repair costs, and the note that counts it
COSTS = {"repair_models": "models_received", "repair_evaluations": "evaluations"}


class Repair:
    def __init__(self, members: Members, log: Log, churn: bool):
        self.members, self.log, self.churn = members, log, churn

    def repaired(
        self, graph: CollaborationGraph, choose: Callable[[Candidates], CollaborationGraph]
    ) -> CollaborationGraph:
        """Return the graph without clients that have left, and with new edges. Collective.

        A client that has joined chooses anew. A client that lost collaborators looks for as many
        others. `choose(candidates)` returns the new edges, within the room of these candidates.
        """
        members, notes = self.members, self.log.notes
        if not self.churn:
            return graph
        receivers, learners = graph.receivers(), members.learners
        gone = members.yet_to_choose[receivers] | ~members.joined[graph.senders]
        kept = graph.only(~(gone & learners[receivers]))
        budget = members.most_senders
        lost = np.minimum(graph.degrees() - kept.degrees(), budget)
        room = np.where(members.yet_to_choose & learners, budget, lost)
        members.yet_to_choose &= ~learners
        if not room.any():
            return kept
        before = {note: notes[note].copy() for note in COSTS.values()}
        with self.log.clock("graph"):
            found = choose(members.candidates(room, kept))
        for cost, note in COSTS.items():
            notes[cost] += notes[note] - before[note]
        return kept | found
