"""`Received`: the models that arrive along a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi import placement as mpi_placement
from dpfl_mpi.mpi.placement import groups_of, rows_per_pass
from dpfl_mpi.transport.mailroom import Arrived, Mailroom


class Received:
    """All models at once, as usual, or in passes if the graph is wider than the window."""

    def __init__(
        self,
        mailroom: Mailroom,
        w_KW: Tensor,
        graph: CollaborationGraph,
        arrived: Arrived | None,
        width: int = 0,
    ):
        """`w_KW` are this rank's own rows; if none `arrived`, a pass brings each client `width`."""
        self.mailroom, self.w, self.graph = mailroom, w_KW, graph
        self.arrived, self.width, self.sending = arrived, width, mailroom.sendings

    def parts(
        self, graph: CollaborationGraph, blocks: Sequence[slice]
    ) -> Iterator[tuple[Received, Sequence[slice]]]:
        """Yield blocks of clients with what they receive of a part of the graph. Collective.

        All blocks, if all models are here; else as many clients as the window has room for. If not
        even one client's models fit, all clients come at once, too, their models in `passes`.
        """
        room, placement = self.mailroom, self.mailroom.placement
        group = None
        several = any(b.stop - b.start > 1 for b in blocks)
        if self.arrived is None and not placement.world.agree(several):
            order, capacity = placement.rank_by_rank, room.capacities[0]
            group = groups_of(graph, placement.owner, order, capacity)
        if group is None:
            yield self, blocks
            return
        groups = group[placement.ids]  # a block is one client
        for g in range(int(group.max(initial=-1)) + 1):
            room.meet("the next clients of what fed.exchange returned")
            room.check(self.sending)
            part = graph.only(group[graph.receivers()] == g)
            arrived = room.put(part)
            self.sending = room.sendings
            members = [blocks[int(i)] for i in np.flatnonzero(groups == g)]
            yield Received(room, self.w, part, arrived), members

    def passes(self, orders: Sequence[Senders]) -> Iterator[tuple[Arrived, list[Senders]]]:
        """Yield, pass by pass, the models here, and those that each client uses. Collective.

        `orders` has each client's senders in its order. One pass, if all models are here.
        """
        room, placement = self.mailroom, self.mailroom.placement
        room.check(self.sending)
        if self.arrived is not None:
            yield self.arrived, list(orders)
            return
        room.meet("the passes of what fed.exchange returned")
        longest = np.array([max(map(len, orders), default=0)], np.float64)
        for first in range(0, int(placement.world.spread(longest)[0, 2]), self.width):
            senders = [order[first : first + self.width] for order in orders]
            room.meet("the next pass of what fed.exchange returned")
            room.check(self.sending)
            arrived = room.put(placement.graph_of(senders))
            self.sending = room.sendings
            yield arrived, senders


def rows_of_all(
    room: Mailroom, clients: np.ndarray, wanted: CollaborationGraph | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield `(j, copy of its row)` of these clients on every rank with clients. Collective.

    With a graph a rank gets only what its clients want; each row once, as many at a time
    as the window has slots, or at most MOST_ROWS if no budget says how wide it is.
    """
    placement, owner = room.placement, room.placement.owner
    n, k, rank = placement.n, len(placement.ids), placement.world.rank
    most = n if room.wanted.any() else min(n, mpi_placement.MOST_ROWS)
    # a rank without budgets makes no pass narrow
    capacity = np.where(room.capacities[0] > 0, room.capacities[0], room.row_limits[0])
    width = rows_per_pass(capacity, placement.per_rank, most)
    slots = min(width, n - k) if k else 0  # so that later passes need no other window
    ranks, receivers = np.unique(owner, return_index=True)  # one client receives for its rank
    away, gets = owner != ranks[:, None], np.full(n, k > 0)
    if wanted is not None:
        wants = np.zeros((placement.world.size, n), bool)  # which rank wants whose row
        wants[owner[wanted.receivers()], wanted.senders] = True
        away &= wants[ranks]
        gets &= wants[rank] | (owner == rank)
    for first in range(0, len(clients), width):
        senders = clients[first : first + width]
        room.meet("the next pass of fed.every_row")
        to, of = np.nonzero(away[:, senders])
        graph = CollaborationGraph.from_edges(n, receivers[to], senders[of])
        arrived = room.put(graph, slots=slots)
        with room.log.clock("exchange"):
            for j in senders[gets[senders]].tolist():
                yield j, arrived.copies([j])[0]
        room.check(arrived.sending)  # the next pass puts the rows that are staged still
