"""How the collaboration graph is chosen: `ggc` (Algorithm 2), `bggc` (Algorithm 3), and the step they share.

Sets hold clients other than k; k itself is always in X and Y. Line numbers are those of the paper's algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi.placement import waves
from dpfl_mpi.numerics.sketches import nearest, sketches
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.search import Rule
from dpfl_mpi.transport.mailroom import Arrived
from dpfl_mpi.transport.passes import Received


def decide(a: float, b: float, coin: float) -> bool:
    """Return whether to add: with probability a / (a + b), and surely where both gains are 0 (Algorithm 2, line 9)."""
    return a + b == 0 or coin < a / (a + b)


REPAIR = {"repair_models": "models_received", "repair_evaluations": "evaluations"}  # notes of what a repair cost
GAINS = [(True, False), (False, True), (False, False), (True, True)]  # a > 0, b > 0: in the order of `graph.CASES`


class Greedy:
    def __init__(self, scoring: Scoring, sums: Sums, run: Resolved):
        self.members, self.log, self.scoring, self.mail, self.sums = sums.members, sums.log, scoring, sums.mail, sums
        self.blocks, self.seed, self.run = scoring.backend.blocks, run.seed, run
        options = run.found("method").options
        self.rule = options(**run.options) if issubclass(options, Rule) else Rule()
        self.repeats = run.ggc_repeats  # searches with other orders and coins, of which the best reward counts
        self._pair = self.sums.ensemble.zeros(0)

    def pair(self, k: int) -> Tensor:
        """Return where k clients' two averages are scored, `[k, 2, W]`: the same memory at each call, as none is kept."""
        if len(self._pair) < 2 * k:
            self._pair = self.sums.ensemble.zeros(2 * k)
        return self._pair[: 2 * k].view(k, 2, -1)

    def ggc(self, w_KW: Tensor, received: Received) -> CollaborationGraph:
        """Return C_k of every client, chosen among the models received (Algorithm 2). Collective."""
        chosen: list[list[int]] = []
        losses = self._losses_of(received) if self.rule.order == "loss" else None
        for part, blocks in received.parts(received.graph, self.blocks):
            starts = self.sums.over_received(part, blocks)
            # block by block, so that the sums of one are held, unless models come in passes
            for group in ([start] for start in starts) if part.arrived is not None else [list(starts)]:
                chosen += self._searched_among(part, group, w_KW, losses)
        return self.members.collect(chosen)

    def _searched_among(
        self,
        received: Received,
        starts: list[tuple[slice, Tensor, np.ndarray]],
        w_KW: Tensor,
        losses: np.ndarray | None,
    ) -> list[list[int]]:
        """Return C_k of the clients of these blocks, from each one's sums of all that it received. Collective where models come in passes."""
        repeats, room = [], self.members.most_senders
        for repeat in range(self.repeats):
            searches = [Search(self, b, w_KW, y, p_y, room, repeat) for b, y, p_y in starts]
            orders = [self.shuffle(k, received.graph.of(k), repeat) for search in searches for k in search.ids]
            if losses is not None:
                mine = losses[searches[0].block.start :] if searches else losses
                orders = [by_loss(order, loss) for order, loss in zip(orders, mine, strict=False)]
            for here, now in received.passes(orders):
                consider(searches, here, now)
            repeats.append([(search.chosen, search.r_x) for search in searches])
            del searches  # with its sums, before the next repeat's are made
        return best_of(repeats)

    def bggc(self, w_KW: Tensor, candidates: Candidates | None = None) -> CollaborationGraph:
        """Return Omega_k of every client, chosen among its candidates in phases of at most B_c models (Algorithm 3). Collective."""
        chosen: list[list[int]] = []
        candidates = self._candidates(w_KW, candidates)
        losses = self._all_losses(w_KW, candidates) if self.rule.order == "loss" else None
        sums, p_sums = self.sums.over_candidates(w_KW, candidates)  # lines 1-7
        # whose sums are held at once; --network simulates all clients in lock-step
        groups, send = 1 if self.mail.ledger.counts else waves(self.members.per_rank), self.mail.exchange
        for group in np.array_split(np.arange(len(self.blocks)), groups):
            blocks, repeats = [self.blocks[b] for b in group], []
            for repeat in range(self.repeats):
                searches = [Search(self, b, w_KW, sums[b], p_sums[b], candidates.room, repeat) for b in blocks]
                send = self._in_phases(searches, w_KW, send, repeat, losses, candidates)
                repeats.append([(search.chosen, search.r_x) for search in searches])
                del searches
            chosen += best_of(repeats)
        self.mail.ask(candidates)  # of those chosen each model once more (line 4 of Algorithm 1)
        return self.members.collect(chosen)

    def _candidates(self, w_KW: Tensor, given: Candidates | None) -> Candidates:
        """Return the candidates among which clients with these rows search, of those given or all of this round. Collective.

        With --candidates M these are the M whose sketches of what would leave them are most alike.
        """
        members, mail, graph = self.members, self.mail, None
        members.exclude_diverged(w_KW)
        candidates = members.candidates() if given is None else members.candidates(given.room, given.stays)
        if math.isinf(self.run.candidates):
            return candidates
        ensemble = self.sums.ensemble
        start = ensemble.initial_row(self.run.init, streams.stream(self.seed, streams.INIT, 0, 0))
        sent = slice(ensemble.size) if mail.packing.columns is None else mail.packing.columns
        if mail.ledger.counts:
            mail.ask(candidates)
            graph = CollaborationGraph.from_lists(map(candidates.asked_by, range(members.n)))
        with self.log.clock("graph"):
            mine = sketches(mail.leaving(w_KW)[:, sent], start[sent], members.active[members.ids], self.seed)
            told = self.mail.spread(mine, graph)
            near = nearest(members.ids, told, candidates.asked_by, int(self.run.candidates))
        return replace(candidates, nearest=members.collect(near))

    def _in_phases(
        self,
        searches: list[Search],
        w_KW: Tensor,
        send: Callable[..., Received],
        repeat: int,
        losses: np.ndarray | None,
        candidates: Candidates,
    ) -> Callable[..., Received]:
        """Let these searches consider all that their clients can reach; `send` is how the first phase's models come. Return how the next ones do. Collective."""
        members = self.members
        ids = np.concatenate([np.zeros(0, np.int64), *(search.ids for search in searches)])
        first, none = int(searches[0].block.start) if searches else 0, np.zeros(0, np.int64)
        lost = [None] * len(ids) if losses is None else losses[first : first + len(ids)]
        orders = [Order(self, candidates, int(k), repeat, loss) for k, loss in zip(ids, lost, strict=True)]  # line 9
        widths = candidates.room[ids]  # of a client's batch; 0 once its budget is full
        while True:  # line 10
            batch = [order.next(int(width)) for order, width in zip(orders, widths, strict=True)]
            rest = len(members.ids) - first - len(batch)  # the graph is that of all this rank's clients
            batch = [none] * first + batch + [none] * rest
            graph = members.collect(batch)  # line 11; a rank draws its own clients' candidates
            if len(graph.senders) == 0:
                return send
            self.mail.ask(candidates)
            for here, now in send(w_KW, graph).passes(batch):
                consider(searches, here, now[first:])  # lines 12-25
            send = self.mail.send  # the rows are staged
            full = np.array([search.is_full(i) for search in searches for i in range(len(search.ids))], bool)
            widths = np.where(full, 0, candidates.room[ids])

    def losses_of_all(self, w_KW: Tensor, candidates: Candidates | None = None) -> np.ndarray:
        """Return the loss of every client's model alone on the validation images of each local client that can receive it, `[K, N]`, else nan. Collective.

        Counts evaluations, and no models received.
        """
        return self._all_losses(w_KW, self._candidates(w_KW, candidates))

    def _all_losses(self, w_KW: Tensor, candidates: Candidates) -> np.ndarray:
        members = self.members
        loss, asks = np.full((len(members.ids), members.n), np.nan), np.zeros((len(members.ids), members.n), bool)
        for i, k in enumerate(members.ids):
            asks[i, candidates.asked_by(k)] = True
        self.log.every_row = True
        for j, row in self.mail.rows(w_KW, candidates):
            with self.log.clock("graph"):
                loss[:, j] = self.scoring.losses(row, asks[:, j])
        return loss

    def _losses_of(self, received: Received) -> np.ndarray:
        """Return the same of the models received."""
        lists = [received.graph.of(k) for k in self.members.ids]
        loss = np.full((len(lists), self.members.n), np.nan)
        # else receivers may have different versions (--staleness), or complete a row by their own layers
        alike = self.mail.versions.count == 1 and self.mail.packing.columns is None
        for here, now in received.passes(lists):
            for j in np.unique(np.concatenate([np.zeros(0, np.int64), *now])):
                asks = np.array([j in senders for senders in now])
                for who in [asks] if alike else np.eye(len(asks), dtype=bool)[asks]:
                    i = int(who.argmax())
                    loss[who, j] = self.scoring.losses(here.rows([j], i)[0], who)[who]
        return loss

    def repaired(
        self, graph: CollaborationGraph, choose: Callable[[Candidates], CollaborationGraph]
    ) -> CollaborationGraph:
        """Return a graph as --churn leaves it: who came has those it chooses anew, who lost some as many others, beside those that stay. Collective.

        `choose(candidates)` returns a graph of these candidates, within their `room`.
        """
        members, notes = self.members, self.log.notes
        if not members.limits.run.churn:
            return graph
        to = graph.receivers()
        lost = members.awake[to] & (members.new[to] | ~members.there[graph.senders])
        kept, budget = graph.only(~lost), members.most_senders
        room = np.where(members.new & members.awake, budget, np.minimum(graph.degrees() - kept.degrees(), budget))
        members.new &= ~members.awake
        if not room.any():
            return kept
        before = {name: notes[name].copy() for name in REPAIR.values()}
        with self.log.clock("graph"):
            found = choose(members.candidates(room, kept))
        for name, note in REPAIR.items():
            notes[name] += notes[note] - before[note]
        return kept | found

    def shuffle(self, k: int, candidates: np.ndarray, repeat: int = 0, number: int | None = None) -> np.ndarray:
        """Return the candidates in client k's order of this round, or of round `number` (and repeat)."""
        return self._stream(streams.CANDIDATES, k, repeat, number).permutation(candidates)

    def coins(self, block: slice, repeat: int) -> list[Generator]:
        """Return each block client's generator of coins in [0, 1) for this round (and repeat); a candidate takes one."""
        return [self._stream(streams.COIN, k, repeat) for k in self.members.ids[block]]

    def _stream(self, purpose: int, k: int, repeat: int, number: int | None = None) -> Generator:
        # --ggc_repeats is below 1000: no repeat has the stream of another round
        number = self.members.round if number is None else number
        return streams.stream(self.seed, purpose, int(k), number * 1000 + repeat)


