"""`Sums`: weighted sums over clients: the average along a graph (equation 4), the mean of all, and the exact sum that the search's w^Y starts from."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import Nobody, UserError
from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.mail import Arrived, MailRoom, Received
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.ensemble import check_fixed_point, fixed_point, from_fixed_point
from dpfl_mpi.settings import Resolved


class Sums:
    """Sums of p_i w_i. Every public method is collective."""

    def __init__(self, mail: MailRoom, backend: Backend, run: Resolved):
        self.members, self.log, self.ensemble = mail.members, mail.log, mail.ensemble
        self.mail, self.blocks = mail, backend.blocks
        self.native = backend.native if mail.wire.columns is None else None  # adds rows where they lie
        self.topology = run.found("method").topology

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
        if received is None:
            received = self.mail.exchange(w_KW, graph)
        if self.mail.wire.columns is not None:
            self.mail.own = w_KW  # whose layers complete what came: fed.exchange may have had others
        graph = members.among_active(graph)
        members.check_budget(graph, "the graph of fed.average")
        out, local = w_KW.clone(), [graph.of(k) for k in members.ids]
        lacks = (np.setdiff1d(mine, received.graph.of(k)) for k, mine in zip(members.ids, local, strict=True))
        if members.world.agree(any(map(len, lacks))):
            raise UserError("the graph of fed.average has an edge along which the models received did not come")
        with self.log.clock("exchange"), torch.no_grad():
            for part, blocks in received.parts(graph, self.blocks):
                if self.native and part.here is not None:
                    rows = np.array([b.start for b in blocks], np.int64)  # of one client each
                    self._average_natively(w_KW, part.here, rows, local, a, out)
                    continue
                for b, total in self._totals(part, blocks, local, a, lambda b: self._own_term(w_KW, b, a)):
                    for i in range(b.start, b.stop):
                        if whole := self._whole(i, local[i], a):
                            out[i] = total[i - b.start] / whole
        return out

    def _average_natively(
        self, w_KW: Tensor, here: Arrived, k: np.ndarray, local: list[np.ndarray], a: np.ndarray, out: Tensor
    ) -> None:
        """Write the averages of these clients, local numbers that follow one another, into `out` by one call."""
        lists = [local[i] for i in k]
        sizes = np.array([len(s) for s in lists], np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes + 1)])
        row, senders = np.repeat(k, sizes), np.concatenate([np.zeros(0, np.int64), *lists])
        models, p, away = np.empty(ends[-1], np.uint64), np.empty(ends[-1]), np.ones(ends[-1], bool)
        away[ends[:-1]] = False  # first its own model, then those of its senders, ascending
        models[~away], p[~away] = rows_at(w_KW, k), a[k, self.members.ids[k]]
        models[away], p[away] = here.places(senders, row), a[row, senders]
        assert self.native is not None
        whole = np.array([self._whole(i, local[i], a) for i in k])
        self.native.means(models, p, ends, whole, out[k[0] : k[-1] + 1] if len(k) else out[:0])

    def _whole(self, i: int, senders: np.ndarray, a: np.ndarray) -> float:
        """Return the weights of local client i's average in all, 0 where it has no senders: then it keeps its row."""
        return float(a[i, self.members.ids[i]] + a[i, senders].sum()) if len(senders) else 0.0

    def _weights(self, weights: Any) -> np.ndarray:
        """Return the weights, float64 `[K, N]`; where none are given p, for each client the same."""
        shape = len(self.members.ids), self.members.n
        if weights is None:
            return np.broadcast_to(self.members.p, shape)
        a = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights)
        wrong = f"{a.dtype} of shape {list(a.shape)}" if a.shape != shape or a.dtype.kind not in "biuf" else ""
        if not wrong and not (fine := np.isfinite(a) & (a >= 0)).all():
            i, j = np.argwhere(~fine)[0]
            wrong = f"{a[i, j]} for client {self.members.ids[i]} of {j}"
        if wrong:
            raise UserError(
                f"the weights of fed.average are {wrong}; allowed are {list(shape)} finite numbers of at least 0"
            )
        return a.astype(np.float64)

    def _mixed(self, w_KW: Tensor, a: np.ndarray, given: bool) -> Tensor:
        """Return sum_j a_ij w_j / sum_j a_ij over all j that take part, `[K, W]`. Collective."""
        if not given or self.topology != "server":
            raise UserError("fed.average needs a graph; weights alone are for a method of topology='server'")
        members, total = self.members, self.ensemble.zeros(len(w_KW), torch.float64)
        for j, row_W in self.mail.rows(w_KW):
            for i in np.flatnonzero(a[:, j]):
                total[i] += row_W.double() * a[i, j]
        a, out = a * members.active, w_KW.clone()
        self.log.notes["models_received"] += 2 * members.active[members.ids]
        for i in np.flatnonzero(members.active[members.ids] & a.any(1)):
            out[i] = total[i] / float(a[i].sum())
        return out

    def _own_term(self, w_KW: Tensor, b: slice, a: np.ndarray) -> Tensor:
        """Return a_kk w_k of each client of a block, float64 `[k, W]`."""
        ids = self.members.ids[b]
        return w_KW[b].double() * self.ensemble.column(a[b][np.arange(len(ids)), ids])

    def _totals(
        self,
        received: Received,
        blocks: Sequence[slice],
        local: Sequence[Senders],
        a: np.ndarray,
        start: Callable[[slice], Tensor],
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield of each of these blocks `start`, to which a_kj w_j of each client's senders is added, in the order of its list, which passes do not change.

        Where the total is int64, `fixed_point` of them. Only where models come in passes are the totals of several blocks held.
        """
        ids, held = self.members.ids, dict[int, Tensor]()
        for here, now in received.passes(local):
            for b in blocks:
                total = held.pop(b.start) if b.start in held else start(b)
                for position in range(max((len(s) for s in now[b]), default=0)):
                    on = [position < len(s) for s in now[b]]  # the weight is 0 where a list has ended
                    j = [int(s[position]) if there else int(k) for s, k, there in zip(now[b], ids[b], on, strict=True)]
                    rows, a_k = here.rows(j, b), self.ensemble.column(a[b][np.arange(len(j)), j] * on)
                    total += fixed_point(rows, a_k[:, 0]) if total.dtype is torch.int64 else rows.double() * a_k
                if received.here is None:
                    held[b.start] = total
                else:
                    yield b, total
        if received.here is None:
            for b in blocks:
                yield b, held.pop(b.start) if b.start in held else start(b)

    def mean(self, w_KW: Tensor) -> Tensor:
        """Return the exact p-weighted mean over all clients that take part, `[W]`: a row up and the mean down are two models per client. Collective."""
        members = self.members
        members.exclude_diverged(w_KW)
        if not members.active.any():
            nobody = "that takes part: those available come later or have stopped early (--patience)"
            why = "with a finite model left; lower --lr or set --clip_norm" if members.present.any() else nobody
            raise Nobody(f"round {members.round} has no client {why}")
        self.mail.wire.to_server()
        with self.log.clock("exchange"):
            self.log.notes["models_received"] += 2 * members.active[members.ids]
            total = self._over_all(self.mail.wire.leaving(w_KW))
            return (from_fixed_point(total) / float(members.p[members.active].sum())).float()

    def over_received(self, received: Received, blocks: Sequence[slice]) -> Iterator[tuple[slice, Tensor, np.ndarray]]:
        """Yield of each of these blocks sum p_i w_i over each client and the senders it received from, float64 `[k, W]`, and sum p_i, `[k]`.

        Their quotient is w^Y.
        """
        members, w_KW, p, graph = self.members, received.w, self.members.p, received.graph
        own = p * members.active
        if blocks:
            self._check(w_KW, slice(blocks[0].start, blocks[-1].stop))

        def share(b: slice) -> np.ndarray:  # fsum: the same bits as in `over_reachable`, whatever the order
            return np.array([math.fsum([p[k], *p[graph.of(k)]]) for k in members.ids[b]])

        if self.native and received.here is not None:
            for b in blocks:
                senders = graph.of(members.ids[b.start])
                models = np.concatenate([rows_at(w_KW, b.start), received.here.places(senders, b)])
                weights = np.concatenate([own[members.ids[b]], p[senders]])
                total = torch.empty(1, w_KW.shape[1], dtype=torch.int64)
                self.native.fixed(models, weights, total[0])
                yield b, from_fixed_point(total), share(b)
            return

        def start(b: slice) -> Tensor:
            return fixed_point(w_KW[b], self.ensemble.column(own[members.ids[b]])[:, 0])

        lists = [graph.of(k) for k in members.ids]
        for b, total in self._totals(received, blocks, lists, self._weights(None), start):
            yield b, from_fixed_point(total), share(b)

    def over_reachable(self, w_KW: Tensor, candidates: Candidates) -> tuple[Tensor, np.ndarray]:
        """Return sum p_i w_i over each client and its candidates, float64 `[K, W]`, and sum p_i, `[K]` (Algorithm 3, lines 1-7). Collective."""
        members, received = self.members, self.log.notes["models_received"]
        wants = (candidates.room > 0)[members.ids] & members.awake[members.ids]
        if candidates.unrestricted and members.there[members.present].all():
            # everyone reaches all others that take part: one exact sum serves all
            with self.log.clock("exchange"):
                received += np.where(wants, int(members.active.sum()) - 1, 0)
                sent = self.mail.wire.leaving(w_KW)  # by every rank, also by one without clients
                each = self._over_all(sent)[None]
                false = np.arange(len(w_KW)) if self.mail.wire.encoder else self.mail.wire.attack.mine
                if len(false):  # these may send what is not their row; a client sums its own true row
                    each = each.expand(len(w_KW), -1).clone()
                    for i in false[members.active[members.ids[false]]]:
                        each[i] += self._term(members.ids[i], w_KW[i]) - self._term(members.ids[i], sent[i])
            if not (self.mail.wire.counts and self.mail.came(w_KW)):
                self.mail.wire.to_all(candidates)
            p_all = np.full(len(w_KW), math.fsum(members.p[members.active]))
            each = from_fixed_point(each).expand(len(w_KW), -1)  # one row for all, but for liars
            return self._completed(each, w_KW, p_all), p_all
        sets = [np.union1d(candidates.asked_by(k), k) for k in members.ids]
        received += np.array([len(s) - 1 for s in sets], np.int64)
        total = self.ensemble.zeros(len(members.ids), torch.int64)
        wanted: list[list[int]] = [[] for _ in range(members.n)]  # by sender: which of this rank's sums it is in
        for i, senders in enumerate(sets):
            for j in senders.tolist():
                wanted[j].append(i)
        for j, row_W in self.mail.rows(w_KW, candidates, parts=True):
            term = self._term(j, row_W)
            for i in wanted[j]:  # a liar sums its own true row
                total[i] += self._term(j, w_KW[i]) if j == members.ids[i] else term
        p_sets, sums_KW = np.array([math.fsum(members.p[s]) for s in sets]), total.view(torch.float64)
        for i in range(len(sets)):  # in place: there is no second copy of all sums
            sums_KW[i] = from_fixed_point(total[i])
        return self._completed(sums_KW, w_KW, p_sets), p_sets

    def _completed(self, sums_KW: Tensor, w_KW: Tensor, p_K: np.ndarray) -> Tensor:
        """Return sums with each client's own columns, for all, where nothing is sent."""
        if self.mail.wire.columns is None:
            return sums_KW
        return self.mail.wire.completed(sums_KW, w_KW.double() * self.ensemble.column(p_K))

    def _check(self, w_KW: Tensor, rows: slice = slice(None)) -> None:
        active, w_KW = self.members.active[self.members.ids[rows]], w_KW[rows]
        check_fixed_point(w_KW if active.all() else w_KW[np.flatnonzero(active)])

    def _term(self, k: int, row_W: Tensor) -> Tensor:
        return fixed_point(row_W[None], self.ensemble.column(self.members.p[k : k + 1])[:, 0])[0]

    def _over_all(self, w_KW: Tensor) -> Tensor:
        """Return the fixed-point sum of p_i w_i, of rows as they leave, over all clients that take part, int64 `[W]`."""
        members = self.members
        total = self.ensemble.zeros(1, torch.int64)[0]
        self._check(w_KW)
        active = np.flatnonzero(members.active[members.ids])
        if self.native:
            self.native.fixed(rows_at(w_KW, active), members.p[members.ids[active]], total)
        else:
            for i in active:
                total += self._term(members.ids[i], w_KW[i])
        return torch.from_numpy(members.world.sum_int64(total.cpu().numpy())).to(self.ensemble.device)


def rows_at(w_KW: Tensor, rows: Any) -> np.ndarray:
    """Return where in memory these rows lie, uint64: of a number `[1]`, of an array `[k]`."""
    return np.atleast_1d(w_KW.data_ptr() + w_KW.stride(0) * w_KW.element_size() * np.asarray(rows)).astype(np.uint64)
