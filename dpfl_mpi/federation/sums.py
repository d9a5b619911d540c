"""`Sums`: weighted sums over clients: averages along a graph, the mean of all, exact sums."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import Nobody, UserError
from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.federation.members import Candidates
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.ensemble import check_fixed_point, fixed_point, from_fixed_point
from dpfl_mpi.transport.mailroom import Arrived, Received


class Sums:
    """Sums of p_i w_i. Every public method is collective."""

    def __init__(self, mail: Mail, backend: Backend, *, server: bool):
        """`server`: the method has one, which may mix all rows."""
        self.members, self.log, self.mail = mail.members, mail.log, mail
        self.ensemble, self.blocks, self.server = backend.ensemble, backend.blocks, server
        # adds rows where they lie in memory
        self.native = backend.native if mail.packing.columns is None else None

    def average(
        self,
        w_KW: Tensor,
        graph: CollaborationGraph | None = None,
        received: Received | None = None,
        weights: np.ndarray | None = None,
    ) -> Tensor:
        """Return sum p_i w_i / sum p_i over each client and its senders, `[K, W]`. Collective.

        Equation 4. `received` saves the exchange. `weights` `[K, N]`, at least 0, replace p: row i
        says how much local client i takes of each client's row. Without a graph a server mixes all
        rows by weights. A client without weights, or that takes no part, keeps its row. The sums
        are float64 in the order of the clients, so the number of ranks changes no bit.
        """
        members = self.members
        a = self._weights(weights)
        if graph is None:
            return self._mixed(w_KW, a, given=weights is not None)
        members.check_graph(graph, "the graph of fed.average")
        if received is None:
            received = self.mail.exchange(w_KW, graph)
        if self.mail.packing.columns is not None:
            self.mail.packing.own = w_KW  # rows that were exchanged may be others
        graph = members.among_active(graph)
        members.check_budget(graph, "the graph of fed.average")
        senders = [graph.of(k) for k in members.ids]
        sent = [received.graph.of(k) for k in members.ids]
        if members.world.agree(any(map(len, map(np.setdiff1d, senders, sent)))):
            lacks = "an edge along which the models received did not come"
            raise UserError(f"the graph of fed.average has {lacks}")
        # a client without senders keeps its row
        each = zip(a, members.ids, senders, strict=True)
        p_sums = np.array([row[k] + row[s].sum() if len(s) else 0.0 for row, k, s in each])
        with self.log.clock("exchange"), torch.no_grad():
            if self.native and received.arrived is not None:
                return self._average_natively(w_KW, received.arrived, senders, a, p_sums)
            out = w_KW.clone()
            for i, total in enumerate(self._totals(received, senders, a, w_KW)):
                if p_sums[i]:
                    out[i] = self.ensemble.quotient(total[0], p_sums[i])
        return out

    def _average_natively(
        self,
        w_KW: Tensor,
        arrived: Arrived,
        senders: list[np.ndarray],
        a: np.ndarray,
        p_sums: np.ndarray,
    ) -> Tensor:
        """Return every client's average, by one call."""
        assert self.native is not None
        out, ids = w_KW.clone(), np.arange(len(senders))
        sizes = np.array([len(s) for s in senders], np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes + 1)])
        to = np.repeat(ids, sizes)
        of = np.concatenate([np.zeros(0, np.int64), *senders])
        # first each client's own model, then those of its senders, ascending
        own = np.zeros(ends[-1], bool)
        own[ends[:-1]] = True
        models = np.empty(ends[-1], np.uint64)
        models[own] = rows_at(w_KW, ids)
        models[~own] = arrived.addresses(of, to)
        p = np.empty(ends[-1])
        p[own] = a[ids, self.members.ids]
        p[~own] = a[to, of]
        self.native.means(models, p, ends, p_sums, out)
        return out

    def _weights(self, weights: Any) -> np.ndarray:
        """Return the weights, float64 `[K, N]`; None: p for each client."""
        shape = len(self.members.ids), self.members.n
        if weights is None:
            return np.broadcast_to(self.members.p, shape)
        a = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights)
        wrong = ""
        if a.shape != shape or a.dtype.kind not in "biuf":
            wrong = f"{a.dtype} of shape {list(a.shape)}"
        elif not (fine := np.isfinite(a) & (a >= 0)).all():
            i, j = np.argwhere(~fine)[0]
            wrong = f"{a[i, j]} for client {self.members.ids[i]} of {j}"
        if wrong:
            allowed = f"allowed are {list(shape)} finite numbers of at least 0"
            raise UserError(f"the weights of fed.average are {wrong}; {allowed}")
        return a.astype(np.float64)

    def _mixed(self, w_KW: Tensor, a: np.ndarray, given: bool) -> Tensor:
        """Return sum_j a_ij w_j / sum_j a_ij over all active j, `[K, W]`. Collective."""
        if not given or not self.server:
            alone = "weights alone are for a method of topology='server'"
            raise UserError(f"fed.average needs a graph; {alone}")
        members, total = self.members, self.ensemble.zeros(len(w_KW), torch.float64)
        for j, row_W in self.mail.rows(w_KW):
            for i in np.flatnonzero(a[:, j]):
                total[i] += row_W.double() * a[i, j]
        a, out = a * members.active, w_KW.clone()
        self.log.notes["models_received"] += 2 * members.active[members.ids]  # one down, one up
        for i in np.flatnonzero(members.active[members.ids] & a.any(1)):
            out[i] = self.ensemble.quotient(total[i], a[i].sum())
        return out

    def _totals(
        self,
        received: Received,
        senders: Sequence[Senders],
        a: np.ndarray,
        w_KW: Tensor,
        exact: bool = False,
    ) -> Iterator[Tensor]:
        """Yield each client's sum a_kk w_k + a_kj w_j over its senders j, in their order, `[1, W]`.

        It is float64, or fixed-point if `exact`. Where models come in passes, all sums are held.
        """

        def weighted(row_1W: Tensor, weight: np.ndarray) -> Tensor:
            column = self.ensemble.column(weight)
            return fixed_point(row_1W, column[:, 0]) if exact else row_1W.double() * column

        def start(i: int) -> Tensor:
            return weighted(w_KW[i : i + 1], a[i, self.members.ids[i : i + 1]])

        in_passes = received.arrived is None
        held = [start(i) for i in range(len(w_KW))] if in_passes else []
        for arrived, now in received.passes(senders):
            for i, of_client in enumerate(now):
                total = held[i] if in_passes else start(i)
                for j in of_client:
                    total += weighted(arrived.rows([j], i), a[i, [j]])
                if not in_passes:
                    yield total
        yield from held

    def mean(self, w_KW: Tensor) -> Tensor:
        """Return the exact p-weighted mean over all active clients, `[W]`. Collective."""
        members = self.members
        members.exclude_diverged(w_KW)
        if not members.active.any():
            why = "that takes part: those available come later or have stopped early (--patience)"
            if members.present.any():
                why = "with a finite model left; lower --lr or set --clip_norm"
            raise Nobody(f"round {members.round} has no client {why}")
        self.mail.ledger.to_server(members.active)
        with self.log.clock("exchange"):
            # a row up, the mean down
            self.log.notes["models_received"] += 2 * members.active[members.ids]  # one down, one up
            total = from_fixed_point(self._over_all(self.mail.leaving(w_KW)))
            return self.ensemble.quotient(total, members.p[members.active].sum()).float()

    def over_received(self, received: Received) -> Iterator[tuple[slice, Tensor, np.ndarray]]:
        """Yield each block, sum p_i w_i over each client and its senders, and sum p_i.

        They are float64 `[k, W]` and `[k]`; their quotient is w^Y.
        """
        w_KW, p, graph = received.w, self.members.p, received.graph
        senders = [graph.of(k) for k in self.members.ids]
        self._check(w_KW)
        totals = self._totals(received, senders, self._weights(None), w_KW, exact=True)
        if self.native and received.arrived is not None:
            fixed = partial(self._fixed, w_KW, received.arrived)
            totals = iter(map(fixed, range(len(w_KW)), senders))
        for b in self.blocks:
            total = torch.cat([next(totals) for _ in senders[b]])
            # fsum: the bits of `over_candidates`, in any order
            p_sums = [math.fsum([p[k], *p[graph.of(k)]]) for k in self.members.ids[b]]
            yield b, from_fixed_point(total), np.array(p_sums)

    def _fixed(self, w_KW: Tensor, arrived: Arrived, i: int, senders: np.ndarray) -> Tensor:
        """Return the fixed-point sum of p_i w_i over local client i and its senders, `[1, W]`."""
        assert self.native is not None
        addresses = arrived.addresses(senders, slice(i, i + 1))
        models, k = np.concatenate([rows_at(w_KW, i), addresses]), self.members.ids[i : i + 1]
        total = torch.empty(1, w_KW.shape[1], dtype=torch.int64)
        self.native.fixed(models, self.members.p[np.concatenate([k, senders])], total[0])
        return total

    def over_candidates(self, w_KW: Tensor, candidates: Candidates) -> tuple[Tensor, np.ndarray]:
        """Return sum p_i w_i over each client and its candidates, and sum p_i. Collective.

        Algorithm 3, lines 1-7; float64 `[K, W]` and `[K]`.
        """
        members, received = self.members, self.log.notes["models_received"]
        if candidates.unrestricted and members.joined[members.present].all():
            wants = (candidates.room > 0)[members.ids] & members.learners[members.ids]
            received += np.where(wants, int(members.active.sum()) - 1, 0)
            return self._over_everyone(w_KW, candidates)
        sets = [np.union1d(candidates.asked_by(k), k) for k in members.ids]
        received += np.array([len(s) - 1 for s in sets], np.int64)
        total = self.ensemble.zeros(len(members.ids), torch.int64)
        rows_of: list[list[int]] = [[] for _ in range(members.n)]  # the sums that a sender is in
        for i, senders in enumerate(sets):
            for j in senders.tolist():
                rows_of[j].append(i)
        for j, row_W in self.mail.rows(w_KW, candidates, whole=False):
            term = self._term(j, row_W)
            for i in rows_of[j]:  # a liar sums its own true row
                total[i] += self._term(j, w_KW[i]) if j == members.ids[i] else term
        p_sums = np.array([math.fsum(members.p[s]) for s in sets])
        sums_KW = total.view(torch.float64)
        for i in range(len(sets)):  # in place: there is no second copy of all sums
            sums_KW[i] = from_fixed_point(total[i])
        return self._completed(sums_KW, w_KW, p_sums), p_sums

    def _over_everyone(self, w_KW: Tensor, candidates: Candidates) -> tuple[Tensor, np.ndarray]:
        """Do `over_candidates` where all ask all: one exact sum serves them. Collective."""
        members, mail = self.members, self.mail
        with self.log.clock("exchange"):
            sent = mail.leaving(w_KW)  # by every rank, also by one without clients
            sums_KW = self._over_all(sent)[None]
            altered = mail.altered()
            if len(altered):  # a client sums its own true row
                sums_KW = sums_KW.expand(len(w_KW), -1).clone()
                for i in altered[members.active[members.ids[altered]]]:
                    k = members.ids[i]
                    sums_KW[i] += self._term(k, w_KW[i]) - self._term(k, sent[i])
        if not (mail.ledger.counts and mail.had_all(w_KW)):
            mail.count_all(candidates)
        p_sums = np.full(len(w_KW), math.fsum(members.p[members.active]))
        sums_KW = from_fixed_point(sums_KW).expand(len(w_KW), -1)
        return self._completed(sums_KW, w_KW, p_sums), p_sums

    def _completed(self, sums_KW: Tensor, w_KW: Tensor, p_K: np.ndarray) -> Tensor:
        """Return sums in which columns that are not sent are each client's own, for all."""
        if self.mail.packing.columns is None:
            return sums_KW
        return self.mail.packing.complete(sums_KW, w_KW.double() * self.ensemble.column(p_K))

    def _check(self, w_KW: Tensor) -> None:
        active = self.members.active[self.members.ids]
        check_fixed_point(w_KW if active.all() else w_KW[np.flatnonzero(active)])

    def _term(self, k: int, row_W: Tensor) -> Tensor:
        return fixed_point(row_W[None], self.ensemble.column(self.members.p[k : k + 1])[:, 0])[0]

    def _over_all(self, w_KW: Tensor) -> Tensor:
        """Return the fixed-point sum of p_i w_i over active clients, int64 `[W]`. Collective."""
        members = self.members
        total = self.ensemble.zeros(1, torch.int64)[0]
        self._check(w_KW)
        active = np.flatnonzero(members.active[members.ids])
        if self.native:
            self.native.fixed(rows_at(w_KW, active), members.p[members.ids[active]], total)
        else:
            for i in active:
                total += self._term(members.ids[i], w_KW[i])
        total = torch.from_numpy(members.world.sum_int64(total.cpu().numpy()))
        return total.to(self.ensemble.device)


def rows_at(w_KW: Tensor, rows: Any) -> np.ndarray:
    """Return where these rows lie in memory, uint64: of a number `[1]`, of an array `[k]`."""
    row_bytes = w_KW.stride(0) * w_KW.element_size()
    return np.atleast_1d(w_KW.data_ptr() + row_bytes * np.asarray(rows)).astype(np.uint64)