class Search:
    """(X, w^X) and (Y, w^Y) of Algorithms 2 and 3, of a block in lock-step; R(X) and R(Y) are carried over, so a candidate costs two evaluations."""

    def __init__(self, greedy: Greedy, block: slice, w_KW: Tensor, y_kW: Tensor, p_y: np.ndarray, room: np.ndarray, repeat: int):
        """Start from X = {k}, and from Y = S and k, whose sum of p_i w_i is `y_kW` `[k, W]` and whose sum of p_i is `p_y` `[k]`."""
        self.scoring, self.block, self.coins = greedy.scoring, block, greedy.coins(block, repeat)
        self.rule, self.ended = greedy.rule, np.zeros(len(greedy.members.ids[block]), bool)
        self.models = 1 if self.rule.search == "forward" else 2  # that are scored of each candidate
        self.ensemble, self.p = self.scoring.backend.ensemble, greedy.members.p
        self.ids = greedy.members.ids[block]
        self.most_senders = room[self.ids]  # B_c - 1
        self.cases = greedy.log.notes["cases"][block]
        self.x, self.y = w_KW[block].double() * self.ensemble.column(self.p[self.ids]), y_kW.clone()
        self.p_x, self.p_y = self.p[self.ids].copy(), p_y.copy()
        self.chosen: list[list[int]] = [[] for _ in self.ids]
        self.r_x = self.r_y = np.zeros(len(self.ids))
        self.pair = greedy.pair(len(self.ids))  # the averages scored next
        self.started = False
        # the native kernels' search decides all models at hand in one call, to the bit as `consider` does one by one
        self.chooser: Any = None
        at_once = len(self.ids) == 1 and not self.scoring.metric_batch and greedy.mail.packing.columns is None
        if at_once and self.rule.decides_as_paper:
            start = (self.x[0], self.y[0], self.pair[0], float(self.p_x[0]), float(p_y[0]))
            self.chooser = self.scoring.backend.chooser(block.start, start, self.cases[0])

    def is_full(self, i: int) -> bool:
        """Whether |X| >= B_c for the block's i-th client; tested before each candidate, the first included."""
        # Paper: line 13 tests after the loop (Algorithm 2) or after a decision (Algorithm 3), which B_c = 1 would never meet.
        return len(self.chosen[i]) >= self.most_senders[i] or bool(self.ended[i])

    def consider(self, here: Arrived, candidates: list[Senders]) -> None:
        """Decide the candidates of each client in their order (lines 2-12), whose models are all `here`."""
        if self.chooser is not None:
            return self._consider_at_once(here, np.asarray(candidates[0], np.int64))
        for position in range(max((len(c) for c in candidates), default=0)):
            active = np.array([position < len(c) and not self.is_full(i) for i, c in enumerate(candidates)], bool)
            if not active.any():
                return
            if not self.started:
                torch.div(self.x, self.ensemble.column(self.p_x), out=self.pair[:, 0])
                torch.div(self.y, self.ensemble.column(self.p_y), out=self.pair[:, 1])
                self.r_x, self.r_y = self._rewards(active)
                self.started = True
            j = [int(c[position] if on else k) for c, on, k in zip(candidates, active, self.ids, strict=True)]
            p_j = np.where(active, self.p[j], 0.0)
            p_xj, p_yj = self.p_x + p_j, self.p_y - p_j
            x_j, y_j = self.scoring.backend.candidate(
                self.x, self.y, here.rows(j, self.block), p_j, p_xj, p_yj, self.pair
            )
            r_xj, r_yj = self._rewards(active)  # R(X and j), R(Y without j): lines 4, 6
            added = np.zeros(len(active), bool)
            for i in np.flatnonzero(active):
                gain, gain_y = r_xj[i] - self.r_x[i], r_yj[i] - self.r_y[i]
                a = max(gain, 0.0)  # line 7
                b = max(gain_y, 0.0)  # line 8
                added[i] = decide(a, b, self.coins[i].random())  # line 9
                if not self.rule.decides_as_paper:
                    added[i] = self._departs(int(i), gain, gain_y, bool(added[i]))
                self.cases[i, GAINS.index((a > 0, b > 0))] += 1
                if added[i]:
                    self.chosen[i].append(j[i])  # line 10
            removed = active & ~added  # line 12
            self.x, self.y = keep(added, x_j, self.x), keep(removed, y_j, self.y)
            self.p_x, self.p_y = np.where(added, p_xj, self.p_x), np.where(removed, p_yj, self.p_y)
            self.r_x, self.r_y = np.where(added, r_xj, self.r_x), np.where(removed, r_yj, self.r_y)

    def _departs(self, i: int, gain: float, gain_y: float, added: bool) -> bool:
        """Return whether to add by the rule where the paper's line 9 says `added`; a search may end here."""
        rule = self.rule
        if rule.search == "forward":
            added = gain >= rule.tolerance * self.r_x[i]  # R is the negative loss
        elif max(gain, gain_y) <= 0 and rule.neither != "add":
            added = rule.neither == "smaller" and gain >= gain_y
        self.ended[i] = rule.stop and not added
        return bool(added)

    def _rewards(self, active: np.ndarray) -> np.ndarray:
        """Return R of both averages of `pair`, `[2, k]`; of a forward search that of Y is not computed, and stands at 0."""
        r = self.scoring.reward(self.block, self.pair[:, : self.models].contiguous(), active).T
        return r if self.models == 2 else np.concatenate([r, r * 0])

    def _consider_at_once(self, here: Arrived, order: np.ndarray) -> None:
        if len(order) == 0 or self.is_full(0):
            return
        room = int(self.most_senders[0]) - len(self.chosen[0])
        added = self.chooser.decide(
            here.addresses(order, self.block), self.p[order], self.coins[0].random(len(order)), room
        )
        self.chosen[0] += order[: len(added)][added].tolist()
        self.scoring.count(self.block, 2 * len(added) + (0 if self.started else 2))
        self.r_x, self.started = np.array([self.chooser.reward]), True


