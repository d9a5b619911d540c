"""`Greedy`: how the collaboration graph is chosen, by Algorithms 2 (`ggc`) and 3 (`bggc`).

Line numbers are those of the paper's algorithms. `search.py` has the loop that both share.
"""

from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from dpfl_mpi.federation.members import Candidates
from dpfl_mpi.federation.neighbours import Neighbours
from dpfl_mpi.federation.orders import Draws, Losses, Order
from dpfl_mpi.federation.search import Search, Start, consider
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.placement import waves
from dpfl_mpi.settings.search import Rule
from dpfl_mpi.transport.mailroom import Received


class Greedy:
    def __init__(self, sums: Sums, neighbours: Neighbours, draws: Draws, rule: Rule):
        self.sums, self.neighbours, self.draws, self.rule = sums, neighbours, draws, rule
        self.members, self.mail, self.blocks = sums.members, sums.mail, sums.blocks
        self._averages = sums.ensemble.zeros(0)

    def ggc(self, w_KW: Tensor, received: Received) -> CollaborationGraph:
        """Return C_k of every client, among the models received (Algorithm 2). Collective."""
        chosen: list[list[int]] = []
        losses = None
        if self.rule.order == "loss":
            losses = self.neighbours.losses_of_received(received)
        starts = self.sums.over_received(received)
        # block by block, to hold the sums of one, unless models come in passes
        groups = [list(starts)] if received.arrived is None else ([start] for start in starts)
        for group in groups:
            chosen += self._chosen_from(received, group, w_KW, losses)
        return self.members.collect(chosen)

    def _chosen_from(
        self, received: Received, starts: list[Start], w_KW: Tensor, losses_KN: Losses
    ) -> list[list[int]]:
        """Return C_k of the clients of these blocks. Collective where models come in passes."""
        graph = received.graph
        searches = self.searches(starts, w_KW, self.members.most_senders)  # line 1
        whole = self._candidate_orders(searches, graph, losses_KN)
        orders = [order.next(len(graph.of(order.k))) for order in whole]
        for here, batch in received.passes(orders):
            consider(searches, here, batch)  # lines 2-15
        return [senders for search in searches for senders in search.chosen]

    def bggc(self, w_KW: Tensor, candidates: Candidates | None = None) -> CollaborationGraph:
        """Return Omega_k of every client, among candidates (Algorithm 3). Collective.

        By default these are all clients in reach. A phase brings at most B_c models.
        """
        candidates = self.neighbours.candidates(w_KW, candidates)
        losses = None
        if self.rule.order == "loss":
            losses = self.neighbours.losses_of(w_KW, candidates)
        y_KW, p_y = self.sums.over_candidates(w_KW, candidates)  # lines 1-7
        # so that the sums of one group are held; --network simulates all clients in lock-step
        groups = 1 if self.mail.ledger.counts else waves(self.members.per_rank)
        chosen: list[list[int]] = []
        receive = self.mail.exchange
        for group in np.array_split(np.arange(len(self.blocks)), groups):
            starts = ((b, y_KW[b], p_y[b]) for b in (self.blocks[i] for i in group))
            searches = self.searches(starts, w_KW, candidates.room)  # line 8
            orders = self._candidate_orders(searches, candidates, losses)  # line 9
            receive = self._in_phases(searches, orders, w_KW, candidates, receive)
            chosen += [senders for search in searches for senders in search.chosen]
            del searches  # and its sums, before those of the next group are made
        self.mail.ask(candidates)  # for the chosen models once more: line 4 of Algorithm 1
        return self.members.collect(chosen)

    def _candidate_orders(
        self,
        searches: list[Search],
        candidates: Candidates | CollaborationGraph,
        losses_KN: Losses,
    ) -> list[Order]:
        orders = []
        for search in searches:
            for i, k in enumerate(search.ids.tolist(), search.block.start):
                losses = None if losses_KN is None else losses_KN[i]
                orders.append(Order(self.draws, candidates, k, losses))
        return orders

    def _in_phases(
        self,
        searches: list[Search],
        orders: list[Order],
        w_KW: Tensor,
        candidates: Candidates,
        receive: Callable[..., Received],
    ) -> Callable[..., Received]:
        """Let these searches consider all candidates. Collective.

        `receive` brings the models of the first phase; returns what brings those of the next.
        """
        first = int(searches[0].block.start) if searches else 0
        none: list[np.ndarray] = [np.zeros(0, np.int64)]
        # all clients of this rank; those of other groups ask for nothing
        before, after = none * first, none * (len(self.members.ids) - first - len(orders))
        while True:  # line 10
            full = [search.is_full(i) for search in searches for i in range(len(search.ids))]
            batch = [
                order.next(0 if is_full else int(candidates.room[order.k]))
                for order, is_full in zip(orders, full, strict=True)
            ]
            batch = before + batch + after
            graph = self.members.collect(batch)  # line 11
            if len(graph.senders) == 0:
                return receive
            self.mail.ask(candidates)
            for here, now in receive(w_KW, graph).passes(batch):
                consider(searches, here, now[first:])  # lines 12-25
            receive = self.mail.send  # the rows are staged by now

    def searches(self, starts: Iterable[Start], w_KW: Tensor, room: np.ndarray) -> list[Search]:
        """Return a search for each block; `room` `[N]`: how many models each client may choose."""
        return [
            Search(
                self.neighbours.scoring,
                self.rule,
                start,
                w_KW,
                room=room[self.members.ids[start[0]]],
                coins=self.draws.coins(start[0]),
                averages_k2W=self._memory(start[0].stop - start[0].start),
                in_place=self.mail.packing.columns is None,
            )
            for start in starts
        ]

    def _memory(self, k: int) -> Tensor:
        """Return memory for two averages of k clients, the same at each call: none is kept."""
        if len(self._averages) < 2 * k:
            self._averages = self.sums.ensemble.zeros(2 * k)
        return self._averages[: 2 * k].view(k, 2, -1)
