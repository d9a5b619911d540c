"""`Wire`: what leaves a client and when it arrives: lies, codec, layers that are sent, bytes, and the clocks of --network.

Everything but `known` is the same on every rank. Without --network, --codec and --send it passes rows on as they are, and counts nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.log import Log
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics.codec import Encoder, columns_of
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.clock import Clock
from dpfl_mpi.transport.links import Links
from dpfl_mpi.transport.speeds import Speeds, speeds_of


class Wire:
    def __init__(self, run: Resolved, log: Log, attack: Attack, head: str):
        self.members, self.log, self.ensemble, self.attack = attack.members, log, attack.ensemble, attack
        n = self.members.n
        self.clock: Clock | None = None
        if run.network:  # root has what a file holds
            told = self.members.world.share(lambda: vars(speeds_of(str(run.network), run.network.table, run.clients, run.seed)))
            self.clock = Clock(Speeds(**told), run.staleness)
        self.versions = run.staleness + 1  # rows of each client that a receiver may get
        self.columns = columns_of(run, self.ensemble, head)  # bool [W] of those that are sent; None: all
        self.counts = bool(run.network or run.codec or self.columns is not None)
        self.whole = 4 * int(self.ensemble.size if self.columns is None else self.columns[: self.ensemble.size].sum())
        self.encoder: Encoder | None = None
        if run.codec:
            start = self.ensemble.initial_row(run.init, streams.stream(run.seed, streams.INIT, 0, 0))
            self.encoder = Encoder(run, self.ensemble, start, self.columns)
            self.known = start.repeat(len(self.members.ids), 1)  # what others know of this rank's clients [K, W]
            self.told = torch.zeros_like(self.known)  # the rows that were encoded last
            # what was encoded last, then in each round before of which rows may be taken still; how often by then, alike
            self.messages = np.zeros((self.versions, len(self.members.ids), self.encoder.bytes), np.uint8)
            self.version = np.zeros((self.versions, n), np.int64)
            # by edge which of them the receiver holds, and when it came; of 0, the initial row, everyone knows
            self.held = Links(2)
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self.bytes = np.zeros(self.members.n, np.int64)  # that each client has sent in this round
        self.age = np.zeros(self.members.n, np.int64)  # rounds that what each received was old, summed
        # whose senders know that it wants their models, not only once asked
        self.standing = np.ones(self.members.n, bool)
        self.ages = Links()  # by edge how many rounds old the row is that its receiver takes
        if self.encoder:
            self.messages[1:], self.version[1:] = self.messages[:-1].copy(), self.version[:-1].copy()
        if self.clock:
            self.clock.begin(self.members.awake)

    def leaving(self, w_KW: Tensor) -> Tensor:
        """Return what others will know of this rank's rows, `[K, W]`: encoded once where they changed; newcomers get whole rows. Collective."""
        w_KW = self.attack.sent(w_KW)
        if self.encoder is None:
            return w_KW
        if not self.members.in_rounds:
            self.version[0] += 2  # nobody has the one before
            return w_KW
        if self.members.world.agree(not self.equal(w_KW, self.told)):
            self.told.copy_(w_KW.detach())
            active = self.members.active
            self.version[0] += active
            with torch.no_grad():
                for i in np.flatnonzero(active[self.members.ids]):
                    self.messages[0, i] = self.encoder.encode(w_KW[i].detach(), self.known[i])
        return self.known

    def equal(self, a_KW: Tensor, b_KW: Tensor) -> bool:
        """Return whether these are the same rows of this rank's clients that take part: who has diverged has NaN, which equals nothing."""
        active = np.flatnonzero(self.members.active[self.members.ids])
        return torch.equal(a_KW[active], b_KW[active])

    def completed(self, rows_kW: Tensor, own_kW: Tensor) -> Tensor:
        """Return rows that arrived with the receivers' own columns where nothing is sent."""
        return rows_kW if self.columns is None else torch.where(self.columns, rows_kW, own_kW)

    def settle(self) -> Clock | None:
        """Move the clocks, if there are any, by what was trained and scored since they last moved. Collective."""
        if self.clock:
            self.clock.work(*self.members.of_all(np.stack([self.log.steps, self.log.images], 1)).T)
            self.log.steps[:], self.log.images[:] = 0, 0
        return self.clock

    def ask(self, candidates: Candidates) -> None:
        """Let all that have room ask their senders now: a search is no standing order, and takes models of its round. Collective."""
        asks, self.ages = candidates.room > 0, Links()
        self.standing &= ~asks
        if clock := self.settle():
            clock.ask(asks)

    def along(self, graph: CollaborationGraph) -> None:
        """Send what left the clients last along a graph: its bytes, its ages, and when its receivers go on. Collective."""
        if not self.counts:
            return
        to, of = graph.receivers(), graph.senders
        edges, sizes = to * graph.n + of, np.full(len(of), self.whole)
        if self.encoder and self.members.in_rounds:  # it sends again each that the receiver has missed
            lacks = np.maximum(self.version[0, of] - self.held.get(edges, 0), 1)
            sizes = np.minimum(lacks * self.encoder.bytes, self.whole)
            self.held.set(edges, self.version[0, of], self.held.table[:, 2].max(initial=0) + 1)
            self.held.trim(self.members.limits.most_senders)
        np.add.at(self.bytes, of, sizes)
        if clock := self.settle():
            ages = clock.exchange(to, of, sizes, self.standing[to])
            np.add.at(self.age, to, ages)
            self.ages.set(edges, ages)

    def tell(self, graph: CollaborationGraph, size: int) -> None:
        """Send along a graph values of this round that take so many bytes. Collective."""
        to, of = graph.receivers(), graph.senders
        np.add.at(self.bytes, of, size)
        if clock := self.settle():
            clock.wait(to, of, clock.arrivals(to, of, np.full(len(of), size), standing=False))

    def to_server(self) -> None:
        """Send a model of everyone that takes part to a server, and its answer back. Collective."""
        if clock := self.settle():
            self.bytes += 2 * self.whole * self.members.active
            clock.server(self.members.active, self.whole)

    def to_all(self, candidates: Candidates) -> None:
        """Send everyone the models of all that it can reach, from its own number on, in phases of as many as its budget allows. Collective."""
        phase = 0
        self.ask(candidates)
        while self.counts:
            now = []
            for k, most in enumerate(candidates.room.tolist()):
                near = candidates.asked_by(k)
                now.append(np.roll(near, -np.searchsorted(near, k))[phase * most : (phase + 1) * most])
            if not any(map(len, now)):
                return
            self.along(CollaborationGraph.from_lists(now))
            self.ask(candidates)
            phase += 1

    def aged(self, to: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Return j + a N for the edges `[E]` from senders j, where the receiver gets the row of a rounds ago."""
        if self.versions == 1:
            return of
        return of + self.ages.get(to * self.members.n + of, 0) * self.members.n

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what a checkpoint holds, as `Parts.state`."""
        mine: dict[str, Any] = {"known": self.known, "told": self.told} if self.encoder else {}
        mine |= {"messages": self.messages.swapaxes(0, 1)} if self.encoder else {}  # a client's move with it
        shared = {"version": self.version} if self.encoder else {}
        links = {name: links.table for name, links in self.links.items()}
        return mine, shared | links | (self.clock.state() if self.clock else {})

    @property
    def links(self) -> dict[str, Links]:
        """What a checkpoint holds of edges, by name."""
        came = self.clock.came if self.clock else []
        return {f"came{a}": links for a, links in enumerate(came)} | ({"held": self.held} if self.encoder else {})