class Order:
    """The candidates of one client in its order (line 9 of Algorithm 3), random, or by its losses `[N]`; only the next few are kept, for all would be N^2 numbers.

    Of up to `MANY` all are drawn for the first few: NumPy exchanges place N - 1 to 1 with a drawn one before it, so each draw may move what ends
    first. That is 1 ms for 100,000, so of more the first few are drawn alone, and the others once these are used up.
    """

    AHEAD = 64  # batches kept; what comes later is drawn again
    MANY = 10_000, 50  # in all, and for one that is kept: above both `Generator.choice` touches only what it returns

    def __init__(self, greedy: Greedy, among: Candidates, k: int, repeat: int, losses: np.ndarray | None = None):
        self.greedy, self.among, self.k, self.repeat, self.losses = greedy, among, k, repeat, losses
        self.done, self.left = 0, 1  # candidates handed out, and to come: at least 1, until the first draw counts them
        self.kept = np.zeros(0, np.int64)  # drawn, not yet handed out

    def next(self, width: int) -> np.ndarray:
        """Return the next `width` candidates, or what is left of them; a client's width is always the same."""
        if width > len(self.kept) and self.left > len(self.kept):
            drawn, of = self._drawn(self.AHEAD * width)
            self.kept = drawn[self.done : self.done + self.AHEAD * width].copy()
            self.left = of - self.done
        now, self.kept = self.kept[:width], self.kept[width:]
        self.done, self.left = self.done + len(now), self.left - len(now)
        return now

    def _drawn(self, few: int) -> tuple[np.ndarray, int]:
        """Return the order, or its first `few` where they are many and none is handed out yet; and how many candidates there are."""
        candidates = self.among.of(self.k)
        if self.losses is not None:
            order = by_loss(self.greedy.shuffle(self.k, candidates, self.repeat), self.losses)
        elif len(candidates) <= max(self.MANY[0], self.MANY[1] * few):
            order = self.greedy.shuffle(self.k, candidates, self.repeat)
        else:
            rng = self.greedy._stream(streams.CANDIDATES, self.k, self.repeat)
            order = rng.choice(candidates, few, replace=False)
            if self.done:
                order = np.concatenate([order, rng.permutation(np.setdiff1d(candidates, order))])
        return order, len(candidates)


def by_loss(order: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the candidates by their losses `[N]`, the smallest first, equal ones in their order."""
    return order[np.argsort(losses[order], kind="stable")]


def keep(which: np.ndarray, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` in the rows where `which` is true, `old` elsewhere."""
    if len(which) == 1:
        return new if which[0] else old
    return torch.where(torch.from_numpy(which).to(new.device)[:, None], new, old)


def consider(searches: list[Search], here: Arrived, now: list[Senders]) -> None:
    """Let each search decide its clients' candidates: `now` has theirs one after the other."""
    first = searches[0].block.start if searches else 0
    for search in searches:
        search.consider(here, now[search.block.start - first : search.block.stop - first])


def best_of(repeats: list[list[tuple[list[list[int]], np.ndarray]]]) -> list[list[int]]:
    """Return the chosen set of each client: of m independent repeats, of whose searches the chosen sets and R(X) are kept, the one with the largest R(X)."""
    return [
        found[int(np.argmax([r_x[i] for _, r_x in found]))][0][i]
        for found in zip(*repeats, strict=True)
        for i in range(len(found[0][0]))
    ]
