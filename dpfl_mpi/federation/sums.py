"""`Sums`: weighted sums over clients: the average along a graph (equation 4), the mean of all, and the exact sum that the search's w^Y starts from."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.mail import MailRoom, Received
from dpfl_mpi.federation.members import Phase
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.numerics.ensemble import check_fixed_point, fixed_point, from_fixed_point
from dpfl_mpi.settings import Resolved


class Sums:
    """Sums of p_i w_i. Every public method is collective."""

    def __init__(self, mail: MailRoom, blocks: list[slice], run: Resolved):
        self.members, self.log, self.ensemble = mail.members, mail.log, mail.ensemble
        self.mail, self.blocks = mail, blocks
        self.topology = run.found("method").topology
        visits = streams.stream(run.seed, streams.VISITS, 0, 0)
        # --averaging serial: the N clients, one after the other; else all at once
        self.order = visits.permutation(run.clients) if run.averaging == "serial" else None

    def average(
        self,
        w_KW: Tensor,
        graph: CollaborationGraph | None = None,
        received: Received | None = None,
        weights: np.ndarray | None = None,
    ) -> Tensor:
        """Return sum p_i w_i / sum p_i over each client and its senders (equation 4), `[K, W]`; `received` saves the exchange. Collective.

        `weights` `[K, N]`, of at least 0, stand in place of p: row i says how much local client i takes of each client's row, itself included.
        A server mixes all rows: its method gives weights and no graph. Each client then sends one row and receives one. The sums are float64, in
        the order of the clients, so the number of ranks changes no bit. Who has no weight, or takes no part, keeps its row.
        """
        members = self.members
        a = self._weights(weights)
        if graph is None:
            return self._mixed(w_KW, a, given=weights is not None)
        members.check_graph(graph, "the graph of fed.average")
        if received is None:  # --averaging serial: senders that come before their receiver send once they have averaged
            received = self.mail.exchange(w_KW, graph if self.order is None else graph.only(later(graph, self.order)))
        graph = members.among_active(graph)
        members.check_budget(graph, "the graph of fed.average")
        if self.order is not None:
            return self._average_serially(w_KW, graph, received, self.order, a)
        total, local = self._own_terms(w_KW, a), [graph.of(k) for k in members.ids]
        self._add(total, received, local, a)
        return self._divided(total, w_KW.clone(), local, range(len(local)), a)

    def _weights(self, weights: Any) -> np.ndarray:
        """Return the weights, float64 `[K, N]`; where none are given p, for each client the same."""
        shape = len(self.members.ids), self.members.n
        if weights is None:
            return np.broadcast_to(self.members.p, shape)
        a = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights)
        if a.shape != shape or a.dtype.kind not in "biuf" or not (np.isfinite(a) & (a >= 0)).all():
            wrong = f"of shape {a.shape}" if a.shape != shape else "not"
            raise UserError(
                f"the weights of fed.average are {wrong}; allowed are {list(shape)} finite numbers of at least 0"
            )
        return a.astype(np.float64)

    def _mixed(self, w_KW: Tensor, a: np.ndarray, given: bool) -> Tensor:
        """Return sum_j a_ij w_j / sum_j a_ij over all j that take part, `[K, W]`. Collective."""
        if not given or self.topology != "server":
            raise UserError("fed.average needs a graph; weights alone are for a method of topology='server'")
        members, total = self.members, self.ensemble.zeros(len(w_KW), torch.float64)
        for j, row_W in self.mail.every_row(w_KW):
            for i in np.flatnonzero(a[:, j]):
                total[i] += row_W.double() * a[i, j]
        a, out = a * members.active, w_KW.clone()
        self.log.notes["models_received"] += 2 * members.active[members.ids]
        for i in np.flatnonzero(members.active[members.ids] & a.any(1)):
            out[i] = total[i] / float(a[i].sum())
        return out

    def _average_serially(
        self, w_KW: Tensor, graph: CollaborationGraph, received: Received, order: np.ndarray, a: np.ndarray
    ) -> Tensor:
        """Return the average with every client's row replaced before the next client of `order` averages, `[K, W]`, as in the authors' code."""
        members, comes_later = self.members, later(graph, order)
        early, late = graph.only(~comes_later), graph.only(comes_later)
        turn = np.zeros(members.n, np.int64)  # one after the last of its senders that come before it
        for k in order:
            turn[k] = 1 + max(turn[early.of(k)], default=-1)
        total, local = self._own_terms(w_KW, a), [graph.of(k) for k in members.ids]
        self._add(total, received, [late.of(k) for k in members.ids], a)
        out = w_KW.clone()
        for now in range(int(turn.max()) + 1):
            mine = np.flatnonzero(turn[members.ids] == now)
            if now > 0:
                turned = early.only(turn[early.receivers()] == now)
                self._add(total, self.mail.exchange(out, turned), [turned.of(k) for k in members.ids], a)
            self._divided(total, out, local, mine, a)
        return out

    def _own_terms(self, w_KW: Tensor, a: np.ndarray) -> Tensor:
        """Return a_kk w_k of each client, float64 `[K, W]`."""
        total = self.ensemble.zeros(len(self.members.ids), torch.float64)
        with self.log.clock("exchange"):
            for b in self.blocks:
                ids = self.members.ids[b]
                total[b] = w_KW[b].double() * self.ensemble.column(a[b][np.arange(len(ids)), ids])
        return total

    def _add(self, total: Tensor, received: Received, local: Sequence[Senders], a: np.ndarray) -> None:
        """Add a_kj w_j of each client's senders, ascending: the order of the sum does not depend on passes."""
        with self.log.clock("exchange"), torch.no_grad():
            for b, rows, a_k in self._one_by_one(received, local, a):
                total[b] += rows.double() * a_k[:, None]

    def _one_by_one(
        self, received: Received, local: Sequence[Senders], a: np.ndarray
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield of each block each position of its lists: the block, a model per client `[k, W]`, and its weight, float64 `[k]`: 0 where a list has ended."""
        ids = self.members.ids
        for here, now in received.passes(local):
            for b in self.blocks:
                for position in range(max((len(s) for s in now[b]), default=0)):
                    on = [position < len(s) for s in now[b]]
                    j = [int(s[position]) if there else int(k) for s, k, there in zip(now[b], ids[b], on, strict=True)]
                    yield b, here.rows(j, b), self.ensemble.column(a[b][np.arange(len(j)), j] * on)[:, 0]

    def _divided(
        self, total: Tensor, out: Tensor, local: Sequence[Senders], which: Iterable[int], a: np.ndarray
    ) -> Tensor:
        """Return `out` with the rows of `which` clients divided by their sums of weights; who has no senders keeps its row."""
        with self.log.clock("exchange"):
            for i in which:
                whole = float(a[i, self.members.ids[i]] + a[i, local[i]].sum())
                if len(local[i]) and whole > 0:
                    out[i] = total[i] / whole
        return out

    def mean(self, w_KW: Tensor) -> Tensor:
        """Return the exact p-weighted mean over all clients that take part, `[W]`: a row up and the mean down are two models per client."""
        members = self.members
        members.exclude_diverged(w_KW)
        if not members.active.any():
            nobody = "that takes part: those available come later or have stopped early (--patience)"
            why = "with a finite model left; lower --lr or set --clip_norm" if members.present.any() else nobody
            raise UserError(f"round {members.round} has no client {why}")
        self.mail.wire.to_server()
        with self.log.clock("exchange"):
            self.log.notes["models_received"] += 2 * members.active[members.ids]
            return (from_fixed_point(self._over_all(w_KW)) / float(members.p[members.active].sum())).float()

    def over_received(self, received: Received) -> tuple[Tensor, np.ndarray]:
        """Return sum p_i w_i over each client and the senders it received from, float64 `[K, W]`, and sum p_i, `[K]`. Their quotient is w^Y."""
        members, w_KW = self.members, received.w
        lists = [received.graph.of(k) for k in members.ids]
        total = self.ensemble.zeros(len(members.ids), torch.int64)
        self._check(w_KW)
        for b, rows, p_k in self._one_by_one(received, lists, self._weights(None)):
            total[b] += fixed_point(rows, p_k)
        for b in self.blocks:
            ids = members.ids[b]
            total[b] += fixed_point(w_KW[b], self.ensemble.column(members.p[ids] * members.active[ids])[:, 0])
        # fsum: the same bits as in `over_reachable`, whatever the order
        shares = [math.fsum([members.p[k], *members.p[s]]) for k, s in zip(members.ids, lists, strict=True)]
        return from_fixed_point(total), np.array(shares)

    def over_reachable(self, w_KW: Tensor) -> tuple[Tensor, np.ndarray]:
        """Return sum p_i w_i over each client and all it can reach, float64 `[K, W]`, and sum p_i, `[K]` (Algorithm 3, lines 1-7). Collective."""
        members, received = self.members, self.log.notes["models_received"]
        members.exclude_diverged(w_KW)
        wants = (members.most_senders > 0)[members.ids] & members.awake[members.ids]
        if members.reach is None and members.kept is None and members.phase is not Phase.ARRIVAL:
            # everyone reaches everyone: one exact sum serves all
            with self.log.clock("exchange"):
                received += np.where(wants, int(members.active.sum()) - 1, 0)
                each, false = self._over_all(w_KW).expand(len(w_KW), -1), self.mail.wire.false
                if len(false):  # a client sums its own true row
                    each, sent = each.clone(), self.mail.wire.leaving(w_KW)
                    for i in false[members.active[members.ids[false]]]:
                        each[i] += self._term(members.ids[i], w_KW[i]) - self._term(members.ids[i], sent[i])
            if not (self.mail.wire.counts and self.mail.came(w_KW)):
                self.mail.wire.to_all()
            p_all = np.full(len(w_KW), math.fsum(members.p[members.active]))
            return self._completed(from_fixed_point(each), w_KW, p_all), p_all
        sets = [np.union1d(members.reachable(k) if w else k, k) for k, w in zip(members.ids, wants, strict=True)]
        received += np.array([len(s) - 1 for s in sets], np.int64)
        total = self.ensemble.zeros(len(members.ids), torch.int64)
        self._check(w_KW)
        wanted: list[list[int]] = [[] for _ in range(members.n)]  # by sender: which of this rank's sums it is in
        for i, senders in enumerate(sets):
            for j in senders.tolist():
                wanted[j].append(i)
        for j, row_W in self.mail.every_row(w_KW):
            term = self._term(j, row_W)
            for i in wanted[j]:  # a liar sums its own true row
                total[i] += self._term(j, w_KW[i]) if j == members.ids[i] else term
        p_sets = np.array([math.fsum(members.p[s]) for s in sets])
        return self._completed(from_fixed_point(total), w_KW, p_sets), p_sets

    def _completed(self, sums_KW: Tensor, w_KW: Tensor, p_K: np.ndarray) -> Tensor:
        """Return sums with each client's own columns, for all, where nothing is sent."""
        if self.mail.wire.columns is None:
            return sums_KW
        return self.mail.wire.completed(sums_KW, w_KW.double() * self.ensemble.column(p_K))

    def _check(self, w_KW: Tensor) -> None:
        check_fixed_point(w_KW[np.flatnonzero(self.members.active[self.members.ids])])

    def _term(self, k: int, row_W: Tensor) -> Tensor:
        return fixed_point(row_W[None], self.ensemble.column(self.members.p[k : k + 1])[:, 0])[0]

    def _over_all(self, w_KW: Tensor) -> Tensor:
        """Return the fixed-point sum of p_i w_i over all clients that take part, int64 `[W]`."""
        members = self.members
        total = self.ensemble.zeros(1, torch.int64)[0]
        w_KW = self.mail.wire.leaving(w_KW)
        self._check(w_KW)
        for i in np.flatnonzero(members.active[members.ids]):
            total += self._term(members.ids[i], w_KW[i])
        return torch.from_numpy(members.world.sum_int64(total.cpu().numpy())).to(self.ensemble.device)


def later(graph: CollaborationGraph, order: np.ndarray) -> np.ndarray:
    """Return which edges have a sender that comes after its receiver in an order of the N clients, bool `[E]`."""
    place = np.argsort(order)
    return place[graph.senders] > place[graph.receivers()]
