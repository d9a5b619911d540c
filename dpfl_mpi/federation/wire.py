"""`Wire`: what leaves a client and when it arrives: lies, codec, layers that are sent, bytes, and the clocks of --network.

Everything but `known` is the same on every rank. Without --network, --codec and --send it passes rows on as they are, and counts nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.federation.codec import Encoder
from dpfl_mpi.federation.log import Log
from dpfl_mpi.federation.members import Phase
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.network.clock import Clock
from dpfl_mpi.network.profiles import Speeds, speeds_of
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved


class Wire:
    def __init__(self, run: Resolved, log: Log, attack: Attack, head: str):
        self.members, self.log, self.ensemble, self.attack = attack.members, log, attack.ensemble, attack
        n = self.members.n
        self.clock: Clock | None = None
        if run.network:  # root has what a file holds
            told = self.members.world.share(lambda: vars(speeds_of(run)))
            self.clock = Clock(Speeds(**told), run.staleness)
        self.versions = run.staleness + 1  # rows of each client that a receiver may get
        self.columns = columns_of(run, self.ensemble, head)  # bool [W] of those that are sent; None: all
        self.counts = bool(run.network or run.codec or run.send)
        self.whole = 4 * int(self.ensemble.size if self.columns is None else self.columns[: self.ensemble.size].sum())
        self.encoder: Encoder | None = None
        if run.codec:
            start = self.ensemble.initial_row(run.init, streams.stream(run.seed, streams.INIT, 0, 0))
            self.encoder = Encoder(run, self.ensemble, start, self.columns)
            self.known = start.repeat(len(self.members.ids), 1)  # what others know of this rank's clients [K, W]
            self.told = torch.zeros_like(self.known)  # the rows that were encoded last
            # who holds what a sender sent last, and before that, receiver by sender: everyone knows the initial row
            self.holds, self.held = np.ones((n, n), bool), np.ones((n, n), bool)
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self.bytes = np.zeros(self.members.n, np.int64)  # that each client has sent in this round
        self.age = np.zeros(self.members.n, np.int64)  # rounds that what each received was old, summed
        self.standing = True  # whether senders know who wants their models, not only once they are asked
        self._ages = np.zeros(0, np.int64), np.zeros(0, np.int64)  # edges as receiver * N + sender, ascending, and ages
        if self.clock:
            self.clock.begin(self.members.active)

    def leaving(self, w_KW: Tensor) -> Tensor:
        """Return what others will know of this rank's rows, `[K, W]`: encoded once where they changed; newcomers get whole rows. Collective."""
        w_KW = self.attack.sent(w_KW)
        if self.encoder is None or self.members.phase is not Phase.ROUNDS:
            return w_KW
        if self.members.world.agree(not torch.equal(w_KW, self.told)):
            self.told.copy_(w_KW.detach())
            active = self.members.active
            self.held[:, active], self.holds[:, active] = self.holds[:, active], False
            with torch.no_grad():
                for i in np.flatnonzero(active[self.members.ids]):
                    self.encoder.encode(w_KW[i].detach(), self.known[i])
        return self.known

    @property
    def false(self) -> np.ndarray:
        """Which of this rank's clients may send what is not their row."""
        return np.arange(len(self.members.ids)) if self.encoder else self.attack.mine

    def completed(self, rows_kW: Tensor, own_kW: Tensor) -> Tensor:
        """Return rows that arrived with the receivers' own columns where nothing is sent."""
        return rows_kW if self.columns is None else torch.where(self.columns, rows_kW, own_kW)

    def settle(self) -> Clock | None:
        """Move the clocks, if there are any, by what was trained and scored since they last moved. Collective."""
        if self.clock:
            members, done = self.members, np.stack([self.log.steps, self.log.images], 1)
            counts = members.world.gather(done, members.owner, everywhere=True)
            assert counts is not None
            self.clock.work(*counts[np.argsort(members.rank_by_rank)].T)
            self.log.steps[:], self.log.images[:] = 0, 0
        return self.clock

    def ask(self) -> None:
        """Let all clients ask their senders now: a search is no standing order, and takes models of its round. Collective."""
        self.standing, self._ages = False, (self._ages[0][:0], self._ages[1][:0])
        if clock := self.settle():
            clock.ask()

    def along(self, graph: CollaborationGraph) -> None:
        """Send what left the clients last along a graph: its bytes, its ages, and when its receivers go on. Collective."""
        if not self.counts:
            return
        to, of = graph.receivers(), graph.senders
        sizes = np.full(len(of), self.whole)
        if self.encoder and self.members.phase is Phase.ROUNDS:
            sizes[self.held[to, of]] = min(self.encoder.bytes, self.whole)
            self.holds[to] = False  # a client keeps the senders of its last graph
            self.holds[to, of] = True
        np.add.at(self.bytes, of, sizes)
        if clock := self.settle():
            ages = clock.exchange(to, of, sizes, self.standing)
            np.add.at(self.age, to, ages)
            self._ages = to * self.members.n + of, ages

    def to_server(self) -> None:
        """Send a model of everyone that takes part to a server, and its answer back. Collective."""
        if clock := self.settle():
            self.bytes += 2 * self.whole * self.members.active
            clock.server(self.members.active, self.whole)

    def to_all(self) -> None:
        """Send everyone the models of all that it can reach. Collective."""
        self.ask()
        if self.counts:
            members = self.members
            wanted = [
                members.reachable(k) if members.most_senders[k] else np.zeros(0, np.int64) for k in range(members.n)
            ]
            self.along(CollaborationGraph.from_lists(wanted))

    def aged(self, to: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Return j + a N for the edges `[E]` from senders j, where the receiver gets the row of a rounds ago."""
        edges, ages = self._ages
        if self.versions == 1 or len(edges) == 0:
            return of
        wanted = to * self.members.n + of
        at = np.minimum(np.searchsorted(edges, wanted), len(edges) - 1)
        return of + np.where(edges[at] == wanted, ages[at], 0) * self.members.n

    def state(self) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
        """Return what a checkpoint holds, as `Parts.state`."""
        mine = {"known": self.known, "told": self.told} if self.encoder else {}
        shared = {"holds": self.holds, "held": self.held} if self.encoder else {}
        return mine, shared | (self.clock.state() if self.clock else {})


def columns_of(run: Resolved, ensemble: Ensemble, head: str) -> Tensor | None:
    """Return which columns leave a client, bool `[W]`, None where all do (--send): "body" is all but the head."""
    if not run.send:
        return None
    layers = run.send.layers
    if not head and {"head", "body"} & set(layers.split(",")):
        raise UserError(f"--send is {run.send}; --model {short(run.model)} names no last layer: name its layers")
    if layers == "body":
        return ~ensemble.columns("head", head, "--send layers")
    return ensemble.columns(layers, head, "--send layers")
