"""`Sums`: sums p_i w_i over clients: averages along a graph, the mean of all, starts of a search.

w_i is the row of client i, i.e. its model of W weights, and p_i its weight in a mean. Local clients
are those of this rank, 0 to K - 1; `members.ids` has their numbers k among all N. Sums over ranks
are fixed-point: whole numbers, whose sum is exact in any order. `native` kernels in C add rows
where they lie in memory; PyTorch computes the same bits. `average` and `mean` are verbs of `fed`;
the search (greedy.py) calls the others.
"""

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
    """Weighted sums of clients' rows, over all ranks. Every public method is collective."""

    def __init__(self, mail: Mail, backend: Backend, *, server: bool):
        """`server`: the method has a server, which may average all rows without a graph."""
        self.members, self.log, self.mail = mail.members, mail.log, mail
        self.ensemble, self.blocks, self.server = backend.ensemble, backend.blocks, server
        # kernels need rows that lie whole in memory
        self.native = backend.native if mail.packing.columns is None else None

    def average(
        self,
        w_KW: Tensor,
        graph: CollaborationGraph | None = None,
        received: Received | None = None,
        weights: np.ndarray | None = None,
    ) -> Tensor:
        """Return sum p_i w_i / sum p_i over each client and its senders, `[K, W]`. Collective.

        This is equation 4. `received` models save the exchange. `weights` `[K, N]`, at least 0,
        replace p: row i says how much local client i takes of each client's row. Without a graph a
        server averages all rows by them. A client that takes no part, or has no weights, keeps its
        row. Sums are float64 in client order, so the number of ranks changes no bit.
        """
        members = self.members
        a = self._weights(weights)  # a[i, j]: how much local client i takes of client j's row
        if graph is None:
            if weights is None or not self.server:
                alone = "weights alone are for a method of topology='server'"
                raise UserError(f"fed.average needs a graph; {alone}")
            return self._averages_of_all(w_KW, a)
        members.check_graph(graph, "the graph of fed.average")
        if received is None:
            received = self.mail.exchange(w_KW, graph)
        if self.mail.packing.columns is not None:
            self.mail.packing.local_rows = w_KW  # maybe trained on since the exchange
        graph = members.among_active(graph)
        members.check_budget(graph, "the graph of fed.average")
        senders = [graph.of(k) for k in members.ids]
        arrived = [received.graph.of(k) for k in members.ids]
        if members.world.agree(any(map(len, map(np.setdiff1d, senders, arrived)))):
            lacks = "an edge along which the models received did not come"
            raise UserError(f"the graph of fed.average has {lacks}")
        # the sum of each client's weights; 0 without senders, to keep the client's row
        p_sums = np.zeros(len(w_KW))
        for i, (k, of_client) in enumerate(zip(members.ids, senders, strict=True)):
            p_sums[i] = a[i, k] + a[i, of_client].sum() if len(of_client) else 0.0
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
        """Return every local client's average by one call of a kernel, `[K, W]`."""
        assert self.native is not None
        out, local = w_KW.clone(), np.arange(len(senders))
        sizes = np.array([len(s) for s in senders], np.int64)
        receivers = np.repeat(local, sizes)
        flat_senders = np.concatenate([np.zeros(0, np.int64), *senders])
        # the kernel's lists are those of all clients in a row: the client's own model, then those
        # of its senders, ascending; client i's part is from ends[i] to ends[i + 1]
        ends = np.concatenate([[0], np.cumsum(sizes + 1)])
        is_own = np.zeros(ends[-1], bool)
        is_own[ends[:-1]] = True
        addresses, p = np.empty(ends[-1], np.uint64), np.empty(ends[-1])
        addresses[is_own] = addresses_of(w_KW, local)
        addresses[~is_own] = arrived.addresses(flat_senders, receivers)
        p[is_own] = a[local, self.members.ids]
        p[~is_own] = a[receivers, flat_senders]
        self.native.means(addresses, p, ends, p_sums, out)
        return out

    def _weights(self, weights: Any) -> np.ndarray:
        """Return the weights of `average`, checked, float64 `[K, N]`; None: p for each client."""
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

    def _averages_of_all(self, w_KW: Tensor, a: np.ndarray) -> Tensor:
        """Return sum_j a_ij w_j / sum_j a_ij over all active j, `[K, W]`. Collective."""
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
        fixed: bool = False,
    ) -> Iterator[Tensor]:
        """Yield for each local client i the sum of a_ij w_j over itself and its senders, `[1, W]`.

        It is float64, or `fixed`-point. If all models are here, one sum is held at a time. In
        passes all K sums are held, because each pass adds to every client's.
        """

        def weighted(row_1W: Tensor, weight: np.ndarray) -> Tensor:
            column = self.ensemble.column(weight)
            return fixed_point(row_1W, column[:, 0]) if fixed else row_1W.double() * column

        def start(i: int) -> Tensor:
            return weighted(w_KW[i : i + 1], a[i, self.members.ids[i : i + 1]])

        in_passes = received.arrived is None
        all_totals = [start(i) for i in range(len(w_KW))] if in_passes else []
        for arrived, senders_here in received.passes(senders):
            for i, of_client in enumerate(senders_here):
                total = all_totals[i] if in_passes else start(i)
                for j in of_client:
                    total += weighted(arrived.rows([j], i), a[i, [j]])
                if not in_passes:
                    yield total
        yield from all_totals

    def mean(self, w_KW: Tensor) -> Tensor:
        """Return the exact p-weighted mean over all active clients, `[W]`. Collective."""
        everyone = np.zeros(self.members.n, np.int64)
        return self.means(w_KW, everyone, self.ensemble.zeros(1))[0]

    def means(self, w_KW: Tensor, group_N: np.ndarray, old_CW: Tensor, down: int = 1) -> Tensor:
        """Return the exact p-weighted mean of each group, `[C, W]`. Collective.

        `group_N` has the group of every client, from 0 to C - 1, the same on every rank. A mean is
        over the active clients of a group; a group without any keeps its row of `old_CW`. Each
        active client sends its row and receives `down` of the C rows.
        """
        members, whole = self.members, np.issubdtype(group_N.dtype, np.integer)
        right = group_N.shape == (members.n,) and whole
        if not right or group_N.min() < 0 or group_N.max() >= len(old_CW):
            allowed = f"{members.n} whole numbers from 0 to {len(old_CW) - 1}, one per client"
            raise UserError(f"fed.means was given other groups than it takes: {allowed}")
        how = "fed.tell brings every rank what the clients of each choose"
        self.mail.mailroom.check_alike("the groups of fed.means are", [group_N], how)
        members.exclude_diverged(w_KW)
        if not members.active.any():
            why = "that takes part: those available come later or have stopped early (--patience)"
            if members.present.any():
                why = "with a finite model left; lower --lr or set --clip_norm"
            raise Nobody(f"round {members.round} has no client {why}")
        if not self.mail.had_all(w_KW):  # else fed.every_row has sent them to the server
            self.mail.ledger.to_server(members.active, down)
        out = old_CW.clone()
        with self.log.clock("exchange"):
            self.log.notes["models_received"] += (1 + down) * members.active[members.ids]
            sent = self.mail.leaving(w_KW)
            for c in range(len(out)):
                of_group = members.active & (group_N == c)
                if of_group.any():
                    total = from_fixed_point(self._over_all(sent, of_group))
                    out[c] = self.ensemble.quotient(total, members.p[of_group].sum()).float()
        return out

    def over_received(self, received: Received) -> Iterator[tuple[slice, Tensor, np.ndarray]]:
        """Yield each block of clients, and what its searches start from as Y: all models received.

        Y is given as sum p_i w_i, float64 `[k, W]`, and sum p_i, float64 `[k]`, over each client
        and its senders.
        """
        w_KW, p, graph = received.w, self.members.p, received.graph
        senders = [graph.of(k) for k in self.members.ids]
        self._check(w_KW)
        totals = self._totals(received, senders, self._weights(None), w_KW, fixed=True)
        if self.native and received.arrived is not None:
            native_total = partial(self._native_total, w_KW, received.arrived)
            totals = iter(map(native_total, range(len(w_KW)), senders))
        for b in self.blocks:
            total = torch.cat([next(totals) for _ in senders[b]])
            # fsum gives the same bits in any order, also in `over_candidates`
            p_sums = [math.fsum([p[k], *p[graph.of(k)]]) for k in self.members.ids[b]]
            yield b, from_fixed_point(total), np.array(p_sums)
        for _ in totals:  # a rank without clients takes part in the passes, too
            pass

    def _native_total(self, w_KW: Tensor, arrived: Arrived, i: int, senders: np.ndarray) -> Tensor:
        """Return the fixed-point sum of p_i w_i over local client i and its senders, `[1, W]`."""
        assert self.native is not None
        own, others = addresses_of(w_KW, i), arrived.addresses(senders, slice(i, i + 1))
        p = self.members.p[[self.members.ids[i], *senders]]
        total = torch.empty(1, w_KW.shape[1], dtype=torch.int64)
        self.native.fixed(np.concatenate([own, others]), p, total[0])
        return total

    def over_candidates(self, w_KW: Tensor, candidates: Candidates) -> tuple[Tensor, np.ndarray]:
        """Return sum p_i w_i and sum p_i over each client and its candidates. Collective."""
        members, received = self.members, self.log.notes["models_received"]
        restricted = candidates.reach or candidates.stays or candidates.nearest
        if restricted is None and members.joined[members.present].all():
            # all clients ask all others: the same sum serves them
            wants = (candidates.room > 0)[members.ids] & members.learners[members.ids]
            received += np.where(wants, int(members.active.sum()) - 1, 0)
            return self._over_everyone(w_KW, candidates)
        # each local client sums other rows: every row is added, as it comes, to all that ask for it
        sets = [np.union1d(candidates.asked_by(k), k) for k in members.ids]
        received += np.array([len(s) - 1 for s in sets], np.int64)
        total = self.ensemble.zeros(len(members.ids), torch.int64)  # fixed-point [K, W]
        users: list[list[int]] = [[] for _ in range(members.n)]  # local clients that sum a row
        for i, senders in enumerate(sets):
            for j in senders.tolist():
                users[j].append(i)
        for j, row_W in self.mail.rows(w_KW, candidates, whole=False):
            term = self._term(j, row_W)
            for i in users[j]:  # a client sums its own row as it is, not as it sends it
                total[i] += self._term(j, w_KW[i]) if j == members.ids[i] else term
        p_sums = np.array([math.fsum(members.p[s]) for s in sets])
        sums_KW = total.view(torch.float64)
        for i in range(len(sets)):  # in place, row by row: there is no second copy of all sums
            sums_KW[i] = from_fixed_point(total[i])
        return self._completed(sums_KW, w_KW, p_sums), p_sums

    def _over_everyone(self, w_KW: Tensor, candidates: Candidates) -> tuple[Tensor, np.ndarray]:
        """Do what `over_candidates` does where all ask all: one exact sum serves them."""
        members, mail = self.members, self.mail
        with self.log.clock("exchange"):
            sent = mail.leaving(w_KW)  # collective, so also on ranks without clients
            sums_KW = self._over_all(sent, members.active)[None]
            # local clients whose sent row is not their true one, which they use in their own sum
            altered = np.arange(len(w_KW)) if mail.packing.encodes else mail.attack.attackers
            if len(altered):
                sums_KW = sums_KW.expand(len(w_KW), -1).clone()
                for i in altered[members.active[members.ids[altered]]]:
                    k = members.ids[i]
                    sums_KW[i] += self._term(k, w_KW[i]) - self._term(k, sent[i])
        if not (mail.ledger.counts and mail.had_all(w_KW)):
            mail.count_all(candidates)
        p_sums = np.full(len(w_KW), math.fsum(members.p[members.active]))
        sums_KW = from_fixed_point(sums_KW).expand(len(w_KW), -1)
        return self._completed(sums_KW, w_KW, p_sums), p_sums

    def _completed(self, sums_KW: Tensor, w_KW: Tensor, p_sums: np.ndarray) -> Tensor:
        """Return the sums, float64 `[K, W]`, with the columns that are not sent (--send) filled in.

        There the sum is the client's own weight times its `p_sums`. Whoever calls divides by
        `p_sums`, and gets its own weight again.
        """
        if self.mail.packing.columns is None:
            return sums_KW
        return self.mail.packing.complete(sums_KW, w_KW.double() * self.ensemble.column(p_sums))

    def _check(self, w_KW: Tensor) -> None:
        """Raise `UserError` if a row of an active client is too large for fixed point."""
        active = self.members.active[self.members.ids]
        check_fixed_point(w_KW if active.all() else w_KW[np.flatnonzero(active)])

    def _term(self, k: int, row_W: Tensor) -> Tensor:
        """Return p_k times a row, in fixed point, int64 `[W]`."""
        return fixed_point(row_W[None], self.ensemble.column(self.members.p[k : k + 1])[:, 0])[0]

    def _over_all(self, w_KW: Tensor, which: np.ndarray) -> Tensor:
        """Return the fixed-point sum of p_i w_i over clients `which`, bool `[N]`, int64 `[W]`.

        They are active. Collective.
        """
        members = self.members
        total = self.ensemble.zeros(1, torch.int64)[0]
        self._check(w_KW)
        local = np.flatnonzero(which[members.ids])
        if self.native:
            self.native.fixed(addresses_of(w_KW, local), members.p[members.ids[local]], total)
        else:
            for i in local:
                total += self._term(members.ids[i], w_KW[i])
        total = torch.from_numpy(members.world.sum_int64(total.cpu().numpy()))
        return total.to(self.ensemble.device)


def addresses_of(w_KW: Tensor, rows: Any) -> np.ndarray:
    """Return where in memory the rows with these numbers lie, uint64 `[k]`; one number: `[1]`."""
    row_bytes = w_KW.stride(0) * w_KW.element_size()
    return np.atleast_1d(w_KW.data_ptr() + row_bytes * np.asarray(rows)).astype(np.uint64)
