"""`Mailroom`: puts rows into other ranks' windows.

`Arrived`: the rows that one sending brought, valid until the next. `Received`: the models that a
graph brings, at once or in passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi import placement as sizes
from dpfl_mpi.mpi.window import Inbox, Route, Transfer, route
from dpfl_mpi.transport.log import Log
from dpfl_mpi.transport.packing import Packing


class Mailroom:
    """This rank's windows, and the staged rows that it puts into others'."""

    def __init__(
        self,
        packing: Packing,
        log: Log,
        *,
        budgets: np.ndarray,
        window_gb: float,
        transfer: Transfer,
        own_code: bool,
    ):
        """Make windows when needed, of `budgets` `[N]` rows per client, within --window_gb.

        With `own_code` all ranks meet before each pass: a user's method may break off.
        """
        placement, count = packing.placement, packing.ages.count
        self.packing, self.placement, self.ages = packing, placement, packing.ages
        self.log, self.window_gb, self.transfer, self.own_code = log, window_gb, transfer, own_code
        self.bytes_put = 0  # by this rank into windows, in this round
        self.sendings = 0  # rows are here until the next one; the same on every rank
        self.inboxes: list[Inbox | None] = [None] * len(packing.staged)
        # rows that each rank would receive at once; then by window how many rows --window_gb
        # allows, and for how many there is room [ranks]
        self.wanted = np.bincount(placement.owner, budgets, placement.world.size).astype(np.int64)
        room = [
            sizes.window_slots(self.wanted, placement.per_rank, count, window_gb, 4 * rows.shape[1])
            for rows in packing.staged
        ]
        self.row_limits = [limit for _, limit in room]
        self.capacities = [np.minimum(slots, limit) for slots, limit in room]
        # of the last two graphs, such as Omega and the one that was chosen
        self._routes: list[tuple[CollaborationGraph, tuple[Route, int | None]]] = []

    def meet(self, place: str) -> None:
        """Wait for all ranks of a user's method; one that is elsewhere is a `UserError` on all."""
        if self.own_code:
            with self.log.clock("wait"):
                self.placement.world.meet(place)

    def begin(self) -> None:
        """Start a round."""
        self.bytes_put = 0
        self.packing.begin()

    def stage(self, rows_KW: Tensor) -> None:
        """Copy the rows that leave this rank's clients; they are put as they are now."""
        self.packing.outgoing[: len(rows_KW)].copy_(rows_KW.detach())  # 25 MB for 100 CNNs
        self.sendings += 1

    def check(self, sending: int) -> None:
        """Raise `UserError` if anything was sent since this sending."""
        if self.sendings != sending:
            models = "models that fed.exchange or fed.every_row received"
            verbs = "fed.exchange, fed.every_row, fed.bggc, fed.narrow"
            late = f"the next sending ({verbs}, or fed.average without models received)"
            raise UserError(f"{models} are used after {late}; only those of the last are here")

    def route(self, graph: CollaborationGraph) -> Route:
        """Return who puts which row where along a graph."""
        world = self.placement.world
        numbered = self.ages.graph(graph)
        return route(numbered, self.ages.owner, self.ages.place, world.rank, world.size)

    def plan(self, graph: CollaborationGraph) -> tuple[Route, int | None]:
        """Return a graph's route, and the models per client that fit a pass, None: all.

        Raises `UserError` if not even one fits.
        """
        for known, planned in self._routes:
            if known is graph and self.ages.count == 1:  # else ages differ
                return planned
        whole, clients = self.route(graph), self.placement.per_rank
        width = sizes.models_per_pass(whole.need, self.capacities[0], clients)
        if width == 0:
            raise sizes.too_narrow(self.window_gb, 4 * self.packing.staged[0].shape[1], clients)
        if width and self.packing.encodes:  # encoded rows take less room
            parts, _ = self.packing.split(graph)
            needs = [self.route(part).need for part in parts]
            fits = [(need <= most).all() for need, most in zip(needs, self.capacities, strict=True)]
            return whole, None if all(fits) else width
        self._routes = [(graph, (whole, width)), *self._routes[:1]]
        return whole, width

    def put(self, graph: CollaborationGraph, whole: Route | None = None, slots: int = 0) -> Arrived:
        """Put the staged rows along a graph that fits the windows; return all here. Collective.

        `whole`: the graph's route, if known. A new window has at least so many `slots`.
        """
        whole = whole or self.route(graph)
        parts, keys = self.packing.split(graph)
        for window, part in enumerate(parts):
            path = whole if part is graph else self.route(part)
            if len(parts) > 1 and not path.need.any():
                continue
            inbox = self._wide_enough(window, path, slots)
            with self.log.clock("exchange"):
                if path.puts:
                    self.packing.pack(window)
                self.log.count("wait", inbox.exchange(path))
                self.bytes_put += len(path.puts) * inbox.row_bytes
                self.packing.unpack(window, path, inbox)
        self.packing.keep(keys)
        self.sendings += 1
        return Arrived(self, whole)

    def rows_of_all(
        self, clients: np.ndarray, wanted: CollaborationGraph | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield `(j, copy of its row)` of these clients on every rank with clients. Collective.

        With a graph a rank gets only what its clients want; each row once, as many at a time
        as the window has slots, or at most MAX_ROWS_PER_PASS if no budget says how wide it is.
        """
        placement, owner, rank = self.placement, self.placement.owner, self.placement.world.rank
        n, k = placement.n, len(placement.ids)
        most = n if self.wanted.any() else min(n, sizes.MAX_ROWS_PER_PASS)
        # a rank without budgets makes no pass narrow
        capacity = np.where(self.capacities[0] > 0, self.capacities[0], self.row_limits[0])
        width = sizes.rows_per_pass(capacity, placement.per_rank, most)
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
            self.meet("the next pass of fed.every_row")
            to, of = np.nonzero(away[:, senders])
            graph = CollaborationGraph.from_edges(n, receivers[to], senders[of])
            arrived = self.put(graph, slots=slots)
            with self.log.clock("exchange"):
                for j in senders[gets[senders]].tolist():
                    yield j, arrived.copies([j])[0]
            self.check(arrived.sending)  # the next pass puts the rows that are staged still

    def _wide_enough(self, window: int, path: Route, slots: int) -> Inbox:
        """Return a window with room for what arrives, on all ranks a new one or none."""
        world, inbox = self.placement.world, self.inboxes[window]
        need = int(path.need[world.rank])
        if not world.agree(inbox is None or need > inbox.slots):
            assert inbox is not None
            return inbox
        if inbox:
            inbox.close()
        if window == len(self.inboxes) - 1:  # whole rows beside encoded ones are few
            need = max(need, slots, int(self.capacities[window][world.rank]))
        return self._open(window, need)

    def _open(self, window: int, slots: int) -> Inbox:
        staged = self.packing.staged[window].numpy()
        inbox = Inbox(self.placement.world, staged, slots, self.transfer)
        self.inboxes[window] = inbox
        return inbox

    def narrow(self, graph: CollaborationGraph) -> None:
        """Give the window just a graph's slots; free the old one first. Collective."""
        whole, width = self.plan(graph)
        self.sendings += 1  # what has arrived goes with the old window
        self.close()
        slots = whole.need if width is None else self.capacities[-1]
        self._open(len(self.inboxes) - 1, int(slots[self.placement.world.rank]))

    def close(self) -> None:
        """Free the windows. Collective."""
        for inbox in filter(None, self.inboxes):
            inbox.close()
        self.inboxes = [None] * len(self.inboxes)


class Arrived:
    """The rows of one exchange, until the next one: this rank's, and those in its windows."""

    def __init__(self, mailroom: Mailroom, route: Route):
        self.mailroom, self.packing, self.ages = mailroom, mailroom.packing, mailroom.ages
        self.route, self.inbox, self.sending = route, mailroom.inboxes[0], mailroom.sendings
        # unpacked rows of other ranks by number; None: they are read in the window
        self.unpacked = self.packing.unpacked(route.arriving)

    def rows(self, senders: Senders, to: slice | int | None = None) -> Tensor:
        """Return copies of the senders' models, `[k, W]` on the device.

        `to` are their receivers: places among this rank's clients, or one receiver for all. They
        matter under --staleness, as a receiver may get an older row, and under --send, where the
        columns that are not sent are the receiver's own. Raises `UserError` if other models were
        sent since.
        """
        if self.ages.count == 1 and self.packing.columns is None:
            return self.copies(senders)
        if to is None:
            which = "rows(senders, i) must say which of fed.ids receives the models"
            raise UserError(f"with --staleness or --send {which}")
        ids = self.mailroom.placement.ids
        rows = self.copies(self.ages.numbers(ids[to], np.asarray(senders)))
        return self.packing.complete(rows, self.packing.own[to])

    def copies(self, numbers: Senders) -> Tensor:
        """Return copies of rows by their numbers, as they were sent, `[k, W]` on the device."""
        self.mailroom.check(self.sending)
        outgoing, place = self.packing.outgoing, self.ages.place
        local = self.ages.owner[numbers] == self.mailroom.placement.world.rank
        if len(numbers) == 1:  # without the gather a search of small models takes 10 % less time
            number = numbers[0]
            row = outgoing[place[number]].clone() if local[0] else self._remote(number)
            return row[None]
        rows = outgoing[torch.from_numpy(np.where(local, place[numbers], 0)).to(outgoing.device)]
        for i in np.flatnonzero(~local).tolist():
            rows[i] = self._remote(numbers[i])
        return rows

    def _remote(self, number: int) -> Tensor:
        """Return a copy of a row of another rank."""
        if self.unpacked is not None:
            return self.unpacked[int(number)].clone()
        assert self.inbox is not None
        slot = int(self.route.slots(number))
        if self.packing.landed is not None:
            return self.packing.landed[slot].clone()
        return torch.from_numpy(self.inbox.take(slot))

    def addresses(self, senders: np.ndarray, to: slice | np.ndarray) -> np.ndarray:
        """Return where in memory the rows of `rows` lie until the next sending, uint64 `[c]`.

        In the device's memory, with all columns sent. `to`: one receiver, or one per sender.
        """
        self.mailroom.check(self.sending)
        placement = self.mailroom.placement
        numbers = self.ages.numbers(placement.ids[to], senders)
        row_bytes = 4 * self.packing.ensemble.width
        out = self.packing.outgoing.data_ptr() + row_bytes * self.ages.place[numbers]
        away = self.ages.owner[numbers] != placement.world.rank
        if self.unpacked is not None:
            out[away] = [self.unpacked[j].data_ptr() for j in numbers[away].tolist()]
        elif self.inbox:
            landed = self.packing.landed
            window = self.inbox.view.ctypes.data if landed is None else landed.data_ptr()
            out[away] = window + row_bytes * self.route.slots(numbers[away])
        return out.astype(np.uint64)


class Received:
    """The models that a graph brings: all at once, or in passes if they exceed the window."""

    def __init__(self, mailroom: Mailroom, w_KW: Tensor, graph: CollaborationGraph):
        """Put the staged rows along the graph, if all fit; `w_KW` are this rank's. Collective."""
        self.mailroom, self.w, self.graph = mailroom, w_KW, graph
        route, self.width = mailroom.plan(graph)
        self.arrived = mailroom.put(graph, route) if self.width is None else None
        self.sending = mailroom.sendings

    def passes(self, orders: Sequence[Senders]) -> Iterator[tuple[Arrived, list[Senders]]]:
        """Yield, pass by pass, the models here, and those that each client uses. Collective.

        `orders`: each client's senders, in its order. If all models are here, there is one pass.
        """
        room, placement = self.mailroom, self.mailroom.placement
        room.check(self.sending)
        if self.width is None:
            assert self.arrived is not None
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

    def models(self) -> Iterator[tuple[int, np.ndarray, Tensor]]:
        """Yield for local clients some of their senders and copies of their models. Collective.

        They are a client's number on this rank, senders `[m]`, ascending, and `[m, W]`.
        """
        for here, batch in self.passes([self.graph.of(k) for k in self.mailroom.placement.ids]):
            for i, senders in enumerate(batch):
                if len(senders):
                    yield i, np.asarray(senders), here.rows(senders, i)
