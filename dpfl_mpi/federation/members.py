"""`Members`: who the clients are, which rank computes each, and who takes part in a round.

Clients of a rank are in decreasing order of training size; `ids` are their global numbers.

Axes: N clients in all, K on this rank, W row width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.limits import Limits
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi.placement import ids_of, place, rows_of
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.ensemble import LARGEST


class Members:
    """The clients of a run. Every array is the same on every rank but `ids` `[K]`."""

    def __init__(self, world: World, n_train: np.ndarray, p: np.ndarray, limits: Limits, exclude: bool):
        """Place the clients by their number of training samples `[N]`.

        Args:
            p: the weight of every client in an average `[N]`.
            exclude: a client whose model diverges is excluded; else it ends the run.
        """
        self.world, self.limits, self.exclude = world, limits, exclude
        self.n, self.p = len(p), p
        self.owner = place(n_train, world.size)  # the rank of every client
        self.rank_by_rank, self.row_of = rows_of(self.owner, n_train)
        self.ids = ids_of(self.owner, n_train, world.rank)
        self.per_rank = np.bincount(self.owner, minlength=world.size)  # K of every rank
        self.others = limits.others.copy()  # B_c - 1: how many other clients' models one average may take; diverged: 0
        self.reach = limits.reach  # whom each client can receive from; None: everyone
        self.alive = np.ones(self.n, bool)
        self.diverged_round = np.full(self.n, -1)
        self.begin(0)

    def begin(self, number: int) -> None:
        """Start a round: who takes part."""
        self.round = number
        self.present = self.limits.present(number)

    @property
    def flipped(self) -> np.ndarray:
        """Whose labels are flipped, bool `[N]`."""
        return self.limits.flipped

    @property
    def active(self) -> np.ndarray:
        """Who takes part in this round and has a finite model, bool `[N]`."""
        return self.alive & self.present

    def reachable(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending: all other clients it can reach that take part."""
        if not self.active[k]:
            return np.zeros(0, np.int64)
        near = np.flatnonzero(self.active) if self.reach is None else self.reach.of(k)
        return near[(near != k) & self.active[near]]

    def among_active(self, graph: CollaborationGraph) -> CollaborationGraph:
        """Return the edges of a graph between clients that take part in this round."""
        if self.active.all():
            return graph
        return graph.only(self.active[graph.receivers()] & self.active[graph.senders])

    def exclude_diverged(self, w_KW: Tensor) -> None:
        """Find clients whose row is not finite, or too large to sum, before any sum or reward: end the run, or exclude them.

        Collective. All ranks find out together: a rank that stopped alone would leave the others waiting for it.

        Raises:
            UserError: on every rank, where a client has diverged and none may be excluded.
        """
        largest = torch.linalg.vector_norm(w_KW, math.inf, dim=1)  # no copy of the rows; NaN where a weight is
        mine = (largest < LARGEST).cpu().numpy()  # false for NaN as well
        gathered = self.world.gather(mine.astype(np.uint8), self.owner, everywhere=True)
        assert gathered is not None
        finite = self._by_client(gathered).astype(bool)
        for k in np.flatnonzero(~finite & self.alive):
            if not self.exclude:
                raise UserError(
                    f"client {k} diverged in round {self.round}: its model is not finite or has a weight beyond {LARGEST:g}; "
                    "lower --lr, set --clip_norm, or --on_divergence exclude"
                )
            self.diverged_round[k] = self.round
        self.alive &= finite
        self.others[~self.alive] = 0

    # from the ranks to all, and to root ----------------------------------------------------------------------------------
    def collect(self, mine: Sequence[Senders]) -> CollaborationGraph:
        """Return on every rank the graph whose edges each rank knows for its own receivers. Collective."""
        lengths = self.world.gather(np.array([len(s) for s in mine], np.int64), self.owner, everywhere=True)
        assert lengths is not None
        receivers = np.repeat(self.rank_by_rank, lengths)
        edges = np.bincount(self.owner[receivers], minlength=self.world.size)  # of every rank
        senders = self.world.gather_ragged(np.concatenate([np.zeros(0, np.int64), *map(np.asarray, mine)]), edges)
        return CollaborationGraph.from_edges(self.n, receivers, senders)

    def to_root(self, rows: np.ndarray) -> np.ndarray | None:
        """Return on root `[N, ...]` in client order from every rank's `[K, ...]`; elsewhere None. Collective."""
        gathered = self.world.gather(rows, self.owner)
        return None if gathered is None else self._by_client(gathered)

    def _by_client(self, gathered: np.ndarray) -> np.ndarray:
        """Return gathered rows `[N, ...]`, which come rank by rank, in the order of the clients."""
        out = np.empty_like(gathered)
        out[self.rank_by_rank] = gathered
        return out
