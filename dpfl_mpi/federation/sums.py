"""`Sums`: weighted sums over clients: the average along a graph (equation 4), the mean of all, and w^Y of the greedy search.

Where different paths to a sum must give the same bits, it is exact: fixed-point numbers, whose order and grouping do not matter.

Axes: N clients in all, K on this rank, W row width.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.log import Log
from dpfl_mpi.federation.mail import MailRoom, Received
from dpfl_mpi.federation.members import Members
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics.ensemble import Ensemble, check_fixed_point, fixed_point, from_fixed_point


class Sums:
    """Sums of p_i w_i. Every method is collective."""

    def __init__(self, members: Members, log: Log, mail: MailRoom, ensemble: Ensemble, blocks: list[slice]):
        self.members, self.log, self.mail, self.ensemble, self.blocks = members, log, mail, ensemble, blocks

    def average(self, w_KW: Tensor, graph: CollaborationGraph, received: Received | None = None) -> Tensor:
        """Return sum p_i w_i / sum p_i over each client and its senders (equation 4), `[K, W]`; see `Federation.average`."""
        members, p = self.members, self.members.p
        if received is None:
            received = self.mail.exchange(w_KW, graph)
        out = w_KW.clone()
        graph = members.among_active(graph)
        if (graph.degrees() > members.others).any():
            raise ValueError("more models for a client than its budget")
        local = [graph.of(k) for k in members.ids]
        total = self.ensemble.zeros(len(members.ids), torch.float64)
        with self.log.clock("exchange"), torch.no_grad():
            for b in self.blocks:
                total[b] = w_KW[b].double() * self.ensemble.column(p[members.ids[b]])
            for here, now in received.passes(local):  # ascending: the order of the sum does not depend on passes
                for b in self.blocks:
                    for rows, p_k in here.one_by_one(b, now[b]):
                        total[b] += rows.double() * p_k[:, None]
            for i, senders in enumerate(local):
                if len(senders):
                    out[i] = total[i] / float(p[members.ids[i]] + p[senders].sum())
        return out

    def mean(self, w_KW: Tensor) -> Tensor:
        """Return the exact p-weighted mean over all clients that take part, `[W]`: the same bits for any number of ranks.

        Each of them sent its row up and gets the mean back: two models per client.
        """
        members = self.members
        members.exclude_diverged(w_KW)
        if not members.active.any():
            raise UserError(
                f"round {members.round} has no client with a finite model left; lower --lr or set --clip_norm"
            )
        with self.log.clock("exchange"):
            self.log.notes["models_received"] += 2 * members.active[members.ids]
            return (from_fixed_point(self._over_all(w_KW)) / float(members.p[members.active].sum())).float()

    def over_received(self, received: Received) -> tuple[Tensor, np.ndarray]:
        """Return w^Y over each client and the senders it received from, float64 `[K, W]`, and its sum of p `[K]`."""
        members, w_KW = self.members, received.w
        lists = [received.graph.of(k) for k in members.ids]
        total = self._zeros()
        self._check(w_KW)
        for here, now in received.passes(lists):
            for b in self.blocks:
                for rows, p_k in here.one_by_one(b, now[b]):
                    total[b] += fixed_point(rows, p_k)
        for b in self.blocks:
            ids = members.ids[b]
            total[b] += fixed_point(w_KW[b], self.ensemble.column(members.p[ids] * members.active[ids])[:, 0])
        # fsum: the same bits as in `over_reachable`, whatever the order
        shares = [math.fsum([members.p[k], *members.p[s]]) for k, s in zip(members.ids, lists, strict=True)]
        return from_fixed_point(total), np.array(shares)

    def over_reachable(self, w_KW: Tensor) -> tuple[Tensor, np.ndarray]:
        """Return w^Y over each client and all it can reach, float64 `[K, W]`, and its sum of p `[K]` (Algorithm 3, lines 1-7)."""
        members, received = self.members, self.log.notes["models_received"]
        members.exclude_diverged(w_KW)
        wants = members.others[members.ids] > 0
        if members.reach is None:  # everyone reaches everyone: one exact sum serves all
            with self.log.clock("exchange"):
                received += np.where(wants, int(members.active.sum()) - 1, 0)
                total = from_fixed_point(self._over_all(w_KW))
                return total.expand(len(w_KW), -1), np.full(len(w_KW), math.fsum(members.p[members.active]))
        sets = [
            np.union1d(members.reachable(k), [k]) if want else np.array([k])
            for k, want in zip(members.ids, wants, strict=True)
        ]
        received += np.array([len(s) - 1 for s in sets], np.int64)
        total = self._zeros()
        self._check(w_KW)
        for j, row_W in self.mail.every_row(w_KW):
            term = self._term(j, row_W)
            for i, members_i in enumerate(sets):
                if j in members_i:
                    total[i] += term
        return from_fixed_point(total), np.array([math.fsum(members.p[s]) for s in sets])

    def _zeros(self) -> Tensor:
        """Return sums to begin with: fixed-point zeros `[K, W]`."""
        return self.ensemble.zeros(len(self.members.ids), torch.int64)

    def _check(self, w_KW: Tensor) -> None:
        """Raise `UserError` where a row that is summed is too large for exact sums."""
        check_fixed_point(w_KW[np.flatnonzero(self.members.active[self.members.ids])])

    def _term(self, k: int, row_W: Tensor) -> Tensor:
        """Return client k's term p_k w_k of an exact sum, fixed-point int64 `[W]`."""
        return fixed_point(row_W[None], self.ensemble.column(self.members.p[k : k + 1])[:, 0])[0]

    def _over_all(self, w_KW: Tensor) -> Tensor:
        """Return the fixed-point sum of p_i w_i over all clients that take part, int64 `[W]`."""
        members = self.members
        total = self.ensemble.zeros(1, torch.int64)[0]
        self._check(w_KW)
        for i in np.flatnonzero(members.active[members.ids]):
            total += self._term(members.ids[i], w_KW[i])
        return torch.from_numpy(members.world.sum_int64(total.cpu().numpy())).to(self.ensemble.device)
