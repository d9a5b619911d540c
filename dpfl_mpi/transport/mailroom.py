"""`Mailroom`: sends models between ranks, for the verbs of `Mail` (federation/mail.py).

A row is one client's model. Staged rows are copies in host memory that MPI sends. A window is
memory of this rank that other ranks write into; a slot is room for one row in it. A route says
which rank writes which row into which slot. A sending is one exchange of all ranks along a graph:
what it brings (`Arrived`) is valid until the next. `Received` brings the models of a graph, in
several passes (sendings) if they exceed the window. Row j + a N is what client j sent a rounds ago.
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
    """This rank's windows, and the verbs that fill them on all ranks."""

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
        """Client k receives `budgets[k]` models at once; no window exceeds `window_gb` (GiB).

        With `own_code`, a user's method, all ranks meet before each pass, as one may leave early.
        """
        placement, count = packing.placement, packing.ages.count
        self.packing, self.placement, self.ages = packing, placement, packing.ages
        self.log, self.window_gb, self.transfer, self.own_code = log, window_gb, transfer, own_code
        self.bytes_put = 0  # by this rank into windows, in this round
        self.sendings = 0  # so far; the same on every rank
        self.inboxes: list[Inbox | None] = [None] * len(packing.staged)  # windows, made when needed
        # the slots that each rank's clients would fill at once [ranks]; then for every window the
        # slots that --window_gb allows, and those that each rank gets [ranks]
        self.wanted = np.bincount(placement.owner, budgets, placement.world.size).astype(np.int64)
        slots_and_limits = [
            sizes.window_slots(self.wanted, placement.per_rank, count, window_gb, 4 * rows.shape[1])
            for rows in packing.staged
        ]
        self.row_limits = [limit for _, limit in slots_and_limits]
        self.capacities = [np.minimum(slots, limit) for slots, limit in slots_and_limits]
        # what `plan` returned for the last two graphs, such as Omega and the graph chosen from it
        self._plans: list[tuple[CollaborationGraph, tuple[Route, int | None]]] = []

    def meet(self, place: str) -> None:
        """Wait for all ranks of a user's method; one that is elsewhere is a `UserError` on all."""
        if self.own_code:
            with self.log.clock("wait"):
                self.placement.world.meet(place)

    def check_alike(self, what: str, arrays: Sequence[np.ndarray], remedy: str) -> None:
        """Raise `UserError` where a user's method has other arrays on some rank. Collective."""
        world = self.placement.world
        if self.own_code and world.unlike({what: [values.tobytes() for values in arrays]}):
            raise UserError(f"{what} not the same on every rank; {remedy}")

    def begin(self) -> None:
        """Start a round."""
        self.bytes_put = 0
        self.packing.begin()

    def stage(self, rows_KW: Tensor) -> None:
        """Copy the rows of this rank's clients; later sendings take them as they are now."""
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
        """Return which rank writes which row into which slot along a graph."""
        world = self.placement.world
        numbered = self.ages.graph(graph)
        return route(numbered, self.ages.owner, self.ages.row_of, world.rank, world.size)

    def plan(self, graph: CollaborationGraph) -> tuple[Route, int | None]:
        """Return a graph's route, and how many models per client fit in a pass; None: all."""
        for known, planned in self._plans:
            if known is graph and self.ages.count == 1:  # else its rows have other ages by now
                return planned
        whole, clients = self.route(graph), self.placement.per_rank
        width = sizes.models_per_pass(whole.need, self.capacities[0], clients)
        if width == 0:
            raise sizes.too_narrow(self.window_gb, 4 * self.packing.staged[0].shape[1], clients)
        if width and self.packing.encodes:  # all may fit, as most rows go as shorter messages
            parts, _ = self.packing.split(graph)
            needs = [self.route(part).need for part in parts]
            pairs = zip(needs, self.capacities, strict=True)
            return whole, None if all((need <= slots).all() for need, slots in pairs) else width
        self._plans = [(graph, (whole, width)), *self._plans[:1]]
        return whole, width

    def put(
        self, graph: CollaborationGraph, whole: Route | None = None, least_slots: int = 0
    ) -> Arrived:
        """Send the staged rows along a graph that fits the windows; return what came. Collective.

        `whole`: the graph's route, if known. A window that is too narrow is made anew, with at
        least `least_slots`, which later passes need.
        """
        whole = whole or self.route(graph)
        parts, keys = self.packing.split(graph)
        for window, part in enumerate(parts):
            path = whole if part is graph else self.route(part)
            if len(parts) > 1 and not path.need.any():  # nothing goes through this window
                continue
            inbox = self._wide_enough(window, path, least_slots)
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

        With a graph, a rank gets only the rows of its clients' senders. A pass brings as many rows
        as the window has slots, or at most MAX_ROWS_PER_PASS where no budget says how wide it is.
        """
        placement, owner, rank = self.placement, self.placement.owner, self.placement.world.rank
        n, k = placement.n, len(placement.ids)
        most = n if self.wanted.any() else min(n, sizes.MAX_ROWS_PER_PASS)
        # a rank whose clients have no budget still gets a window, and makes no pass narrower
        capacity = np.where(self.capacities[0] > 0, self.capacities[0], self.row_limits[0])
        width = sizes.rows_per_pass(capacity, placement.per_rank, most)
        slots = min(width, n - k) if k else 0  # so that later passes need no other window
        # on each rank that has clients one of them receives the rows that are away, on other ranks
        ranks, receivers = np.unique(owner, return_index=True)
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
            arrived = self.put(graph, least_slots=slots)
            with self.log.clock("exchange"):
                for j in senders[gets[senders]].tolist():
                    yield j, arrived.copies([j])[0]
            self.check(arrived.sending)  # else the next pass would send rows staged meanwhile

    def _wide_enough(self, window: int, path: Route, least_slots: int) -> Inbox:
        """Return this window, made anew on all ranks if it lacks slots on one of them."""
        world, inbox = self.placement.world, self.inboxes[window]
        need = int(path.need[world.rank])
        if not world.agree(inbox is None or need > inbox.slots):
            assert inbox is not None
            return inbox
        if inbox:
            inbox.close()
        if window == len(self.inboxes) - 1:  # of a codec's two windows the first needs few slots
            need = max(need, least_slots, int(self.capacities[window][world.rank]))
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
    """The rows that this rank can read after one sending: its own, and those in its windows."""

    def __init__(self, mailroom: Mailroom, route: Route):
        self.mailroom, self.packing, self.ages = mailroom, mailroom.packing, mailroom.ages
        self.route, self.inbox, self.sending = route, mailroom.inboxes[0], mailroom.sendings
        # unpacked rows of other ranks by number; None: they are read in the window
        self.unpacked = self.packing.unpacked(route.arriving)

    def rows(self, senders: Senders, to: int) -> Tensor:
        """Return copies of the senders' models, `[k, W]` on the device, until the next sending.

        `to` is their receiver by local number. It matters under --staleness, where a receiver may
        get an older row, and under --send, where columns that are not sent are the receiver's.
        """
        if self.ages.count == 1 and self.packing.columns is None:
            return self.copies(senders)
        ids = self.mailroom.placement.ids
        rows = self.copies(self.ages.numbers(ids[to], np.asarray(senders)))
        return self.packing.complete(rows, self.packing.local_rows[to])

    def copies(self, numbers: Senders) -> Tensor:
        """Return copies of rows by their numbers, as they were sent, `[k, W]` on the device."""
        self.mailroom.check(self.sending)
        outgoing, row_of = self.packing.outgoing, self.ages.row_of
        local = self.ages.owner[numbers] == self.mailroom.placement.world.rank
        if len(numbers) == 1:  # without the gather a search of small models takes 10 % less time
            number = numbers[0]
            row = outgoing[row_of[number]].clone() if local[0] else self._remote(number)
            return row[None]
        # gather the local rows, and row 0 for each remote one, which then replaces it
        rows = outgoing[torch.from_numpy(np.where(local, row_of[numbers], 0)).to(outgoing.device)]
        for i in np.flatnonzero(~local).tolist():
            rows[i] = self._remote(numbers[i])
        return rows

    def _remote(self, number: int) -> Tensor:
        """Return a copy of a row of another rank."""
        # in `unpacked` after a codec or of some columns, in `landed` on a GPU, else in the window
        if self.unpacked is not None:
            return self.unpacked[int(number)].clone()
        assert self.inbox is not None
        slot = int(self.route.slots(number))
        if self.packing.landed is not None:
            return self.packing.landed[slot].clone()
        return torch.from_numpy(self.inbox.take(slot))

    def addresses(self, senders: np.ndarray, to: slice | np.ndarray) -> np.ndarray:
        """Return where in the device's memory the senders' rows lie, for a kernel, uint64 `[c]`.

        All columns must be sent. `to`: the local number of one receiver, or of one per sender.
        """
        self.mailroom.check(self.sending)
        placement = self.mailroom.placement
        numbers = self.ages.numbers(placement.ids[to], senders)
        row_bytes = 4 * self.packing.ensemble.width
        out = self.packing.outgoing.data_ptr() + row_bytes * self.ages.row_of[numbers]
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
        """Send the staged rows, copies of `w_KW`, along the graph if all fit. Collective."""
        self.mailroom, self.w, self.graph = mailroom, w_KW, graph
        route, self.width = mailroom.plan(graph)
        self.arrived = mailroom.put(graph, route) if self.width is None else None
        self.sending = mailroom.sendings

    def passes(self, orders: Sequence[Senders]) -> Iterator[tuple[Arrived, list[Senders]]]:
        """Yield, pass by pass, what arrived, and for each local client whose models. Collective.

        `orders`: each client's senders, in its order. If all models are here, there is one pass.
        """
        mailroom, placement = self.mailroom, self.mailroom.placement
        mailroom.check(self.sending)
        if self.width is None:
            assert self.arrived is not None
            yield self.arrived, list(orders)
            return
        mailroom.meet("the passes of what fed.exchange returned")
        # all ranks make as many passes as the client with the most senders needs
        longest = np.array([max(map(len, orders), default=0)], np.float64)
        for first in range(0, int(placement.world.spread(longest)[0, 2]), self.width):
            senders = [order[first : first + self.width] for order in orders]
            mailroom.meet("the next pass of what fed.exchange returned")
            mailroom.check(self.sending)
            arrived = mailroom.put(placement.graph_of(senders))
            self.sending = mailroom.sendings
            yield arrived, senders

    def models(self) -> Iterator[tuple[int, np.ndarray, Tensor]]:
        """Yield for local clients some of their senders and copies of their models. Collective.

        They are the client's local number, the senders `[m]`, ascending, and the models `[m, W]`.
        """
        senders_of = [self.graph.of(k) for k in self.mailroom.placement.ids]
        for arrived, lists in self.passes(senders_of):
            for i, senders in enumerate(lists):
                if len(senders):
                    yield i, np.asarray(senders), arrived.rows(senders, i)
