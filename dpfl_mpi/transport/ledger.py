"""`Ledger`: what sending would cost on a network: bytes, ages of models, and simulated clocks."""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.transport.clock import Clock
from dpfl_mpi.transport.links import Links
from dpfl_mpi.transport.log import Log
from dpfl_mpi.transport.packing import Encoded, Packing


class Ledger:
    """Every rank has the same. Methods that send or ask are collective."""

    def __init__(self, packing: Packing, log: Log, *, clock: Clock | None, counts: bool):
        """Count where `counts` says so: with --network, --codec or --send. `clock`: --network's."""
        self.packing, self.log, self.clock, self.counts = packing, log, clock, counts
        self.placement, self.ages = packing.placement, packing.ages
        self.begin(np.ones(self.placement.n, bool))

    def begin(self, learners: np.ndarray) -> None:
        """Start a round of the clients that train, bool `[N]`."""
        n = self.placement.n
        self.bytes = np.zeros(n, np.int64)  # that each client has sent in this round
        self.age = np.zeros(n, np.int64)  # in rounds, of what each received, summed
        self.standing = np.ones(n, bool)  # whose senders send without being asked
        self.ages.forget()
        if self.clock:
            self.clock.begin(learners)

    def settle(self) -> Clock | None:
        """Move the clocks by the work since they last moved, and return them. Collective."""
        if self.clock:
            work = np.stack([self.log.steps, self.log.images], 1)
            self.clock.work(*self.placement.of_all(work).T)
            self.log.steps[:] = 0
            self.log.images[:] = 0
        return self.clock

    def ask(self, asks: np.ndarray) -> None:
        """Let clients, bool `[N]`, ask their senders now, for models of this round. Collective."""
        self.ages.forget()
        self.standing &= ~asks
        if clock := self.settle():
            clock.ask(asks)

    def send(self, graph: CollaborationGraph, in_rounds: bool) -> None:
        """Send the rows that left last along a graph. Collective."""
        if not self.counts:
            return
        to, of = graph.receivers(), graph.senders
        sizes = self.packing.count_bytes(to, of, in_rounds)
        np.add.at(self.bytes, of, sizes)
        if clock := self.settle():
            ages = clock.exchange(to, of, sizes, self.standing[to])
            np.add.at(self.age, to, ages)
            self.ages.set(to, of, ages)

    def tell(self, graph: CollaborationGraph, size: int) -> None:
        """Send values of this round, so many bytes, along a graph. Collective."""
        to, of = graph.receivers(), graph.senders
        np.add.at(self.bytes, of, size)
        if clock := self.settle():
            clock.wait(to, of, clock.arrivals(to, of, np.full(len(of), size), standing=False))

    def to_server(self, active: np.ndarray, down: int = 1) -> None:
        """Send a model of each active client, bool `[N]`, to a server, and `down` back. Collective.

        A client's bytes are those of both ways.
        """
        if clock := self.settle():
            self.bytes += (1 + down) * self.packing.row_bytes * active
            clock.server(active, self.packing.row_bytes, down)

    @property
    def links(self) -> dict[str, Links]:
        """What a checkpoint stores of edges, by name."""
        arrived = self.clock.arrived if self.clock else []
        links = {f"came{age}": of_age for age, of_age in enumerate(arrived)}
        if isinstance(self.packing, Encoded):
            links["held"] = self.packing.latest
        return links

    def state(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint stores, by name."""
        tables = {name: links.table for name, links in self.links.items()}
        return tables | (self.clock.state() if self.clock else {})
