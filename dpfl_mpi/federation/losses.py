"""`Losses`: the loss of single models on the receivers' validation images."""

import numpy as np
from torch import Tensor

from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.similar import Similar
from dpfl_mpi.transport.passes import Received


class Losses:
    def __init__(self, scoring: Scoring, mail: Mail, similar: Similar):
        self.scoring, self.mail, self.similar = scoring, mail, similar
        self.members, self.log = mail.members, mail.log

    def losses_of_all(self, w_KW: Tensor, candidates: Candidates | None = None) -> np.ndarray:
        """Return the loss of every candidate's model for each local client, `[K, N]`. Collective.

        It is taken on the validation images that the search sees, and NaN for other clients.
        Counts evaluations, and no models received.
        """
        return self.of_candidates(w_KW, self.similar.candidates(w_KW, candidates))

    def of_candidates(self, w_KW: Tensor, candidates: Candidates) -> np.ndarray:
        """Return the same of just these candidates."""
        ids = self.members.ids
        losses = np.full((len(ids), self.members.n), np.nan)
        asks = np.zeros(losses.shape, bool)
        for i, k in enumerate(ids):
            asks[i, candidates.asked_by(k)] = True
        for j, row_W in self.mail.every_row(w_KW, candidates):
            with self.log.clock("graph"):
                losses[:, j] = self.scoring.losses(row_W, asks[:, j])
        return losses

    def of_received(self, received: Received) -> np.ndarray:
        """Return the loss of every model that each local client received, else NaN, `[K, N]`."""
        lists = [received.graph.of(k) for k in self.members.ids]
        losses = np.full((len(lists), self.members.n), np.nan)
        # else receivers have different versions of a row, or complete it by their own layers
        alike = self.mail.ages.count == 1 and self.mail.packing.columns is None
        for here, batch in received.passes(lists):
            for j in np.unique(np.concatenate([np.zeros(0, np.int64), *batch])):
                asks = np.array([j in senders for senders in batch])
                for scored in [asks] if alike else np.eye(len(asks), dtype=bool)[asks]:
                    i = int(scored.argmax())
                    row_W = here.rows([j], i)[0]
                    losses[scored, j] = self.scoring.losses(row_W, scored)[scored]
        return losses
