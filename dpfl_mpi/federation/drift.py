"""--drift SHARE:ROUND: from that round on, a share of the clients has the labels of two classes exchanged.

The two classes are drawn once for all clients, and who drifts is drawn once, too. A drifting client that holds neither class sees no change. Its
training, validation and test labels change together. From then on the best model of every client is the best since the drift.

Axes: N clients, K on this rank.
"""

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.values import of_clients


class Drift:
    """Who drifts, when, and between which classes."""

    def __init__(self, run: Resolved, classes: int):
        share, self.round = (run.drift.share, run.drift.round) if run.drift else (0.0, 0)  # round 0: never
        self.drifted = np.zeros(run.clients, bool)
        order = streams.stream(run.seed, streams.DRIFT, 0, 0).permutation(run.clients)
        self.drifted[order[: of_clients(share, run.clients)]] = True
        self.classes = np.sort(streams.stream(run.seed, streams.DRIFT, 0, 1).permutation(classes)[:2])
        self.done = False

    def due(self, number: int) -> bool:
        """Return whether the classes change their names as round `number` begins."""
        return 0 < self.round <= number and not self.done

    @property
    def awaited(self) -> bool:
        """Whether the drift is still to come. Until then nobody stops early: a client that has stopped would never see it."""
        return self.round > 0 and not self.done

    def happen(self, members: Members, scoring: Scoring) -> None:
        """Exchange the two classes in the labels of this rank's drifting clients, and forget the best model of every client."""
        self.done = True
        a, b = (int(c) for c in self.classes)
        scoring.backend.exchange_classes(np.flatnonzero(self.drifted[members.ids]), a, b)
        scoring.forget_best()
        scoring.stale[:] = 0
