"""`Similar`: with --candidates M, a client asks only the M most similar clients."""

import math
from dataclasses import replace

import numpy as np
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.sketches import nearest, sketches


class Similar:
    def __init__(self, mail: Mail, ensemble: Ensemble, *, most: float, seed: int, init: str):
        """Keep the `most` similar clients, infinity: all; `seed` and `init` give the first row."""
        self.mail, self.members, self.ensemble = mail, mail.members, ensemble
        self.most, self.seed, self.init = most, seed, init

    def candidates(self, w_KW: Tensor, given: Candidates | None) -> Candidates:
        """Return whom clients with these rows may ask, of the candidates given or all. Collective.

        Clients exchange sketches of how far the rows that leave them are from the initial row.
        """
        members = self.members
        members.exclude_diverged(w_KW)  # a client that diverges now is no candidate
        found = members.candidates(given.room, given.stays) if given else members.candidates()
        if math.isinf(self.most):
            return found
        sketches_NE = self._sketches(w_KW, found)
        with self.mail.log.clock("graph"):
            lists = nearest(members.ids, sketches_NE, found.asked_by, int(self.most))
        return replace(found, nearest=members.collect(lists))

    def _sketches(self, w_KW: Tensor, candidates: Candidates) -> np.ndarray:
        """Return the sketches of all clients, int8 `[N, E]`. Collective."""
        mail, ensemble, active = self.mail, self.ensemble, self.members.active
        start = ensemble.initial_row(self.init, streams.stream(self.seed, streams.INIT, 0, 0))
        columns = mail.packing.columns
        sent = slice(ensemble.size) if columns is None else columns
        along = None
        if mail.ledger.counts:
            mail.ask(candidates)
            lists = map(candidates.asked_by, range(self.members.n))
            along = CollaborationGraph.from_lists(lists)
        with mail.log.clock("graph"):
            rows = mail.leaving(w_KW)[:, sent]
            local = sketches(rows, start[sent], active[self.members.ids], self.seed)
            return mail.spread(local, along)
