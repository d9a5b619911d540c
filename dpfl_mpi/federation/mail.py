"""`MailRoom`: this rank's window and the sending of rows along a graph; `Received` and `Arrived`: the models that came."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.wire import Wire
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi import placement
from dpfl_mpi.mpi.placement import (
    models_per_pass,
    rows_per_pass,
    too_narrow,
    window_rows,
    window_slots,
)
from dpfl_mpi.mpi.window import Inbox, Route, route

SPAN = 2**32  # versions of a client's row are fewer


class MailRoom:
    """The window that other ranks put models into, made when it is first needed. Every method that sends is collective."""

    def __init__(self, wire: Wire, window_gb: float):
        self.wire, self.members, self.log, self.ensemble = wire, wire.members, wire.log, wire.ensemble
        self.window_gb = window_gb
        k, pinned = len(self.members.ids), self.ensemble.device.type == "cuda"
        # whether rows are put as --codec and --send have them
        self.packs = wire.encoder is not None or wire.columns is not None
        # the rows that are put: those of this round, then those of each round before that may be taken still
        width = wire.whole // 4 if self.packs else self.ensemble.width
        self.stagings = [torch.zeros(wire.versions * k, width, pin_memory=pinned)]
        if self.packs and wire.encoder:
            self.stagings.append(torch.zeros(wire.versions * k, -(-wire.encoder.bytes // 4), pin_memory=pinned))
        # what was sent last, for local receivers: a method may train its rows on before it averages what it received
        self.sent = self.ensemble.zeros(wire.versions * k) if pinned or self.packs else self.stagings[0]
        self.own = self.sent[:k]  # the receivers' own rows, where not all columns are sent
        # of j + a N, the row of client j of a rounds ago: its rank, and its place among the staged rows there
        of_rank = self.members.per_rank[self.members.owner]
        self.owner = np.tile(self.members.owner, wire.versions)
        self.row_of = np.concatenate([self.members.row_of + a * of_rank for a in range(wire.versions)])
        self.bytes_put = 0  # that this rank has put into windows in this round
        self.sendings = 0  # the same on every rank; what came before the last one is no longer here
        self.everywhere = False  # whether the rows that were sent last came to every client
        self.inboxes: list[Inbox | None] = [None] * len(self.stagings)  # of whole rows, and of encoded ones
        self.store: dict[int, Tensor] = {}  # packed rows of other ranks by `keys`, as far as clients keep them
        self.stored = np.zeros(0, np.int64)  # rank * N * SPAN + key of all that ranks have in their stores
        # called before each pass, which a method may break off on some ranks; `Parts` puts its own `meet` here
        self.meet: Callable[[str], None] = lambda place: None
        # of the last two graphs, such as Omega and the one that was chosen
        self._routes: list[tuple[CollaborationGraph, tuple[Route, int | None]]] = []

    def begin(self) -> None:
        self.bytes_put = 0
        self.wire.begin()
        if self.wire.versions > 1 and len(self.own):
            self.sent[len(self.own) :] = self.sent[: -len(self.own)].clone()

    def state(self) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
        """Return what a checkpoint holds, as `Parts.state`: what may be taken still, and what is on the wire."""
        mine, shared = self.wire.state()
        if self.wire.versions > 1:  # a client's rows move with it to whichever rank
            mine["versions"] = self.sent.view(self.wire.versions, len(self.own), self.ensemble.width).transpose(0, 1)
        return mine, shared

    def exchange(self, w_KW: Tensor, graph: CollaborationGraph) -> Received:
        """Send every row along the graph, as far as both ends take part; return what arrives, until the next sending (Algorithm 1, line 9). Collective."""
        self.members.check_graph(graph, "the graph of fed.exchange")
        self.members.exclude_diverged(w_KW)
        came = self.came(w_KW)
        self.stage(w_KW)
        return self.send(w_KW, graph, came)

    def send(self, w_KW: Tensor, graph: CollaborationGraph, came: bool = False) -> Received:
        """Do what `exchange` does with rows that are staged; `came` says that every client has them by `every_row`. Collective."""
        members = self.members
        graph = members.among_active(graph)
        if members.reach is not None and not graph.within(members.reach):
            whom = "its receiver; fed.reachable(k) names its candidates"
            raise UserError(f"the graph of fed.exchange has an edge outside the --reach of {whom}")
        degrees = graph.degrees()[members.ids]
        if came:  # then they count where fed.note_received tells of them
            degrees = degrees * (not self.log.told)
            self.log.again += degrees
        self.log.notes["models_received"] += degrees
        if not (came and self.log.told):
            self.wire.along(graph)
        whole, width = self._whole_route(graph)
        return Received(self, w_KW, graph, self.put(graph, whole) if width is None else None, width or 0)

    def every_row(self, w_KW: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield `(j, copy of its row [W])` of every client that takes part, in client order, on every rank with clients; send nothing meanwhile. Collective."""
        self.log.every_row = True
        return self.rows(w_KW)

    def rows(
        self, w_KW: Tensor, candidates: Candidates | None = None, parts: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """Do `every_row`: as many rows at a time as the window has slots, at most `MOST_ROWS` where there is no graph; a rank gets each once.

        Of `candidates`, where they are the nearest alone, a rank gets those that its clients ask for.
        No receiver completes a row of which not all is sent: it is a `UserError`, but where `parts` will do.
        """
        members = self.members
        if self.wire.columns is not None and not parts:
            sent = members.limits.run.send
            what = f"--send is {sent}" if sent else f"sends is {members.limits.run.found('method').sends}"
            raise UserError(f"{what}; fed.every_row and losses of all models need whole ones: allowed is all")
        members.exclude_diverged(w_KW)
        came = self.wire.counts and self.came(w_KW)
        self.stage(w_KW)
        if not came:
            self.wire.to_all(candidates or members.candidates()) if members.serves else self.wire.to_server()
        self.everywhere = True
        limit = self._capacity(0)
        limit = np.where(limit > 0, limit, self._limit())  # a rank where nobody has a budget makes no pass narrow
        # without a graph nothing else says how wide the window is
        most = members.n if members.most_senders.any() else min(members.n, placement.MOST_ROWS)
        width, k = rows_per_pass(limit, members.per_rank, most), len(members.ids)
        slots = min(width, members.n - k) if k else 0  # so that later passes need no other window
        ranks, first_of = np.unique(members.owner, return_index=True)  # one client of each rank receives for all
        everyone, away = np.flatnonzero(members.active), members.owner != ranks[:, None]
        wanted = np.ones(members.n, bool)
        if candidates and (near := candidates.nearest):  # models that no client of a rank asks for do not come to it
            asked = np.zeros((members.world.size, members.n), bool)
            asked[members.owner[near.receivers()], near.senders] = True
            away, wanted = away & asked[ranks], asked[members.world.rank] | (members.owner == members.world.rank)
        for start in range(0, len(everyone), width):
            now = everyone[start : start + width]
            self.meet("the next pass of fed.every_row")
            to, of = np.nonzero(away[:, now])
            graph = CollaborationGraph.from_edges(members.n, first_of[to], now[of])
            here = self.put(graph, self.route(graph), slots)
            with self.log.clock("exchange"):
                for j in now[wanted[now]].tolist() if k else []:
                    yield j, here.as_sent([j])[0]
            self.check(here.number)  # the method sent nothing meanwhile: the next pass puts the rows staged above

    def tell(self, values: np.ndarray, graph: CollaborationGraph | None = None) -> np.ndarray:
        """Return on every rank the values `[N, ...]` of all clients, from every rank's `[K, ...]`; no models, which `exchange` sends. Collective.

        They cost the bytes that they take along the edges of the graph, without one from all to all in reach. They are what the clients have, not what
        liars make of it.
        """
        members = self.members
        if graph is not None:
            members.check_graph(graph, "the graph of fed.tell")
        if self.wire.versions > 1:
            stale = f"--staleness is {self.wire.versions - 1}"
            raise UserError(f"{stale}; what fed.tell brings is of the same round, for which all wait: allowed is 0")
        k = len(members.ids)
        if not isinstance(values, np.ndarray) or values.shape[:1] != (k,) or values.dtype.kind not in "biuf":
            given = f"{type(values).__name__} of shape {getattr(values, 'shape', ())}"
            takes = f"it takes a NumPy array of {k} rows, one per client of this rank"
            raise UserError(f"fed.tell was given {given}; {takes}")
        kinds = members.world.texts(json.dumps([values.dtype.str, values.shape[1:]]) if k else "")
        first, *other = dict.fromkeys(filter(None, kinds))
        if other:
            raise UserError(f"fed.tell was given arrays of {first} on one rank, and of {other[0]} on another")
        kind, shape = json.loads(first)
        return self.spread(values if k else np.zeros((0, *shape), kind), graph)  # of no rows it can be any

    def spread(self, values: np.ndarray, graph: CollaborationGraph | None = None) -> np.ndarray:
        """Do what `tell` does, of this round whatever --staleness, as a search takes models of its round."""
        members = self.members
        if self.wire.counts:
            graph = CollaborationGraph.from_lists(map(members.reachable, range(members.n))) if graph is None else graph
            self.wire.tell(members.among_active(graph), values.itemsize * math.prod(values.shape[1:]))
        with self.log.clock("exchange"):
            return members.of_all(values)

    def stage(self, w_KW: Tensor) -> None:
        """Keep what leaves this rank's clients, to be put: what they receive is as it is now, on whichever rank they are."""
        with self.log.clock("exchange"):
            self.sent[: len(w_KW)].copy_(self.wire.leaving(w_KW).detach())  # 25 MB for 100 CNNs
        if self.wire.columns is not None:
            self.own = w_KW
        self.sendings += 1
        self.everywhere = False

    def came(self, w_KW: Tensor) -> bool:
        """Return whether every_row has just brought these very rows to all clients. Collective."""
        if not self.log.every_row:
            return False
        same = self.everywhere and self.wire.equal(self.sent[: len(w_KW)], self.wire.leaving(w_KW).detach())
        return not self.members.world.agree(not same)

    def check(self, number: int) -> None:
        """Raise `UserError` where models were sent since the sending of this number: its own are no longer here."""
        if self.sendings != number:
            sending = "fed.exchange, fed.every_row, fed.bggc, fed.narrow, or fed.average without models received"
            late = f"models that fed.exchange or fed.every_row received are used after the next sending ({sending})"
            raise UserError(f"{late}; only those of the last sending are here")

    def put(self, graph: CollaborationGraph, whole: Route, slots: int = 0) -> Arrived:
        """Put the staged rows along a graph, whose route fits the window, made with so many `slots` at least; return the models here now. Collective."""
        rank, routes = self.members.world.rank, [whole]
        if self.wire.encoder:
            routes, self.stored = self._by_form(graph)
        else:
            self.store.clear()
        for form, to in enumerate(routes):
            if len(routes) > 1 and not to.need.any():
                continue
            need, inbox = int(to.need[rank]), self.inboxes[form]
            if self.members.world.agree(inbox is None or need > inbox.slots):
                usual = form == len(routes) - 1  # whole rows beside encoded ones are few
                inbox = self._open(form, max(need, slots, int(self._capacity()[rank])) if usual else need)
            assert inbox is not None
            with self.log.clock("exchange"):
                if to.puts:
                    self._fill(form)
                self.log.count("wait", inbox.exchange(to))
                self.bytes_put += len(to.puts) * inbox.row_bytes
                if self.packs:
                    self._unpack(form, to, inbox)
        self.sendings += 1
        here = Arrived(self, whole)
        if self.wire.encoder:
            mine = set((self.stored - rank * self.members.n * SPAN).tolist())
            self.store = {key: row for key, row in self.store.items() if key in mine}
        return here

    def _fill(self, form: int) -> None:
        """Stage what is put: on a GPU one host copy of the rank's rows."""
        staging, columns, size = self.stagings[form], self.wire.columns, self.ensemble.size
        if form:
            size = self.wire.messages.shape[2]
            staging.numpy().view(np.uint8)[:, :size] = self.wire.messages.reshape(len(staging), size)
        elif self.packs:
            staging.copy_(self.sent[:, :size] if columns is None else self.sent[:, :size][:, columns[:size]])
        elif self.sent is not staging:
            staging.copy_(self.sent)

    def _unpack(self, form: int, to: Route, inbox: Inbox) -> None:
        """Store the rows that came: whole, or as what was encoded of their change."""
        columns, size, encoder = self.wire.columns, self.ensemble.size, self.wire.encoder
        for slot, key in reversed(list(enumerate(self.keys(to.arriving).tolist()))):  # older ones first
            came = inbox.take(slot)
            if form and encoder:
                row = (encoder.start if key % SPAN == 1 else self.store[key - 1]).clone()
                encoder.decode(came.view(np.uint8)[: encoder.bytes], row)
            else:
                row = self.ensemble.zeros(1)[0]
                row[:size][slice(None) if columns is None else columns[:size]] = torch.from_numpy(came).to(row.device)
            self.store[key] = row

    def keys(self, aged: np.ndarray) -> np.ndarray:
        """Return under which numbers the store has the rows j + a N: their clients and versions."""
        n = self.members.n
        return aged % n * SPAN + self.wire.version.ravel()[aged] if self.wire.encoder else aged

    def route(self, graph: CollaborationGraph) -> Route:
        world, versions = self.members.world, self.wire.versions
        if versions > 1:
            to = graph.receivers()
            graph = CollaborationGraph.from_edges(graph.n * versions, to, self.wire.aged(to, graph.senders))
        return route(graph, self.owner, self.row_of, world.rank, world.size)

    def _by_form(self, graph: CollaborationGraph) -> tuple[list[Route], np.ndarray]:
        """Return the routes of whole rows, and of encoded ones, to ranks that have the version before; and `stored` after them.

        Of what a client keeps, or gets now, ranks keep the versions that may be taken still.
        """
        wire, n, table, to = self.wire, graph.n, self.wire.held.table, graph.receivers()
        keys = self.owner[to] * n * SPAN + self.keys(wire.aged(to, graph.senders))
        lacks = ~np.isin(keys, self.stored)
        follows = np.isin(keys - 1, np.concatenate([self.stored, keys])) | (keys % SPAN == 1)
        stored = np.union1d(self.stored, keys)
        pairs = stored // SPAN
        kept = np.concatenate([keys // SPAN, self.owner[table[:, 0] // n] * n + table[:, 0] % n])
        stays = np.isin(pairs, kept) & (stored % SPAN >= wire.version[-1, pairs % n])
        return [self.route(graph.only(lacks & ~follows)), self.route(graph.only(lacks & follows))], stored[stays]

    def _whole_route(self, graph: CollaborationGraph) -> tuple[Route, int | None]:
        """Return the route of a whole graph, and how many models per client fit one pass; None where the whole graph fits every window."""
        for known, made in self._routes:
            if known is graph and self.wire.versions == 1:  # else the ages differ
                return made
        whole, clients = self.route(graph), self.members.per_rank
        width = models_per_pass(whole.need, self._capacity(0), clients)
        if width == 0:
            self.members.check_budget(graph, "the graph of fed.exchange")
            raise too_narrow(self.window_gb, 4 * self.stagings[0].shape[1], clients)
        if width and self.wire.encoder:  # encoded rows take less room, until some come whole again
            forms, _ = self._by_form(graph)
            return whole, None if all((to.need <= self._capacity(f)).all() for f, to in enumerate(forms)) else width
        self._routes = [(graph, (whole, width)), *self._routes[:1]]
        return whole, width

    def _limit(self, form: int = 0) -> int:
        """Return how many rows of a form --window_gb allows a rank's window."""
        return window_rows(self.window_gb, 4 * self.stagings[form].shape[1])

    def _capacity(self, form: int = -1) -> np.ndarray:
        """Return the slots that every rank's window may have: B_c - 1 per client, no more than there are other clients, within --window_gb."""
        members = self.members
        wanted = np.bincount(members.owner, members.most_senders, minlength=members.world.size).astype(np.int64)
        rows = members.n * self.wire.versions
        return np.minimum(window_slots(wanted, members.per_rank * self.wire.versions, rows), self._limit(form))

    def narrow(self, graph: CollaborationGraph) -> None:
        """Give the window just the slots that a graph needs; the old one is freed first. Collective."""
        self.members.check_graph(graph, "the graph of fed.narrow")
        alive = self.members.alive
        if not alive.all():  # who has diverged sends and receives no more
            graph = graph.only(alive[graph.receivers()] & alive[graph.senders])
        whole, width = self._whole_route(graph)
        self.sendings += 1  # what has arrived goes with the old window
        self.close()
        slots = (whole.need if width is None else self._capacity())[self.members.world.rank]
        self._open(len(self.inboxes) - 1, int(slots))

    def _open(self, form: int, slots: int) -> Inbox:
        if old := self.inboxes[form]:
            old.close()
        inbox = self.inboxes[form] = Inbox(self.members.world, self.stagings[form].numpy(), slots)
        return inbox

    def close(self) -> None:
        for inbox in filter(None, self.inboxes):
            inbox.close()
        self.inboxes = [None] * len(self.stagings)


class Arrived:
    """The models that are here now, until the next are put: staged rows of this rank, and slots of its window."""

    def __init__(self, mail: MailRoom, to: Route):
        self.mail, self.members, self.ensemble = mail, mail.members, mail.ensemble
        self.w, self.to, self.inbox, self.number = mail.sent, to, mail.inboxes[0], mail.sendings
        self.first = self.inbox.view.ctypes.data if self.inbox else 0  # where the window begins
        self.stored = dict[int, Tensor]()  # packed rows of other ranks
        if mail.packs:
            keys = mail.keys(to.arriving).tolist()
            self.stored = {j: mail.store[key] for j, key in zip(to.arriving.tolist(), keys, strict=True)}

    def rows(self, senders: Senders, to: slice | int | None = None) -> Tensor:
        """Return copies of the models of these senders, `[k, W]` on the device; after a later sending this is a `UserError`.

        `to` are their receivers, of this rank, or is the one of all: it may get an older row, and completes one of which not all is sent.
        """
        wire = self.mail.wire
        if wire.versions == 1 and wire.columns is None:
            return self.as_sent(senders)
        if to is None:
            raise UserError("with --staleness or --send rows(senders, i) must say which of fed.ids receives the models")
        out = self.as_sent(wire.aged(self.members.ids[to], np.asarray(senders)))
        return wire.completed(out, self.mail.own[to])

    def as_sent(self, senders: Senders) -> Tensor:
        self.mail.check(self.number)
        device, row_of = self.ensemble.device, self.mail.row_of
        here = self.mail.owner[senders] == self.members.world.rank
        if len(senders) == 1:  # without the gather a search of small models takes a tenth less
            j = senders[0]
            row = self.w[row_of[j]].clone() if here[0] else self._taken(j).to(device)
            return row[None]
        out = self.w[torch.from_numpy(np.where(here, row_of[senders], 0)).to(device)]  # one gather, no loop
        for i in np.flatnonzero(~here).tolist():
            out[i] = self._taken(senders[i])
        return out

    def _taken(self, j: int) -> Tensor:
        """Return a copy of the row of a client of another rank."""
        if self.mail.packs:
            return self.stored[int(j)].clone()
        assert self.inbox is not None
        return torch.from_numpy(self.inbox.take(int(self.to.slots(j))))

    def places(self, senders: np.ndarray, to: slice | np.ndarray) -> np.ndarray:
        """Return where in this process's memory the rows lie that `rows` gives, uint64 `[c]`: on a CPU, all columns sent, until the next sending.

        `to` are the receivers, of this rank: one, or one per sender.
        """
        self.mail.check(self.number)
        senders, row = self.mail.wire.aged(self.members.ids[to], senders), 4 * self.ensemble.width
        out = self.w.data_ptr() + row * self.mail.row_of[senders]
        away = self.mail.owner[senders] != self.members.world.rank
        if self.mail.packs:
            out[away] = [self.stored[j].data_ptr() for j in senders[away].tolist()]
        else:
            out[away] = self.first + row * self.to.slots(senders[away])
        return out.astype(np.uint64)


class Received:
    """The models that arrive along a graph: all at once, as usual, or in passes where the graph is wider than the window."""

    def __init__(self, mail: MailRoom, w_KW: Tensor, graph: CollaborationGraph, here: Arrived | None, width: int):
        """Hold what is here already; where that is None, a pass brings each client `width` models. `w_KW` are this rank's own rows."""
        self.mail, self.w, self.graph, self.here, self.width = mail, w_KW, graph, here, width
        self.number = mail.sendings

    def parts(self, graph: CollaborationGraph, blocks: Sequence[slice]) -> Iterator[tuple[Received, Sequence[slice]]]:
        """Yield blocks of clients and what they receive of a part of the graph: all where they are here, else as many clients as the window has room for.

        Where it has no room for all senders of one client, all clients come at once, too, their models in `passes`. Collective.
        """
        mail, members = self.mail, self.mail.members
        group = None
        if self.here is None and not members.world.agree(any(b.stop - b.start > 1 for b in blocks)):
            group = placement.groups_of(graph, members.owner, members.rank_by_rank, mail._capacity(0))
        if group is None:
            yield self, blocks
            return
        mine = group[members.ids]  # a block is one client
        for g in range(int(group.max(initial=-1)) + 1):
            mail.meet("the next clients of what fed.exchange returned")
            mail.check(self.number)
            now = graph.only(group[graph.receivers()] == g)
            here = mail.put(now, mail.route(now))
            self.number = mail.sendings
            yield Received(mail, self.w, now, here, 0), [blocks[int(i)] for i in np.flatnonzero(mine == g)]

    def passes(self, orders: Sequence[Senders]) -> Iterator[tuple[Arrived, list[Senders]]]:
        """Yield, pass by pass, the models here and which of them each local client uses, in its given order; one pass where all are here. Collective."""
        self.mail.check(self.number)
        if self.here is not None:
            yield self.here, list(orders)
            return
        members = self.mail.members
        self.mail.meet("the passes of what fed.exchange returned")
        longest = members.world.spread(np.array([max(map(len, orders), default=0)], np.float64))[0, 2]
        for first in range(0, int(longest), self.width):
            now = [s[first : first + self.width] for s in orders]
            self.mail.meet("the next pass of what fed.exchange returned")
            self.mail.check(self.number)
            graph = members.collect(now)
            here = self.mail.put(graph, self.mail.route(graph))
            self.number = self.mail.sendings
            yield here, now
