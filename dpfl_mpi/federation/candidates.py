"""`Candidates`: whom each client may ask for a model, and how many models it may average with."""

import functools
from dataclasses import dataclass

import numpy as np

from dpfl_mpi.graph import CollaborationGraph


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of every client at one moment of a round. All ranks have the same."""

    receives: np.ndarray  # bool [N]: who may ask
    sends: np.ndarray  # bool [N]: who may be asked
    room: np.ndarray  # int64 [N]: how many others' models a client may average with
    reach: CollaborationGraph | None  # the senders that each receiver can reach; None: everyone
    stays: CollaborationGraph | None = None  # edges that a repair keeps: no candidates
    nearest: CollaborationGraph | None = None  # with --candidates: only the M most similar clients

    def of(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending, whether or not it has room for any."""
        if not self.receives[k]:
            return np.zeros(0, np.int64)
        graph = self.nearest or self.reach
        if graph is None and self.stays is None:  # the usual case, without a comparison per sender
            if not self.sends[k]:
                return self._senders.copy()
            return np.delete(self._senders, self._senders.searchsorted(k))
        found = self._senders if graph is None else graph.of(k)
        if self.stays is not None:
            found = np.setdiff1d(found, self.stays.of(k))
        return found[(found != k) & self.sends[found]]

    def asked_by(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending; none where it has no room."""
        return self.of(k) if self.room[k] > 0 else np.zeros(0, np.int64)

    @property
    def unrestricted(self) -> bool:
        """Whether every receiver may ask every sender."""
        return self.reach is None and self.stays is None and self.nearest is None

    @functools.cached_property
    def _senders(self) -> np.ndarray:
        return np.flatnonzero(self.sends)
