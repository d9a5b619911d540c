"""`Greedy`: the two verbs of `fed` that choose the collaboration graph.

`bggc` (Algorithm 3) chooses Omega before round 1: client k's Omega_k are at most B_c - 1 others
among all candidates. `ggc` (Algorithm 2) chooses client k's collaborators C_k in a round, among
those whose models it received. Line numbers are those of the paper's algorithms. A `Search`
(search.py) decides on candidates one by one, for the clients of a block, which a kernel takes.
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
        # One block after the other, so that only its sums are in memory. But models that do not all
        # fit into the window come in passes (`arrived` is None), each for all blocks.
        groups = [list(starts)] if received.arrived is None else ([start] for start in starts)
        for group in groups:
            searches = self.searches(group, w_KW, self.members.most_senders)  # line 1
            orders = self._candidate_orders(searches, received.graph, losses)
            candidates = [order.next(len(received.graph.of(order.k))) for order in orders]
            for arrived, batch in received.passes(candidates):
                consider(searches, arrived, batch)  # lines 2-15
            chosen += [senders for search in searches for senders in search.chosen]
            del group, searches  # frees the sums before those of the next block are made
        return self.members.collect(chosen)

    def bggc(self, w_KW: Tensor, candidates: Candidates | None = None) -> CollaborationGraph:
        """Return Omega_k of every client, among candidates (Algorithm 3). Collective.

        By default these are all clients in reach. They come in phases: in each a client receives as
        many models as its budget allows, and decides on them.
        """
        candidates = self.neighbours.candidates(w_KW, candidates)
        losses = None
        if self.rule.order == "loss":
            losses = self.neighbours.losses_of(w_KW, candidates)
        y_KW, p_y = self.sums.over_candidates(w_KW, candidates)  # lines 1-7
        # groups of blocks, one after the other, so that only one holds the sums of its X; but
        # where single messages are counted or changed (--network, --codec, --send) all ask at once
        groups = 1 if self.mail.ledger.counts else waves(self.members.per_rank)
        chosen: list[list[int]] = []
        # `exchange` stages the rows, i.e. copies them to be sent, and `send` sends staged rows
        receive: Callable[..., Received] = self.mail.exchange
        for group in np.array_split(np.arange(len(self.blocks)), groups):
            blocks = [self.blocks[i] for i in group]
            starts = ((b, y_KW[b], p_y[b]) for b in blocks)
            searches = self.searches(starts, w_KW, candidates.room)  # line 8
            orders = self._candidate_orders(searches, candidates, losses)  # line 9
            # clients of this rank before the group and after it ask for nothing
            first = int(searches[0].block.start) if searches else 0
            nothing: list[np.ndarray] = [np.zeros(0, np.int64)]
            before, after = nothing * first, nothing * (len(self.members.ids) - first - len(orders))
            while True:  # line 10
                full = [search.is_full(i) for search in searches for i in range(len(search.ids))]
                batch = [
                    order.next(0 if is_full else int(candidates.room[order.k]))
                    for order, is_full in zip(orders, full, strict=True)
                ]
                batch = before + batch + after
                graph = self.members.collect(batch)  # line 11
                if len(graph.senders) == 0:  # on all ranks
                    break
                self.mail.ask(candidates)
                for arrived, senders in receive(w_KW, graph).passes(batch):
                    consider(searches, arrived, senders[first:])  # lines 12-25
                receive = self.mail.send
            chosen += [senders for search in searches for senders in search.chosen]
            del searches  # frees the sums before those of the next group are made
        self.mail.ask(candidates)  # --network: line 4 of Algorithm 1 asks for models once more
        return self.members.collect(chosen)

    def _candidate_orders(
        self, searches: list[Search], candidates: Candidates | CollaborationGraph, losses_KN: Losses
    ) -> list[Order]:
        """Return each client's order of its candidates, for the clients of these searches."""
        orders = []
        for search in searches:
            for i, k in enumerate(search.ids.tolist(), search.block.start):
                losses = None if losses_KN is None else losses_KN[i]
                orders.append(Order(self.draws, candidates, k, losses))
        return orders

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
        """Return memory for two averages of k clients. All searches use the same, in turn."""
        if len(self._averages) < 2 * k:
            self._averages = self.sums.ensemble.zeros(2 * k)
        return self._averages[: 2 * k].view(k, 2, -1)
